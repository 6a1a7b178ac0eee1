"""Sharded modules in the graphs of `torch.compile`: gathers and reductions as operators, one of each per group."""
