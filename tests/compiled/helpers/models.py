"""What the tests of compiled models train, and how they shard, compile and step it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp2 import fully_shard
from tests import harness

multi_rank = functools.partial(harness.multi_rank, timeout=300)
"""As elsewhere, with time for several compilations on a busy machine."""

WIDTH = 8


class Block(nn.Module):
    """Uneven rows (11), a rank without rows on 4 ranks (2), a frozen, an unused and a 0-D parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)
        self.few = nn.Parameter(torch.randn(2, WIDTH))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x + self.frozen))
        return x + self.scale * self.down(hidden) + (x @ self.few.T) @ self.few


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Small(nn.Module):
    """Two blocks of one layer, which compile soon."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    """`Model`, the same each time."""
    torch.manual_seed(0)
    return Model()


def build_small() -> Small:
    """`Small`, the same each time."""
    torch.manual_seed(0)
    return Small()


def batch(generator: torch.Generator) -> Tensor:
    """Four rows."""
    return torch.randn(4, WIDTH, generator=generator)


def batch_of(step: int, rank: int, rows: int = 4) -> Tensor:
    """The rows of one rank in one step."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step * 100 + rank))


def loss_of(output: Tensor) -> Tensor:
    """The sum of squares, in fp32."""
    return output.float().square().sum()


def shard(model: nn.Module, **arguments: Any) -> None:
    """Each block, then the whole."""
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)


def saves_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of selective checkpointing: all but products of matrices is computed again."""
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, saves_products)

CHECKPOINTS = ("inside", "outside", "selective")


def shard_checkpointed(model: nn.Module, where: str, **arguments: Any) -> None:
    """`shard`, each block's activations checkpointed ``inside`` or ``outside`` of it, or ``selective``ly inside."""
    for index, block in enumerate(model.blocks):
        if where == "outside":
            model.blocks[index] = checkpoint_wrapper(fully_shard(block, **arguments))
        else:
            context = {"context_fn": selective} if where == "selective" else {}
            model.blocks[index] = fully_shard(checkpoint_wrapper(block, **context), **arguments)
    fully_shard(model, **arguments)


def whole(model: nn.Module, backend: Any) -> Any:
    """``torch.compile(model)``."""
    return torch.compile(model, backend=backend, fullgraph=True)


def by_method(model: nn.Module, backend: Any) -> nn.Module:
    """``model.compile()``."""
    model.compile(backend=backend, fullgraph=True)
    return model


def by_blocks(model: nn.Module, backend: Any) -> nn.Module:
    """``block.compile()`` of each block."""
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def steps_of(number_of_backwards: int) -> Callable[[nn.Module, int, int], list[Tensor]]:
    """Several backwards in each step, whose gradients add up."""

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        losses = []
        for micro in range(number_of_backwards):
            loss = loss_of(model(batch_of(number, rank * 10 + micro)))
            loss.backward()
            losses.append(loss.detach())
        return losses

    return step


def rank() -> int:
    """This one's."""
    return dist.get_rank()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer takes."""
    return [param for param in model.parameters() if param.requires_grad]


def cleared(params: Iterable[nn.Parameter]) -> None:
    """Without gradients."""
    for param in params:
        param.grad = None


class FeedForward(nn.Module):
    """For tensor parallelism; ``few`` is left out of it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.few = nn.Parameter(torch.randn(3, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) + (x @ self.few.T) @ self.few


class Parallel(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelized(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def build_parallel(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return Parallel(hidden)
