"""What the programs of `tests/parity` share: a tower of layers of distinct sizes, and training beside the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.harness import Reference, adamw, assert_trains_like, tolerance_for
from tests.harness.compare import Tolerance
from tests.harness.models import MLP, UNEVEN_MLP, Batch, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.trace import Trace, traced

WIDTH = 8
ROWS = {"a": 32, "b": 64, "c": 128, "d": 256}
SIZES = {name: rows * WIDTH for name, rows in ROWS.items()}
"""Elements of each layer of `Tower`: what `Trace.named` needs."""


class _MarkBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None


class Layer(nn.Module):
    """One weight, used twice. Notes in ``trace``, if set, when its forward and its backward begin to compute."""

    def __init__(self, name: str, rows: int) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(rows, WIDTH) / (rows * WIDTH) ** 0.5)
        self.trace: Trace | None = None

    def forward(self, x: Tensor) -> Tensor:
        trace = self.trace
        if trace is None:
            return x + torch.tanh(x @ self.weight.T) @ self.weight
        trace.mark(f"forward {self.name}")
        output = x + torch.tanh(x @ self.weight.T) @ self.weight
        return _MarkBackward.apply(output, lambda: trace.mark(f"backward {self.name}")) * 1

    def also(self, x: Tensor) -> Tensor:
        """Another method that uses the weight."""
        return self.forward(x)


class Tower(nn.Module):
    """Layers ``a``, ``b``, ``c``, ``d``, one after the other; no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in ROWS.items():
            setattr(self, name, Layer(name, rows))

    def forward(self, x: Tensor) -> Tensor:
        for name in ROWS:
            x = getattr(self, name)(x)
        return x

    def watch(self, trace: Trace | None) -> None:
        """Has every layer note its work in ``trace``."""
        for name in ROWS:
            getattr(self, name).trace = trace


def _vectors(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator))


TOWER = ModelCase("tower", Tower, _vectors, tuple(ROWS), F.mse_loss)
ROOTED = ModelCase("rooted", UNEVEN_MLP.make_model, UNEVEN_MLP.make_batch, ("0", "2"), UNEVEN_MLP.loss_of)
"""The uneven MLP, its last layer in the root's group."""


def shard(case: ModelCase, model: nn.Module | None = None, **options: Any) -> Any:
    """``model``, or a new one, sharded bottom-up as ``case`` says, every call with ``options``."""
    model = case.build() if model is None else model
    for unit in case.units(model):
        API.fully_shard(unit, **options)
    return model


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh over all ranks; two axes are ``replicate`` and ``shard`` unless named otherwise."""
    if names is None and len(shape) == 2:
        names = ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is given."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_on(case: ModelCase, model: nn.Module, step: int = 0, rank: int | None = None, micro: int = 0) -> Tensor:
    """The loss of this rank, or of ``rank``, in that step and microbatch."""
    return case.loss(model, case.batch(0, step, dist.get_rank() if rank is None else rank, micro))


def step_names(model: Any, *, before: int = 2) -> list[str]:
    """What one step of a sharded `TOWER` issues, between the marks of the layers, after ``before`` other steps."""
    for _ in range(before):
        loss_on(TOWER, model).backward()
    with traced() as trace:
        model.watch(trace)
        loss_on(TOWER, model).backward()
        model.watch(None)
    return trace.named(SIZES)


def is_sharded(parameter: Tensor) -> bool:
    """Whether the sharded parameter is registered (of a model without tensor parallelism)."""
    return isinstance(parameter, DTensor)


def train(
    case: ModelCase,
    model: nn.Module,
    *,
    steps: int = 3,
    world_size: int | None = None,
    tolerance: Tolerance | str | None = "by world size",
    reference: Reference | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **watching: Any,
) -> None:
    """Trains ``model`` beside the reference, by `assert_trains_like` with ``watching``.

    Args:
        world_size: Ranks with data of their own; all by default. Fewer under tensor parallelism.
    """
    world_size = dist.get_world_size() if world_size is None else world_size
    reference = Reference(case, world_size=world_size) if reference is None else reference
    optimizer = adamw(trainable(model)) if optimizer is None else optimizer
    if isinstance(tolerance, str):
        tolerance = tolerance_for(world_size)
    assert_trains_like(reference, model, optimizer, steps=steps, tolerance=tolerance, **watching)


__all__ = ["MLP", "ROOTED", "ROWS", "SIZES", "TOWER", "UNEVEN_MLP", "WIDTH", "Layer", "Tower"]
