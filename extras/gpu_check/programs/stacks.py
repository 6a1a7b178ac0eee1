"""No program: the model that most of them train, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from extras.gpu_check.setting import Setting
from fsdp2 import fully_shard

DEPTH = 6


def stack(setting: Setting, width: int, depth: int = DEPTH) -> nn.Sequential:
    """Layers of ``width``, with the same parameters on all ranks, on this rank's device."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return layers.to(setting.device)


def sharded(layers: nn.Sequential, shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    """``layers``, each of them and the whole sharded."""
    for layer in layers:
        shard(layer, **options)
    return shard(layers, **options)


def batch(setting: Setting, width: int, step: int, rank: int | None = None, rows: int = 32) -> Tensor:
    """The data of ``rank`` (this one) in ``step``."""
    seed = step * 1000 + (setting.rank if rank is None else rank)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(setting.device)


def train(setting: Setting, model: nn.Module, width: int, steps: int, lr: float = 0.1) -> list[float]:
    """Train by SGD; the losses of this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        loss = model(batch(setting, width, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    setting.synchronize()
    return [float(loss) for loss in losses]


def plainly_trained(setting: Setting, width: int, steps: int, lr: float = 0.1) -> list[float]:
    """The losses of this rank when one process trains the plain model as all ranks would."""
    model = stack(setting, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        for rank in range(setting.ranks):
            loss = model(batch(setting, width, step, rank)).square().mean()
            (loss / setting.ranks).backward()
            if rank == setting.rank:
                losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differing(found: list[float], expected: list[float], tolerance: float = 0.0) -> str | None:
    """Where two lists of losses first differ by more than ``tolerance`` of the expected one; None if nowhere."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not abs(one - other) <= tolerance * abs(other):  # NaN too
            return f"the loss of step {step} is {one!r}, and should be {other!r}"
    return None
