"""What a program of `programs/` is told, and the process group that it may want."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True)
class Setting:
    """This rank's part.

    Attributes:
        device_type: "cuda", or "cpu" in a rehearsal.
        store: A file that ranks meet at.
        options: What the batch says.
    """

    device_type: str
    rank: int
    ranks: int
    store: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_rehearsal(self) -> bool:
        """On the CPU: sizes are small, and measurements are worth nothing."""
        return self.device_type == "cpu"

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return torch.device("cuda", self.rank) if self.device_type == "cuda" else torch.device("cpu")

    def pick(self, real: T, rehearsed: T) -> T:
        """``real`` on GPUs."""
        return rehearsed if self.is_rehearsal else real

    @contextmanager
    def group(self, backend: str | None = None, *, binds_device: bool = False) -> Iterator[None]:
        """The process group of all ranks, by the backend of the device if no other is named.

        ``binds_device``: it is told its device.
        """
        if self.device_type == "cuda":
            torch.cuda.set_device(self.device)
        os.environ["LOCAL_RANK"] = str(self.rank)
        dist.init_process_group(
            backend or BACKENDS[self.device_type],
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.ranks,
            device_id=self.device if binds_device and not self.is_rehearsal else None,
        )
        yield
        dist.destroy_process_group()  # not after an exception: peers may be in a collective for ever

    def synchronize(self) -> None:
        """Let the host wait for the device."""
        if not self.is_rehearsal:
            torch.cuda.synchronize()
