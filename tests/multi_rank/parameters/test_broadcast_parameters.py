"""`broadcast_parameters`: one rank's values on all ranks, before sharding."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp2 import (
    FSDPModule,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    FSDPValueError,
    broadcast_parameters,
    full_parameters,
    fully_shard,
)
from tests.harness import multi_rank
from tests.harness.compare import assert_same, assert_sharded_same, gather, parameters_of
from tests.harness.models import TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import adamw
from tests.harness.shared.odd_parameters import ODD
from tests.harness.shared.training import loss_on, shard


class Kinds(nn.Module):
    """Tensors of many dtypes and strides; every rank has other values in them, and other strides in one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.large = nn.Parameter(torch.randn(37, 100, generator=generator))
        self.turned = nn.Parameter(torch.randn(50, 31, generator=generator).t())
        self.differs = nn.Parameter(torch.randn(9, 40, generator=generator))
        if rank:
            self.differs = nn.Parameter(torch.randn(40, 9, generator=generator).t())
        self.wide = nn.Parameter(torch.randn(2, 3, 500, generator=generator).bfloat16(), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(5, dtype=torch.complex64, generator=generator))
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.float64, generator=generator))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.packed = nn.Parameter(torch.randint(255, (7, 3), generator=generator).to(torch.uint8), requires_grad=False)
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("mask", torch.rand(11, generator=generator) > 0.5, persistent=False)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in (*module.named_parameters(), *module.named_buffers())}


@multi_rank(2, 4)
@pytest.mark.parametrize("message_bytes", [1 << 25, 1000, 16])
@pytest.mark.parametrize("buffers", [True, False])
def test_all_ranks_have_the_values_of_one(message_bytes: int, buffers: bool, world_size: int) -> None:
    module, src = Kinds(dist.get_rank()), world_size - 1
    before = tensors_of(module)
    own = {name: each.clone() for name, each in before.items()}
    file: Any = sys.modules[broadcast_parameters.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "MESSAGE_BYTES", message_bytes)
        broadcast_parameters(module, src, buffers=buffers)
    expected = tensors_of(Kinds(src))
    if not buffers:
        expected |= {name: own[name] for name in ("steps", "mask")}
    after = tensors_of(module)
    assert_same("tensors", after, expected)
    assert all(each.data_ptr() == before[name].data_ptr() for name, each in after.items())
    assert all(each.stride() == before[name].stride() for name, each in after.items())


@multi_rank(2)
def test_messages_are_bounded_and_ties_travel_once() -> None:
    model = TIED.build(seed=dist.get_rank())
    sent: list[int] = []
    file: Any = sys.modules[broadcast_parameters.__module__]
    with pytest.MonkeyPatch.context() as patch:
        original = dist.broadcast

        def counted(tensor: torch.Tensor, **options: Any) -> None:
            sent.append(tensor.numel())
            original(tensor, **options)

        patch.setattr(dist, "broadcast", counted)
        broadcast_parameters(model)
        total = sum(each.nbytes for each in model.parameters())
        assert len(sent) == 1 and total <= sent[0] <= total + 128 * len(list(model.parameters()))
        sent.clear()
        patch.setattr(file, "MESSAGE_BYTES", 5000)
        broadcast_parameters(model)
        assert max(sent) <= 5000 and len(sent) < 2 * total / 5000
    assert model.head.weight is model.embedding.weight
    assert_same("parameters", parameters_of(model), parameters_of(TIED.build()))


@multi_rank(4)
def test_the_source_is_counted_in_the_process_group() -> None:
    rank = dist.get_rank()
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"].get_group()
    model = UNEVEN_MLP.build(seed=rank)
    broadcast_parameters(model, 1, process_group=group)
    assert_same("parameters", parameters_of(model), parameters_of(UNEVEN_MLP.build(seed=rank // 2 * 2 + 1)))
    with pytest.raises(FSDPValueError, match="src=2 is no rank of the process group"):
        broadcast_parameters(model, 2, process_group=group)
    others = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(FSDPValueError, match="a process group that this rank is in"):
            broadcast_parameters(model, process_group=others)


@pytest.mark.full
@multi_rank(2)
def test_unit_by_unit_and_then_trained() -> None:
    """What is sharded below is left alone; the module itself may not be sharded."""
    model = TRANSFORMER.build(seed=dist.get_rank())
    for unit in TRANSFORMER.units(model):
        broadcast_parameters(unit)
        fully_shard(unit)
    plain = TRANSFORMER.build()
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain))
    for moment in ("sharded", "unsharded"):
        broadcast_parameters(model)  # every rank has its own rows, which stay
        assert_same(moment, {"": loss_on(TRANSFORMER, model, 0, 0)}, {"": loss_on(TRANSFORMER, plain, 0, 0)})
    broadcast_parameters(nn.ModuleList([model.blocks[0]]))


def hybrid(case: ModelCase, seed: int, **arguments: Any) -> nn.Module:
    model = case.build(seed=seed)
    model.register_buffer("steps", torch.tensor(dist.get_rank()))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for unit in case.units(model):
        fully_shard(unit, mesh=mesh, **arguments)
    return model


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER, ODD], ids=lambda each: each.name)
@pytest.mark.parametrize("moment", ["before", "after a forward", "after a step"])
def test_replicas_get_the_rows_of_one(case: ModelCase, moment: str, world_size: int) -> None:
    replica = dist.get_rank() // (world_size // 2)
    model = hybrid(case, replica)
    assert isinstance(model, FSDPModule)
    model.set_replica_check(parameters=False, buffers=False)
    expected = {name: each.clone() for name, each in parameters_of(case.build(seed=1)).items()}
    if moment != "before":
        loss_on(case, model, 0, 0).backward()
    if moment == "after a step":
        adamw([each for each in model.parameters() if each.requires_grad]).step()
    broadcast_parameters(model, world_size - 1)
    found = {name: gather(each) for name, each in parameters_of(model).items()}
    if moment != "after a step":
        assert_same("parameters", found, expected)
    for each in found.values():
        values = [torch.empty_like(each.contiguous()) for _ in range(world_size)]
        dist.all_gather(values, each.contiguous())
        assert all(torch.equal(values[0], other) for other in values), "all replicas are one"
    assert model.steps.item() == world_size - 1
    plain = case.build()
    plain.load_state_dict(found, strict=False)
    assert_same("loss", {"": loss_on(case, model, 0, 0)}, {"": loss_on(case, plain, 0, 0)})


