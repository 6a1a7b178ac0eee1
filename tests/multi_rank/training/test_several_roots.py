"""Sharded modules below several roots, which take turns: every gradient is the unsharded reference's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, FSDPRuntimeError, fully_shard, share_comm_ctx, unwrap
from fsdp2.core.state import state_of, states_below_all
from tests.harness import multi_rank, others_full
from tests.harness.reference import adamw
from tests.harness.shared.ways import WAYS
from tests.multi_rank.training.helpers import assert_same_gradients, differentiate


class Outer(nn.Module):
    """A head of its own on an encoder that it may share."""

    def __init__(self, encoder: nn.Module, width: int, *, owns: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(7, width)
        self.scale = nn.Parameter(torch.ones(3)) if owns else None

    def forward(self, x: Tensor) -> Tensor:
        output = self.head(torch.tanh(self.encoder(x)))
        return output if self.scale is None else output * self.scale.sum()


def build() -> nn.ModuleDict:
    """An encoder of two groups, and two models around it; nothing is sharded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        encoder = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 7))
        return nn.ModuleDict(
            {"encoder": encoder, "a": Outer(encoder, 3, owns=True), "b": Outer(encoder, 9, owns=False)}
        )


def sharded(**settings: object) -> nn.ModuleDict:
    models = build()
    encoder, a, b = models["encoder"], models["a"], models["b"]
    for module in (encoder[0], encoder, a.head, a, b.head, b):
        fully_shard(module, **settings)
    return models


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank + 1))


Losses = Callable[[nn.ModuleDict, Tensor], Iterator[Tensor]]


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def in_turn(models: nn.ModuleDict, x: Tensor) -> Iterator[Tensor]:
    for name in ("a", "b", "encoder", "b", "a", "a"):
        yield loss(models[name](x))


def together(models: nn.ModuleDict, x: Tensor) -> Iterator[Tensor]:
    """Both forwards before one backward."""
    yield loss(models["a"](x)) + loss(models["b"](x + 1)) + loss(models["encoder"](x - 1))


def crossed(models: nn.ModuleDict, x: Tensor) -> Iterator[Tensor]:
    """The first backward comes when the second root has claimed the encoder."""
    first, second = loss(models["a"](x)), loss(models["b"](x))
    yield first
    third = loss(models["b"](x))
    yield second
    yield third


def evaluated(models: nn.ModuleDict, x: Tensor) -> Iterator[Tensor]:
    """An evaluation of the other root between a forward and its backward."""
    first = loss(models["a"](x))
    with torch.no_grad():
        models["b"](x)
    yield first
    yield loss(models["b"](x))


def parts(models: nn.ModuleDict, x: Tensor) -> Iterator[Tensor]:
    """A part of the encoder, the encoder, and what contains it: from inside out."""
    yield loss(models["encoder"][0](x))
    yield loss(models["encoder"](x))
    yield loss(models["b"](x))
    yield loss(models["encoder"][0](x))
    yield loss(models["a"](x))


PROGRAMS = {each.__name__: each for each in (in_turn, together, crossed, evaluated, parts)}


