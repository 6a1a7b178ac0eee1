"""Every public callable, given what it does not take: one of our errors, and the model as it was.

One process, simulated ranks. `WRONG` goes into each argument in turn, where what an argument takes (a bool takes True)
may pass. What arguments mean together has its own list.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import FSDPError, FSDPModule, FSDPTypeError, FSDPValueError, fully_shard
from fsdp2.arguments import accepts
from fsdp2.core.agreement import settings_of
from fsdp2.core.state import states_below
from tests.harness.fake import FakeWorlds
from tests.unit.helpers import for_each

WORLD_SIZE = 4


@pytest.fixture(autouse=True)
def world(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE, rank=1)


WRONG: list[Any] = [
    None,
    True,
    "no",
    -1,
    2.5,
    math.nan,
    torch.ones(2),
    torch.tensor(True),
    torch.complex64,
    [],
    [3],
    {"a": 1},
    nn.Linear,
    object(),
]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def sharded() -> nn.Sequential:
    model = layers()
    fully_shard(model[0])
    return fully_shard(model)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD_SIZE,))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# What each is called with when one argument is put in the place of another: of a sharded model, unless it shards.
SHARDING: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "fully_shard": lambda model: {"module": model},
    "auto_shard": lambda model: {"model": model, "min_bytes": 0},
    "choose_groups": lambda model: {"model": model, "min_bytes": 0},
    "cpu_offload_by_budget": lambda model: {"module": model, "budget_bytes": 0},
    "balanced_owners": lambda model: {"module": model, "mesh": mesh()},
    "estimate": lambda model: {"make_model": model, "mesh_shape": 2, "batch": torch.ones(2, 5)},
    "suggest": lambda model: {"make_model": model, "mesh_shape": 2, "batch": torch.ones(2, 5)},
    "register_fsdp_forward_method": lambda model: {"module": model, "method_name": "extra_repr"},
}
FUNCTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "clip_grad_norm_": lambda model: {"parameters": list(model.parameters()), "max_norm": 1.0},
    "clip_grads_with_norm_": lambda model: {
        "parameters": list(model.parameters()),
        "max_norm": 1.0,
        "total_norm": torch.tensor(2.0),
    },
    "get_total_norm": lambda model: {"tensors": [each.detach() for each in model.parameters()]},
    "accumulate": lambda model: {"module": model, "last": True},
    "broadcast_parameters": lambda model: {"module": nn.Linear(2, 2)},
    "compare_parameters": lambda model: {"module": nn.Linear(2, 2)},
    "divergence_report": lambda model: {"model": model},
    "compile_report": lambda model: {"model": model},
    "explain": lambda model: {"model": model},
    "full_parameters": lambda model: {"module": model},
    "make_graphed_step": lambda model: {"step": model, "module": model, "optimizer": optimizer(model)},
    "metrics": lambda model: {"model": model, "write": None},
    "timeline": lambda model: {"model": model},
    "inference": lambda model: {"module": model},
    "offload_optimizer_state": lambda model: {"optimizer": optimizer(model)},
    "pending_gradients": lambda model: {"module": model},
    "prepare_compile": lambda model: {"model": model},
    "flight_record": lambda model: {},
    "set_graph_capture": lambda model: {"model": model, "enabled": True},
    "set_watchdog": lambda model: {"seconds": 10},
    "share_comm_ctx": lambda model: {"modules": [model]},
    "synchronize_gradients": lambda model: {"module": model},
    "step_on_owners": lambda model: {"optimizer": optimizer(model)},
    "unwrap": lambda model: {"module": nn.Linear(2, 2)},
    "optim.local": lambda model: {"optimizer_class": torch.optim.SGD, "params": model.parameters(), "lr": 0.1},
}
CLASSES: dict[str, Callable[[], dict[str, Any]]] = {
    "CPUOffloadPolicy": dict,
    "DDPMeshInfo": lambda: {"mesh": mesh(), "replicate_mesh_dim": 0},
    "DataParallelMeshDims": lambda: {"shard": "dp"},
    "DataParallelMeshInfo": lambda: {"mesh": mesh(), "shard_mesh_dim": 0},
    "FSDPMeshInfo": lambda: {"mesh": mesh(), "shard_mesh_dim": 0},
    "Hardware": lambda: {"name": "m", "ranks_per_node": 8, "memory_bytes": 2**30},
    "HSDPMeshInfo": lambda: {
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")),
        "shard_mesh_dim": 1,
        "replicate_mesh_dim": 0,
    },
    "MixedPrecisionPolicy": dict,
    "OffloadPolicy": dict,
    "Owned": lambda: {"rank": 0},
    "BlockShard": lambda: {"block_numels": (4,)},
    "RaggedShard": lambda: {"rows": (1, 2)},
    "RowBlocks": lambda: {"rows": 2},
    "ShardedGradScaler": lambda: {"device": "cpu"},
    "ShardingConfig": dict,
    "ShardPlacementResult": lambda: {"placement": Shard(0), "mesh_info": None},
}
METHODS: dict[str, dict[str, Any]] = {
    "unshard": {},
    "set_reshard_after_forward": {"reshard_after_forward": True},
    "set_reshard_after_backward": {"reshard_after_backward": True},
    "set_strategy": {"strategy": "zero3"},
    "set_keep_unsharded_storage": {"keep": False},
    "set_unshard_in_backward": {"unshard_in_backward": True},
    "_set_unshard_async_op": {"async_op": False},
    "set_modules_to_forward_prefetch": {"modules": []},
    "set_modules_to_backward_prefetch": {"modules": []},
    "set_prefetch_budget": {"nbytes": None},
    "set_backward_prefetch": {"when": "before"},
    "set_replica_check": {},
    "set_recovery": {},
    "set_divergence": {},
    "join_step": {},
    "set_full_precision": {"full_precision": False},
    "set_requires_gradient_sync": {"requires_gradient_sync": True},
    "set_requires_all_reduce": {"requires_all_reduce": True},
    "set_is_last_backward": {"is_last_backward": True},
    "set_post_optim_event": {"event": None},
    "set_custom_all_gather": {"comm": None},
    "set_custom_reduce_scatter": {"comm": None},
    "set_all_reduce_hook": {"hook": print},
    "set_gradient_divide_factor": {"factor": 2.0},
    "set_gradient_reduction": {"reduction": "mean"},
    "set_reduce_scatter_divide_factor": {"factor": 2.0},
    "set_force_sum_reduction_for_comms": {"enable": False},
    "set_reduce_scatter_unused_params": {"reduce_scatter_unused_params": False},
    "set_reduce_scatter_max_input_buffers": {"max_input_buffers": 1},
    "set_separate_reduce_scatter_group": {},
    "set_allocate_memory_from_process_group_for_comm": {"enable": False},
    "set_symm_mem_for_comm": {"backend": "no"},
    "set_communication_memory_pool": {"enable": False},
    "set_manual_backward_finalization": {"enabled": False},
    "finalize_backward": {},
}
# Without arguments, or not called by users: what functions return, and what is derived from.
UNCHECKED = {
    *("AllGather", "Comm", "ReduceScatter", "FSDPModule", "RaggedDTensor", "optim"),
    *("CompileReport", "CompiledGroup", "DivergenceReport", "GradientReductionHandle", "GroupChoice", "ModuleGroup"),
    *(
        "Estimate",
        "Explanation",
        "GraphedStep",
        "Metrics",
        "OptimizerStateOffload",
        "PendingGradient",
        "StepMetrics",
        "Suggestions",
        "Timeline",
    ),
    "UnshardHandle",
    *("disable_fsdp_module_new_init", "get_cls_to_fsdp_cls"),
}
MODULES_OWN = {"share_memory", "reshard", "reset_iter_state", "extra_repr"}  # those of nn.Module, or of no arguments


def test_the_lists_are_complete() -> None:
    errors = {name for name in fsdp2.__all__ if name.startswith("FSDP") and name.endswith("Error")}
    assert set(fsdp2.__all__) == {*SHARDING, *FUNCTIONS, *CLASSES, *UNCHECKED, *errors} - {"optim.local"}
    methods = {name for name, value in vars(FSDPModule).items() if inspect.isfunction(value) and name[0] != "_"}
    assert methods == {*METHODS, *MODULES_OWN} - {"_set_unshard_async_op"}


def look(model: nn.Module) -> Any:
    """What a refused call must leave as it was."""
    states = states_below(model)
    groups = [group for state in states for group in state.unit]
    settings = [settings_of([state], state.unit, state.root_settings) for state in states]
    parameters = [(name, id(parameter), parameter._version) for name, parameter in model.named_parameters()]
    return [type(each) for each in model.modules()], parameters, settings, [group.phase for group in groups]


def put_wrong_values(call: Callable[..., Any], make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    """Call with each wrong value in the place of each argument."""
    hints, signature = typing.get_type_hints(inspect.unwrap(call)), inspect.signature(call)
    problems: list[str] = []
    for name in signature.parameters:
        if name in ("self", "args", "kwargs", "arguments", "fully_shard_arguments", "params", "event"):
            continue
        for value in WRONG:
            model, given = make()
            before = look(model)
            of_model = {"self": model} if "self" in signature.parameters else {}
            where = f"{call.__qualname__}({name}={value!r})"
            try:
                call(**of_model, **{**given, name: value})
            except FSDPError:
                if look(model) != before:
                    problems.append(f"{where} has changed the model")
            except Exception as error:
                problems.append(f"{where}: {type(error).__name__}: {error}")
            else:
                if not accepts(hints.get(name, Any), value):
                    problems.append(f"{where} was accepted")
    if "arguments" not in signature.parameters:  # which another callable gets
        model, given = make()
        of_model = {"self": model} if "self" in signature.parameters else {}
        with pytest.raises(FSDPTypeError, match="no_such_argument"):
            call(**of_model, **given, no_such_argument=1)
    assert not problems, "\n".join(problems)


@pytest.mark.filterwarnings("ignore:reshard_after_forward=1")
@for_each("name", list(SHARDING))
def test_functions_that_shard(name: str) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        model = layers()
        return model, SHARDING[name](model)

    put_wrong_values(getattr(fsdp2, name), make)


@for_each("name", list(FUNCTIONS))
def test_functions_on_sharded_models(name: str) -> None:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        model = sharded()
        return model, FUNCTIONS[name](model)

    put_wrong_values(fsdp2.optim.local if name == "optim.local" else getattr(fsdp2, name), make)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@for_each("name", list(METHODS))
def test_methods(name: str) -> None:
    put_wrong_values(getattr(FSDPModule, name), lambda: (sharded(), METHODS[name]))


@for_each("name", list(CLASSES))
def test_classes(name: str) -> None:
    kind: Any = getattr(fsdp2, name)
    problems: list[str] = []
    fields = [each.name for each in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else ["rows"]
    hints = typing.get_type_hints(kind.__init__)
    for field in fields:
        if field in ("is_spmd_mesh", "placement"):  # no argument; and checked for each parameter
            continue
        for value in WRONG:
            try:
                kind(**{**CLASSES[name](), field: value})
            except FSDPError:
                continue
            except Exception as error:
                problems.append(f"{name}({field}={value!r}): {type(error).__name__}: {error}")
            else:
                if not accepts(hints.get(field, Any), value):
                    problems.append(f"{name}({field}={value!r}) was accepted")
    with pytest.raises(FSDPTypeError, match="no_such_argument"):
        kind(**CLASSES[name](), no_such_argument=1)
    assert not problems, "\n".join(problems)


# ---- ranges, and what contradicts itself ---------------------------------------------------------


def with_gradients() -> nn.Module:
    model = sharded()
    model(torch.ones(2, 5)).sum().backward()
    return model


@for_each("max_norm", [-1, -0.5, math.nan, torch.tensor(-1.0)])
def test_clipping_never_turns_gradients_round(max_norm: Any) -> None:
    model = with_gradients()
    before = [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    with pytest.raises(FSDPValueError, match=r"clip_grad_norm_\(\) takes a number >= 0 as 'max_norm', got"):
        fsdp2.clip_grad_norm_(model.parameters(), max_norm)
    after = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@for_each("max_norm", [0, 1, 2.5, math.inf, torch.tensor(1.0)])
def test_norms_to_clip_to(max_norm: Any) -> None:
    fsdp2.clip_grad_norm_(with_gradients().parameters(), max_norm)


CONTRADICTIONS: dict[str, Callable[[nn.Sequential], object]] = {
    "twice in a list": lambda m: fully_shard([m[0], m[0]]),
    "strategy and resharding": lambda m: fully_shard(m, strategy="zero2", reshard_after_forward=True),
    "strategy and placement": lambda m: fully_shard(m, strategy="replicate", shard_placement_fn=lambda p: Shard(0)),
    "no divisor": lambda m: fully_shard(m, reshard_after_forward=3),
    "a dim that there is not": lambda m: fully_shard(m, shard_placement_fn=lambda p: Shard(5)),
    "an owner that there is not": lambda m: fully_shard(m, shard_placement_fn=lambda p: fsdp2.Owned(7)),
    "no placement": lambda m: fully_shard(m, shard_placement_fn=lambda p: 3),  # type: ignore[arg-type,return-value]
    "a name that there is not": lambda m: fully_shard(m, dp_mesh_dims=fsdp2.DataParallelMeshDims("dp")),
    "an input that there is not": lambda m: fully_shard(
        m, mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=("nothing",))
    ),
    "offload that keeps a part": lambda m: fsdp2.CPUOffloadPolicy(gradients=False),
    "a dim out of range": lambda m: fsdp2.FSDPMeshInfo(mesh(), shard_mesh_dim=3),
    "sizes that cross": lambda m: fsdp2.auto_shard(m, max_bytes=1, min_bytes=2),
}


@for_each("what", list(CONTRADICTIONS))
def test_contradictions(what: str) -> None:
    model = layers()
    with pytest.raises(FSDPError):
        CONTRADICTIONS[what](model)
    assert type(model) is nn.Sequential
    fully_shard(model)
    model(torch.ones(2, 5)).sum().backward()