@multi_rank(4)
def test_a_group_that_misses_replicas_is_refused_on_all_ranks() -> None:
    model = hybrid(UNEVEN_MLP, 0)
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"].get_group()
    with pytest.raises(FSDPValueError, match=r"replicas of '\w+' are also on the ranks \[\d\]"):
        broadcast_parameters(model, process_group=group)


@multi_rank(2)
def test_inside_of_full_parameters() -> None:
    model = shard(ODD, ODD.build(seed=dist.get_rank()))
    with full_parameters(model):
        broadcast_parameters(model, 1)
    found = {name: gather(each) for name, each in parameters_of(model).items()}
    with full_parameters(model):
        assert_same("parameters", parameters_of(model), found)
    assert not torch.equal(found["head.weight"], ODD.build(seed=7).head.weight)
    values = [torch.empty_like(found["head.weight"]) for _ in range(2)]
    dist.all_gather(values, found["head.weight"])
    assert torch.equal(*values)


@multi_rank(4)
def test_parts_of_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank("dp")

    def built(seed: int) -> nn.Module:
        return parallelize_module(UNEVEN_MLP.build(seed), mesh["tp"], {"0": ColwiseParallel(), "2": ColwiseParallel()})

    model = built(rank)
    with pytest.raises(FSDPValueError, match=r"'0.weight' is a DTensor .*process_group=mesh\['dp'\].get_group"):
        broadcast_parameters(model)
    broadcast_parameters(model, process_group=mesh["dp"].get_group())
    expected = parameters_of(UNEVEN_MLP.build(0))
    assert_same("parameters", {name: gather(each) for name, each in parameters_of(model).items()}, expected)


def replaced_by(bias: torch.Tensor) -> Callable[[Any], None]:
    return lambda model: setattr(model[2], "bias", nn.Parameter(bias))


OF_OTHER_RANKS: dict[str, Callable[[Any], object]] = {
    "2.bias .34. torch.float32": replaced_by(torch.empty(34)),
    "more .2. torch.float32": lambda model: model.register_buffer("more", torch.ones(2)),
}
"""Refused because ranks differ."""

REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception]]] = {
    "'2.bias' is on the meta device": (replaced_by(torch.empty(33, device="meta")), FSDPRuntimeError),
    "'graph' is a Tensor of layout torch.sparse_coo": (
        lambda model: model.register_buffer("graph", torch.eye(3).to_sparse()),
        FSDPNotImplementedError,
    ),
    "'5.weight' is not initialized": (lambda model: model.append(nn.LazyLinear(3)), FSDPRuntimeError),
    **{text: (change, FSDPRuntimeError) for text, change in OF_OTHER_RANKS.items()},
}


@multi_rank(2, 4)
@pytest.mark.parametrize("text", REFUSED)
@pytest.mark.parametrize("where", ["on all ranks", "on one"])
def test_what_is_refused_on_all_ranks(text: str, where: str, world_size: int) -> None:
    model = UNEVEN_MLP.build(seed=dist.get_rank())
    change, kind = REFUSED[text]
    is_alone = where == "on one" and dist.get_rank() != world_size - 1
    if not is_alone:
        change(model)
    if where == "on all ranks" and text in OF_OTHER_RANKS:
        broadcast_parameters(model)
        return
    with pytest.raises(FSDPRuntimeError if is_alone else kind, match=text):
        broadcast_parameters(model)
    kept = UNEVEN_MLP.build(seed=dist.get_rank())
    assert torch.equal(model[0].weight, kept[0].weight)


def test_under_a_launcher_the_process_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fully_shard` makes it: this is often called first."""
    with pytest.raises(FSDPRuntimeError, match="needs a process group, and none is initialized"):
        broadcast_parameters(nn.Linear(2, 2))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    try:
        broadcast_parameters(nn.Linear(2, 2))
        assert dist.is_initialized() and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
