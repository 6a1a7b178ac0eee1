"""How a group communicates: custom collectives, buffers in flight, process groups, which backward is the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import Reference, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import UNEVEN_MLP
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter, persistent_collectives
from tests.harness.parity.implementation import API, beyond_torch
from tests.harness.parity.programs import SIZES, TOWER, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, REDUCE, SCATTER, traced

# ---- custom collectives --------------------------------------------------------------------------


@multi_rank(2, 4)
def test_custom_collectives_are_called_once_for_all_parameters_of_a_group(world_size: int) -> None:
    """And allocate the memory that they communicate in."""
    model, gathers, scatters = TOWER.build(), [], []
    API.fully_shard([model.a, model.b])
    API.fully_shard(model)
    model.b.set_custom_all_gather(custom_all_gather(gathers))
    model.b.set_custom_reduce_scatter(custom_reduce_scatter(scatters))
    loss_on(TOWER, model).backward()
    assert len(gathers) == 2 and len(scatters) == 1  # forward and backward
    numel = SIZES["a"] + SIZES["b"]
    for entry in (*gathers, *scatters):
        assert numel <= entry["numel"] <= numel * 9 / 8
        assert entry["ranks"] == list(range(world_size)) and entry["own_memory"]
        assert entry.get("input", entry.get("output")) * world_size == entry["numel"]


@multi_rank(2)
def test_a_custom_all_gather_is_told_whether_it_may_be_asynchronous() -> None:
    """By `unshard(async_op=True)`, and for forward and backward by `_set_unshard_async_op`; else it is not."""
    model, log = shard(TOWER), []
    model.b.set_custom_all_gather(custom_all_gather(log))
    loss_on(TOWER, model).backward()
    model.b.unshard()
    model.b.reshard()
    assert [entry["async_op"] for entry in log] == [False] * 3
    log.clear()
    handle = model.b.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    model.b.reshard()
    model._set_unshard_async_op(True)
    loss_on(TOWER, model).backward()
    assert [entry["async_op"] for entry in log] == [True] * 3


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("replicate", [1, 2])
@beyond_torch("gradients are views of the buffers, which the next group overwrites")
def test_training_with_collectives_that_use_their_buffers_again(replicate: int, world_size: int) -> None:
    """No gradient, and nothing that waits for its all-reduce, stays in a buffer that the next group writes."""
    model = shard(UNEVEN_MLP, mesh=mesh_of(replicate, world_size // replicate))
    gather, scatter = persistent_collectives()
    for unit in UNEVEN_MLP.units(model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)

    def before_forward(micro: int) -> None:
        model.set_requires_all_reduce(micro == 1)

    reference = Reference(UNEVEN_MLP, world_size=world_size, microbatches=2)
    train(UNEVEN_MLP, model, reference=reference, before_forward=before_forward, tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("precision", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=str)
def test_training_with_custom_collectives_under_hsdp(precision: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    model, gathers, scatters = shard(TOWER, mesh=mesh, mp_policy=API.MixedPrecisionPolicy(**precision)), [], []
    for unit in TOWER.units(model):
        unit.set_custom_all_gather(custom_all_gather(gathers))
        unit.set_custom_reduce_scatter(custom_reduce_scatter(scatters))
    train(TOWER, model, reference=Reference(TOWER, world_size=4, **precision))
    assert {entry["dtype"] for entry in gathers} == {precision.get("param_dtype", torch.float32)}
    ranks = dist.get_process_group_ranks(mesh["shard"].get_group())
    assert all(entry["ranks"] == ranks for entry in [*gathers, *scatters])


@multi_rank(2)
@pytest.mark.parametrize("name", ["AllGather", "ReduceScatter"])
def test_custom_collectives_must_be_complete(name: str) -> None:
    class Incomplete(getattr(API, name)):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()


@multi_rank(2)
@pytest.mark.parametrize("enable", [True, False])
def test_memory_of_the_process_group_which_gloo_does_not_have(enable: bool) -> None:
    model = shard(UNEVEN_MLP)
    for unit in UNEVEN_MLP.units(model):
        unit.set_allocate_memory_from_process_group_for_comm(enable)
    train(UNEVEN_MLP, model, steps=2)


@multi_rank(2)
@pytest.mark.parametrize("enable", [True, False])
def test_the_process_group_is_asked_for_memory_where_it_has_some(enable: bool) -> None:
    asked: list[int] = []

    class Backend:
        """What FSDP asks of a process group's backend, as one with an allocator answers."""

        def supports_tensor_alloc(self, device: torch.device) -> bool:
            return True

        def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            asked.append(size)
            return torch.empty(size, dtype=dtype, device=device)

    model = shard(TOWER)
    loss_on(TOWER, model).backward()
    model.b.set_allocate_memory_from_process_group_for_comm(True)
    model.b.set_allocate_memory_from_process_group_for_comm(enable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: Backend())
        loss_on(TOWER, model).backward()
    # Gathered in forward and backward, scattered once.
    assert sum(SIZES["b"] <= size <= SIZES["b"] * 9 / 8 for size in asked) == (3 if enable else 0)


