"""One rank of a program in which something happens to a rank: run by `test_ranks_that_fail`, with case and rank."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import fsdp2


def happens(case: str) -> None:
    """What happens to that rank, before a step of all."""
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "ended":
        os._exit(0)
    elif case == "in a barrier":
        dist.barrier()
    elif case == "raised":
        raise ValueError("a batch that cannot be read")


def main(case: str, to: int) -> None:
    """Train two steps; then the case, and what is said of it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    fsdp2.set_watchdog(1)

    def step() -> None:
        model(torch.randn(3, 6)).sum().backward()

    step()
    step()
    begun = time.monotonic()
    try:
        if rank == to:
            happens(case)
        step()
    except Exception as error:
        print(f"rank {rank} after {time.monotonic() - begun:.0f} s, {type(error).__name__}: {error}", flush=True)
        os._exit(3)  # as torchrun ends it; a group that lost a rank is of no use
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
