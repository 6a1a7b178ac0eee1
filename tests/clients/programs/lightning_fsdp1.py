"""Lightning Fabric with `FSDPStrategy`: accumulation without sync, clipping, saving and loading, full or sharded.

Usage:
    torchrun --nproc-per-node 2 lightning_fsdp1.py FOLDER [full|sharded]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from trial import Report, batch, build, finish, mean_over_ranks, mean_squared_error, part

STEPS, MICROBATCHES, MAX_NORM = 4, 3, 0.5
RATE = 0.1


class OnCPU(FSDPStrategy):
    """Lightning's connector wants a GPU for `FSDPStrategy` itself; torch's FSDP1 a device, if there is none."""

    @property
    def root_device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def setup_module(self, module: nn.Module) -> nn.Module:
        """With the device, which Lightning gives by its index alone."""
        self._fsdp_kwargs.setdefault("device_id", torch.device("cpu"))
        policy = self._fsdp_kwargs.pop("auto_wrap_policy")
        device = self._fsdp_kwargs.pop("device_id")
        wrapped = FullyShardedDataParallel(module, auto_wrap_policy=policy, device_id=device, **self._fsdp_kwargs)
        self._fsdp_kwargs["auto_wrap_policy"] = policy
        return wrapped


def main() -> None:
    """Train, save in the middle and come back to it, and report."""
    folder, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "full"
    reference = build()
    block = type(next(iter(reference.blocks)))  # type: ignore[arg-type]
    strategy = OnCPU(auto_wrap_policy={block}, state_dict_type=kind)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(build())
    assert isinstance(model._forward_module, FullyShardedDataParallel)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=RATE, momentum=0.9)
    report = Report("fsdp2" if FullyShardedDataParallel.__module__.startswith("fsdp2") else "torch")
    for step in range(STEPS):
        loss, norm = train(fabric, model, optimizer, step)
        losses = []
        for index in range(MICROBATCHES):
            losses.append(mean_squared_error(reference, *batch(MICROBATCHES * step + index)))
            (losses[-1] / MICROBATCHES).backward()
        report.add("loss", loss, sum(each.item() for each in losses) / MICROBATCHES)
        report.add("gradient norm", norm, nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM).item())
        expected_optimizer.step()
        expected_optimizer.zero_grad()
        if step == 1:
            state = {"model": model, "optimizer": optimizer}
            fabric.save(folder / "checkpoint", state)
            train(fabric, model, optimizer, step)  # to be forgotten
            fabric.load(folder / "checkpoint", state)
    finish(report)


def train(fabric: Any, model: Any, optimizer: Any, step: int) -> tuple[float, float]:
    """One step; its loss and the norm of its gradient before clipping."""
    losses = []
    for index in range(MICROBATCHES):
        rows = (part(each, fabric.global_rank, fabric.world_size) for each in batch(MICROBATCHES * step + index))
        with fabric.no_backward_sync(model, enabled=index < MICROBATCHES - 1):
            loss = mean_squared_error(model, *rows)
            fabric.backward(loss / MICROBATCHES)
        losses.append(mean_over_ranks(loss))
    norm = fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses) / MICROBATCHES, norm.item()


if __name__ == "__main__":
    main()
