"""`torch.compile(model, fullgraph=True)` of sharded models trains like eager, in one graph, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy
from fsdp2.core.transport import NATIVE, VARIABLE
from tests.compiled.helpers.models import batch, build, by_blocks, by_method, multi_rank, shard, whole
from tests.compiled.helpers.twins import assert_trains_alike, compiling, one_backward

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@multi_rank(2, 4)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize(
    ("compile", "options", "again"),
    [
        (whole, {}, 3),
        (by_method, {}, 3),
        (whole, {"reshard_after_forward": True}, 4),
        (whole, {"reshard_after_forward": False}, 0),
        (whole, {"mp_policy": HALF}, 3),
    ],
)
def test_the_whole_model_is_one_graph(compile: Any, options: dict[str, Any], again: int) -> None:
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, **options), one_backward(batch), compile=compile)
        assert graphs.collectives() == [(4, 0), (again, 4)]


@multi_rank(2)
@pytest.mark.full
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


@multi_rank(4)
@pytest.mark.full  # 11 s each; eager replicas, and graphs without, run each time
@pytest.mark.parametrize("way", ["", NATIVE])
def test_over_replicas(way: str) -> None:
    os.environ[VARIABLE] = way
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, mesh=mesh), one_backward(batch))
        assert graphs.collectives() == [(4, 0), (3, 4)]
        # What ends a reduction of ours sums over replicas too.
        assert graphs.backward[0].get("all_reduce", 0) == (4 if way == NATIVE else 0)


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("compile", [whole, by_blocks])
def test_by_torchs_own_collectives(compile: Any) -> None:
    """Where the eager runtime has them too: graphs have functional collectives, which compilers know."""
    os.environ[VARIABLE] = NATIVE
    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard, one_backward(batch), compile=compile)
        assert "begin_gather" not in graphs.forward[0]
        assert graphs.forward[0]["all_gather_into_tensor"] == (4 if compile is whole else 1)
