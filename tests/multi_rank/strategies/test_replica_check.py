"""Replicas compare what they hold when training begins; `compare_parameters` does so before sharding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import FSDPModule, FSDPRuntimeError, broadcast_parameters, compare_parameters, fully_shard
from tests.harness import multi_rank, tolerance_for
from tests.harness.models import UNEVEN_MLP
from tests.harness.reference import Reference, adamw
from tests.harness.shared.odd_parameters import ODD
from tests.harness.shared.slices import Mixture, backward_of, expert_of, grid, placement_of_experts
from tests.harness.shared.ways import hybrid
from tests.harness.training import assert_trains_like

KINDS: dict[str, Callable[[], dict[str, Any]]] = {"hybrid": hybrid, "replicate": lambda: {"strategy": "replicate"}}


def shard(model: nn.Module, kind: str) -> FSDPModule:
    for unit in UNEVEN_MLP.units(model):
        fully_shard(unit, **KINDS[kind]())
    assert isinstance(model, FSDPModule)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    return UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, dist.get_rank()))


@pytest.mark.parametrize("kind", KINDS)
@multi_rank(2, 4)
def test_replicas_that_differ_are_named_and_broadcasting_mends_them(kind: str, world_size: int) -> None:
    model = shard(UNEVEN_MLP.build(), kind)
    name, other = next((name, each) for name, each in model.named_parameters() if each.dim() == 1)
    if dist.get_rank() == world_size - 1:
        other.detach().to_local().add_(1e-6)  # of one rank only
    with torch.no_grad():
        loss_of(model)  # it need not be the same yet
    for _ in range(2):
        with pytest.raises(FSDPRuntimeError, match=rf"replicas of \w+ hold different values of '{name}', and would"):
            loss_of(model)
    broadcast_parameters(model)
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    optimizer = adamw(list(model.parameters()))
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_for(world_size))


@multi_rank(4)
def test_what_is_meant_to_differ_is_not_compared() -> None:
    model = shard(UNEVEN_MLP.build(seed=dist.get_rank() // 2), "hybrid")
    model.set_replica_check(parameters=False)
    loss_of(model).backward()
    with pytest.raises(FSDPRuntimeError, match="must be called on the root"):
        next(each for each in model.children() if isinstance(each, FSDPModule)).set_replica_check(False)


@pytest.mark.parametrize("differ", [False, True])
@multi_rank(4)
def test_replicas_that_only_some_ranks_have(differ: bool) -> None:
    replicated, whole = grid(replicas=True), grid()
    has_replicas = dist.get_rank() < 2
    model: Any = Mixture([expert_of(dist.get_rank())])
    fully_shard(model, shard_placement_fn=placement_of_experts(model, replicated if has_replicas else whole))
    if differ and dist.get_rank() == 1:
        model.experts["0"][0].bias.detach().to_local().add_(1.0)
    with pytest.raises(FSDPRuntimeError, match=r"values of 'experts\.0\.0\.bias'") if differ else nullcontext():
        backward_of(model)


@pytest.mark.parametrize("checks", [True, False])
@multi_rank(4)
def test_buffers_that_differ_are_a_warning(checks: bool) -> None:
    plain = UNEVEN_MLP.build()
    plain.register_buffer("average", torch.full((3,), float(dist.get_rank() // 2)))
    plain.register_buffer("same", torch.ones(2, dtype=torch.bool), persistent=False)
    model = shard(plain, "hybrid")
    model.set_replica_check(buffers=checks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            loss_of(model).backward()
    said = [str(each.message) for each in told if "hold different values of the buffers" in str(each.message)]
    assert len(said) == int(checks) and all("'average'. Call" in each for each in said)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@multi_rank(4)
def test_it_is_done_once_and_shown_to_nobody() -> None:
    counts = []
    model = shard(UNEVEN_MLP.build(), "hybrid")
    for _ in range(3):
        with CommDebugMode() as seen:
            loss_of(model).backward()
        counts.append(dict(seen.get_comm_counts()))
    assert counts[0] == counts[1] == counts[2]


@multi_rank(2, 4)
def test_ranks_compare_before_sharding(world_size: int) -> None:
    compare_parameters(ODD.build())
    model = ODD.build()
    with torch.no_grad():
        if dist.get_rank() == world_size - 1:
            for name, each in model.named_parameters():
                if name == "head.weight":
                    each.view(-1)[[0, 1]] = each.view(-1)[[1, 0]]  # the same numbers in another order
    with pytest.raises(FSDPRuntimeError, match=r"the ranks have different values of 'head.weight' in \w+: seed alike"):
        compare_parameters(model)
    compare_parameters(model, ignored_params=[model.get_parameter("head.weight")])
    broadcast_parameters(model)
    compare_parameters(model)
    fully_shard(model)
    compare_parameters(model)


@multi_rank(4)
def test_a_process_group_of_some() -> None:
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"].get_group()
    model = UNEVEN_MLP.build(seed=dist.get_rank() // 2)
    compare_parameters(model, process_group=group)
    with pytest.raises(FSDPRuntimeError, match="the ranks have different values of"):
        compare_parameters(model)


@pytest.mark.full  # 8 s
@multi_rank(4)
def test_a_compiled_model() -> None:
    model = shard(UNEVEN_MLP.build(seed=dist.get_rank() // 2), "hybrid")
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
        with pytest.raises(FSDPRuntimeError, match="hold different values of"):
            loss_of(compiled)
        broadcast_parameters(model)
        loss_of(compiled).backward()
