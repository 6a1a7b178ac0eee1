"""Compiled models beside the unsharded reference: what the twins of the other files cannot show, being sharded too."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from fsdp2.core.transport import NATIVE, VARIABLE
from tests.compiled.helpers.models import multi_rank, whole
from tests.compiled.helpers.twins import Graphs, compiling
from tests.harness import MODEL_CASES, ModelCase, Reference, tolerance_for
from tests.harness.compare import SUM_ORDER
from tests.harness.models import TIED, UNEVEN_MLP
from tests.harness.training import assert_trains_like

QUICK = {UNEVEN_MLP}


def compiled_like(
    reference: Reference,
    graphs: Graphs,
    tolerance: Any,
    *,
    blocks: bool = False,
) -> None:
    """Train a compiled model of the reference's case."""
    case = reference.case
    model = case.build()
    units = case.units(model)
    for unit in units:
        fully_shard(unit)
    if blocks:
        for unit in units[:-1]:
            unit.compile(backend=graphs.backend(), fullgraph=True)
        called = model
    else:
        called = whole(model, graphs.backend())
    train_like(reference, called, tolerance)


def train_like(reference: Reference, called: Any, tolerance: Any) -> None:
    params = [param for param in called.parameters() if param.requires_grad]
    optimizer = fsdp2.optim.local(torch.optim.AdamW, params, lr=1e-2, eps=1e-3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        assert_trains_like(reference, called, optimizer, steps=5, tolerance=tolerance, clip=fsdp2.clip_grad_norm_)


# Quick: uneven rows. Full: 10 s each, transformers 20 s.
@multi_rank(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.full]) for case in MODEL_CASES], ids=str
)
def test_whole_models(case: ModelCase, world_size: int) -> None:
    with compiling() as graphs:
        compiled_like(Reference(case, world_size=world_size), graphs, tolerance_for(world_size))
        assert len(graphs.forward) == len(graphs.backward) == 1


@multi_rank(2, 4)
@pytest.mark.full  # 12 s each
@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("case", [UNEVEN_MLP, TIED], ids=str)
def test_accumulated_and_clipped(case: ModelCase, blocks: bool, world_size: int) -> None:
    reference = Reference(case, world_size=world_size, microbatches=3, max_norm=0.1)
    with compiling() as graphs:
        compiled_like(reference, graphs, SUM_ORDER, blocks=blocks)


class Alternating:
    """A model, every second call of which is eager."""

    def __init__(self, model: nn.Module, called: Any) -> None:
        self.model = model
        self.next = itertools.cycle([called, model])

    def __call__(self, *args: Any) -> Any:
        return next(self.next)(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@multi_rank(2, full=[4])
@pytest.mark.parametrize("way", ["", NATIVE])
def test_beside_eager_calls(way: str, world_size: int) -> None:
    """Every second one: peer to peer, and by torch's own collectives."""
    os.environ[VARIABLE] = way
    reference = Reference(UNEVEN_MLP, world_size=world_size, microbatches=3)
    with compiling() as graphs:
        model = reference.case.build()
        for unit in reference.case.units(model):
            fully_shard(unit)
        train_like(reference, Alternating(model, whole(model, graphs.backend())), tolerance_for(world_size))
        assert len(graphs.forward) == len(graphs.backward) == 1
