"""A model with experts, which shard their parameters over another mesh than the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.harness.models import MLP, ModelCase
from tests.harness.parity.implementation import API


class Experts(nn.Module):
    """A layer whose ``expert`` parameters may be sharded otherwise than its ``dense`` ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 32)
        self.expert = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.dense(x)))


class TwoLevels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](torch.cat([x, x], dim=1))


EXPERTS = ModelCase("experts", TwoLevels, MLP.make_batch, ("blocks.0", "blocks.1"), F.mse_loss)


def place_experts(model: nn.Module, mesh_info: Any, placement: Shard | None = None) -> Callable[[nn.Parameter], Any]:
    """Expert parameters on ``mesh_info``, the rest wherever `fully_shard` is told."""
    experts = {parameter for name, parameter in model.named_parameters() if "expert" in name}

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return None
        return API.ShardPlacementResult(placement=placement, mesh_info=mesh_info)

    return place
