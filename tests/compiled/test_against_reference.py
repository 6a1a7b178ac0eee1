"""Compiled models beside the unsharded reference: what the twins of the other files cannot show, being sharded too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import fully_shard
from tests.compiled.models import multi_rank, whole
from tests.compiled.twins import Graphs, compiling
from tests.harness import MODEL_CASES, ModelCase, Reference, tolerance_for
from tests.harness.compare import SUM_ORDER
from tests.harness.models import MLP, PARTLY_USED, TIED, TRANSFORMER, UNEVEN_MLP
from tests.harness.training import assert_trains_like

QUICK = {UNEVEN_MLP}


def compiled_like(
    reference: Reference, graphs: Graphs, tolerance: Any, *, blocks: bool = False, **arguments: Any
) -> None:
    case = reference.case
    model = case.build()
    units = case.units(model)
    for unit in units:
        fully_shard(unit, **arguments)
    if blocks:
        for unit in units[:-1]:
            unit.compile(backend=graphs.backend(), fullgraph=True)
        called = model
    else:
        called = whole(model, graphs.backend())
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = fsdp2.optim.local(torch.optim.AdamW, params, lr=1e-2, eps=1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        assert_trains_like(reference, called, optimizer, steps=3, tolerance=tolerance)


# Quick: uneven rows. Full: 10 s each, transformers 20 s.
@multi_rank(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.full]) for case in MODEL_CASES], ids=str
)
def test_whole_models(case: ModelCase, world_size: int) -> None:
    with compiling() as graphs:
        compiled_like(Reference(case, world_size=world_size), graphs, tolerance_for(world_size))
        assert len(graphs.forward) == len(graphs.backward) == 1


@multi_rank(2)
@pytest.mark.full  # 15 s each
@pytest.mark.parametrize("case", [TRANSFORMER, PARTLY_USED, TIED], ids=str)
def test_blocks(case: ModelCase, world_size: int) -> None:
    with compiling() as graphs:
        compiled_like(Reference(case, world_size=world_size), graphs, tolerance_for(world_size), blocks=True)


@multi_rank(4)
@pytest.mark.full  # 15 s each
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (4, 1)])
def test_over_replicas(sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    with compiling() as graphs:
        compiled_like(Reference(UNEVEN_MLP, world_size=4), graphs, SUM_ORDER, mesh=mesh)


@multi_rank(2)
@pytest.mark.full  # 12 s
def test_accumulated(world_size: int) -> None:
    with compiling() as graphs:
        compiled_like(Reference(MLP, world_size=world_size, microbatches=3), graphs, SUM_ORDER)


@multi_rank(2)
@pytest.mark.full  # 12 s each
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "replicate"])
def test_strategies(strategy: Any, world_size: int) -> None:
    with compiling() as graphs:
        compiled_like(Reference(UNEVEN_MLP, world_size=world_size), graphs, SUM_ORDER, strategy=strategy)
