"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

BETAS = (0.9, 0.95)
FINAL_FRACTION = 0.05
"""The learning rate at the end, as a fraction of its peak."""


@dataclass(frozen=True, slots=True)
class CosineSchedule:
    """Linear warmup to `peak` over `warmup_steps`, then half a cosine down to a twentieth of it."""

    peak: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * cosine)


def make_optimizer(model: nn.Module, *, weight_decay: float) -> torch.optim.AdamW:
    """Make AdamW for `model`, sharded or not: matrices decay, norms do not.

    Fused, because on a CPU the other forms pay DTensor's dispatch for every small operation of every
    parameter. The learning rate is set anew before each update, by `set_learning_rate`.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group of `optimizer` the same `learning_rate`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(model: nn.Module, *, max_norm: float) -> torch.Tensor:
    """Scale all gradients down to a global norm of at most `max_norm`; return the norm before, a scalar.

    A collective where the gradients are sharded: every rank calls it.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
