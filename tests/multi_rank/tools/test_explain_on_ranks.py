"""`fsdp2.explain` on real ranks: nothing is communicated, ranks say the same, gloo sends as many bytes as foretold."""

from __future__ import annotations

import collections
import json

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.tools.facts import facts_of
from tests.harness import multi_rank
from tests.harness.counting import Traffic
from tests.harness.shared.language_model import LM, sharded, step


@multi_rank(4)
@pytest.mark.parametrize("axes", [{"shard": 4}, {"replicate": 2, "shard": 2}, {"replicate": 4}], ids=str)
def test_gloo(axes: dict[str, int], world_size: int) -> None:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = sharded(LM(words=51), mesh=mesh, strategy="zero3" if "shard" in axes else "replicate")
    if dist.get_rank() == 2:  # alone: nothing is communicated
        fsdp2.explain(model)
    step(model)
    facts = facts_of(model, ranks_per_node=1)
    expected: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for each in facts.exchanges:  # of several members those who look are shown one exchange
        expected[each.kind, 0 if each.kind == "all-reduce" else len(each.ranks), each.part_bytes] += each.times
    with Traffic() as traffic:
        step(model)
    assert traffic.counts == expected
    assert {each.way for each in facts.exchanges} == {"pairs"} and facts.groups[0].backend == "gloo"
    assert all(each.inside_bytes == 0 for each in facts.exchanges)
    # Of an all-reduce over 4 ranks the parts differ by an element where they are not even.
    slack = 4 * 4 * len(facts.groups) if axes == {"replicate": 4} else 0
    assert abs(traffic.sent_bytes - sum(each.between_bytes for each in facts.exchanges)) <= slack
    of_ranks: list[list[tuple[str, int, int]]] = [[]] * world_size
    dist.all_gather_object(of_ranks, [(each.kind, each.times, each.between_bytes) for each in facts.exchanges])
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    read = json.loads(fsdp2.explain(model).to_json())
    assert read["rank"] == dist.get_rank() and len(read["groups"]) == 4
