"""`torch.compile` of single blocks, as torchtitan and Accelerate do: the hooks stay outside of the graphs."""

from __future__ import annotations

import warnings

import pytest

from fsdp2 import fully_shard
from tests.harness import Reference, adamw, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import TRANSFORMER
from tests.harness.training import assert_trains_like


@multi_rank(2)
@pytest.mark.parametrize("order", ["compiled, then sharded", "sharded, then compiled"])
def test_blocks_compiled_as_full_graphs_train_like_the_reference(order: str, world_size: int) -> None:
    # Blocks of the user's own class. (Of torch.nn's, 2.15 traces the hooks too and refuses, torch's own as well.)
    model = TRANSFORMER.build()
    for unit in TRANSFORMER.units(model):
        if unit is model:
            fully_shard(unit)
        elif order == "compiled, then sharded":
            unit.compile(backend="aot_eager", fullgraph=True)
            fully_shard(unit)
        else:
            fully_shard(unit)
            unit.compile(backend="aot_eager", fullgraph=True)
    reference = Reference(TRANSFORMER, world_size=world_size)
    optimizer = adamw(list(model.parameters()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
        assert_trains_like(reference, model, optimizer, steps=2, tolerance=SUM_ORDER)
