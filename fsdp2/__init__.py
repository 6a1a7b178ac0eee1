"""Fully sharded data parallelism for PyTorch: ``fully_shard`` and what belongs to it."""

from fsdp2.api import fully_shard
from fsdp2.common import (
    FSDPError,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
)
from fsdp2.module import FSDPModule, UnshardHandle

__all__ = [
    "FSDPError",
    "FSDPModule",
    "FSDPNotImplementedError",
    "FSDPRuntimeError",
    "FSDPTypeError",
    "FSDPValueError",
    "UnshardHandle",
    "fully_shard",
]
__version__ = "0.1.0"