@multi_rank(2)
@pytest.mark.parametrize("method", ["set_custom_all_gather", "set_custom_reduce_scatter"])
def test_memory_of_the_process_group_is_no_choice_beside_custom_collectives(method: str) -> None:
    model, make = shard(TOWER), custom_all_gather if "gather" in method else custom_reduce_scatter
    getattr(model.a, method)(make([]))
    with pytest.raises((AssertionError, RuntimeError, ValueError), match="custom"):
        model.a.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises((AssertionError, RuntimeError, ValueError, NotImplementedError)):
        model.a.set_symm_mem_for_comm()


# ---- buffers and process groups ------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize(("buffers", "recurse"), [(1, True), (2, True), (4, True), (4, False)])
def test_no_more_inputs_of_reductions_are_kept_than_allowed_and_no_fewer(buffers: int, recurse: bool) -> None:
    """Seen by what is still alive of earlier reductions when the last of four is issued."""
    model, log = shard(TOWER), []
    model.set_reduce_scatter_max_input_buffers(buffers, recurse=recurse)  # the root has no parameters of its own
    reduce_scatter = custom_reduce_scatter(log)
    for unit in TOWER.units(model):
        unit.set_custom_reduce_scatter(reduce_scatter)
    loss_on(TOWER, model).backward()
    alive = [min(index, buffers - 1) if recurse else 0 for index in range(4)]
    assert [entry["earlier_inputs_alive"] for entry in log] == alive


@pytest.mark.full
@multi_rank(4)
def test_reductions_in_a_process_group_of_their_own() -> None:
    """A process group with the ranks of the shard axis."""
    mesh = mesh_of(2, 2)
    model = shard(TOWER, mesh=mesh)
    ranks = tuple(dist.get_process_group_ranks(mesh["shard"].get_group()))

    def groups_of_a_step() -> tuple[set[str], set[str]]:
        with traced() as trace:
            loss_on(TOWER, model).backward()
        assert {each.ranks for kind in (GATHER, SCATTER) for each in trace.of(kind)} == {ranks}
        return {each.group for each in trace.of(GATHER)}, {each.group for each in trace.of(SCATTER)}

    groups_of_a_step()
    gather, scatter = groups_of_a_step()
    assert gather == scatter and len(gather) == 1
    model.set_separate_reduce_scatter_group()
    gather_now, scatter_now = groups_of_a_step()
    assert gather_now == gather and len(scatter_now) == 1 and scatter_now.isdisjoint(gather)
    model.set_separate_reduce_scatter_group(True)  # again: the same one
    assert groups_of_a_step() == (gather_now, scatter_now)
    model.zero_grad()
    train(TOWER, model)
    model.set_separate_reduce_scatter_group(False)
    assert groups_of_a_step() == (gather, scatter)


@multi_rank(2)
def test_a_process_group_of_its_own_for_one_module_only() -> None:
    model = shard(TOWER)
    model.set_separate_reduce_scatter_group(recurse=False)  # the root has no parameters of its own
    model.b.set_separate_reduce_scatter_group(recurse=False)
    loss_on(TOWER, model).backward()
    with traced() as trace:
        loss_on(TOWER, model).backward()
    (gathers,) = {each.group for each in trace.of(GATHER)}
    groups = {each.numel * 8 // SIZES["b"] in (8, 9): each.group for each in trace.of(SCATTER)}
    assert len(trace.of(SCATTER)) == 4
    assert groups[False] == gathers and groups[True] != gathers


# ---- which backward is the last ------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
def test_a_backward_that_is_not_the_last_leaves_its_reductions_pending() -> None:
    """Seen by the memory of the reductions: kept until the last backward has waited for them."""
    model, log = shard(TOWER), []
    reduce_scatter = custom_reduce_scatter(log)
    model.set_reduce_scatter_max_input_buffers(2)
    for unit in TOWER.units(model):
        unit.set_custom_reduce_scatter(reduce_scatter)
    for is_last in (False, True, False, True):
        model.set_is_last_backward(is_last)
        loss_on(TOWER, model).backward()
        assert any(not each.expired() for each in reduce_scatter.inputs) == (not is_last)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_gradient_sync_recurses_unless_told_not_to(recurse: bool) -> None:
    model = shard(TOWER)
    loss_on(TOWER, model).backward()
    model.zero_grad()
    model.set_requires_gradient_sync(False, recurse=recurse)  # the root has no parameters of its own
    model.b.set_requires_gradient_sync(False, recurse=False)
    with traced() as trace:
        loss_on(TOWER, model).backward()
    assert len(trace.of(SCATTER)) == (0 if recurse else 3) and trace.of(REDUCE) == []
    assert model.b.weight.grad is None and (model.a.weight.grad is None) == recurse
