"""Fully sharded data parallelism for PyTorch: ``fully_shard`` and what belongs to it."""

import fsdp2._versions  # isort: skip  says what is known of the installed torch, before anything else is imported

import importlib
from typing import TYPE_CHECKING

import fsdp2.model.torch_view
import fsdp2.optim.torch_clipping
import fsdp2.plugs
import fsdp2.ragged.merged_rows
import fsdp2.tools.log  # noqa: F401  these fill ports of the core
from fsdp2 import optim
from fsdp2._moved import know_former_names
from fsdp2.api.fully_shard import fully_shard
from fsdp2.api.functions import register_fsdp_forward_method, share_comm_ctx
from fsdp2.api.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
)
from fsdp2.api.policies import CPUOffloadPolicy, OffloadPolicy
from fsdp2.api.unwrap import unwrap
from fsdp2.arguments import nearest
from fsdp2.compiled.entry import prepare_compile
from fsdp2.compiled.report import CompiledGroup, CompileReport, compile_report
from fsdp2.compiled.support import set_graph_capture
from fsdp2.core.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fsdp2.core.options import (
    AllGather,
    Comm,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    ReduceScatter,
)
from fsdp2.core.sharding import ShardPlacementResult
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.grouping.config import ShardingConfig
from fsdp2.grouping.group_choice import GroupChoice, ModuleGroup
from fsdp2.grouping.offload_budget import cpu_offload_by_budget
from fsdp2.grouping.sharding import auto_shard, choose_groups
from fsdp2.model.accumulation import accumulate
from fsdp2.model.broadcast_parameters import broadcast_parameters
from fsdp2.model.full_parameters import full_parameters
from fsdp2.model.graphed_step.step import GraphedStep, make_graphed_step
from fsdp2.model.inference import inference
from fsdp2.model.pending_gradients import PendingGradient, pending_gradients, synchronize_gradients
from fsdp2.model.replica_check import compare_parameters
from fsdp2.optim.clip_grad import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from fsdp2.optim.grad_scaler import ShardedGradScaler
from fsdp2.optim.offload import OptimizerStateOffload, offload_optimizer_state
from fsdp2.optim.owner_step import step_on_owners
from fsdp2.plugs.parameters.owned import Owned, balanced_owners
from fsdp2.plugs.parameters.row_blocks import RowBlocks
from fsdp2.plugs.schedules.divergence import DivergenceReport, divergence_report
from fsdp2.plugs.watchdog import flight_record, set_watchdog
from fsdp2.ragged.dtensor import RaggedDTensor
from fsdp2.ragged.placement import BlockShard, RaggedShard
from fsdp2.tools.environment import warn_of_unknown

if TYPE_CHECKING:
    from fsdp2.tools.estimating.estimate import estimate
    from fsdp2.tools.estimating.hardware import Hardware
    from fsdp2.tools.estimating.result import Estimate
    from fsdp2.tools.estimating.suggest import Suggestions, suggest
    from fsdp2.tools.explaining import Explanation, explain
    from fsdp2.tools.metrics import Metrics, StepMetrics, metrics
    from fsdp2.tools.timeline.timeline import Timeline, timeline

_WHEN_ASKED_FOR = {
    "Estimate": "estimating.result",
    "Explanation": "explaining",
    "Hardware": "estimating.hardware",
    "Metrics": "metrics",
    "StepMetrics": "metrics",
    "Suggestions": "estimating.suggest",
    "Timeline": "timeline.timeline",
    "estimate": "estimating.estimate",
    "explain": "explaining",
    "metrics": "metrics",
    "suggest": "estimating.suggest",
    "timeline": "timeline.timeline",
}
"""Modules of `fsdp2.tools` by the names of theirs that are imported with the first use: most runs use none of them."""


def __getattr__(name: str) -> object:
    """One of the tools, which are imported when they are asked for.

    Raises:
        AttributeError: there is none of this name.
    """
    module = _WHEN_ASKED_FOR.get(name)
    if module is None:
        meant = "" if name.startswith("_") else nearest(name, __all__)
        raise AttributeError(f"module 'fsdp2' has no attribute '{name}'.{meant}")
    found = getattr(importlib.import_module(f"fsdp2.tools.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """All names, those of tools that are not imported yet too."""
    return sorted({*globals(), *_WHEN_ASKED_FOR})


know_former_names()
warn_of_unknown()

__all__ = [
    "AllGather",
    "BlockShard",
    "CPUOffloadPolicy",
    "Comm",
    "CompileReport",
    "CompiledGroup",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "DivergenceReport",
    "Estimate",
    "Explanation",
    "FSDPError",
    "FSDPMeshInfo",
    "FSDPModule",
    "FSDPNotImplementedError",
    "FSDPRuntimeError",
    "FSDPTypeError",
    "FSDPValueError",
    "GradientReductionHandle",
    "GraphedStep",
    "GroupChoice",
    "Hardware",
    "HSDPMeshInfo",
    "Metrics",
    "MixedPrecisionPolicy",
    "ModuleGroup",
    "OffloadPolicy",
    "OptimizerStateOffload",
    "Owned",
    "PendingGradient",
    "RaggedDTensor",
    "RaggedShard",
    "ReduceScatter",
    "RowBlocks",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardingConfig",
    "Suggestions",
    "StepMetrics",
    "Timeline",
    "UnshardHandle",
    "accumulate",
    "auto_shard",
    "balanced_owners",
    "broadcast_parameters",
    "choose_groups",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "compare_parameters",
    "compile_report",
    "cpu_offload_by_budget",
    "disable_fsdp_module_new_init",
    "divergence_report",
    "estimate",
    "explain",
    "flight_record",
    "full_parameters",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "get_total_norm",
    "inference",
    "make_graphed_step",
    "metrics",
    "offload_optimizer_state",
    "optim",
    "pending_gradients",
    "prepare_compile",
    "register_fsdp_forward_method",
    "set_graph_capture",
    "set_watchdog",
    "share_comm_ctx",
    "step_on_owners",
    "suggest",
    "synchronize_gradients",
    "timeline",
    "unwrap",
]
__version__ = "0.1.0"
