"""`FSDPParamGroup`: its phases, what makes gathered values stale, what it takes over and refuses. No data moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPRuntimeError, FSDPValueError, fully_shard
from fsdp2.core.group import FSDPParamGroup, free_cleared_gradients
from fsdp2.core.options import refuse_settings
from fsdp2.core.plan import Waiting
from fsdp2.core.state import state_of
from fsdp2.errors import ParamPhase
from tests.harness import fake_world
from tests.harness.internals import allocated_bytes, gradient_buffers, groups_of, unsharded_bytes


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_world(2):
        yield


def build(**options: object) -> tuple[nn.Linear, FSDPParamGroup]:
    """A sharded layer that is a root, and its only group."""
    model = fully_shard(nn.Linear(4, 6), **options)  # type: ignore[call-overload]
    state_of(model).ensure_root()  # type: ignore[union-attr]
    (group,) = groups_of(model)
    return model, group


def unshard(group: FSDPParamGroup) -> None:
    assert group.unshard()
    group.wait_for_unshard()


def test_phases_decide_what_is_registered_and_what_is_allocated() -> None:
    model, group = build()
    sharded = [*model.parameters()]
    assert group.phase is ParamPhase.SHARDED and group.sharded == tuple(sharded) and allocated_bytes(group) == 0
    assert group.unshard() and group.phase is ParamPhase.UNSHARDING
    assert [*model.parameters()] == sharded, "until the gather is waited for"
    group.wait_for_unshard()
    assert group.phase is ParamPhase.UNSHARDED
    assert [type(each) for each in model.parameters()] == [nn.Parameter] * 2 and model.weight.shape == (6, 4)
    assert allocated_bytes(group) >= unsharded_bytes(group) == 30 * 4
    group.reshard()
    assert group.phase is ParamPhase.SHARDED and [*model.parameters()] == sharded and allocated_bytes(group) == 0
    group.reshard()
    group.wait_for_unshard()
    assert group.phase is ParamPhase.SHARDED, "nothing to do"


def test_what_is_there_is_not_gathered_again_unless_it_was_written() -> None:
    _, group = build()
    unshard(group)
    gathers = mock.Mock(wraps=group.transport.all_gather)
    with mock.patch.object(group.transport, "all_gather", gathers):
        assert not group.unshard() and group.phase is ParamPhase.UNSHARDED and not group.is_stale()
        with torch.no_grad():
            group.sharded[0].add_(1)
        assert group.is_stale()
        unshard(group)
        assert gathers.call_count == 1 and not group.is_stale()
        group.note_write()  # which the host has not seen
        assert group.is_stale()
        with torch.no_grad():
            group.sharded[0].to_local().add_(1)
        unshard(group)
        assert gathers.call_count == 2


def test_a_backward_is_refused_what_was_written_since_its_forward() -> None:
    _, group = build()
    unshard(group)
    group.reshard()
    assert group.unshard(for_backward=True)
    group.reshard()
    with torch.no_grad():
        group.sharded[0].add_(1)
    assert not group.unshard(for_backward=True, is_prefetch=True), "only expected: nothing is done"
    with pytest.raises(FSDPRuntimeError, match="were changed between a forward and its backward"):
        group.unshard(for_backward=True)


def test_what_rests_in_place_is_found_by_the_backward_and_freed_by_a_reshard() -> None:
    model, group = build()
    unshard(group)
    unsharded = model.weight
    group.rest_in_place()
    assert isinstance(model.weight, DTensor) and group.phase is ParamPhase.SHARDED and allocated_bytes(group) > 0
    assert not group.unshard(for_backward=True) and model.weight is unsharded, "without a gather"
    group.rest_in_place()
    group.reshard()
    assert allocated_bytes(group) == 0


def test_a_gather_that_nobody_waits_for_is_over_before_its_memory_goes() -> None:
    _, group = build()
    work = mock.Mock(has_failed=False)

    def gather(members: object, works: list[object], user_waits: bool) -> None:
        works.append(work)

    with mock.patch.object(group.transport, "all_gather", gather):
        group.unshard()
        work.wait.assert_not_called()
        group.reshard()
    work.wait.assert_called_once_with()
    assert group.phase is ParamPhase.SHARDED and allocated_bytes(group) == 0


def test_a_gather_that_an_exception_cut_short_is_not_waited_for_and_comes_anew() -> None:
    _, group = build()
    with (
        mock.patch.object(group.transport, "all_gather", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        group.unshard()
    assert group.was_interrupted and group.was_cut_short
    with pytest.raises(FSDPRuntimeError, match="was interrupted by an exception before all had arrived"):
        group.wait_for_unshard()
    group.reshard()
    assert group.phase is ParamPhase.SHARDED and not group.was_interrupted and not group.is_prepared
    group.prepare(group.comm)  # type: ignore[arg-type]
    unshard(group)


def test_a_shard_that_the_user_has_replaced_is_taken_over_and_the_plan_is_made_anew() -> None:
    model, group = build()
    plan = group.plan
    assert group.plan is plan
    replacement = nn.Parameter(model.weight.detach() * 2)
    model.weight = replacement
    group.adopt_replaced()
    assert group.sharded[0] is replacement and group.is_prepared and group.plan is not plan
    model.bias.requires_grad_(False)
    group.adopt_replaced()
    assert not group.plan.params[1].requires_grad


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "replaced": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(6, 4))),
    "written": lambda model: model.weight.detach().add_(1),
    "converted": lambda model: setattr(model.weight, "data", model.weight.data.double()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_changes_while_unsharded_is_refused_and_the_shard_is_back(
    write: Callable[[nn.Module], object],
) -> None:
    model, group = build()
    sharded = model.weight
    unshard(group)
    write(model)
    with pytest.raises(FSDPRuntimeError, match="'weight' was replaced, converted or written while it was unsharded"):
        group.reshard()
    assert model.weight is sharded and group.phase is ParamPhase.SHARDED and allocated_bytes(group) == 0


def test_data_that_was_set_is_refused_once() -> None:
    model, group = build()
    model.weight.data = model.weight.data * 2
    with pytest.raises(FSDPRuntimeError, match=r"\.data was set on parameter 'weight'"):
        group.begin_iteration(ends_by_itself=False)
    group.begin_iteration(ends_by_itself=False)


def test_an_iteration_does_not_begin_with_gradients_that_nobody_has_reduced() -> None:
    _, group = build()
    unshard(group)
    group.params[0].unsharded.grad = torch.ones(6, 4)  # type: ignore[union-attr]
    group.reshard()
    with pytest.raises(FSDPRuntimeError, match="a backward left gradients in 'Linear' that were not reduced"):
        group.begin_iteration(ends_by_itself=True)
    group.begin_iteration(ends_by_itself=False)


def test_settings_that_cannot_be_are_refused_before_they_are_made() -> None:
    _, group = build(mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    before = group.settings
    with pytest.raises(FSDPValueError, match="native HSDP"):
        refuse_settings(group, dataclasses.replace(before, all_reduce_hook_stream=object()))
    with mock.patch.object(group.reducer, "waiting", Waiting.REDUCE_SCATTERED):
        for wanted in ({"divide_factor": 3.0}, {"only_sums": True}):
            with pytest.raises(FSDPRuntimeError, match="wait for their all-reduce"):
                refuse_settings(group, dataclasses.replace(before, **wanted))  # type: ignore[arg-type]
    assert group.settings is before


def gradient_bytes(group: FSDPParamGroup) -> int:
    return sum(each.untyped_storage().nbytes() for each in gradient_buffers(group))


def step(model: nn.Module) -> list[Tensor]:
    model(torch.ones(1, 4)).sum().backward()
    return [each.grad.to_local() for each in model.parameters()]  # type: ignore[union-attr]


def test_memory_of_gradients_is_freed_when_they_are_cleared_and_nobody_holds_them() -> None:
    model, group = build()
    held = step(model)
    free_cleared_gradients([group])
    assert gradient_bytes(group) >= 15 * 4, "they are there"
    model.zero_grad()
    free_cleared_gradients([group])
    assert gradient_bytes(group), "somebody holds one"
    del held
    free_cleared_gradients([group])
    assert not gradient_bytes(group)
