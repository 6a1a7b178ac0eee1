"""Deep copies and pickles of sharded modules."""
