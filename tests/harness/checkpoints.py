"""What tests of checkpoints share: a small model with everything in it, ways to shard it, processes started anew.

The model is trained in some processes and saved; others load it. What is compared is whole: `snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import BlockShard, MixedPrecisionPolicy, Owned, RowBlocks, fully_shard, step_on_owners
from tests.harness.pool import WorkerPool

ROWS = 13


class Feed(nn.Module):
    """Two matrices, cut by tensor parallelism where that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Uneven rows, tied weights, a scalar, a frozen and an unused parameter, buffers of all kinds."""

    def __init__(self, seed: int = 0, blocks: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(ROWS, 6)
            self.blocks = nn.ModuleList(Feed() for _ in range(blocks))
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, ROWS, bias=False)
            self.head.weight = self.embed.weight
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(3, 2))
            self.register_buffer("counts", torch.arange(4))  # of forwards: the same on all ranks
            self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts.add_(1)
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden) * self.table.sum() * self.frozen.mean()
        return self.head(hidden) * self.scale


def tokens_of(step: int, rank: int) -> torch.Tensor:
    """The batch of a rank in a step."""
    return torch.randint(0, ROWS, (7,), generator=torch.Generator().manual_seed(1000 * step + rank))


# ---- ways to shard -------------------------------------------------------------------------------


def _units(model: Net) -> list[nn.Module]:
    return [*model.blocks, model]


def _with(model: Net, **arguments: Any) -> None:
    for unit in _units(model):
        fully_shard(unit, **arguments)


def _tensor_parallel(model: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _with(model, mesh=mesh["dp"])


def _torchs(model: Net) -> None:
    model.scale = nn.Parameter(model.scale.detach().clone().view(1))  # torch shards nothing without dims
    for unit in _units(model):
        torch_fully_shard(unit)


def _hybrid() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


LAYOUTS: dict[str, Callable[[Net], None]] = {
    "plain": lambda model: None,
    "1d": _with,
    "hybrid": lambda model: _with(model, mesh=_hybrid()),
    "tp": _tensor_parallel,
    "replicate": lambda model: _with(model, strategy="replicate"),
    "zero1": lambda model: _with(model, strategy="zero1"),
    "columns": lambda model: _with(model, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.dim() == 2 else None),
    "blocks": lambda model: _with(model, shard_placement_fn=lambda p: RowBlocks(2) if p.dim() == 2 else None),
    "merged": lambda model: _with(
        model, shard_placement_fn=lambda p: BlockShard.split_leading(p.shape, 2) if p.dim() == 2 else None
    ),
    "owned": lambda model: _with(
        model, shard_placement_fn=lambda p: Owned(p.numel() % dist.get_world_size()) if p.dim() == 2 else None
    ),
    "half": lambda model: _with(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    ),
    "torch": _torchs,
}
"""By name; "plain" is one process, "tp" four."""


# ---- optimizers ----------------------------------------------------------------------------------


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and p.requires_grad]
    others = [p for name, p in named.items() if p.dim() != 2]
    return [{"params": matrices, "lr": 0.02}, {"params": others, "weight_decay": 0.1}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.AdamW(_groups(model), lr=0.01),
    "groups turned": lambda model: torch.optim.AdamW(_groups(model)[::-1], lr=0.01),
    "two": lambda model: [torch.optim.AdamW([group], lr=0.01) for group in _groups(model)],
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
    "local": lambda model: fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=0.01),
    "flat": lambda model: fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=0.01, flat=True),
    "owners": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "offloaded": lambda model: _offloaded(torch.optim.AdamW(model.parameters(), lr=0.01)),
}


def _offloaded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    fsdp2.offload_optimizer_state(optimizer)
    return optimizer


@dataclass(frozen=True, slots=True)
class Run:
    """A model that is trained.

    Attributes:
        model: sharded.
        optimizer: one or a list.
        kind: the name of the optimizer.
        tensor_size: ranks that compute with the same batch.
    """

    model: Net
    optimizer: Any
    kind: str
    tensor_size: int = 1

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]

    def step(self, index: int) -> None:
        """Train one step."""
        rank = dist.get_rank() // self.tensor_size if dist.is_initialized() else 0
        self.backward(index, rank)
        for optimizer in self.optimizers:
            step_on_owners(optimizer) if self.kind == "owners" else optimizer.step()
            optimizer.zero_grad()

    def backward(self, index: int, rank: int) -> None:
        """Gradients of one batch."""
        self.model(tokens_of(index, rank)).float().square().mean().mul(1e-2).backward()


def begin(layout: str, kind: str = "adamw", *, seed: int = 0, device: str = "cpu", blocks: int = 2) -> Run:
    """A model, sharded, and its optimizer. On all ranks."""
    with torch.device(device):
        model = Net(seed, blocks)
    LAYOUTS[layout](model)
    return Run(model, OPTIMIZERS[kind](model), kind, 2 if layout == "tp" else 1)


# ---- what is compared ----------------------------------------------------------------------------


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def snapshot(run: Run) -> dict[str, Any]:
    """The model, its buffers and its optimizers' state and hyperparameters, whole, by name. Collective."""
    named = dict(run.model.named_parameters())
    found: dict[str, Any] = {name: whole(p) for name, p in named.items()}
    found |= {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    for optimizer in run.optimizers:
        names = {id(p): name for name, p in named.items()}
        for group in optimizer.param_groups:
            hyper = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                name = names[id(parameter)]
                found[f"{name} hyper"] = dict(hyper)
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{name} {key}"] = whole(value) if isinstance(value, torch.Tensor) else value
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not equal, bit by bit."""
    names = [name for name in {**one, **other} if not _equal(one.get(name), other.get(name))]
    return [f"{name}: {_shown(one.get(name))} and {_shown(other.get(name))}" for name in names]


def _shown(value: Any) -> str:
    return str(value.flatten()[:3].tolist()) if isinstance(value, torch.Tensor) else str(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Of two snapshots."""
    found = differences(one, other)
    assert not found, "\n".join(found[:10])


# ---- processes -----------------------------------------------------------------------------------


@contextmanager
def processes(world_size: int) -> Iterator[WorkerPool]:
    """So many, started anew."""
    pool = WorkerPool(world_size)
    try:
        yield pool
    finally:
        pool.stop()


def anew(world_size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 60.0, **named: Any) -> list[Any]:
    """Run ``body`` on so many processes that are started for it and end with it; what it returned, by rank."""
    with processes(world_size) as pool:
        return pool.run(body, *arguments, timeout=timeout, **named)


def saved(folder: Path) -> set[str]:
    """Names of all that is in ``folder``."""
    return {each.name for each in folder.iterdir()} if folder.exists() else set()
