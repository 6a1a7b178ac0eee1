"""Gradients offloaded by themselves: they add up on the host until a step's last backward, beside the reference."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp2
from fsdp2 import CPUOffloadPolicy, OffloadPolicy, fully_shard, offload_optimizer_state
from fsdp2.core.buffers import Offloading
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of
from tests.harness.internals import groups_of
from tests.harness.models import FROZEN, TIED, ModelCase
from tests.harness.shared.training import CASE, loss_on, trainable

GRADIENTS = CPUOffloadPolicy(parameters=False, gradients=True)
STATE = CPUOffloadPolicy(parameters=False, optimizer_state=True)
BOTH = CPUOffloadPolicy(parameters=False, gradients=True, optimizer_state=True)


def shard(
    policy: OffloadPolicy = GRADIENTS, case: ModelCase = CASE, model: nn.Module | None = None, **options: Any
) -> Any:
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit, offload_policy=policy, **options)
    return model


def last_of(microbatches: int, model: Any) -> Callable[[int], None]:
    """Says which backward is the last; before it, there is no gradient."""

    def before_forward(micro: int) -> None:
        assert all(parameter.grad is None for parameter in model.parameters())
        model.set_is_last_backward(micro == microbatches - 1)

    return before_forward


def train(model: Any, reference: Reference, tolerance: Any, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = adamw(trainable(model))
    before = last_of(reference.microbatches, model)
    assert_trains_like(reference, model, optimizer, steps=steps, tolerance=tolerance, before_forward=before)
    return optimizer


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [CASE, TIED, FROZEN], ids=str)
@pytest.mark.parametrize("policy", [GRADIENTS, BOTH], ids=["gradients", "gradients and state"])
@pytest.mark.parametrize("microbatches", [3, 1])
def test_offloaded_gradients_train_like_the_reference(
    microbatches: int, case: ModelCase, policy: CPUOffloadPolicy, world_size: int
) -> None:
    reference = Reference(case, world_size=world_size, microbatches=microbatches)
    train(shard(policy, case), reference, tolerance_for(world_size))


@multi_rank(2)
def test_units_with_and_without_it() -> None:
    model = CASE.build()
    fully_shard(model[0], offload_policy=BOTH)
    fully_shard(model[2])
    fully_shard(model, offload_policy=STATE)
    reference = Reference(CASE, world_size=2, microbatches=3)
    assert_trains_like(
        reference,
        model,
        adamw(trainable(model)),
        steps=3,
        before_forward=lambda micro: model.set_is_last_backward(micro == 2),
    )


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor, used: int) -> Tensor:
        return self.layers[used](x).square().sum()  # type: ignore[no-any-return]


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [1, 0, 0], [1, 1]], ids=str)
def test_groups_that_the_last_backward_does_not_come_to(order: list[int], world_size: int) -> None:
    model, plain = Branches(), Branches()
    for layer in model.layers:
        fully_shard(layer, offload_policy=GRADIENTS)
    sharded: Any = fully_shard(model, offload_policy=GRADIENTS)
    batches = torch.randn(world_size, len(order), 3, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for micro, used in enumerate(order):
            sharded.set_is_last_backward(micro == len(order) - 1)
            sharded(batches[dist.get_rank(), micro], used).backward()
            for batch in batches[:, micro]:
                (plain(batch, used) / world_size).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_sharded_same("gradients", gradients_of(sharded), expected, tolerance=SUM_ORDER)
        model.zero_grad()
        plain.zero_grad()


@multi_rank(2)
def test_hooks_see_the_sum_once() -> None:
    model = shard()
    seen: list[Tensor] = []
    parameter = trainable(model)[0]
    parameter.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
    train(model, Reference(CASE, world_size=2, microbatches=3), None, steps=1)
    assert len(seen) == 1


# ---- where gradients are -------------------------------------------------------------------------


@contextmanager
def host_memory() -> Iterator[set[int]]:
    """The storages that were allocated on the host as such."""
    storages: set[int] = set()
    allocate = Offloading.empty_on_host

    def allocated(self: Offloading, *args: Any) -> Tensor:
        tensor = allocate(self, *args)
        storages.add(tensor.untyped_storage()._cdata)
        return tensor

    with mock.patch.object(Offloading, "empty_on_host", allocated):
        yield storages


def memory() -> dict[int, int]:
    """Bytes of every storage that a tensor is on, by its identity."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("policy", [GRADIENTS, OffloadPolicy()], ids=["offloaded", "not offloaded"])
def test_between_backwards_there_are_no_gradients_on_the_device(policy: OffloadPolicy) -> None:
    with host_memory() as on_host:
        model = shard(policy)

        def on_device(micro: int, *, is_last: bool) -> int:
            """Bytes on the device after one backward."""
            model.set_is_last_backward(is_last)
            loss_on(CASE, model, 0, dist.get_rank(), micro).backward()
            for group in groups_of(model):
                group.comm.finish_reduces()
            return sum(size for storage, size in memory().items() if storage not in on_host)

        on_device(0, is_last=False)
        on_device(1, is_last=True)
        model.zero_grad()
        resting = on_device(0, is_last=False)
        assert on_device(1, is_last=False) == on_device(2, is_last=False) == resting
        gradients = on_device(3, is_last=True) - resting
    own = sum(parameter.to_local().nbytes for parameter in trainable(model))
    assert (gradients >= own and len(on_host) == 3) if policy == GRADIENTS else (gradients == 0 and not on_host)


