"""The enums and configurations of FSDP1: torch's own where it has them, else ours of the same names, fields and values.

A program that was written for FSDP1 imports them from ``torch.distributed.fsdp``, and compares by identity. A torch
that has dropped FSDP1 has dropped them too.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch_names

_torch_names.need(_torch_names.COMPAT_FSDP1)


class _ShardingStrategy(Enum):
    """How parameters, gradients and optimizer state are divided."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class _HandleShardingStrategy(Enum):
    """The same, of a unit."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class _BackwardPrefetch(Enum):
    """When the next unit's parameters are gathered in backward."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class _StateDictType(Enum):
    """What ``state_dict()`` holds."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class _OptimStateKeyType(Enum):
    """By what an optimizer's state dict names parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


_TrainingState = Enum("_TrainingState", ("IDLE", "FORWARD_BACKWARD", "SUMMON_FULL_PARAMS"))


@dataclass
class _MixedPrecision:
    """The dtypes that a unit computes and communicates in."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)


@dataclass
class _CPUOffload:
    """Whether parameters rest in host memory."""

    offload_params: bool = False


@dataclass
class _StateDictConfig:
    """Of every kind of state dict."""

    offload_to_cpu: bool = False


@dataclass
class _FullStateDictConfig(_StateDictConfig):
    """Whole tensors; on rank 0 only, if asked."""

    rank0_only: bool = False


@dataclass
class _LocalStateDictConfig(_StateDictConfig):
    """Flat shards."""


@dataclass
class _ShardedStateDictConfig(_StateDictConfig):
    """This rank's part of every tensor."""

    _use_dtensor: bool = False


@dataclass
class _OptimStateDictConfig:
    """Of every kind of an optimizer's state dict."""

    offload_to_cpu: bool = True


@dataclass
class _FullOptimStateDictConfig(_OptimStateDictConfig):
    """Whole tensors; on rank 0 only, if asked."""

    rank0_only: bool = False


@dataclass
class _LocalOptimStateDictConfig(_OptimStateDictConfig):
    """Flat shards."""

    offload_to_cpu: bool = False


@dataclass
class _ShardedOptimStateDictConfig(_OptimStateDictConfig):
    """This rank's part of every tensor."""

    _use_dtensor: bool = False


def _found(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:  # a torch without FSDP1
        return None


_API = _found("torch.distributed.fsdp.api")
_WRAPPER = _found("torch.distributed.fsdp.fully_sharded_data_parallel")
_FLAT_PARAM = _found("torch.distributed.fsdp._flat_param")


def _torchs(ours: Any, module: ModuleType | None) -> Any:
    """Torch's object of that name; ``ours``, under that name, where it has none."""
    name = ours.__name__.removeprefix("_")
    found = getattr(module, name, None)
    if found is not None:
        return found
    ours.__name__ = ours.__qualname__ = name
    return ours


ShardingStrategy: Any = _torchs(_ShardingStrategy, _API)
HandleShardingStrategy: Any = _torchs(_HandleShardingStrategy, _FLAT_PARAM)
BackwardPrefetch: Any = _torchs(_BackwardPrefetch, _API)
StateDictType: Any = _torchs(_StateDictType, _API)
TrainingState: Any = _torchs(_TrainingState, _found("torch.distributed.fsdp._common_utils"))
OptimStateKeyType: Any = _torchs(_OptimStateKeyType, _WRAPPER)
MixedPrecision: Any = _torchs(_MixedPrecision, _API)
CPUOffload: Any = _torchs(_CPUOffload, _API)
StateDictConfig: Any = _torchs(_StateDictConfig, _API)
FullStateDictConfig: Any = _torchs(_FullStateDictConfig, _API)
LocalStateDictConfig: Any = _torchs(_LocalStateDictConfig, _API)
ShardedStateDictConfig: Any = _torchs(_ShardedStateDictConfig, _API)
OptimStateDictConfig: Any = _torchs(_OptimStateDictConfig, _API)
FullOptimStateDictConfig: Any = _torchs(_FullOptimStateDictConfig, _API)
LocalOptimStateDictConfig: Any = _torchs(_LocalOptimStateDictConfig, _API)
ShardedOptimStateDictConfig: Any = _torchs(_ShardedOptimStateDictConfig, _API)


@dataclass
class _StateDictSettings:
    """What `FullyShardedDataParallel.set_state_dict_type` has set."""

    state_dict_type: Any
    state_dict_config: Any
    optim_state_dict_config: Any


StateDictSettings: Any = _torchs(_StateDictSettings, _API)
