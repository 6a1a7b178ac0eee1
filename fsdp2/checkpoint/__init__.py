"""Checkpoints that can be trusted, on torch's distributed checkpoints and safetensors; see `docs/checkpoints.md`.

Stands on the public surface of `fsdp2` and on the core; nothing of the engine knows it.
"""

from fsdp2.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    SaveFailed,
)
from fsdp2.checkpoint.loading import load
from fsdp2.checkpoint.random_state import RandomState
from fsdp2.checkpoint.report import LoadReport
from fsdp2.checkpoint.runs import Checkpoints
from fsdp2.checkpoint.saving import save

__all__ = [
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointIncomplete",
    "CheckpointMismatch",
    "Checkpoints",
    "LoadReport",
    "RandomState",
    "SaveFailed",
    "load",
    "save",
]