@multi_rank(2)
def test_a_step_without_a_last_backward_is_refused() -> None:
    model = shard()
    reference = Reference(CASE, world_size=2, microbatches=3)
    optimizer = train(model, reference, None, steps=1)
    model.set_is_last_backward(False)
    loss_on(CASE, model, 0, dist.get_rank()).backward()
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"add up in host memory.*set_is_last_backward\(True\)"):
        optimizer.step()
    with pytest.raises(fsdp2.FSDPRuntimeError, match="gradients wait"):
        copy.deepcopy(model)
    model.reset_iter_state()
    with pytest.raises(fsdp2.FSDPRuntimeError, match="add up in host memory"):
        optimizer.step(lambda: loss_on(CASE, model, 0, dist.get_rank()).backward())
    model.reset_iter_state()
    before = last_of(3, model)
    assert_trains_like(reference, model, optimizer, steps=2, before_forward=before)


@multi_rank(2)
def test_the_last_backward_may_be_that_of_a_closure() -> None:
    model, plain = shard(), CASE.build()
    model.set_is_last_backward(False)
    loss_on(CASE, model, 0, dist.get_rank(), 0).backward()
    model.set_is_last_backward(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step(lambda: loss_on(CASE, model, 0, dist.get_rank(), 1).backward())
    for micro in range(2):
        for rank in range(2):
            (loss_on(CASE, plain, 0, rank, micro) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


@multi_rank(2)
def test_a_failed_backward_drops_the_sum() -> None:
    model = shard()
    reference = Reference(CASE, world_size=2, microbatches=3)
    optimizer = train(model, reference, None, steps=1)
    model.set_is_last_backward(False)
    loss_on(CASE, model, 0, dist.get_rank()).backward()
    handle = model[0].register_forward_hook(lambda *args: args[2].register_hook(lambda gradient: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        loss_on(CASE, model, 0, dist.get_rank()).backward()
    handle.remove()
    with pytest.warns(UserWarning, match="were dropped"):
        model.set_is_last_backward(True)
        loss_on(CASE, model, 0, dist.get_rank())
    model.reset_iter_state()
    assert_trains_like(reference, model, optimizer, steps=2, before_forward=last_of(3, model))


# ---- state, as the policy asks -------------------------------------------------------------------


@multi_rank(2, 4)
def test_the_policy_offloads_the_optimizer_state(world_size: int) -> None:
    model = shard(STATE)
    optimizer = adamw(trainable(model))
    reference = Reference(CASE, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=1, tolerance=tolerance_for(world_size))
    with pytest.raises(fsdp2.FSDPRuntimeError, match="offloaded already"):
        offload_optimizer_state(optimizer)
    resting = [state["exp_avg"].to_local().data_ptr() for state in optimizer.state.values()]
    loss_on(CASE, model, 1, dist.get_rank()).backward()
    optimizer.step()
    assert [state["exp_avg"].to_local().data_ptr() for state in optimizer.state.values()] == resting
    with pytest.raises(fsdp2.FSDPRuntimeError, match="offloaded already"):
        offload_optimizer_state(optimizer)


@multi_rank(2)
def test_distributed_state_dicts() -> None:
    model = shard(BOTH)
    reference = Reference(CASE, world_size=2, microbatches=3)
    optimizer = train(model, reference, None, steps=2)
    states = copy.deepcopy(get_state_dict(model, optimizer))
    second = shard(BOTH, model=CASE.build(seed=1))
    second_optimizer = adamw(trainable(second))
    set_state_dict(second, second_optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    assert_trains_like(reference, second, second_optimizer, steps=2, before_forward=last_of(3, second))


# ---- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [{"gradients": False}, {"optimizer_state": False}], ids=str)
def test_a_step_on_the_host_needs_all_there(choices: dict[str, bool]) -> None:
    with pytest.raises(fsdp2.FSDPValueError, match=rf"{next(iter(choices))}=False.*parameters=False and choose"):
        CPUOffloadPolicy(**choices)  # type: ignore[arg-type]


def test_other_refusals() -> None:
    with pytest.raises(fsdp2.FSDPValueError, match=r"offloads nothing.*OffloadPolicy\(\)"):
        CPUOffloadPolicy(parameters=False)
    with pytest.raises(fsdp2.FSDPTypeError, match=r"takes a bool or None as 'gradients', got 'cpu'"):
        CPUOffloadPolicy(gradients="cpu")  # type: ignore[arg-type]
    assert CPUOffloadPolicy() == CPUOffloadPolicy(parameters=True, gradients=True, optimizer_state=True)
