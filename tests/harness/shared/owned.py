"""A model with matrices to own, and how tests of owned parameters shard it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import Owned, balanced_owners, fully_shard
from tests.harness import Reference, adamw
from tests.harness.compare import Tolerance, tolerance_for
from tests.harness.models import Batch, ModelCase
from tests.harness.shared.training import trainable
from tests.harness.training import assert_trains_like

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from muon import Muon


class Block(nn.Module):
    """Matrices of several sizes, a stack of them, one that lies transposed in memory, and what is no matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width, bias=False)
        self.experts = nn.Parameter(torch.randn(3, width, width) / width)
        self.mix = nn.Parameter((torch.randn(5, width) / width).t())
        self.unused = nn.Parameter(torch.randn(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        h = h + torch.einsum("bi,eij->bj", x, self.experts)
        return x + h + x @ self.mix @ self.mix.t()


class Net(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _used() -> nn.Module:
    """Without matrices that get no gradient, and so no state: torch loads a state for every parameter."""
    net = Net()
    for block in net.blocks:
        del block.unused
    return net


class MixedBlock(Block):
    """A part of its matrices in fp64."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        for each in (self.norm, self.up, self.down):
            each.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x.double())))).float()
        return x + h + torch.einsum("bi,eij->bj", x, self.experts) + x @ self.mix @ self.mix.t()


def _mixed() -> nn.Module:
    net = Net()
    net.blocks = nn.ModuleList(MixedBlock(8) for _ in range(3))
    return net


def _tokens(generator: torch.Generator) -> Batch:
    return Batch(torch.randint(16, (6,), generator=generator), torch.randint(16, (6,), generator=generator))


UNITS = ("blocks.0", "blocks.1", "blocks.2")
NET = ModelCase("net", Net, _tokens, UNITS, F.cross_entropy)
MIXED_NET = ModelCase("mixed_net", _mixed, _tokens, UNITS, F.cross_entropy)
USED_NET = ModelCase("used_net", _used, _tokens, UNITS, F.cross_entropy)


@dataclass(frozen=True, slots=True)
class OneOwner:
    """All matrices on one rank."""

    rank: int

    def __call__(self, parameter: nn.Parameter) -> Owned | None:
        return Owned(self.rank) if parameter.dim() > 1 else None


def sharded(
    case: ModelCase = NET,
    model: nn.Module | None = None,
    *,
    mesh: DeviceMesh | None = None,
    owners: Any = None,
    **options: Any,
) -> nn.Module:
    """``model``, or a new one, its matrices owned; balanced over the ranks unless ``owners`` says otherwise."""
    model = case.build() if model is None else model
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),)) if mesh is None else mesh
    units = case.units(model)
    owners = balanced_owners(model, mesh, units=units, select=is_matrix) if owners is None else owners
    for unit in units:
        fully_shard(unit, mesh=mesh, shard_placement_fn=owners, **options)
    return model


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() in (2, 3) and "embedding" not in name and "head" not in name


class Both(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for the rest, as one optimizer."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if is_matrix(name, p)]
        self.parts = (Muon(matrices), adamw([p for name, p in named if not is_matrix(name, p)]))
        super().__init__([p for _, p in named], {})

    def step(self, closure: Any = None) -> None:
        for each in self.parts:
            each.step()


def muon_of(model: nn.Module) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    """For `Reference`, which names no parameters: `Both` of ``model``, the reference's own."""
    return lambda parameters: Both(model)


ORTHOGONALIZED = Tolerance(1e-3, 1e-4, "Newton-Schulz magnifies what the order of sums leaves")


def train(
    model: nn.Module,
    case: ModelCase = NET,
    *,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    tolerance: Tolerance | None = None,
    before_forward: Callable[[int], None] | None = None,
    **reference_options: Any,
) -> None:
    world_size = dist.get_world_size()
    reference = Reference(case, world_size=world_size, make_optimizer=make, **reference_options)
    tolerance = tolerance_for(world_size) if tolerance is None else tolerance
    assert_trains_like(
        reference, model, make(trainable(model)), steps=3, tolerance=tolerance, before_forward=before_forward
    )


def fsdp_param_of(parameter: nn.Parameter) -> int | None:
    """The rank that has all rows, if one has."""
    rows = next((each.rows for each in parameter.placements if hasattr(each, "rows")), ())
    whole = [rank for rank, number in enumerate(rows) if number]
    return whole[0] if len(whole) == 1 else None
