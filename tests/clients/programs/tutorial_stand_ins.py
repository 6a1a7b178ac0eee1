"""What torch's FSDP1 tutorial uses that is not here: MNIST, CUDA and NCCL. Imported by each of its ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

RANKS, SEED = 2, 7
FOLDER = "TUTORIAL_FOLDER"


class MNIST:
    """As torchvision's: random images."""

    def __init__(self, root: str, train: bool, download: bool = False, transform: Any = None) -> None:
        generator = torch.Generator().manual_seed(int(train))
        count = 48 if train else 32
        self.images = torch.randn(count, 1, 28, 28, generator=generator)
        self.targets = torch.randint(10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.targets[index])


datasets = SimpleNamespace(MNIST=MNIST)
transforms = SimpleNamespace(Compose=lambda steps: None, ToTensor=lambda: None, Normalize=lambda mean, deviation: None)


class Event:
    """As CUDA's."""

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        """Now."""
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing runs ahead."""

    def elapsed_time(self, other: Event) -> float:
        """In milliseconds."""
        return 1e3 * (other._at - self._at)


def on_host(method: Any) -> Any:
    """``to``, for which the number of a device is the host."""

    def to(self: Any, *arguments: Any, **options: Any) -> Any:
        return method(self, *("cpu" if type(each) is int else each for each in arguments), **options)

    return to


def init_process_group(backend: str, rank: int, world_size: int) -> None:
    """By gloo, and a file: the tutorial's port may be another's."""
    path = Path(os.environ[FOLDER])
    _init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=world_size)
    if rank == 0:
        owner = FullyShardedDataParallel.__module__.partition(".")[0]
        (path / "implementation").write_text(owner)


def set_device(rank: int) -> None:
    """As CUDA's, before the model is made: the tutorial sets no seed in its ranks, whose models would differ."""
    torch.manual_seed(SEED)


def note_gradient_norm(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Before each step, of all parameters together. Collective."""
    if not dist.is_initialized():
        return
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    total = torch.stack([each.double().square().sum() for each in locals_]).sum()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        with (Path(os.environ[FOLDER]) / "norms").open("a") as file:
            file.write(f"{total.sqrt().item()}\n")


_init_process_group = dist.init_process_group
dist.init_process_group = init_process_group  # type: ignore[assignment]
torch.cuda.device_count = lambda: RANKS
torch.cuda.set_device = set_device
torch.cuda.Event = Event  # type: ignore[misc, assignment]
nn.Module.to = on_host(nn.Module.to)  # type: ignore[method-assign]
Tensor.to = on_host(Tensor.to)  # type: ignore[method-assign]
register_optimizer_step_pre_hook(note_gradient_norm)
