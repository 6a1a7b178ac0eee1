"""A model with every kind of parameter and buffer, all ways of sharding it, and peaks of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp2 import BlockShard, CPUOffloadPolicy, MixedPrecisionPolicy, Owned, RowBlocks, fully_shard


class Block(nn.Module):
    """Two projections, a norm, a parameter of no dims, integers, a transposed one, and buffers of both kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 2)
        self.down = nn.Linear(2 * width + 2, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.randn(()))
        self.steps = nn.Parameter(torch.randint(9, (7, 3)), requires_grad=False)
        self.mix = nn.Parameter(torch.randn(5, width).t())
        self.register_buffer("seen", torch.randint(9, ()))
        self.register_buffer("mean", torch.randn(width))
        self.register_buffer("frequencies", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(self.norm(x)))) * self.gain
        return x + h + x @ self.mix @ self.mix.t() + self.mean + self.frequencies.sum() + self.steps.sum()


class Net(nn.Module):
    """Such blocks between an embedding and a head that is tied to it. ``extra`` is sharded by nothing."""

    def __init__(self, width: int = 10, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.extra = nn.Parameter(torch.randn(3, width)[:, ::2])
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.extra.sum()


def build(seed: int = 0, **sizes: int) -> Net:
    """On this seed."""
    torch.manual_seed(seed)
    return Net(**sizes)


def _hybrid() -> dict[str, Any]:
    size = dist.get_world_size()
    return {"mesh": init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))}


def _owned(parameter: nn.Parameter) -> Owned | None:
    return Owned(parameter.shape[0] % dist.get_world_size()) if parameter.dim() else None


def _blocks(parameter: nn.Parameter) -> RowBlocks | None:
    return RowBlocks(5) if parameter.dim() else None


def _merged(parameter: nn.Parameter) -> BlockShard | None:
    merges = parameter.dim() > 1 and parameter.is_contiguous()
    return BlockShard.split_leading(parameter.shape, parameter.dim()) if merges else None


def _last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.dim() - 1) if parameter.dim() else None


LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "zero3": dict,
    "replicate": lambda: {"strategy": "replicate"},
    "hybrid": _hybrid,
    "mixed": lambda: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": lambda: {"offload_policy": CPUOffloadPolicy()},
    "owned": lambda: {"shard_placement_fn": _owned},
    "row blocks": lambda: {"shard_placement_fn": _blocks},
    "merged rows": lambda: {"shard_placement_fn": _merged},
    "last dim": lambda: {"shard_placement_fn": _last_dim},
}
"""Arguments of `fully_shard`."""

TENSOR_PARALLEL = "tensor parallel"

QUICK = ("hybrid", "owned", TENSOR_PARALLEL)
"""What the short suite runs; the full one (4 minutes more) all layouts, and all of them on 4 ranks."""


def shard(model: Net, layout: str) -> Net:
    """Sharded block by block, in this layout, or with tensor parallelism (4 ranks)."""
    settings: dict[str, Any] = {}
    if layout == TENSOR_PARALLEL:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        settings = {"mesh": mesh["dp"]}
    else:
        settings = LAYOUTS[layout]()
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, ignored_params={model.extra}, **settings)


class _Memory(NamedTuple):
    storage: StorageWeakRef
    address: int
    nbytes: int


class _Allocations(TorchDispatchMode):
    """The storages that operators have made while it is on, and the most bytes that were in them at a time.

    The profiler's trace misses what the threads of gloo free: they are the last to hold what was broadcast.
    """

    def __init__(self, counted: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        storages = [each.untyped_storage() for each in counted]
        self._live = {each._cdata: _Memory(StorageWeakRef(each), each.data_ptr(), each.nbytes()) for each in storages}
        self._known: dict[int, StorageWeakRef] = {}  # whose identities are not used again while they are held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):  # what was there before
            if type(each) is Tensor and each.untyped_storage()._cdata not in self._live:
                self._known.setdefault(each.untyped_storage()._cdata, StorageWeakRef(each.untyped_storage()))
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if type(each) is Tensor and not each.is_meta:
                storage = each.untyped_storage()
                if storage._cdata not in self._known and storage.nbytes() and not self._is_slice(storage.data_ptr()):
                    self._live[storage._cdata] = _Memory(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())
                del storage
        if self._sum() > self.peak:
            for _ in range(10):  # threads of gloo's may let go of it only now
                time.sleep(0.002 * (self._sum() > self.peak))
            self.peak = max(self.peak, self._sum())
        return result

    def _sum(self) -> int:
        self._live = {key: memory for key, memory in self._live.items() if not memory.storage.expired()}
        return sum(memory.nbytes for memory in self._live.values())

    def _is_slice(self, address: int) -> bool:
        """Of memory that is counted already."""
        self._sum()
        return any(memory.address <= address < memory.address + memory.nbytes for memory in self._live.values())


def peak_bytes(function: Callable[[], object], counted: Iterable[Tensor] = ()) -> int:
    """The most memory that tensors of this rank take at a time while it runs, beside those that were there before.

    ``counted``: of those, the ones that count as long as they live.
    """
    with _Allocations(counted) as allocations:
        function()
    return allocations.peak
