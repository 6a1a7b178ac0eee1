"""Optimizers on sharded parameters, their state, hooks and copies, and clipping by the norm of all."""
