"""Optimizer state offloaded by itself: at rest on the host, on the device while a parameter group is stepped.

On CPU both are the same memory, so what can be seen is which storages there are: those at rest are never computed with,
and those on the device are gone when the next group has its turn.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import CPUOffloadPolicy, fully_shard, offload_optimizer_state
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same, parameters_of
from tests.harness.shared.optimizers import EVERY_KIND, MakeOptimizer, loss_of, sgd_momentum, tolerance_of, two_groups
from tests.harness.shared.training import CASE, shard, trainable


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def moved(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The local tensors that rest on the host."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [local(value) for value in values if isinstance(value, Tensor) and value.dim() > 0]


def addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    return [tensor.data_ptr() for tensor in moved(optimizer)]


class PerBlock(torch.optim.AdamW):
    """One parameter group per parameter; notes what of the state is in memory, beside that at rest, in each turn.

    Attributes:
        alive: in every turn of the last step, bytes of the copies that are being computed with.
        computed_with: addresses of these copies.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__([{"params": [parameter]} for parameter in parameters], lr=1e-2, eps=1e-3)
        self.alive: list[int] = []
        self.seen: list[Any] = []
        self.computed_with: set[int] = set()

    def _init_group(self, group: dict[str, Any], *args: Any) -> Any:
        result = super()._init_group(group, *args)
        if len(self.alive) == len(self.param_groups):
            self.alive, self.seen = [], []
        for parameter in group["params"]:
            state = self.state[parameter]
            self.seen += [weakref.ref(local(state[key])) for key in ("exp_avg", "exp_avg_sq")]
            self.computed_with |= {local(state[key]).data_ptr() for key in ("exp_avg", "exp_avg_sq")}
        self.alive.append(sum(tensor.nbytes for each in self.seen if (tensor := each()) is not None))
        return result


# ---- optimizer state -----------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("make", EVERY_KIND, ids=lambda f: f.__name__)
def test_every_optimizer_trains_like_the_reference(make: MakeOptimizer, world_size: int) -> None:
    model = shard()
    optimizer = make(trainable(model))
    offload_optimizer_state(optimizer)
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    tolerance = tolerance_of(make, world_size)
    assert_trains_like(reference, model, optimizer, steps=1, tolerance=tolerance)
    resting = addresses(optimizer)
    for _ in range(2):
        step_like(reference, model, optimizer, tolerance)
    assert addresses(optimizer) == resting, "host memory is kept from step to step"


def step_like(reference: Reference, model: nn.Module, optimizer: torch.optim.Optimizer, tolerance: Any) -> None:
    """One step; the sharded parameters need not be exactly the reference's before it."""
    record = reference.step()
    loss_of(reference.case, model, record.step).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_sharded_same("parameters", parameters_of(model), record.parameters, tolerance=tolerance)


@multi_rank(2, 4)
def test_the_state_of_one_group_at_a_time_is_on_the_device() -> None:
    model = shard()
    optimizer = PerBlock(trainable(model))
    offload_optimizer_state(optimizer)
    for step in range(3):
        loss_of(CASE, model, step).backward()
        resting, optimizer.computed_with = set(addresses(optimizer)) - {0}, set()
        optimizer.step()
        assert not optimizer.computed_with & resting
        own = [2 * local(group["params"][0]).nbytes for group in optimizer.param_groups]
        assert optimizer.alive == own
        optimizer.zero_grad()