def assert_trains(models: nn.ModuleDict, program: Losses, world_size: int, *, steps: int = 3) -> None:
    """`models` and a plain twin in the same state, the twin with the mean over all ranks."""
    plain = build()
    optimizers = [adamw(list(each.parameters())) for each in (models, plain)]
    for step in range(steps):
        for each in program(models, batch(step, dist.get_rank())):
            each.backward()
        for rank in range(world_size):
            for each in program(plain, batch(step, rank)):
                (each / world_size).backward()
        assert_same_gradients(models, plain, f"in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@multi_rank(2, full=[4])  # full: 10 s
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", others_full(PROGRAMS, ["together", "crossed"]))
def test_every_backward_is_right(program: str, way: str, world_size: int) -> None:
    assert_trains(sharded(**WAYS[way]()), PROGRAMS[program], world_size)


@pytest.mark.full
@multi_rank(2)
def test_one_program_after_the_other(world_size: int) -> None:
    """Roots form in one order and are used in another; the roots of copies share among themselves."""
    models = sharded()
    for program in (parts, crossed, in_turn, together):
        with torch.no_grad():
            for mine, theirs in zip(models.parameters(), sharded().parameters(), strict=True):
                mine.copy_(theirs)
        copied = copy.deepcopy(models)
        for each in (copied, models):
            assert_trains(each, program, world_size)


@multi_rank(2)
def test_each_root_keeps_its_orders() -> None:
    models = sharded()
    for each in in_turn(models, batch(0, dist.get_rank())):
        each.backward()
    roots = [state_of(models[name]).own_root for name in ("a", "b")]
    before = [root.learned.forward for root in roots]
    assert all(before) and before[0] != before[1]
    for each in in_turn(models, batch(0, dist.get_rank())):
        each.backward()
    assert [root.learned.forward for root in roots] == before
    assert [state_of(models[name]).own_root for name in ("a", "b")] == roots
    assert roots[0].comm is roots[1].comm


@multi_rank(2)
def test_accumulation_without_communication_over_roots() -> None:
    """What is left unsharded by the backward of one root is reduced by that of the other."""
    models, plain = sharded(), build()
    for name, reduces in (("a", False), ("b", True), ("a", True)):
        for module in models.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(reduces, recurse=False)
        differentiate(models, plain, lambda each, rank, name=name: loss(each[name](batch(0, rank))))
    assert_same_gradients(models, plain)


@contextmanager
def raising(module: nn.Module, *, in_backward: bool) -> Iterator[None]:
    def throw(*_: object) -> None:
        raise ZeroDivisionError

    def throw_later(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(throw)

    handle = module.register_forward_hook(throw_later if in_backward else throw)
    with pytest.raises(ZeroDivisionError):
        yield
    handle.remove()


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("in_backward", [True, False])
def test_a_failure_of_one_root_does_not_stop_the_other(in_backward: bool, world_size: int) -> None:
    models = sharded()
    x = batch(0, dist.get_rank())
    for name in ("a", "b"):
        loss(models[name](x)).backward()
    with raising(models["encoder"][0], in_backward=in_backward):
        loss(models["a"](x)).backward()
    for name in ("a", "b", "encoder"):
        models[name].zero_grad()
    assert_trains(models, in_turn, world_size)


class Boom(Exception):
    """Of the program."""


@multi_rank(1, 2)
@pytest.mark.parametrize("how", ["exception", "reset_iter_state"])
def test_recovering_one_root_leaves_the_gradients_of_another_in_flight(how: str, world_size: int) -> None:
    """They share a communication context, and the other's reduction has not been waited for."""
    a, b = (fully_shard(nn.Linear(4, 4)) for _ in range(2))
    share_comm_ctx([a, b])
    x = torch.ones(2, 4)
    a(x).sum().backward()
    a.zero_grad()
    b.set_is_last_backward(False)
    b(x).sum().backward()
    output = a(x)
    if how == "exception":
        output.register_hook(fails)
        with pytest.raises(Boom):
            output.sum().backward()
        a(x).sum().backward()
    else:
        a.reset_iter_state()
    b.set_is_last_backward(True)
    b(x).sum().backward()
    assert torch.equal(b.weight.grad.full_tensor(), torch.full((4, 4), 4.0))


def fails(gradient: Tensor) -> None:
    raise Boom


@multi_rank(2)
def test_roots_that_are_busy() -> None:
    """One root's forward inside another's."""
    models = sharded()
    x = batch(0, dist.get_rank())

    def nested(*_: object) -> None:
        models["b"](x)

    handle = models["a"].head.register_forward_pre_hook(nested)
    for _ in range(2):
        message = r"Outer begins a forward, but its submodule '?encoder.*is being used by .*Outer.*take turns"
        with pytest.raises(FSDPRuntimeError, match=message):
            models["a"](x)
    handle.remove()
    assert_trains(models, in_turn, dist.get_world_size())


@multi_rank(2)
def test_contexts_that_were_two_become_one(world_size: int) -> None:
    """Parts that ran alone, each with a context of its own, meet below a root that shares the context of another."""
    models = sharded()
    other = fully_shard(nn.Linear(2, 2))
    other(torch.ones(1, 2)).sum().backward()
    x = batch(0, dist.get_rank())
    models["encoder"](x).sum().backward()
    models["a"].head(torch.ones(1, 7)).sum().backward()
    share_comm_ctx([other, models["a"]])
    for name in ("a", "b", "encoder"):
        models[name].zero_grad()
    assert_trains(models, in_turn, world_size)
    groups = [group for state in states_below_all([models["a"], models["b"]]) for group in state.unit]
    assert len({group.comm for group in groups}) == 1


@pytest.mark.full
@multi_rank(2)
def test_what_is_shared_can_be_unwrapped(world_size: int) -> None:
    """Both roots notice."""
    models = sharded()
    x = batch(0, dist.get_rank())
    for name in ("a", "b"):
        loss(models[name](x)).backward()
    unwrap(models["encoder"])
    for name in ("a", "b"):
        with pytest.raises(FSDPRuntimeError, match=r"encoder.*belongs to no group"):
            models[name](x)
    models["encoder"].zero_grad()
    fully_shard(models["encoder"])
    for name in ("a", "b", "encoder"):
        models[name].zero_grad()
    assert_trains(models, in_turn, world_size)
