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


@multi_rank(2, full=[4])  # 10 s; meshes run on four
@pytest.mark.parametrize("reshard", [None, True, False])
def test_the_whole_model_is_one_graph(reshard: bool | None) -> None:
    with compiling() as graphs:
        assert_trains_alike(
            graphs, build, lambda model: shard(model, reshard_after_forward=reshard), one_backward(batch)
        )
        again = {None: 3, True: 4, False: 0}[reshard]
        assert graphs.collectives() == [(4, 0), (again, 4)]


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
def test_a_whole_graph_in_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, mp_policy=policy), one_backward(batch))
        assert graphs.collectives() == [(4, 0), (3, 4)]


@pytest.mark.full  # 11 s; eager replicas, and graphs without, run each time
@multi_rank(4)
def test_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, mesh=mesh), one_backward(batch))
        assert graphs.collectives() == [(4, 0), (3, 4)]
        assert "all_reduce" not in graphs.backward[0], "what ends a reduction sums over replicas too"


@multi_rank(2)
@pytest.mark.parametrize("compile", [whole, by_blocks])
def test_by_torchs_own_collectives(compile: Any) -> None:
    """Where the eager runtime has them too: graphs have functional collectives, which compilers know."""
    os.environ[VARIABLE] = NATIVE
    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard, one_backward(batch), compile=compile)
        assert "begin_gather" not in graphs.forward[0]
        assert graphs.forward[0]["all_gather_into_tensor"] == (4 if compile is whole else 1)


@pytest.mark.full  # 11 s
@multi_rank(4)
def test_over_replicas_by_torchs_own_collectives() -> None:
    os.environ[VARIABLE] = NATIVE
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with compiling() as graphs:
        assert_trains_alike(graphs, build, lambda model: shard(model, mesh=mesh), one_backward(batch))
        assert graphs.collectives() == [(4, 0), (3, 4)]
        assert graphs.backward[0]["all_reduce"] == 4
