"""A batch that fails, and training that goes on: as if the batch had not been there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from extras.gpu_check.programs.stacks import batch, differing, sharded, stack
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting

STEPS = 5
FAILS = 2
OUT_OF_MEMORY = "out of memory"
TOO_MUCH_BYTES = 1 << 44


class Planned(Exception):
    """In a backward, on every rank."""


def _fail(setting: Setting, what: str) -> None:
    if what == OUT_OF_MEMORY:
        if not setting.is_rehearsal:
            torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device=setting.device)
        raise torch.OutOfMemoryError("as a device would")
    raise KeyboardInterrupt if what == "interrupt" else Planned


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, setting: Setting, what: str) -> torch.Tensor:
        ctx.fails = setting, what
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _fail(*ctx.fails)


class _MayFail(nn.Module):
    """In the middle of a model; ``fails`` in the next forward or backward, if anything."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting, self.fails = setting, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        what, self.fails = self.fails, ""
        if what == OUT_OF_MEMORY and self.setting.rank == 0:
            _fail(self.setting, what)
        if what and what != OUT_OF_MEMORY:
            return _Fails.apply(x, self.setting, what)
        return x


def _losses(setting: Setting, what: str, complaints: list[str]) -> list[float]:
    """Of all batches but one: it fails by ``what``, or, if by nothing, is left out."""
    width = setting.pick(512, 32)
    layers, may_fail = stack(setting, width), _MayFail(setting)
    place = len(layers) if what == OUT_OF_MEMORY else len(layers) // 2  # collectives of a forward that ends are issued
    model = sharded(nn.Sequential(*layers[:place], may_fail, *layers[place:]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        if step == FAILS:
            if not what:
                continue
            may_fail.fails = what
        failed = torch.zeros(1, device=setting.device)
        try:
            loss = model(batch(setting, width, step)).square().mean()
        except torch.OutOfMemoryError:
            failed += 1
        dist.all_reduce(failed)
        if failed.item():  # one rank has no loss: all leave the batch out
            continue
        try:
            loss.backward()
        except (Planned, KeyboardInterrupt):
            optimizer.zero_grad()
            continue
        if step == FAILS:
            complaints.append("nothing was raised")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def run(setting: Setting) -> Found:
    """Options: ``what``: out of memory (on one rank, in forward), exception or interrupt (in backward)."""
    complaints: list[str] = []
    with setting.group():
        expected = _losses(setting, "", complaints)
        found = _losses(setting, setting.options["what"], complaints)
    if len(found) != len(expected):
        complaints.append(f"{len(found)} steps were done, and should be {len(expected)}")
    elif said := differing(found, expected, tolerance=1e-5):
        complaints.append(f"after the batch that failed, {said}")
    return {"losses": found, COMPLAINTS: complaints}
