"""A small language model, its tensor parallel plan, and how it is sharded and trained on a mesh of several axes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.harness.compare import Tolerance
from tests.harness.models import Batch, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import mesh_of, train, trainable

VOCABULARY, WIDTH, SEQUENCE = 16, 8, 4
PARTIAL_SUMS = Tolerance(rtol=1e-4, atol=1e-6, reason="tensor parallelism splits sums of the matrix products")


class FeedForward(nn.Module):
    """Its hidden size divides by 2, for tensor parallelism, but not by 4: FSDP's shards of it are uneven."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


class Language(nn.Module):
    """Embedding, two blocks, norm, head: every style of tensor parallelism has its place."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous())


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


EVEN = ModelCase("even", partial(Language, 16), _tokens, ("blocks.0", "blocks.1"), token_loss)
UNEVEN = ModelCase("uneven", partial(Language, 14), _tokens, ("blocks.0", "blocks.1"), token_loss)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool, local_logits: bool = True) -> nn.Module:
    """Column- and row-wise linears; with ``sequence`` also norms and embedding, activations split by sequence."""
    between: Any = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Replicate() if local_logits else Shard(-1),
            use_local_output=local_logits,
        ),
    }
    if sequence:
        plan |= {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "norm": SequenceParallel(),
        }
    return parallelize_module(model, mesh, plan)


def world(*shape: int) -> DeviceMesh:
    """(dp, tp), or (replicate, shard, tp)."""
    return mesh_of(*shape, names=("dp", "tp") if len(shape) == 2 else ("replicate", "shard", "tp"))


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "shard"]


def parallelized(case: ModelCase, mesh: DeviceMesh, *, sequence: bool = True, seed: int = 0, **options: Any) -> Any:
    """Tensor parallel over the last axis, sharded over the others."""
    local_logits = options.pop("local_logits", True)
    model = tensor_parallel(case.build(seed), mesh["tp"], sequence=sequence, local_logits=local_logits)
    for unit in case.units(model):
        API.fully_shard(unit, mesh=data_axes(mesh), **options)
    return model


def train_2d(case: ModelCase, model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """The data of a rank is that of its place on the data parallel axes; tensor parallel peers share it."""
    tensor_parallel_size = mesh["tp"].size()
    options.setdefault("tolerance", PARTIAL_SUMS)
    # Parameters of the data mesh alone and of the whole mesh do not meet in one foreach call.
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, eps=1e-3, foreach=False)
    train(
        case,
        model,
        world_size=dist.get_world_size() // tensor_parallel_size,
        rank=dist.get_rank() // tensor_parallel_size,
        optimizer=optimizer,
        **options,
    )
