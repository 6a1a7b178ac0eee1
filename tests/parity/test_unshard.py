"""`unshard` and `reshard` by hand, the handle of an asynchronous one, and storage that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.harness import multi_rank
from tests.harness.models import UNEVEN_MLP
from tests.harness.parity.implementation import API, torch_from
from tests.harness.parity.programs import ROOTED, SIZES, TOWER, is_sharded, loss_on, shard, train
from tests.harness.parity.trace import GATHER, Trace, trace_of, traced


def gathers(trace: Trace) -> list[str]:
    """The layers of the tower that were gathered, in order."""
    return [name.split()[1] for name in trace.named(SIZES) if name.startswith(GATHER)]


def whole(parameter: Tensor) -> Tensor:
    """A parameter's value, whether registered sharded or not."""
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


# ---- unshard and reshard by hand -----------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("ran_before", [False, True])
def test_unshard_registers_the_whole_parameters_and_reshard_the_sharded_ones(ran_before: bool) -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    if ran_before:
        loss_on(UNEVEN_MLP, model).backward()
    sharded = list(model[0].parameters())
    assert model[0].unshard() is None
    for name, parameter in model[0].named_parameters():
        assert isinstance(parameter, nn.Parameter) and not is_sharded(parameter)
        assert torch.equal(parameter, plain.get_parameter(f"0.{name}"))
    assert model[0].reshard() is None
    assert all(mine is yours for mine, yours in zip(model[0].parameters(), sharded, strict=True))


@multi_rank(2)
def test_unshard_and_reshard_are_not_recursive() -> None:
    model = shard(ROOTED)
    model.unshard()
    assert not is_sharded(model[4].weight) and is_sharded(model[0].weight)
    model[0].unshard()
    model.reshard()
    assert is_sharded(model[4].weight) and not is_sharded(model[0].weight)


@multi_rank(2)
def test_unshard_twice_gathers_once_and_forward_not_again() -> None:
    model = shard(TOWER)
    loss_on(TOWER, model).backward()
    assert gathers(trace_of(lambda: (model.b.unshard(), model.b.unshard()))) == ["b"]
    assert "b" not in gathers(trace_of(lambda: loss_on(TOWER, model)))


@multi_rank(2)
def test_reshard_of_what_is_sharded_does_nothing() -> None:
    model = shard(TOWER)
    model.a.reshard()
    model.a.reshard()
    assert is_sharded(model.a.weight)


@multi_rank(2)
def test_an_asynchronous_unshard_is_waited_for_by_its_handle() -> None:
    model = shard(TOWER)
    loss_on(TOWER, model).backward()
    with traced() as trace:
        handle = model.c.unshard(async_op=True)
    assert gathers(trace) == ["c"] and isinstance(handle, API.UnshardHandle)
    assert handle.wait() is None
    assert not is_sharded(model.c.weight)
    assert torch.equal(model.c.weight, TOWER.build().c.weight)
    handle.wait()  # again: nothing
    model.c.reshard()


@pytest.mark.full
@multi_rank(2)
def test_an_asynchronous_unshard_is_waited_for_by_forward() -> None:
    model = shard(UNEVEN_MLP)

    def before_forward(micro: int) -> None:
        for unit in UNEVEN_MLP.units(model):
            unit.unshard(async_op=True)

    train(UNEVEN_MLP, model, before_forward=before_forward)


@multi_rank(2)
def test_an_unshard_that_is_never_used_is_dropped() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.skipped = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Skipping()
    for unit in (model.used, model.skipped, model):
        API.fully_shard(unit)
    for _ in range(3):
        model.skipped.unshard(async_op=True)
        model(torch.randn(2, 8)).sum().backward()
    assert is_sharded(model.skipped.weight) and model.skipped.weight.grad is None


@multi_rank(2)
def test_unshard_follows_the_mixed_precision_policy() -> None:
    model = shard(TOWER, mp_policy=API.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.a.unshard()
    assert model.a.weight.dtype == torch.bfloat16


@pytest.mark.full
@multi_rank(2)
def test_a_handle_of_a_module_without_parameters() -> None:
    model = shard(TOWER)  # the root has none of its own
    handle = model.unshard(async_op=True)
    assert isinstance(handle, API.UnshardHandle)
    handle.wait()
    model.reshard()
    assert API.UnshardHandle().wait() is None


# ---- keeping the storage (2.15) ------------------------------------------------------------------


@multi_rank(2)
@torch_from((2, 15), "set_keep_unsharded_storage is new")
@pytest.mark.parametrize("recurse", [True, False])
def test_kept_storage_has_the_same_address_every_time(recurse: bool) -> None:
    model = shard(TOWER)
    loss_on(TOWER, model).backward()
    model.set_keep_unsharded_storage(True, recurse=recurse)  # the root has no parameters of its own
    model.c.unshard()
    weight = model.c.weight
    model.c.reshard()
    assert (weight.untyped_storage().size() > 0) == recurse
    model.b.set_keep_unsharded_storage(True, recurse=False)
    addresses = []
    for _ in range(3):
        model.b.unshard()
        weight = model.b.weight
        addresses.append(weight.data_ptr())
        model.b.reshard()
        assert weight.untyped_storage().size() >= weight.nbytes  # registered no more, but not freed
        assert is_sharded(model.b.weight)
        loss_on(TOWER, model).backward()
    assert len(set(addresses)) == 1
    model.set_keep_unsharded_storage(False)
    model.b.unshard()
    weight = model.b.weight
    model.b.reshard()
    assert weight.untyped_storage().size() == 0


@multi_rank(2)
def test_whole_values_are_those_of_the_shards() -> None:
    """In whatever way a parameter is registered, its value is the same."""
    model = shard(UNEVEN_MLP)
    sharded = [whole(parameter) for parameter in model.parameters()]
    for unit in UNEVEN_MLP.units(model):
        unit.unshard()
    assert all(torch.equal(whole(p), value) for p, value in zip(model.parameters(), sharded, strict=True))
