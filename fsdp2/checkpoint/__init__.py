"""Checkpoints that can be trusted, on torch's distributed checkpoints and safetensors.

Stands on the public surface of `fsdp2` and on the core; nothing of the engine knows it.
"""

from fsdp2.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    SaveFailed,
)
from fsdp2.checkpoint.iterating import iter_full_parameters
from fsdp2.checkpoint.loading import load
from fsdp2.checkpoint.random_state import RandomState
from fsdp2.checkpoint.report import LoadReport
from fsdp2.checkpoint.runs import Checkpoints
from fsdp2.checkpoint.safetensors_files import load_safetensors, save_safetensors
from fsdp2.checkpoint.saving import save
from fsdp2.checkpoint.whole import load_full

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointIncomplete",
    "CheckpointMismatch",
    "Checkpoints",
    "LoadReport",
    "RandomState",
    "SaveFailed",
    "iter_full_parameters",
    "load",
    "load_full",
    "load_safetensors",
    "save",
    "save_safetensors",
]
