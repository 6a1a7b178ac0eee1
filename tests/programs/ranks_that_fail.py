"""One rank of a program in which something happens to a rank: run by `test_ranks_that_fail`, with case and rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp2


def happens(case: str, model: Any) -> None:
    """What happens to that rank, before a step of all."""
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "ended":
        os._exit(0)
    elif case == "in a barrier":
        dist.barrier()
    elif case == "in full_tensor":
        model[0].weight.full_tensor()
    elif case == "raised":
        raise ValueError("a batch that cannot be read")


def clip_or_not(model: nn.Module, *, clips: bool) -> None:
    """A rank leaves out what the others do after a step, and comes to what is after that."""
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.barrier()


class Layers(nn.Sequential):
    """Layers of equal size, in an order that may be another one."""

    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all in ``order``."""
        for index in self.order:
            x = self[index](x)
        return x


def go_on(model: Layers, case: str, *, diverges: bool) -> None:
    """Steps in which a rank diverges, without a message's name to tell: until something is said."""
    if diverges and case != "asked":
        model.order = (0, 2) if case == "skips" else (1, 0, 2)
    if case == "evaluates":
        torch.set_grad_enabled(False)
    if case == "asked":
        time.sleep(5.0 if diverges else 0.0)
    for _ in range(1000):
        loss = model(torch.randn(3, 6)).sum()
        if loss.requires_grad:
            loss.backward()
        if case == "asked":
            return
        time.sleep(0.01)


def main(case: str, to: int) -> None:
    """Train two steps; then the case, and what is said of it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Layers(*[nn.Linear(6, 6) for _ in range(3)])
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    fsdp2.set_watchdog(1, dump_signal=signal.SIGUSR2 if case == "asked" else None)

    def step() -> None:
        model(torch.randn(3, 6)).sum().backward()

    step()
    step()
    print("ready", flush=True)
    begun = time.monotonic()
    try:
        if case in ("swaps", "skips", "evaluates", "asked"):
            go_on(model, case, diverges=rank == to)
        elif rank == to:
            happens(case, model)
        step()
        if case == "clips":
            clip_or_not(model, clips=rank != to)
    except Exception as error:
        print(f"rank {rank} after {time.monotonic() - begun:.0f} s, {type(error).__name__}: {error}", flush=True)
        if case in ("swaps", "skips", "evaluates"):
            time.sleep(3.0)  # rank 0 keeps the store, from which the others learn why
        os._exit(3)  # as torchrun ends it; a group that lost a rank is of no use
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
