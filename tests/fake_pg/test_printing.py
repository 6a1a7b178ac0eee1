"""``print(model)`` says of each sharded module how it is sharded, and of others what it said before."""

from __future__ import annotations

import copy
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2 import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from tests.harness.fake import FakeWorlds
from tests.harness.shared.language_model import two_axes

BF16 = MixedPrecisionPolicy(torch.bfloat16)


class Scaled(nn.Module):
    """Says something of itself on two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def extra_repr(self) -> str:
        return "one\n  two"


def test_a_model_before_and_after_its_first_step(simulate: FakeWorlds) -> None:
    simulate(8)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Scaled(), nn.Linear(4, 4)), nn.ReLU())
    plain = repr(model)
    fully_shard(model[0], mp_policy=BF16)
    fully_shard(model[1][0])  # type: ignore[index]
    fully_shard(model[1])
    fully_shard(model)
    assert_expected_inline(
        repr(model),
        """\
FSDPSequential(
  [no parameters of its own]
  (0): FSDPLinear(in_features=4, out_features=4, bias=True, [Shard(0)/8, bf16])
  (1): FSDPSequential(
    [Shard(0)/8, fp32]
    (0): FSDPScaled(
      one
        two
      [Shard(0)/8, fp32]
    )
    (1): Linear(in_features=4, out_features=4, bias=True)
  )
  (2): ReLU()
)""",
    )
    model(torch.ones(2, 4)).sum().backward()
    assert_expected_inline(
        repr(model),
        """\
FSDPSequential(
  [root, no parameters of its own]
  (0): FSDPLinear(in_features=4, out_features=4, bias=True, [0, Shard(0)/8, bf16])
  (1): FSDPSequential(
    [1, Shard(0)/8, fp32]
    (0): FSDPScaled(
      one
        two
      [1.0, Shard(0)/8, fp32]
    )
    (1): Linear(in_features=4, out_features=4, bias=True)
  )
  (2): ReLU()
)""",
    )
    again = copy.deepcopy(model[0])
    assert repr(again) == "FSDPLinear(in_features=4, out_features=4, bias=True, [Shard(0)/8, bf16])"
    assert "[Shard(0)/8, bf16]" in repr(copy.deepcopy(model))
    fsdp2.unwrap(model)
    assert repr(model) == plain


def shown(module: nn.Module, **arguments: Any) -> str:
    text = repr(fully_shard(module, **arguments))
    return text[text.index("[") :].removesuffix(")")


def test_of_all_kinds(simulate: FakeWorlds) -> None:
    simulate(8)
    linear = lambda: nn.Linear(8, 16, bias=False)  # noqa: E731
    assert shown(linear(), mesh=two_axes()) == "[Shard(0)/4 x 2 replicas, fp32]"
    assert shown(linear(), mesh=two_axes(), strategy="replicate") == "[Replicate()/8, fp32]"
    assert shown(linear(), shard_placement_fn=lambda p: Shard(1)) == "[Shard(1)/8, fp32]"
    assert shown(linear(), shard_placement_fn=lambda p: fsdp2.Owned(3)) == "[RaggedShard/8, fp32]"
    assert shown(linear(), offload_policy=CPUOffloadPolicy()) == "[Shard(0)/8, fp32, offloaded]"
    norm = nn.LayerNorm(8)
    norm.weight.data = norm.weight.data.double()
    assert shown(norm) == "[Shard(0)/8, fp64+fp32]"


def test_under_tensor_parallelism_the_data_parallel_dim_is_shown(simulate: FakeWorlds) -> None:
    simulate(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(nn.Linear(8, 16), mesh["tp"], ColwiseParallel())
    assert shown(module, mesh=mesh["dp"]) == "[StridedShard(0, 2)/4, fp32]"
    named = torch.distributed.tensor.distribute_module(nn.Linear(8, 16), mesh)
    assert shown(named, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp")) == "[Shard(0)/4, fp32]"
