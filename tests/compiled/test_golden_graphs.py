"""The collectives of graphs, in their order and with their shapes, on simulated worlds of 8 and 64 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.compiled.helpers.twins import compiling
from tests.harness import FakeWorlds


class Twins(nn.Module):
    """Two layers that are sharded, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 10)
        self.head = nn.Linear(10, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def collectives_of(graphs: Any) -> str:
    """One line for each: which, and what it returns; forward first."""
    return "\n".join(line for title, found in graphs.issued for line in (f"{title}:", *(f"  {each}" for each in found)))


def traced(model: nn.Module, shard: Any) -> str:
    shard(model)
    with compiling() as graphs:
        called = torch.compile(model, backend=graphs.backend(), fullgraph=True)
        called(torch.randn(2, 16)).sum().backward()
        return collectives_of(graphs)


def shard_whole(model: nn.Module) -> None:
    fully_shard(model)


def shard_parts(model: nn.Module, **arguments: Any) -> None:
    fully_shard(model.first, **arguments)
    fully_shard(model.second, **arguments)
    fully_shard(model, **arguments)


def test_one_layer_on_8_ranks(simulate: FakeWorlds) -> None:
    simulate(8)
    assert_expected_inline(
        traced(nn.Sequential(nn.Linear(16, 16)), shard_whole),
        """\
forward:
  all_gather_into_tensor -> float32[288]
backward:
  reduce_scatter_tensor avg -> float32[36]""",
    )


def test_one_layer_on_64_ranks(simulate: FakeWorlds) -> None:
    """16 rows: a rank has one or none."""
    simulate(64, rank=63)
    assert_expected_inline(
        traced(nn.Sequential(nn.Linear(16, 16)), shard_whole),
        """\
forward:
  all_gather_into_tensor -> float32[1280]
backward:
  reduce_scatter_tensor avg -> float32[20]""",
    )


@pytest.mark.full  # 2 s each
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_parts_on_8_ranks(simulate: FakeWorlds, rank: int) -> None:
    """Backward gathers the parts again, last first, and not the root; each is reduced when its gradients are there.

    Ranks without rows issue the same collectives, else others would wait for them forever.
    """
    simulate(8, rank=rank)
    assert_expected_inline(
        traced(Twins(), shard_parts),
        """\
forward:
  all_gather_into_tensor -> float32[96]
  all_gather_into_tensor -> float32[288]
  all_gather_into_tensor -> float32[288]
backward:
  all_gather_into_tensor -> float32[288]
  reduce_scatter_tensor avg -> float32[36]
  reduce_scatter_tensor avg -> float32[36]
  reduce_scatter_tensor avg -> float32[12]""",
    )


def test_parts_over_replicas_in_mixed_precision(simulate: FakeWorlds) -> None:
    simulate(64, rank=9)
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = traced(Twins(), lambda model: shard_parts(model, mesh=mesh, mp_policy=policy))
    assert_expected_inline(
        found,
        """\
forward:
  all_gather_into_tensor -> bfloat16[128]
  all_gather_into_tensor -> bfloat16[320]
  all_gather_into_tensor -> bfloat16[320]
backward:
  all_gather_into_tensor -> bfloat16[320]
  reduce_scatter_tensor avg -> float32[36]
  all_reduce avg -> float32[36]
  reduce_scatter_tensor avg -> float32[36]
  all_reduce avg -> float32[36]
  reduce_scatter_tensor avg -> float32[12]
  all_reduce avg -> float32[12]""",
    )
