"""Gradients of gradients: a penalty on the gradient of inputs, as for critics, score matching and physics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, FSDPRuntimeError, _torch, fully_shard
from tests.harness import multi_rank, others_full
from tests.harness.compare import SUM_ORDER, assert_sharded_same, parameters_of
from tests.harness.shared.ways import WAYS
from tests.multi_rank.training.helpers import assert_same_gradients, differentiate

WIDTH = 7


class Critic(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


class Linear(nn.Module):
    """Of which the second backward comes to no module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def build(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"critic": Critic, "linear": Linear, "recomputed": lambda: Critic(recompute=True)}[kind]()


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step * 10 + rank)).requires_grad_()


def penalty(model: nn.Module, step: int, rank: int, *, only: bool) -> Tensor:
    x = inputs(step, rank)
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = (slope.norm(dim=1) - 1).square().mean()
    return loss if only else loss + output.mean()


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    **WAYS,
    "reshard": lambda: {"reshard_after_forward": True},
    "on two ranks": lambda: {"reshard_after_forward": 2},
    "kept after backward": dict,
}


@multi_rank(2, full=[4])
@pytest.mark.parametrize("only", [False, True], ids=["with a loss", "penalty only"])
@pytest.mark.parametrize("kind", ["critic", "linear", "recomputed"])
@pytest.mark.parametrize("setting", others_full(SETTINGS, ["default", "kept after backward"]))
def test_a_gradient_penalty_equals_the_reference(setting: str, kind: str, only: bool) -> None:
    model, plain = shard(build(kind), **SETTINGS[setting]()), build(kind)
    model.set_reshard_after_backward(setting != "kept after backward")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(3):
        differentiate(model, plain, lambda each, rank, step=step: penalty(each, step, rank, only=only))
        for each in (*model.blocks, model):
            each.reshard()
        assert_same_gradients(model, plain, f"in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # and an evaluation in between
            model(inputs(step, dist.get_rank()))
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain), tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("only", [False, True], ids=["with a loss", "penalty only"])
@pytest.mark.parametrize("kind", ["critic", "linear", "recomputed"])
def test_a_gradient_penalty_that_is_finalized_by_hand(kind: str, only: bool) -> None:
    """The sharded parameters are there then, with their gradients, to be clipped."""
    model, plain = shard(build(kind)), build(kind)
    model.set_manual_backward_finalization(True)
    for step in range(2):
        differentiate(model, plain, lambda each, rank, step=step: penalty(each, step, rank, only=only))
        model.finalize_backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        norm, expected_norm = (nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain))
        torch.testing.assert_close(norm.full_tensor(), expected_norm)
        assert_same_gradients(model, plain, f"in step {step}")
        for each in (model, plain):
            each.zero_grad()


@multi_rank(2)
@pytest.mark.parametrize("kind", ["critic", "linear"])
def test_the_second_backward_leaves_nothing_unsharded(kind: str, world_size: int) -> None:
    model = shard(build(kind), reshard_after_forward=True)
    loss = penalty(model, 0, dist.get_rank(), only=True)
    loss.backward()
    for block in model.blocks:
        assert all(hasattr(parameter, "placements") for parameter in block.parameters())


def square_of(slope: Tensor) -> Tensor:
    return (slope.norm(dim=1) - 1).square().mean()


