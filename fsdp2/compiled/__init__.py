"""Sharded modules in the graphs of `torch.compile`: gathers and reductions as functional collectives, one per group."""
