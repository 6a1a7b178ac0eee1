"""`accumulate`: gradients of several microbatches are those of one batch, whatever happens between."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import FSDPRuntimeError, accumulate, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of

MICROBATCHES = 3


class Branches(nn.Module):
    """A part that only the first microbatch uses, and one that only the last does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.first, self.final = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor, micro: int) -> Tensor:
        """Through the parts that ``micro`` uses."""
        x = self.always(x).relu()
        found = x.sum()
        if micro == 0:
            found = found + self.first(x).square().sum()
        if micro == MICROBATCHES - 1:
            found = found + self.final(x).square().sum()
        return found


def batch(rank: int, micro: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(100 * rank + micro))


def sharded(layout: str) -> Branches:
    arguments: dict[str, Any] = {}
    if layout == "hybrid":
        arguments["mesh"] = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        )
    model = Branches()
    for part in (model.always, model.first, model.final):
        fully_shard(part, **arguments)
    fully_shard(model, **arguments)
    return model


def expected(world_size: int) -> dict[str, Tensor | None]:
    plain = Branches()
    for rank in range(world_size):
        for micro in range(MICROBATCHES):
            (plain(batch(rank, micro), micro) / world_size).backward()
    return {name: each.grad for name, each in plain.named_parameters()}


@pytest.mark.parametrize("kept", ["unsharded", "sharded"])
@pytest.mark.parametrize("layout", ["1D", "hybrid"])
@multi_rank(2, 4)
def test_the_last_microbatch_has_the_sum(layout: str, kept: Any, world_size: int) -> None:
    model, rank = sharded(layout), dist.get_rank()
    for _ in range(2):
        for micro in range(MICROBATCHES):
            last = micro == MICROBATCHES - 1
            with accumulate(model, last=last, kept=kept), CommDebugMode() as seen, warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of the mode's own hooks
                model(batch(rank, micro), micro).backward()
            counts = {str(op): n for op, n in seen.get_comm_counts().items()}
            if not last and kept == "unsharded":
                assert not any("reduce" in op for op in counts), counts
            if not last:
                assert not any("allreduce" in op for op in counts), counts
        assert_sharded_same("gradients", gradients_of(model), expected(world_size), tolerance=SUM_ORDER)
        model.zero_grad()


@pytest.mark.full
@multi_rank(2)
def test_blocks_nest_and_end_in_an_exception(world_size: int) -> None:
    model, rank = sharded("1D"), dist.get_rank()
    with pytest.raises(OSError, match="no more data"), accumulate(model, last=False):
        raise OSError("no more data")
    with accumulate(model, last=False), accumulate(model.always, last=True):
        model(batch(rank, 0), 0).backward()
    assert all(each.grad is None for each in model.parameters()), "the outer block is not the last"
    with accumulate(nn.ModuleList([model]), last=False):
        model(batch(rank, 1), 1).backward()
    model(batch(rank, 2), 2).backward()
    assert_sharded_same("gradients", gradients_of(model), expected(world_size), tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(2)
def test_after_setters_of_the_users(world_size: int) -> None:
    """Where nothing is to be reduced, no block reduces; and the setting is the user's again after it."""
    model, rank = sharded("1D"), dist.get_rank()
    model.set_requires_gradient_sync(False)
    with accumulate(model, last=True):
        model(batch(rank, 0), 0).backward()
    model(batch(rank, 1), 1).backward()
    assert all(each.grad is None for each in model.parameters())
    model.set_requires_gradient_sync(True)
    model(batch(rank, 2), 2).backward()
    assert_sharded_same("gradients", gradients_of(model), expected(world_size), tolerance=SUM_ORDER)


def test_a_module_without_sharded_ones() -> None:
    with pytest.raises(FSDPRuntimeError, match="contains no sharded module"):
        accumulate(nn.Linear(2, 2), last=True)
