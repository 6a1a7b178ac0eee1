"""What users do to sharded modules: the methods of `FSDPModule`, copies, unwrapping, tying."""
