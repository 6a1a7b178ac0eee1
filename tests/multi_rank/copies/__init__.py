"""Deep copies of sharded modules."""
