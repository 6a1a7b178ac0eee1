"""FSDP1's interface, `FullyShardedDataParallel` and what goes with it, to the engine of `fully_shard`.

``from fsdp2.compat.fsdp1 import FullyShardedDataParallel as FSDP`` is all that a program changes. Nothing is flattened:
parameters are DTensors under their own names. 'Programs written for FSDP1' in the documentation says what
each argument and method comes to.

Owns: the wrapper, wrapping policies, FSDP1's state dicts. Stands on the public face of fsdp2, and works with a torch
that has no FSDP1.
"""

import fsdp2
from fsdp2.compat.fsdp1.config import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    HandleShardingStrategy,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp2.compat.fsdp1.flat_optim_state import flat_optim_state_dict, flat_optim_state_dict_to_load
from fsdp2.compat.fsdp1.flat_param import (
    FlatParameter,
    FlatParamHandle,
    FlatParamShardMetadata,
    ParamInfo,
    SharedParamInfo,
)
from fsdp2.compat.fsdp1.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from fsdp2.compat.fsdp1.wrapped_layout import flat_layout
from fsdp2.compat.fsdp1.wrapper import FullyShardedDataParallel

ShardedGradScaler = fsdp2.ShardedGradScaler

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HandleShardingStrategy",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ParamInfo",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "SharedParamInfo",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "always_wrap_policy",
    "enable_wrap",
    "flat_layout",
    "flat_optim_state_dict",
    "flat_optim_state_dict_to_load",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
