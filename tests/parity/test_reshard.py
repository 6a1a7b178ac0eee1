"""When parameters are sharded and when not: after forward, after backward, by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness import multi_rank
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import beyond_torch
from tests.harness.parity.programs import ROOTED, SIZES, TOWER, is_sharded, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, Trace, trace_of, traced


def gathers(trace: Trace) -> list[str]:
    """The layers of the tower that were gathered, in order."""
    return [name.split()[1] for name in trace.named(SIZES) if name.startswith(GATHER)]


# ---- reshard_after_forward -----------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
def test_true_registers_the_sharded_parameters_after_forward() -> None:
    model = shard(ROOTED, reshard_after_forward=True)
    output = model(ROOTED.batch(0, 0, 0).inputs)
    assert all(is_sharded(parameter) for parameter in model.parameters())
    assert all(parameter.placements == (Shard(0),) for parameter in model.parameters())
    del output


@multi_rank(2)
def test_false_registers_the_unsharded_parameters_after_forward() -> None:
    model, plain = shard(ROOTED, reshard_after_forward=False), ROOTED.build()
    output = model(ROOTED.batch(0, 0, 0).inputs)
    for mine, original in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, nn.Parameter) and type(mine.data) is Tensor and mine.requires_grad
        assert torch.equal(mine, original)
    del output


@multi_rank(2)
def test_none_is_true_for_submodules_and_false_for_the_root() -> None:
    model = shard(ROOTED)
    output = model(ROOTED.batch(0, 0, 0).inputs)
    assert is_sharded(model[0].weight) and is_sharded(model[2].weight) and not is_sharded(model[4].weight)
    del output


@multi_rank(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_resharding_decides_what_backward_gathers(reshard_after_forward: bool) -> None:
    model = shard(TOWER, reshard_after_forward=reshard_after_forward)
    loss_on(TOWER, model).backward()
    losses: list[Tensor] = []
    assert sorted(gathers(trace_of(lambda: losses.append(loss_on(TOWER, model))))) == list("abcd")
    in_backward = gathers(trace_of(losses[0].backward))
    assert sorted(in_backward) == (list("abcd") if reshard_after_forward else [])


@pytest.mark.full
@multi_rank(2)
def test_what_was_unsharded_in_forward_is_freed_after_it() -> None:
    model = shard(TOWER)
    kept: list[Tensor] = []
    model.b.register_forward_pre_hook(lambda module, args: kept.append(module.weight))
    output = model(TOWER.batch(0, 0, 0).inputs)
    assert not isinstance(kept[0], DTensor)
    assert kept[0].untyped_storage().size() == 0
    del output


@pytest.mark.full
@multi_rank(2)
def test_the_phases_of_one_step() -> None:
    """Sharded at rest, unsharded while forward or backward computes, for every submodule."""
    model = shard(TOWER)
    sharded_at: dict[str, list[bool]] = {}

    class Phases(Trace):
        def mark(self, name: str) -> None:
            sharded_at[name] = [is_sharded(getattr(model, name[-1]).weight)]

    model.watch(Phases())
    assert all(is_sharded(parameter) for parameter in model.parameters())
    loss = loss_on(TOWER, model)
    assert all(is_sharded(parameter) for parameter in model.parameters())
    loss.backward()
    assert all(is_sharded(parameter) and parameter.grad is not None for parameter in model.parameters())
    marks = [f"{phase} {name}" for phase, names in (("forward", "abcd"), ("backward", "dcba")) for name in names]
    assert sharded_at == {mark: [False] for mark in marks} and list(sharded_at) == marks


# ---- an int --------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(TOWER, id="even"),
        pytest.param(ROOTED, id="uneven", marks=beyond_torch("uneven parameters are registered with their padding")),
    ],
)
def test_an_int_registers_parameters_sharded_over_that_many_ranks(case: ModelCase) -> None:
    model, plain = shard(case, reshard_after_forward=2), case.build()
    output = model(case.batch(0, 0, 0).inputs)
    for mine, original in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, nn.Parameter) and isinstance(mine, DTensor)
        assert mine.device_mesh.shape == (2, 2) and mine.placements == (Replicate(), Shard(0))
        chunks = original.detach().chunk(2)
        coordinate = dist.get_rank() % 2
        assert torch.equal(mine.to_local(), chunks[coordinate] if coordinate < len(chunks) else original[:0])
    del output


@pytest.mark.full
@multi_rank(4)
def test_an_int_gathers_among_that_many_ranks_in_backward() -> None:
    model = shard(TOWER, reshard_after_forward=2)
    loss_on(TOWER, model).backward()
    with traced() as forward:
        loss = loss_on(TOWER, model)
    with traced() as backward:
        loss.backward()
    first = dist.get_rank() // 2 * 2
    assert {each.ranks for each in forward.of(GATHER)} == {(0, 1, 2, 3)}
    assert {each.ranks for each in backward.of(GATHER)} == {(first, first + 1)}
    assert sorted(gathers(backward)) == list("abcd")


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, ROOTED, TRANSFORMER], ids=str)
def test_an_int_trains_like_the_unsharded_model(case: ModelCase) -> None:
    train(case, shard(case, reshard_after_forward=2))


@pytest.mark.full
@multi_rank(4)
def test_an_int_under_hsdp() -> None:
    """The factor is one of the shard axis; groups of that many ranks lie within it."""
    model = shard(TOWER, mesh=mesh_of(1, 4), reshard_after_forward=2)
    loss_on(TOWER, model).backward()
    with traced() as trace:
        loss_on(TOWER, model).backward()
    first = dist.get_rank() // 2 * 2
    assert {each.ranks for each in trace.of(GATHER)} == {(0, 1, 2, 3), (first, first + 1)}
    model.zero_grad()
    train(TOWER, model)


@pytest.mark.full
@multi_rank(4)
def test_an_int_of_the_whole_size_is_true() -> None:
    model = shard(TOWER, reshard_after_forward=4)
    output = model(TOWER.batch(0, 0, 0).inputs)
    assert all(parameter.placements == (Shard(0),) for parameter in model.parameters())
    del output


@multi_rank(4)
@pytest.mark.filterwarnings("ignore:reshard_after_forward=1:UserWarning")  # torch logs it
def test_the_int_one_is_false() -> None:
    """Resharding to one rank is not resharding."""
    model = shard(TOWER, reshard_after_forward=1)
    loss_on(TOWER, model).backward()
    loss = loss_on(TOWER, model)
    assert not any(is_sharded(parameter) for parameter in model.parameters())
    assert gathers(trace_of(loss.backward)) == []


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("how", [2, False])
def test_reshard_after_such_a_forward_registers_the_sharded_parameters(how: bool | int) -> None:
    model = shard(TOWER, reshard_after_forward=how)
    before = list(model.parameters())
    loss = loss_on(TOWER, model)
    for unit in TOWER.units(model):
        unit.reshard()
    assert all(mine is yours for mine, yours in zip(model.parameters(), before, strict=True))
    loss.backward()
    train_after = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert all(gradient.abs().sum() > 0 for gradient in train_after)


# ---- set_reshard_after_forward -------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_forward_changes_it_at_runtime(recurse: bool) -> None:
    model = shard(ROOTED)
    loss_on(ROOTED, model).backward()
    model.set_reshard_after_forward(False, recurse=recurse)
    loss = loss_on(ROOTED, model)
    assert is_sharded(model[0].weight) == (not recurse) and not is_sharded(model[4].weight)
    loss.backward()
    model.set_reshard_after_forward(True, recurse=recurse)
    loss = loss_on(ROOTED, model)
    assert is_sharded(model[0].weight) and is_sharded(model[4].weight)
    loss.backward()


@multi_rank(2)
@pytest.mark.parametrize("value", [True, False])
def test_set_reshard_after_forward_before_the_first_forward_holds_for_the_root_too(value: bool) -> None:
    model = shard(ROOTED)
    model.set_reshard_after_forward(value)
    loss = loss_on(ROOTED, model)
    assert is_sharded(model[4].weight) == value and is_sharded(model[0].weight) == value
    loss.backward()


@pytest.mark.full
@multi_rank(4)
def test_set_reshard_after_forward_replaces_an_int() -> None:
    model = shard(TOWER, reshard_after_forward=2)
    loss_on(TOWER, model).backward()
    model.set_reshard_after_forward(True)
    loss = loss_on(TOWER, model)
    assert all(parameter.placements == (Shard(0),) for parameter in model.parameters())
    loss.backward()


@multi_rank(2)
@pytest.mark.parametrize("value", [2, None, 1.0, "True"], ids=repr)
def test_set_reshard_after_forward_takes_only_a_bool(value: object) -> None:
    model = shard(TOWER)
    with pytest.raises(ValueError, match="bool"):
        model.set_reshard_after_forward(value)


# ---- set_reshard_after_backward ------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_parameters_stay_unsharded_after_backward_where_asked(recurse: bool) -> None:
    model = shard(ROOTED)
    model.set_reshard_after_backward(False, recurse=recurse)
    loss_on(ROOTED, model).backward()
    assert is_sharded(model[0].weight) == (not recurse) and not is_sharded(model[4].weight)


@pytest.mark.full
@multi_rank(2)
def test_the_next_forward_then_gathers_nothing() -> None:
    model = shard(TOWER)
    model.set_reshard_after_backward(False)
    loss_on(TOWER, model).backward()
    assert gathers(trace_of(lambda: loss_on(TOWER, model))) == []
    model.set_reshard_after_backward(True)
    loss_on(TOWER, model).backward()
    assert all(is_sharded(parameter) for parameter in model.parameters())
