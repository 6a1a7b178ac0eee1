"""Every write to sharded parameters between two gathers, with and without `cache_shards`: the same bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fsdp2 import CPUOffloadPolicy, Owned, fully_shard, step_on_owners
from fsdp2.optim.guard import GUARD
from tests.harness import multi_rank
from tests.harness.shared.optimizers import adamw_for_loop, adamw_foreach, adamw_fused, local_like, sgd
from tests.harness.shared.training import trainable
from tests.multi_rank.precision.helpers import (
    CACHED,
    MICROBATCHES,
    PLAIN,
    assert_alike,
    halve,
    halve_locals,
    local,
    microbatch,
    shard,
)

# ---- writes between microbatches --------------------------------------------------------------------


def halve_locals_at_once(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([parameter.to_local() for parameter in model.parameters()], 0.5)


def halve_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.to_local().mul_(0.5)


def halve_detached(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.detach().mul_(0.5)


def halve_at_once_and_say_so(model: Any) -> None:
    """DTensor's operators on lists move no counter."""
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.5)
    torch.autograd.graph.increment_version(parameters)


def halve_what_state_dicts_show(model: Any) -> None:
    """As `torch.distributed.checkpoint.load` does; no counter moves, but a state dict was asked for."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.to_local().mul_(0.5)


def load(model: Any, *, assign: bool = False) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def load_assigning(model: Any) -> None:
    load(model, assign=True)


def replace(model: Any) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = parameter.detach().full_tensor() * 0.5
                new = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                setattr(module, name, nn.Parameter(new))


def set_storage(model: Any) -> None:
    """The local tensors lie elsewhere then, where gathers do not look: the same with and without a cache."""
    for parameter in model.parameters():
        parameter._local_tensor.set_(parameter.to_local().detach() * 0.5)


def convert(model: Any) -> None:
    model.double()
    halve(model)
    model.float()


def move(model: Any) -> None:
    """The same place: no values move, but parameters have other counters."""
    model.to("cpu")
    halve(model)


def freeze_and_write(model: Any) -> None:
    halve(model)
    model[0].weight.requires_grad_(False)


def initialize(model: Any) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(parameter.detach().full_tensor().mean()) + 0.125)


WRITES = [
    halve,
    halve_locals,
    halve_locals_at_once,
    halve_in_inference_mode,
    halve_detached,
    halve_at_once_and_say_so,
    halve_what_state_dicts_show,
    load,
    load_assigning,
    replace,
    set_storage,
    convert,
    move,
    freeze_and_write,
    initialize,
]


@pytest.mark.full  # 6 s
@multi_rank(2)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("offloaded", [False, True], ids=["", "offloaded"])
def test_writes_between_microbatches_are_seen(offloaded: bool, write: Callable[[Any], None]) -> None:
    options = {"offload_policy": CPUOffloadPolicy()} if offloaded else {}
    models = [shard(policy, **options) for policy in (PLAIN, CACHED)]
    for micro in range(MICROBATCHES):
        losses = [microbatch(model, 0, micro) for model in models]
        assert torch.equal(*losses)
        assert_alike(*models)
        for model in models:
            model.reshard()
            before = [local(parameter).clone() for parameter in model.parameters()]
            write(model)
            assert not all(map(torch.equal, before, map(local, model.parameters())))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("make", [sgd, adamw_for_loop, adamw_foreach, adamw_fused])
@pytest.mark.parametrize("how", ["plain", "each", "flat", "locals", "hooks", "replaced guard"])
def test_steps_are_seen(how: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Of every implementation, also of optimizers that hold the local tensors themselves."""
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    steps = [step_of(model, how, make) for model in models]
    for step in range(3):
        for micro in range(2):
            losses = [microbatch(model, step, micro) for model in models]
            assert torch.equal(*losses)
        for each in steps:
            each()
        assert_alike(*models)


@multi_rank(2)
@pytest.mark.parametrize("make", [sgd, adamw_foreach, adamw_fused])
def test_steps_on_owners_are_seen(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Of stand-ins, which no group knows."""

    def place(parameter: nn.Parameter) -> Owned | None:
        return Owned(parameter.shape[0] % 2) if parameter.ndim == 2 else None

    models = [shard(policy, shard_placement_fn=place) for policy in (PLAIN, CACHED)]
    optimizers = [make([p for p in model.parameters() if p.ndim == 2]) for model in models]
    for step in range(3):
        for micro in range(2):
            losses = [microbatch(model, step, micro) for model in models]
            assert torch.equal(*losses)
        for optimizer in optimizers:
            step_on_owners(optimizer)
        assert_alike(*models)


def step_of(model: Any, how: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], object]:
    if how == "locals":
        return lambda: step_on_locals(model, make)
    if how == "hooks":
        for parameter in model.parameters():
            one = make([parameter])
            parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
        return lambda: None
    optimizer = make(trainable(model))
    if how in ("each", "flat"):
        optimizer = local_like(optimizer, flat=how == "flat")
    if how == "replaced guard":
        GUARD.remove()
        fully_shard(nn.Linear(2, 2))
    return optimizer.step


def step_on_locals(model: Any, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    locals_ = []
    for parameter in model.parameters():
        one = parameter.detach().to_local()
        one.requires_grad_().grad = parameter.grad.to_local()
        locals_.append(one)
    make(locals_).step()


class Ascent(torch.optim.Optimizer):
    """Steps in two halves, between which a closure runs, all writes by DTensor's operators on lists."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        parameters = self.param_groups[0]["params"]
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(parameters, [p.grad for p in parameters], alpha=0.5)
        return loss


@multi_rank(2)
def test_a_closure_within_a_step_sees_what_was_written_before() -> None:
    models = [shard(policy) for policy in (PLAIN, CACHED)]
    optimizers = [Ascent(trainable(model)) for model in models]
    for step in range(3):
        for model in models:
            microbatch(model, step, 0)
        losses = [
            each.step(lambda model=model, step=step: microbatch(model, step, 1))
            for each, model in zip(optimizers, models, strict=True)
        ]
        assert torch.equal(*losses)
    assert_alike(*models)
