"""A model of dense layers and of one expert on each part of the ranks, and the same with all experts in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult, fully_shard

EXPERTS = 2


def grid(replicas: bool = False) -> DeviceMesh:
    """Four ranks, two for each expert; with ``replicas`` they hold the whole of it."""
    if replicas:
        return init_device_mesh("cpu", (EXPERTS, 2, 1), mesh_dim_names=("ep", "copies", "edp"))
    return init_device_mesh("cpu", (EXPERTS, 2), mesh_dim_names=("ep", "edp"))


def expert_of(rank: int) -> int:
    """Which expert the rank trains."""
    return rank // 2


class Mixture(nn.Module):
    """Dense layers around ``experts``; those of a higher number have fewer layers, if they are ``uneven``."""

    def __init__(self, experts: Iterable[int], *, uneven: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleDict()
        for expert in experts:
            torch.manual_seed(1 + expert)
            layers = EXPERTS - expert if uneven else 1
            self.experts[str(expert)] = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Through one of the experts."""
        hidden: Tensor = self.last(torch.tanh(self.experts[str(expert)](torch.tanh(self.first(x)))))
        return hidden


def placement_of_experts(model: Mixture, mesh: DeviceMesh) -> Any:
    """A ``shard_placement_fn``: experts on their own mesh."""
    names = mesh.mesh_dim_names or ()
    info: Any = HSDPMeshInfo(mesh["copies", "edp"], 1, 0) if "copies" in names else FSDPMeshInfo(mesh["edp"], 0)
    chosen = set(model.experts.parameters())
    return lambda parameter: ShardPlacementResult(None, info) if parameter in chosen else None


def sharded_mixture(
    mesh: DeviceMesh | None = None, *, whole: DeviceMesh | None = None, uneven: bool = False, **options: Any
) -> Any:
    """That of this rank; all dense parameters over ``whole``, by default all ranks."""
    model = Mixture([expert_of(dist.get_rank())], uneven=uneven)
    place = placement_of_experts(model, mesh or grid())
    return fully_shard(model, mesh=whole, shard_placement_fn=place, **options)


def batch_of(rank: int, step: int = 0) -> Tensor:
    """What the rank computes with."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_on(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """Of the rank's batch by the rank's expert."""
    loss: Tensor = model(batch_of(rank, step), expert_of(rank)).square().sum()
    return loss


def backward_of(model: nn.Module, step: int = 0) -> None:
    """On this rank."""
    loss_on(model, dist.get_rank(), step).backward()


def whole_mixture(*, uneven: bool = False, steps: Iterable[int] = (0,)) -> Mixture:
    """All experts, with the gradients that four ranks have: the mean over those that compute with a parameter."""
    model = Mixture(range(EXPERTS), uneven=uneven)
    for step in steps:
        for rank in range(2 * EXPERTS):
            loss_on(model, rank, step).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        parameter.grad /= 2 if "experts" in name else 2 * EXPERTS
    return model


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of a sharded one, on every rank of each parameter's mesh."""
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
