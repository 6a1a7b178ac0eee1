"""A placement that the package does not have is one class: nothing else in it is touched."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPValueError, fully_shard, unwrap
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.sharding import PartitionKey, RowPlacement, Wanted
from tests.harness import Reference, adamw, multi_rank
from tests.harness.models import TRANSFORMER
from tests.harness.training import assert_trains_like


@dataclass(frozen=True)
class OnLastOrInPairs(RowPlacement):
    """Vectors live on the last rank, matrices are dealt out in pairs of rows."""

    form = "OnLastOrInPairs()"
    owner: int | None = None
    rows: int = 1

    @property
    def partition_key(self) -> PartitionKey:
        return PartitionKey(0, self.rows, self.owner)

    def checked_for(self, parameter: nn.Parameter, fqn: str, mesh: DataParallelMesh) -> Wanted:
        if not parameter.dim():
            return None
        if parameter.dim() == 1:
            return OnLastOrInPairs(owner=mesh.shard_size - 1)
        return OnLastOrInPairs(rows=2)

    def refuse_cut(self, parameter: DTensor, where: str) -> None:
        raise FSDPValueError(f"{where} is cut by tensor parallelism")


@multi_rank(4)
@pytest.mark.parametrize("reshard_after_forward", [True, 2], ids=str)
def test_it_trains_saves_and_is_unwrapped(reshard_after_forward: bool | int, world_size: int) -> None:
    case = TRANSFORMER
    model = case.build()
    for unit in case.units(model):
        fully_shard(
            unit, reshard_after_forward=reshard_after_forward, shard_placement_fn=lambda parameter: OnLastOrInPairs()
        )
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=2)
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    assert vectors and all(
        each.to_local().numel() == (each.numel() if dist.get_rank() == world_size - 1 else 0) for each in vectors
    )
    saved = {name: each.full_tensor() for name, each in model.state_dict().items()}
    plain = unwrap(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, saved[name]), name


@multi_rank(2)
def test_messages_name_it() -> None:
    with pytest.raises(FSDPValueError, match=r"must return Shard\(i\), .*OnLastOrInPairs\(\), a ShardPlacementResult"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda parameter: 0)  # type: ignore[arg-type, return-value]