def slope_of(model: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def loss_before(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """As in docs/how-to/double-backward.md, and in WGAN-GP."""
    loss = model(x).mean()
    (loss + square_of(slope_of(model, y))).backward()


def loss_after(model: nn.Module, x: Tensor, y: Tensor) -> None:
    slope = slope_of(model, y)
    (model(x).mean() + square_of(slope)).backward()


def separate_backwards(model: nn.Module, x: Tensor, y: Tensor) -> None:
    slope = slope_of(model, y)
    model(x).mean().backward()
    square_of(slope).backward()


def differentiated_twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = square_of(slope_of(model, y))
    loss.backward(retain_graph=True)
    loss.backward()


def third_order(model: nn.Module, x: Tensor, y: Tensor) -> None:
    slope = slope_of(model, y)
    (curvature,) = torch.autograd.grad(slope.square().sum(), y, create_graph=True)
    curvature.square().mean().backward()


def never_differentiated(model: nn.Module, x: Tensor, y: Tensor) -> None:
    slope_of(model, y)
    model(x).mean().backward()


def evaluation_between(model: nn.Module, x: Tensor, y: Tensor) -> None:
    slope = slope_of(model, y)
    with torch.no_grad():
        model(x)
    square_of(slope).backward()


def without_reduction_first(model: Any, x: Tensor, y: Tensor) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    loss_before(model, y.detach(), x.requires_grad_())
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    loss_before(model, x, y)


BESIDE = [
    loss_before,
    loss_after,
    separate_backwards,
    differentiated_twice,
    third_order,
    never_differentiated,
    evaluation_between,
    without_reduction_first,
]


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("program", BESIDE, ids=lambda program: program.__name__)
def test_a_recorded_backward_beside_ordinary_ones(program: Any, reshard_after_forward: Any, world_size: int) -> None:
    model, plain = shard(build("critic"), reshard_after_forward=reshard_after_forward), build("critic")
    for step in range(2):
        program(model, inputs(step, dist.get_rank()).detach(), inputs(step + 5, dist.get_rank()))
        plain.zero_grad()
        for rank in range(world_size):
            program(plain, inputs(step, rank).detach(), inputs(step + 5, rank))
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= world_size
        assert_same_gradients(model, plain)
        model.zero_grad()


@multi_rank(2)
def test_a_recorded_backward_of_parameters_that_were_written(world_size: int) -> None:
    model = shard(build("critic"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slope = slope_of(model, inputs(0, dist.get_rank()))
    model(inputs(1, dist.get_rank())).mean().backward()
    optimizer.step()
    with pytest.raises(FSDPRuntimeError, match="were changed between a forward and its backward"):
        square_of(slope).backward()
    optimizer.zero_grad()
    penalty(model, 2, dist.get_rank(), only=False).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@multi_rank(4)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
@pytest.mark.parametrize("reshard_after_forward", [None, 2])
def test_functional_transforms_of_a_trainable_model(reshard_after_forward: int | None) -> None:
    """`torch.func`: gradients, also per example, Jacobians and Hessians with respect to inputs; then it trains."""
    model, plain = shard(build("critic"), reshard_after_forward=reshard_after_forward), build("critic")
    x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([x, 2 * x])
    for transform, at in (
        (lambda each: torch.func.grad(lambda z: each(z).sum()), x),
        (lambda each: torch.func.vmap(torch.func.grad(lambda z: each(z).sum())), rows),
        (torch.func.jacrev, x),
        (torch.func.jacfwd, x),
        (lambda each: torch.func.hessian(lambda z: each(z).sum()), x),
        (lambda each: torch.func.grad_and_value(lambda z: each(z).sum()), x),
    ):
        found, expected = transform(model)(at), transform(plain)(at)
        torch.testing.assert_close(found, expected)
    differentiate(model, plain, lambda each, rank: penalty(each, 0, rank, only=False))
    assert_same_gradients(model, plain)


def grad_transform(model: nn.Module, x: Tensor) -> None:
    torch.func.grad(lambda z: model(z).sum())(x)


def tangent(model: nn.Module, x: Tensor) -> None:
    torch.func.jvp(model, (x,), (x,))


def recorded_gradient(model: nn.Module, x: Tensor) -> None:
    slope_of(model, x.requires_grad_())


@multi_rank(2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
@pytest.mark.parametrize("look", [grad_transform, tangent, recorded_gradient], ids=lambda look: look.__name__)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_a_gradient_of_inputs_before_clipping(reshard_after_forward: Any, look: Any, world_size: int) -> None:
    """For logging: what clips, steps and averages after it finds the sharded parameters and their gradients."""
    model, plain = shard(build("critic"), reshard_after_forward=reshard_after_forward), build("critic")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(2):
        penalty(model, step, dist.get_rank(), only=False).backward()
        look(model, inputs(step, dist.get_rank()).detach())
        for rank in range(world_size):
            (penalty(plain, step, rank, only=False) / world_size).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, plain)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_sharded_same("parameters", parameters_of(model), parameters_of(plain), tolerance=SUM_ORDER)


def dual_output(model: nn.Module, x: Tensor, along: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, along))).tangent


def dual_gradient(model: nn.Module, x: Tensor, along: Tensor) -> Tensor:
    """Forward over reverse."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), along)
        (slope,) = torch.autograd.grad(model(dual).sum(), x, create_graph=True)
        return forward_ad.unpack_dual(slope).tangent


def func_jvp(model: nn.Module, x: Tensor, along: Tensor) -> Tensor:
    return torch.func.jvp(model, (x,), (along,))[1]


def func_jvp_beside_a_call(model: nn.Module, x: Tensor, along: Tensor) -> Tensor:
    return func_jvp(model, x, along) + model(x)


def func_jvp_of_grad(model: nn.Module, x: Tensor, along: Tensor) -> Tensor:
    return torch.func.jvp(torch.func.grad(lambda each: model(each).sum()), (x,), (along,))[1]


@multi_rank(2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
@pytest.mark.parametrize("reshard_after_forward", [None, True])
@pytest.mark.parametrize(
    "derivative",
    [dual_output, dual_gradient, func_jvp, func_jvp_beside_a_call, func_jvp_of_grad],
    ids=lambda each: each.__name__,
)
def test_losses_of_directional_derivatives(derivative: Any, reshard_after_forward: Any) -> None:
    """A graph of its own leads from a tangent to the parameters, past the outputs."""
    model, plain = shard(build("critic"), reshard_after_forward=reshard_after_forward), build("critic")
    for step in range(2):

        def loss_of(each: nn.Module, rank: int, step: int = step) -> Tensor:
            x, along = (inputs(number, rank).detach() for number in (step, step + 5))
            return derivative(each, x, along).square().mean()  # type: ignore[no-any-return]

        differentiate(model, plain, loss_of)
        assert_same_gradients(model, plain)
        differentiate(model, plain, lambda each, rank, step=step: penalty(each, step, rank, only=False))
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


class Taken:
    """What a module may be given, in which no tensor can be replaced by another."""

    __slots__ = ("__weakref__", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Taking(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), recompute

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(x)))

    def forward(self, taken: Taken) -> Tensor:
        x = self.up(taken.x)
        return checkpoint(self.between, x, use_reentrant=False) if self.recompute else self.between(x)


@multi_rank(2)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("saves", [True, False])
def test_inputs_inside_of_objects(saves: bool, recompute: bool, world_size: int) -> None:
    """Their gradient shows that a recorded backward is differentiated, even after the state was looked at."""
    torch.manual_seed(0)
    plain: Any = Taking(recompute)
    model: Any = Taking(recompute)
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    reused = inputs(0, dist.get_rank())
    for step in range(3):

        def loss(each: Any, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(each(Taken(x)).sum(), x, create_graph=True)
            return (slope.norm(dim=1) - 1).square().mean()

        mine = loss(model, reused)
        if saves:
            model.state_dict()
        mine.backward()
        for rank in range(world_size):
            (loss(plain, inputs(0, rank)) / world_size).backward()
        assert_same_gradients(model, plain, f"in step {step}")
        model.zero_grad()
        plain.zero_grad()
    assert len(_torch.tensor_hooks(reused) or {}) == 1


@multi_rank(2)
def test_shards_that_were_written_while_a_recorded_backward_waits(world_size: int) -> None:
    """As by `.to_local()` of what a state dict holds, which nothing notices: the next forward gathers them anew."""
    model: Any = shard(build("critic"))
    x = inputs(0, dist.get_rank())
    torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.to_local().detach().data.zero_()
        assert not model(x).any()
