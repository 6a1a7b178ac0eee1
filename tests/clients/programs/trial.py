"""What the client programs share: a model, its batches, the unsharded training, and the report of both.

The programs know nothing of fsdp2: they are written for torch, and run with either implementation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

REPORT = "CLIENT_REPORT"
WIDTH = 12
# What torch's wrapper for activation checkpointing adds to the names of parameters.
CHECKPOINTED = "_checkpoint_wrapped_module."


class Block(nn.Module):
    """A residual block; 4 does not divide its inner size, and 2 (for tensor parallelism) does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 26)
        self.outer = nn.Linear(26, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, WIDTH) to the same."""
        hidden: Tensor = self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))
        return x + hidden


class Model(nn.Module):
    """Blocks, and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, WIDTH) to (batch, 5)."""
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def build(blocks: int = 3) -> Model:
    """The same model on every rank."""
    torch.manual_seed(0)
    return Model(blocks)


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """The inputs and targets of all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, 5, generator=generator)


def part(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """The rows of one of ``world_size`` ranks."""
    return tensor.chunk(world_size)[rank]


def squared_norm(gradients: Iterable[Tensor | None]) -> float:
    """The sum of squares, over all ranks where gradients are sharded. Collective then."""
    total = 0.0
    for gradient in gradients:
        if gradient is not None:
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            total += full.double().square().sum().item()
    return total


def gradient_norm(model: nn.Module) -> float:
    """Of all parameters together. Collective, where they are sharded."""
    return squared_norm(parameter.grad for parameter in model.parameters()) ** 0.5


def implementation(module: nn.Module) -> str:
    """Whose `FSDPModule`, or wrapper of FSDP1, a module or what lies below it is: a package; "none" if nobody's."""
    owners = {
        cls.__module__.partition(".")[0]
        for each in module.modules()
        for cls in type(each).__mro__
        if cls.__name__ in ("FSDPModule", "FullyShardedDataParallel")
    }
    return "+".join(sorted(owners)) or "none"


@dataclass
class Report:
    """What a program hands to its test.

    Attributes:
        implementation: see `implementation`.
        found: named series of numbers from the sharded training, as losses by step.
        expected: the same from the unsharded training.
    """

    implementation: str = "none"
    found: dict[str, list[float]] = field(default_factory=dict)
    expected: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, found: float, expected: float) -> None:
        """One more number of a series."""
        self.found.setdefault(name, []).append(found)
        self.expected.setdefault(name, []).append(expected)

    def add_parameters(self, model: nn.Module, reference: nn.Module) -> None:
        """The norms of all parameters, and how far they are from the reference's at most. Collective."""
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            whole = expected[name.replace(CHECKPOINTED, "")]
            self.add("parameter difference", (full - whole).abs().max().item(), 0.0)
            self.add("parameter norm", full.norm().item(), whole.norm().item())

    def save(self, state: Mapping[str, Tensor]) -> None:
        """Whole tensors of a checkpoint, or handed to another program: the test compares them by name. On rank 0."""
        if dist.get_rank() == 0 and REPORT in os.environ:
            torch.save(dict(state), Path(os.environ[REPORT]).with_suffix(".pt"))

    def write(self) -> None:
        """To the file that the test named, on rank 0; else to standard output."""
        if int(os.environ.get("RANK", "0")) != 0:
            return
        text = json.dumps(asdict(self))
        if REPORT in os.environ:
            Path(os.environ[REPORT]).write_text(text)
        else:
            print(text, file=sys.stdout, flush=True)


def finish(report: Report) -> NoReturn:
    """Write the report and end this process, well. Collective.

    Without tearing the interpreter down: a thread of gloo that lets go of the last tensor then aborts the process, once
    in some twenty runs ("terminate called without an active exception"; torch 2.13, with torch's implementation too).
    """
    report.write()
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)


def mean_over_ranks(value: Tensor) -> float:
    """The mean of one number per rank. Collective."""
    total = value.detach().clone().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_unsharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    *,
    max_norm: float | None = None,
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms (before clipping) by step, in one process on the whole batch."""
    losses, norms = [], []
    for inputs, targets in batches:
        loss = loss_of(model, inputs, targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(gradient_norm(model))
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def mean_squared_error(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of most programs."""
    return torch.nn.functional.mse_loss(model(inputs), targets)
