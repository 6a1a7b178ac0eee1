"""Compares a sharded model with the unsharded one, trained in the same process on the batches of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from extras.torch_gaps.registry import Trial

WIDTH = 8
ROWS = 4
Loss = Callable[[nn.Module, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

# fp32: the collective may sum in another order. bfloat16: 8 bits of mantissa, in every gradient and in their mean.
FP32 = 1e-5
BF16 = 4e-2


class Wrong(Exception):
    """The program ran, and its result is not what the unsharded model gives."""


def batch(rank: int, step: int = 0, *, width: int = WIDTH) -> Tensor:
    """The inputs of one rank in one step, `(ROWS, width)`, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, width, generator=generator)


def tokens(rank: int, step: int = 0, *, vocabulary: int) -> Tensor:
    """Token ids of one rank in one step, `(ROWS,)`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(vocabulary, (ROWS,), generator=generator)


def squared_output(model: nn.Module, inputs: Tensor) -> Tensor:
    """The default loss: the mean square of the output, in fp32."""
    output: Tensor = model(inputs)
    return output.float().square().mean()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The default optimizer."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor (a collective), a plain one as it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def expect_same(actual: Tensor, expected: Tensor, what: str, *, tolerance: float = FP32) -> None:
    """Raises `Wrong` unless ``actual`` is ``expected`` within ``tolerance`` of its largest element.

    Args:
        tolerance: 0 for bit by bit.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        found, wanted = (f"{tuple(each.shape)} {each.dtype}" for each in (actual, expected))
        raise Wrong(f"{what} is {found}, not {wanted}")
    if tolerance == 0 or not actual.dtype.is_floating_point:
        if not torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
            raise Wrong(f"the bytes of {what} differ")
        return
    difference = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    if not difference <= tolerance * largest + 1e-9:
        raise Wrong(f"{what} {_by_how_much(actual.double(), expected.double(), difference, largest)}")


def _by_how_much(actual: Tensor, expected: Tensor, difference: float, largest: float) -> str:
    ratio = ((actual * expected).sum() / expected.square().sum()).item()
    if (actual - ratio * expected).abs().max().item() <= 1e-3 * max(abs(ratio), 1e-3) * largest:
        return f"is {ratio:.2f} times what it should be"
    return f"is off by up to {difference:.2g}, its largest element being {largest:.2g}"


def expect_same_parameters(
    model: nn.Module, plain: nn.Module, *, tolerance: float = FP32, start: nn.Module | None = None
) -> None:
    """All parameters of ``model``, gathered, are those of ``plain``. Collective.

    Args:
        start: the unsharded model before training, to tell where nothing was trained.
    """
    for name, expected in plain.named_parameters():
        if start is not None and torch.equal(whole(model.get_parameter(name)), start.get_parameter(name).detach()):
            raise Wrong(f"`{name}` is not trained: it keeps its first value")
        expect_same(whole(model.get_parameter(name)), expected.detach(), f"`{name}`", tolerance=tolerance)


def expect_same_gradients(model: nn.Module, plain: nn.Module, *, tolerance: float = FP32) -> None:
    """All gradients of ``model``, gathered, are those of ``plain``. Collective."""
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad
        if (found is None) != (parameter.grad is None):
            raise Wrong(f"the gradient of `{name}` is {'missing' if found is None else 'not None'}")
        if found is not None and parameter.grad is not None:
            expect_same(whole(found), parameter.grad, f"the gradient of `{name}`", tolerance=tolerance)


def mean_backward(trial: Trial, plain: nn.Module, step: int, *, loss: Loss = squared_output) -> None:
    """Leaves in ``plain`` the gradients of the mean over all ranks' batches."""
    for rank in range(trial.world_size):
        (loss(plain, batch(rank, step)) / trial.world_size).backward()


def expect_trains_alike(
    trial: Trial,
    model: nn.Module,
    plain: nn.Module,
    *,
    steps: int = 3,
    loss: Loss = squared_output,
    make_optimizer: MakeOptimizer = sgd,
    optimizer: torch.optim.Optimizer | None = None,
    tolerance: float = FP32,
) -> None:
    """Trains the sharded ``model`` on this rank's batches and ``plain`` on all, comparing gradients and parameters.

    Args:
        optimizer: of ``model``, if it exists already; else ``make_optimizer`` makes it.

    Raises:
        Wrong: with the first that differs.
    """
    start = copy.deepcopy(plain)
    ours = optimizer or make_optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
    reference = make_optimizer(parameter for parameter in plain.parameters() if parameter.requires_grad)
    for step in range(steps):
        loss(model, batch(trial.rank, step)).backward()
        mean_backward(trial, plain, step, loss=loss)
        expect_same_gradients(model, plain, tolerance=tolerance)
        for each in (ours, reference):
            each.step()
            each.zero_grad()
        expect_same_parameters(model, plain, tolerance=tolerance, start=start if optimizer else None)