@pytest.mark.full
@multi_rank(2)
def test_what_somebody_holds_is_taken_back_at_the_end() -> None:
    """Of an optimizer that looks at all state first, and computes then."""

    class Eager(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__([{"params": [parameter]} for parameter in parameters], {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            sums = [self.state[each].setdefault("sum", torch.zeros_like(each)) for each in parameters]
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.sub_(total.add_(parameter.grad), alpha=0.1)

    model = shard()
    optimizer = Eager(trainable(model))
    offload_optimizer_state(optimizer)
    assert_trains_like(Reference(CASE, world_size=2, make_optimizer=Eager), model, optimizer, steps=3)


@multi_rank(2)
def test_a_step_that_raises_loses_nothing() -> None:
    model = shard()
    optimizer = two_groups(trainable(model))
    handle = offload_optimizer_state(optimizer)
    reference = Reference(CASE, world_size=2, make_optimizer=two_groups)
    assert_trains_like(reference, model, optimizer, steps=2)
    with fails(optimizer), pytest.raises(ZeroDivisionError):
        optimizer.step()
    saved = optimizer.state_dict()
    assert type(optimizer.state).__name__ == "defaultdict"
    assert len(saved["state"]) == len(trainable(model))
    with fails(optimizer), pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert_trains_like(reference, model, optimizer, steps=2)
    with fails(optimizer), pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    assert type(optimizer.state).__name__ == "defaultdict"
    assert_trains_like(reference, model, optimizer, steps=1)


@contextmanager
def fails(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the step brings the first state to the device, and raises."""

    def init_group(group: dict[str, Any], *args: Any) -> None:
        assert optimizer.state[group["params"][0]]
        raise ZeroDivisionError

    with mock.patch.object(optimizer, "_init_group", init_group):
        optimizer.param_groups[0]["params"][0].grad = None
        yield


@pytest.mark.full
@multi_rank(2)
def test_closures() -> None:
    model = shard()
    optimizer = sgd_momentum(trainable(model))
    offload_optimizer_state(optimizer)
    reference = Reference(CASE, world_size=2, make_optimizer=sgd_momentum)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            model.zero_grad()
            loss = loss_of(CASE, model, step)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert_sharded_same("parameters", parameters_of(model), reference.step().parameters)


@multi_rank(2)
def test_removing_it_goes_on() -> None:
    model = shard()
    optimizer = adamw(trainable(model))
    handle = offload_optimizer_state(optimizer)
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=2)
    handle.remove()
    handle.remove()
    before = addresses(optimizer)
    assert_trains_like(reference, model, optimizer, steps=1)
    assert addresses(optimizer) == before, "stepped where it lies"
    offload_optimizer_state(optimizer)
    assert_trains_like(reference, model, optimizer, steps=1)


# ---- its state dicts -----------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("how", ["its own", "sharded", "full"])
@pytest.mark.parametrize("loads", ["offloaded", "not offloaded"])
def test_state_dicts(how: str, loads: str, world_size: int) -> None:
    options = StateDictOptions(full_state_dict=how == "full")
    model = shard()
    optimizer = two_groups(trainable(model))
    offload_optimizer_state(optimizer)
    reference = Reference(CASE, world_size=world_size, make_optimizer=two_groups)
    tolerance = tolerance_for(world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance)
    found = get_state_dict(model, optimizer, options=options)
    states: list[Any] = list(copy.deepcopy((model.state_dict(), optimizer.state_dict()) if how == "its own" else found))
    if how == "full":  # which rank 0 alone has
        dist.broadcast_object_list(states)
        for name, parameter in reference.model.named_parameters():
            expected = reference.optimizer.state[parameter]
            assert_same(name, states[1]["state"][name], expected, tolerance=tolerance)
    second = shard(CASE, CASE.build(seed=1))
    second_optimizer = two_groups(trainable(second))
    if loads == "offloaded":
        offload_optimizer_state(second_optimizer)
    if how == "its own":
        second.load_state_dict(states[0])
        second_optimizer.load_state_dict(states[1])
    else:
        loaded = {"model_state_dict": states[0], "optim_state_dict": states[1]}
        set_state_dict(second, second_optimizer, **loaded, options=options)
    for _ in range(2):
        step_like(reference, second, second_optimizer, tolerance)


# ---- what makes no sense -------------------------------------------------------------------------


@multi_rank(2)
def test_of_parameters_that_are_on_meta() -> None:
    """It is offloaded before the model has memory, and steps as if after."""
    with torch.device("meta"):
        models = [nn.Linear(4, 6) for _ in range(2)]
    optimizers = []
    for model in models:
        fully_shard(model)
    for index, model in enumerate(models):
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.1))
        if index == 0:
            offload_optimizer_state(optimizers[0])
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same("parameters", *(parameters_of(model) for model in models))


@multi_rank(2)
def test_refusals() -> None:
    model = shard()
    optimizer = adamw(trainable(model))
    with pytest.raises(fsdp2.FSDPTypeError, match="takes an Optimizer as 'optimizer', got a FSDPSequential"):
        offload_optimizer_state(model)  # type: ignore[arg-type]
    offload_optimizer_state(optimizer)
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"offloaded already.*remove\(\)"):
        offload_optimizer_state(optimizer)
    offloaded = CASE.build()
    fully_shard(offloaded, offload_policy=CPUOffloadPolicy())
    with pytest.raises(fsdp2.FSDPValueError, match=r"steps on the host.*parameters=False, optimizer_state=True"):
        offload_optimizer_state(adamw(trainable(offloaded)))
