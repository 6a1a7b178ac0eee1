"""Optimizers on sharded parameters: `fsdp2.optim.local`, offloaded state, steps on owners, clipping."""

from fsdp2.optim.adapter import local

__all__ = ["local"]
