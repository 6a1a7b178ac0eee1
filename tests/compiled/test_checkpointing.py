"""Activation checkpointing in graphs, inside and outside of sharded modules: numbers, and what is kept for backward.

Parameters here have sizes that no activation has, so that a saved one is seen by its size.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointError, checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.compiled.helpers.models import batch_of, loss_of, multi_rank, selective
from tests.compiled.helpers.twins import Graphs, assert_trains_alike, compiling
from tests.harness import FakeWorlds

ROWS, WIDTH, HIDDEN = 5, 16, 22
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x)))


class Inside(nn.Module):
    """Checkpoints its own layer."""

    def __init__(self, context: Any = None, parts: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(parts))
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.context is None:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context)
        return x


class Caller(nn.Module):
    """Checkpoints calls of its blocks, which are sharded."""

    def __init__(self, blocks: list[nn.Module], *, checkpoints: bool, inner: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3, bias=False)
        self.checkpoints = checkpoints
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        for start in range(0, len(self.blocks), self.inner):
            some = self.blocks[start : start + self.inner]
            if self.checkpoints:
                x = checkpoint(run_all, some, x, use_reentrant=False)
            else:
                x = run_all(some, x)
        return self.head(x)


def run_all(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def plain() -> nn.Module:
    return Caller([Layer() for _ in range(3)], checkpoints=False)


def inside() -> nn.Module:
    return Caller([Inside() for _ in range(3)], checkpoints=False)


def parts_inside() -> nn.Module:
    return Caller([Inside(parts=2) for _ in range(2)], checkpoints=False)


def selective_inside() -> nn.Module:
    return Caller([Inside(selective) for _ in range(3)], checkpoints=False)


def outside() -> nn.Module:
    return Caller([Layer() for _ in range(3)], checkpoints=True)


def several_outside() -> nn.Module:
    return Caller([Layer() for _ in range(4)], checkpoints=True, inner=2)


def nested() -> nn.Module:
    return Caller([Inside() for _ in range(2)], checkpoints=True)


def wrapped_inside() -> nn.Module:
    """`checkpoint_wrapper` below `fully_shard`, the order of torchtitan."""
    return Caller([checkpoint_wrapper(Layer()) for _ in range(3)], checkpoints=False)


MAKERS = [plain, inside, parts_inside, selective_inside, outside, several_outside, nested, wrapped_inside]


def shard(model: nn.Module, **arguments: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)


def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number * 100 + rank)
    loss = loss_of(model(torch.randn(ROWS, WIDTH, generator=generator)))
    loss.backward()
    return [loss.detach()]


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make()


def assert_nothing_whole_is_saved(graphs: Graphs, parts: int = 1) -> None:
    """Nothing that a forward graph hands on is as large as a parameter of a block, or the buffer that gathered it.

    ``parts``: into which tensor parallelism has cut it before.
    """
    limit = WIDTH * HIDDEN // parts
    assert limit > ROWS * HIDDEN, "no activation is as large"
    assert [numel for outputs in graphs.outputs for numel in outputs if numel >= limit] == []


# Quick: one row, the order that is common. Full: 6 s each.
@multi_rank(2)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[] if make is inside else [pytest.mark.full]) for make in MAKERS]
)
def test_trains_alike_and_saves_no_unsharded_parameter(make: Any) -> None:
    with compiling() as graphs:
        assert_trains_alike(graphs, lambda: seeded(make), lambda model: shard(model, reshard_after_forward=True), step)
        assert len(graphs.forward) == len(graphs.backward) == 1
        units = len(seeded(make).blocks) + 1
        assert graphs.collectives() == [(units, 0), (units, units)]
        assert_nothing_whole_is_saved(graphs)


@multi_rank(2)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("make", [plain, inside, outside, selective_inside, nested])
def test_without_resharding_the_unsharded_parameters_are_saved(make: Any) -> None:
    """But what is gathered inside of a checkpointed region is gathered again with all else that is made there."""
    with compiling() as graphs:
        assert_trains_alike(graphs, lambda: seeded(make), lambda model: shard(model, reshard_after_forward=False), step)
        units = len(seeded(make).blocks) + 1
        keeps_gathers = torch.__version__ < "2.12"  # also those inside of the region
        again = units - 1 if make in (outside, nested) and not keeps_gathers else 0
        assert graphs.collectives() == [(units, 0), (again, units)]
        if make is plain:
            whole = [numel for numel in graphs.outputs[0] if numel == WIDTH * HIDDEN]
            assert len(whole) == 2 * len(seeded(make).blocks) - 1  # the first one's input needs no gradient


@multi_rank(2)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("make", [inside, selective_inside, wrapped_inside])
def test_block_by_block(make: Any) -> None:
    def by_blocks(model: nn.Module, backend: Any) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    with compiling() as graphs:
        assert_trains_alike(
            graphs,
            lambda: seeded(make),
            lambda model: shard(model, reshard_after_forward=True),
            step,
            compile=by_blocks,
        )
        assert {gathers for gathers, _ in graphs.collectives()} == {1}
        assert_nothing_whole_is_saved(graphs)


PARALLEL = [plain, inside, outside, selective_inside]


@multi_rank(4)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", PARALLEL)
def test_over_replicas(make: Any, policy: MixedPrecisionPolicy) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with compiling() as graphs:
        assert_trains_alike(
            graphs,
            lambda: seeded(make),
            lambda model: shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True),
            step,
        )
        units = len(seeded(make).blocks) + 1
        assert graphs.collectives() == [(units, 0), (units, units)]
        assert_nothing_whole_is_saved(graphs)


@multi_rank(4)
@pytest.mark.full  # 10 s each: DTensor makes a trace several times as long
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("make", PARALLEL)
def test_beside_tensor_parallelism(make: Any, sizes: tuple[int, ...], policy: MixedPrecisionPolicy) -> None:
    """What must not be saved is what the data-parallel ranks gather: this rank's part of tensor parallelism."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["shard"] if sizes[0] == 1 else mesh["replicate", "shard"]

    def shard_parallel(model: nn.Module) -> None:
        for layer in [module for module in model.modules() if isinstance(module, Layer)]:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(model, mesh=data, mp_policy=policy, reshard_after_forward=True)

    def step_parallel(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        return step(model, number, rank // 2)

    with compiling() as graphs:
        assert_trains_alike(graphs, lambda: seeded(make), shard_parallel, step_parallel)
        units = len(seeded(make).blocks) + 1 if sizes[1] > 1 else 0
        assert graphs.collectives() == [(units, 0), (units, units)]
        if units:  # a single shard is the whole, and no gather makes it
            assert_nothing_whole_is_saved(graphs, parts=2)


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_compiled_below_a_checkpoint_outside_of_the_graph() -> None:
    """Blocks compiled alone, called by an eager model that checkpoints them: the graph runs again in backward."""

    def by_blocks(model: nn.Module, backend: Any) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    with compiling() as graphs:
        assert_trains_alike(graphs, lambda: seeded(outside), shard, step, compile=by_blocks)


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_dropout_in_a_checkpoint_is_drawn_once() -> None:
    class Dropped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    def make() -> nn.Module:
        return Caller([Dropped() for _ in range(2)], checkpoints=True)

    def drawn(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        torch.manual_seed(number)
        return [*step(model, number, rank), batch_of(0, 0)]

    with compiling() as graphs:
        assert_trains_alike(graphs, lambda: seeded(make), shard, drawn)


@pytest.mark.full  # 2 s each
@pytest.mark.parametrize("fullgraph", [True, False])
def test_composable_checkpointing_is_refused(simulate: FakeWorlds, fullgraph: bool) -> None:
    """Dynamo cannot trace it; with a graph break, backward finds that what was computed again differs. Never silent."""
    simulate(2)
    model = seeded(plain)
    for block in model.blocks:
        fully_shard(composable_checkpoint(block))
    fully_shard(model)
    with compiling() as graphs, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*outside of its graph.*")
        called = torch.compile(model, backend=graphs.backend(), fullgraph=fullgraph)
        with pytest.raises(Unsupported if fullgraph else CheckpointError):
            called(torch.ones(ROWS, WIDTH)).sum().backward()
