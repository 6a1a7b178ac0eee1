"""`fsdp2.make_graphed_step`: clipping, AdamW and a schedule beside a plain model, with eager steps in between.

In a rehearsal the step runs again in the place of a replay.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import fsdp2
from extras.gpu_check.programs.stacks import batch, sharded, stack
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from tests.harness.recording.graphs import RepeatedStep, graphs

STEPS = 60


def _trained(setting: Setting, model: torch.nn.Sequential, width: int, *, is_graphed: bool) -> tuple[list[Any], Any]:
    """Losses of all steps, and what ran them."""
    rate = torch.tensor(1e-2, device=setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    clip = fsdp2.clip_grad_norm_ if is_graphed else torch.nn.utils.clip_grad_norm_

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        clip(list(model.parameters()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = fsdp2.make_graphed_step(step, model, optimizer) if is_graphed else step
    losses = []
    for index in range(STEPS):
        losses.append(run(batch(setting, width, index)).detach())
        if index % 10 == 9:  # of another shape, which the graph must neither see nor spoil
            step(batch(setting, width, index, rows=5))
            with torch.no_grad():
                model(batch(setting, width, index, rows=3))
        schedule.step()
    setting.synchronize()
    return [float(loss) for loss in losses], run


def run(setting: Setting) -> Found:
    """Losses of replays are those of a plain model in as many eager steps."""
    width = setting.pick(1024, 32)
    with setting.group(), graphs(RepeatedStep) if setting.is_rehearsal else nullcontext():
        found, graphed = _trained(setting, sharded(stack(setting, width)), width, is_graphed=True)
        expected, _ = _trained(setting, stack(setting, width), width, is_graphed=False)
    complaints = [
        f"the loss of step {index} is {one}, and was to be {other}"
        for index, (one, other) in enumerate(zip(found, expected, strict=True))
        if abs(one - other) > 1e-3 * abs(other) + 1e-6
    ]
    if not graphed.is_recorded:
        complaints.append("nothing was recorded")
    return {"steps": STEPS, COMPLAINTS: complaints}
