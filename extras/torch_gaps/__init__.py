"""What an implementation of `fully_shard` does in the cases that users ask for and torch has refused so far.

Each case (`cases/`) is a program of a few lines, run by `run.py` on gloo ranks in processes of their own and compared
with the unsharded model. `record.py` keeps the outcomes per torch version in outcomes.json and writes the table of
docs/beyond.md; `python -m extras.torch_gaps` (or `make torch-gaps`) does both.
"""
