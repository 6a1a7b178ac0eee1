"""`python -m benchmarks.peers`: this package's `fully_shard` beside other packages that shard, in one run."""
