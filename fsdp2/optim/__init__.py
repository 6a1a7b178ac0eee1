"""Optimizers on sharded parameters: `fsdp2.optim.local`, offloaded state, steps on owners, clipping."""

from fsdp2.optim.adapter import local
from fsdp2.optim.ordinary import set_local_steps

__all__ = ["local", "set_local_steps"]
