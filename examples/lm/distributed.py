"""The process group: which rank this is, on which device it computes, and what all ranks agree on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lm.errors import UserError

GRACE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among all of them."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone prints and writes metrics."""
        return self.rank == 0

    def sum(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        """Add each of `values` (scalars) over the ranks, in float64. A collective: every rank calls it."""
        total = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        dist.all_reduce(total)
        return total.tolist()

    def require_equal(self, value: int, *, what: str) -> None:
        """Raise `UserError` on every rank unless all hold the same `value`. A collective."""
        extremes = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        largest, smallest = extremes[0].item(), -extremes[1].item()
        if largest != smallest:
            raise UserError(f"{what} differs between ranks: every machine needs the same files and versions")


def launched_by_torchrun() -> bool:
    """Whether a launcher has set this process's rank in the environment."""
    return "RANK" in os.environ


def is_first_on_machine() -> bool:
    """Whether this process is its machine's first, or the only one; needs no process group."""
    return local_rank() == 0


def local_rank() -> int:
    """Return this process's place among those on its machine, 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device(name: str) -> torch.device:
    """Turn `auto`, `cpu` or `cuda` into this process's device: one GPU for each local rank.

    Raises:
        UserError: there is no GPU, or fewer than there are processes on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; use --device cpu")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{local_world_size} processes share {torch.cuda.device_count()} GPUs on this machine: "
            "lower --nproc-per-node, or use --device cpu"
        )
    return torch.device("cuda", local_rank())


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """Open the default process group: NCCL where `device` is a GPU, gloo otherwise. Every rank enters.

    Without a launcher the group has one rank, so the same program runs unsharded.
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if launched_by_torchrun():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)
    finally:
        # gloo's thread lets go of the last tensor after the collective has returned. If Python is ending by then, it
        # aborts the process (torch 2.13).
        time.sleep(GRACE_SECONDS)
        dist.destroy_process_group()
