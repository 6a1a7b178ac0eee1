"""Gradients that are asked for by the sharded parameters: `backward(inputs=...)`, `autograd.grad`, autograd nodes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2.compat
from fsdp2 import FSDPNotImplementedError, FSDPRuntimeError, fully_shard
from tests.harness import multi_rank
from tests.harness.shared.ways import WAYS
from tests.multi_rank.training.helpers import assert_same_gradients


def whole_and_sharded(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    sharded = copy.deepcopy(whole)
    for unit in (sharded[0], sharded[2], sharded):
        fully_shard(unit, **options)
    return whole, sharded


def batch_of(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def pick(model: nn.Module, indices: Iterable[int]) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    return [parameters[index] for index in indices]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [1], [2, 3]], ids=str)
@multi_rank(2, 4)
def test_a_backward_with_inputs_accumulates_in_these(indices: list[int], way: str, world_size: int) -> None:
    whole, sharded = whole_and_sharded(**WAYS[way]())
    asked, of_whole = pick(sharded, indices), pick(whole, indices)
    for _ in range(2):
        sharded(batch_of(dist.get_rank())).square().mean().backward(inputs=asked)
        for rank in range(world_size):
            (whole(batch_of(rank)).square().mean() / world_size).backward(inputs=of_whole)
    assert_same_gradients(sharded, whole)


@pytest.mark.parametrize("allow_unused", [False, True])
@pytest.mark.parametrize("with_penalty", [False, True])
@multi_rank(2)
def test_grad_of_what_a_module_computed_is_refused(allow_unused: bool, with_penalty: bool) -> None:
    """With a penalty on the shards it would be that of the penalty alone."""
    _, sharded = whole_and_sharded()
    parameters = list(sharded.parameters())
    loss = sharded(batch_of(0)).sum()
    if with_penalty:
        loss = loss + sum(each.square().sum() for each in parameters).full_tensor()  # type: ignore[union-attr]
    with pytest.raises(FSDPNotImplementedError, match=r"autograd\.grad .* sharded parameter '0\.weight'"):
        torch.autograd.grad(loss, parameters, allow_unused=allow_unused)
    sharded.zero_grad()
    sharded(batch_of(0)).sum().backward()
    assert all(each.grad is not None for each in parameters)


@multi_rank(2)
def test_grad_of_a_penalty_and_of_inputs() -> None:
    whole, sharded = whole_and_sharded()
    parameters = list(sharded.parameters())
    for unused in (False, True):
        found = torch.autograd.grad(sum(each.square().sum() for each in parameters), parameters, allow_unused=unused)
        for gradient, parameter in zip(found, whole.parameters(), strict=True):
            assert torch.allclose(gradient.full_tensor(), 2 * parameter)  # type: ignore[attr-defined]
    slopes = []
    for model in (whole, sharded):
        x = batch_of(0).requires_grad_()
        slopes.append(torch.autograd.grad(model(x).sum(), x)[0])
    assert torch.allclose(*slopes)
    with pytest.raises(RuntimeError, match=r"index 1 was not used"):
        torch.autograd.grad(parameters[0].sum(), parameters[:2])
    assert torch.autograd.grad(parameters[0].sum(), parameters[:2], allow_unused=True)[1] is None


class Adjoint(torch.autograd.Function):
    """Runs ``func`` without gradients, and again in backward, as torchdiffeq's adjoint does."""

    @staticmethod
    def forward(ctx: Any, func: nn.Module, differentiate: Any, y: Tensor, *params: Tensor) -> Tensor:
        ctx.func, ctx.differentiate, ctx.params = func, differentiate, params
        ctx.save_for_backward(y)
        with torch.no_grad():
            return y + func(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            y = ctx.saved_tensors[0].detach().requires_grad_()
            return None, None, *ctx.differentiate(y + ctx.func(y), y, gradient, ctx.params)


def by_grad(result: Tensor, y: Tensor, gradient: Tensor, params: tuple[Tensor, ...]) -> list[Tensor]:
    found = torch.autograd.grad(result, (y, *params), gradient, allow_unused=True)
    return [torch.zeros_like(of) if each is None else each for of, each in zip((y, *params), found, strict=True)]


def by_backward(result: Tensor, y: Tensor, gradient: Tensor, params: tuple[Tensor, ...]) -> list[Tensor | None]:
    result.backward(gradient)
    return [y.grad, *[None for _ in params]]


class Flow(nn.Module):
    """Linear layers around a module that is differentiated by `Adjoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.func, self.last = (
            nn.Linear(3, 3),
            nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)),
            nn.Linear(3, 3),
        )

    def forward(self, x: Tensor, differentiate: Callable[..., Any]) -> Tensor:
        y: Tensor = Adjoint.apply(self.func, differentiate, self.first(x), *self.func.parameters())
        return self.last(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("inside", [False, True])
@multi_rank(2)
def test_an_adjoint_is_refused_and_may_call_backward(inside: bool, world_size: int) -> None:
    """Its parameters would be trained with zeros."""
    torch.manual_seed(0)
    whole = Flow()
    sharded: Any = copy.deepcopy(whole)
    for unit in (sharded.func, sharded) if inside else (sharded.func,):
        fully_shard(unit)
    with pytest.raises(FSDPNotImplementedError, match="adjoint"):
        sharded(batch_of(0), by_grad).sum().backward()
    sharded.zero_grad()
    sharded(batch_of(dist.get_rank()), by_backward).square().mean().backward()
    for rank in range(world_size):
        (whole(batch_of(rank), by_grad).square().mean() / world_size).backward()
    assert_same_gradients(sharded if inside else sharded.func, whole if inside else whole.func)


@multi_rank(2)
def test_the_node_of_a_sharded_parameter_s_gradient_is_refused() -> None:
    """A hook there would never be called."""
    _, sharded = whole_and_sharded()
    for parameter in sharded.parameters():
        with pytest.raises(FSDPNotImplementedError, match="register_post_accumulate_grad_hook"):
            parameter.expand_as(parameter)
        with torch.no_grad():
            parameter.expand_as(parameter)
        assert parameter.expand(2, *parameter.shape).shape[0] == 2
        for compare in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
            compare(parameter, parameter.detach().clone() + 1).backward()
        assert parameter.grad is not None


@pytest.mark.parametrize("kind", ["not installed", "layers only"])
@multi_rank(2)
def test_a_stage_that_pipelining_takes_for_a_plain_module_splits_no_backward(kind: str, world_size: int) -> None:
    """Zero-bubble schedules. With `fsdp2.compat.install` and the stage sharded they train: tests/clients."""
    from torch.distributed.pipelining import PipelineStage

    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(layers[0])
    model = fully_shard(layers) if kind == "not installed" else layers
    stage = PipelineStage(model, dist.get_rank(), world_size, torch.device("cpu"))
    inputs = batch_of(0).requires_grad_()
    outputs = model(inputs)
    half = {"stage_output": [outputs], "output_grads": [torch.ones_like(outputs)], "input_values": [inputs]}
    installed = fsdp2.compat.install() if kind == "layers only" else contextlib.nullcontext()
    with installed, pytest.raises(RuntimeError) as caught:
        stage.backward_maybe_with_nosync("input", half)
    error = caught.value if isinstance(caught.value, FSDPRuntimeError) else caught.value.__cause__  # torch may wrap it
    assert isinstance(error, FSDPRuntimeError)
    sharded = {"not installed": "FSDPSequential: itself", "layers only": "Sequential: 0"}[kind]
    assert f"does not know that its module is sharded ({sharded})" in str(error)


@multi_rank(2)
def test_schedules_that_split_no_backward_need_no_install() -> None:
    """Before a run pipelining asks for gradients of inputs, to see their shapes: that is no split backward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    rank = dist.get_rank()
    model = fully_shard(copy.deepcopy(plain[rank]), mesh=mesh["dp"])
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    inputs, targets = torch.randn(2, 4, 3)
    schedule.step(*((inputs,) if rank == 0 else ()), **({} if rank == 0 else {"target": targets}))
    for given, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        (nn.functional.mse_loss(plain(given), wanted) / 2).backward()
    for mine, other in zip(model.parameters(), plain[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), other.grad)
