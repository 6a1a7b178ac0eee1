"""Benchmarks of `fsdp2` beside torch's `fully_shard` and the unsharded model, in one process.

Run them with `python -m benchmarks` (or `make bench`). Every figure is the cost of one rank: the process
group is torch's `fake` one, whose collectives return at once and deliver no real data, so that what remains
is the implementation itself. See `__main__.py` for the options and `report.py` for what each printed column
means.
"""
