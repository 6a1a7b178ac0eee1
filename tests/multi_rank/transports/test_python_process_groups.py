"""Process groups written in Python: another program's own, and torch's, whose ranks are threads of one process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.api.module import get_cls_to_fsdp_cls
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.models import MLP, UNEVEN_MLP
from tests.harness.threads import Threads


class Counting(dist.ProcessGroup):
    """A group of a program's own, in Python: counts what it is asked for, and lets the default group do it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.inside = dist.group.WORLD
        self.asked: list[str] = []

    def getBackendName(self) -> str:
        return "counting"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _delegate(name: str) -> None:
    def method(self: Counting, *args: Any) -> Any:
        self.asked.append(name)
        return getattr(self.inside, name)(*args)

    setattr(Counting, name, method)


NEW_NAMES = ("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single")  # from torch 2.13 on
OLD_NAMES = ("_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base")

for each in (*(NEW_NAMES if hasattr(dist, "all_gather_single") else OLD_NAMES), "allgather", "allreduce", "barrier"):
    _delegate(each)


class Covering(Counting):
    """The same over a backend that one could communicate by without its knowing."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(store, rank, size, timeout)
        backend = self.inside._get_backend(torch.device("cpu"))
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)


KINDS = {"counting": Counting, "covering": Covering}


def mesh_of_group(name: str) -> tuple[DeviceMesh, Counting]:
    """A mesh over all ranks, on a group of that class."""
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, KINDS[name], devices=["cpu"])
    group = dist.new_group(backend=name)
    assert isinstance(group, Counting)
    return DeviceMesh.from_group(group, "cpu"), group


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("name", list(KINDS))
def test_models_train_on_a_process_group_written_in_python(name: str, world_size: int) -> None:
    mesh, group = mesh_of_group(name)
    model = UNEVEN_MLP.build()
    for unit in UNEVEN_MLP.units(model):
        fully_shard(unit, mesh=mesh)
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=2, tolerance=tolerance_for(world_size))
    reductions = [call for call in group.asked if "scatter" in call]
    assert len(reductions) == 2 * len(UNEVEN_MLP.unit_names)


@multi_rank(2)
def test_memory_is_torchs_where_a_process_group_in_python_has_none(world_size: int) -> None:
    mesh, _ = mesh_of_group("counting")
    model = fully_shard(UNEVEN_MLP.build(), mesh=mesh)
    model.set_allocate_memory_from_process_group_for_comm(True)
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=1, tolerance=tolerance_for(world_size))


# ---- ranks that are threads ------------------------------------------------------------------------


@multi_rank(Threads(2))
def test_a_rank_that_makes_modules_uninitialized_does_not_change_that_of_others() -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    if dist.get_rank() == 0:
        with fsdp2.disable_fsdp_module_new_init():
            dist.barrier()
            dist.barrier()
    else:
        dist.barrier()
        assert "in_features" in vars(type(model)(4, 4))
        dist.barrier()


@multi_rank(Threads(4), timeout=120)
def test_ranks_interrupt_each_other_anywhere(world_size: int) -> None:
    """Each builds, copies and trains, in turns of a few operations; parameters were drawn before."""
    originals = [MLP.build() for _ in range(2)]
    reference = Reference(MLP, world_size=world_size)
    dist.barrier()
    with _without_baton():
        for original in originals:
            model = copy.deepcopy(original)
            for unit in MLP.units(model):
                fully_shard(unit, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            copied = copy.deepcopy(model)
            for each in (model, copied):
                optimizer = adamw(list(each.parameters()))
                MLP.loss(each, MLP.batch(0, 0, dist.get_rank())).backward()
                optimizer.step()
        assert type(model) is type(copied) is get_cls_to_fsdp_cls()[type(originals[0])]
    expected = reference.step()
    for name, parameter in copied.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected.parameters[name])


@contextmanager
def _without_baton() -> Iterator[None]:
    from tests.harness.threads import _BATON

    interval = sys.getswitchinterval()
    _BATON.is_held = False
    _BATON.lock.release()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        _BATON.lock.acquire()
        _BATON.is_held = True
