"""`torch.compile(model, fullgraph=True)` of sharded models trains like eager, in one graph, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.compiled.twins import assert_trains_alike, compiling, one_backward
from tests.harness import multi_rank

WIDTH = 8


class Block(nn.Module):
    """Uneven rows (11), a rank without rows on 4 ranks (2), a frozen, an unused and a 0-D parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)
        self.few = nn.Parameter(torch.randn(2, WIDTH))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x + self.frozen))
        return x + self.scale * self.down(hidden) + (x @ self.few.T) @ self.few


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def shard(model: nn.Module, **arguments: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)


@multi_rank(2, 4)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_the_whole_model_is_one_graph(reshard: bool | None) -> None:
    with compiling() as graphs:
        assert_trains_alike(
            graphs, build, lambda model: shard(model, reshard_after_forward=reshard), one_backward(batch)
        )
        again = {None: 3, True: 4, False: 0}[reshard]
        assert graphs.collectives() == [(4, 0), (again, 4)]


def by_method(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend, fullgraph=True)
    return model


def by_blocks(model: nn.Module, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


@multi_rank(2)
def test_compiled_by_its_method() -> None:
    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard, one_backward(batch), compile=by_method)
        assert graphs.collectives() == [(4, 0), (3, 4)]


@multi_rank(2)
@pytest.mark.parametrize("before", [True, False])
def test_each_block_is_one_graph(before: bool) -> None:
    with compiling() as graphs:

        def shard_compiled(model: nn.Module) -> None:
            if before and not compiled:
                compiled.append(by_blocks(model, graphs.backend()))
            shard(model)

        compiled: list[nn.Module] = []
        assert_trains_alike(
            graphs,
            build,
            shard_compiled,
            one_backward(batch),
            compile=(lambda model, _: model) if before else by_blocks,
        )
        # The first block's input needs no gradient, which makes a graph of its own.
        assert graphs.collectives() == [(1, 0), (1, 0), (1, 1), (1, 1)]


@multi_rank(2)
def test_in_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, mp_policy=policy), one_backward(batch))
        assert graphs.collectives() == [(4, 0), (3, 4)]


@multi_rank(4)
def test_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, mesh=mesh), one_backward(batch))
        assert graphs.collectives() == [(4, 0), (3, 4)]
        assert graphs.backward[0]["all_reduce"] == 4
