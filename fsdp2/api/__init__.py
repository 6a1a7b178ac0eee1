"""What programs call first: `fully_shard`, `FSDPModule`, policies. Above the engine and all that it is made of."""
