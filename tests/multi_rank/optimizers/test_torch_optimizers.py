"""Which optimizers of `torch.optim` take sharded parameters, and which `fsdp2.optim.local` serves: as the docs say."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import FSDPNotImplementedError
from tests.harness import (
    Reference,
    Tolerance,
    assert_same,
    assert_trains_like,
    full_parameters,
    multi_rank,
    tolerance_for,
)
from tests.harness.shared.optimizers import FUSED, Parameters, loss_of, through_dtensor
from tests.harness.shared.training import CASE, shard, trainable

DOCS = Path(__file__).parents[3] / "docs" / "how-to" / "local-optimizers.md"


@dataclass(frozen=True)
class Kind:
    """A class of `torch.optim` in one of its implementations.

    Attributes:
        plain: whether it takes sharded parameters as they are.
        local: whether `fsdp2.optim.local` takes it.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    plain: bool = True
    local: bool = True

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.options.items() if value is True)])

    def __call__(self, parameters: Parameters) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.name)(parameters, lr=1e-2, **self.options)  # type: ignore[no-any-return]

    def locally(self, parameters: Parameters) -> torch.optim.Optimizer:
        """On local shards."""
        return fsdp2.optim.local(getattr(torch.optim, self.name), parameters, lr=1e-2, **self.options)


LOOP, FOREACH, FUSED_KERNEL = {"foreach": False}, {"foreach": True}, {"fused": True}
# Those that `optimizers.EVERY_KIND` has not.
BOTH = [Kind(name, options) for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam") for options in (LOOP, FOREACH)]
BOTH += [Kind("Adam", FUSED_KERNEL), Kind("Adagrad", FOREACH), Kind("SGD", FOREACH), Kind("Rprop", LOOP)]
LOCAL_ONLY = [
    Kind("Adagrad", FUSED_KERNEL, plain=False),
    Kind("Rprop", FOREACH, plain=False),
    Kind("SGD", FUSED_KERNEL, plain=False),
]
NEITHER = [
    Kind("Adafactor", LOOP, plain=False, local=False),
    Kind("Adafactor", FOREACH, plain=False, local=False),
    Kind("LBFGS", plain=False, local=False),
]


def closure_of(model: nn.Module) -> Any:
    """What evaluates the loss anew, as `LBFGS` wants it."""

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(CASE, model)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    return closure


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("kind", [*BOTH, *LOCAL_ONLY], ids=str)
@pytest.mark.parametrize("locally", [False, True])
def test_those_that_take_sharded_parameters(locally: bool, kind: Kind) -> None:
    """As they are, and as `fsdp2.optim.local` makes them."""
    model = shard()
    assert_trains_like(
        Reference(CASE, world_size=2, make_optimizer=kind),
        model,
        kind.locally(trainable(model)) if locally else kind(trainable(model)),
        steps=3,
        tolerance=FUSED if "fused" in kind.options else tolerance_for(2),
    )


@multi_rank(2)
@pytest.mark.parametrize("kind", [*LOCAL_ONLY, *NEITHER], ids=str)
def test_those_whose_operations_dtensor_lacks(kind: Kind) -> None:
    """Their first step raises, on every rank, and no parameter is lost."""
    model = shard()
    optimizer = kind(trainable(model))
    loss_of(CASE, model).backward()
    with through_dtensor(), pytest.raises((NotImplementedError, RuntimeError), match=r"aten|unevenly sharded"):
        optimizer.step(closure_of(model))


@pytest.mark.full
@multi_rank(2)
def test_muon_gathers_matrices() -> None:
    """Rows are uneven. Of a matrix of one row DTensor makes a whole update, and refuses to add it to a shard."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 5, bias=False))
    model = fsdp2.fully_shard(copy.deepcopy(whole))
    inputs = torch.randn(8, 6)  # of full rank: directions without gradient would be made of rounding
    optimizers = [torch.optim.Muon(each.parameters(), lr=1e-2) for each in (whole, model)]
    for _ in range(3):
        whole(inputs).square().mean().backward()
        model(inputs.chunk(2)[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    rounding = Tolerance(rtol=0, atol=3e-3, reason="matrices are orthogonalized in bfloat16, in partial sums")
    assert_same("parameters", full_parameters(model), dict(whole.named_parameters()), tolerance=rounding)


@multi_rank(2)
def test_sparse_gradients_are_refused() -> None:
    model: Any = fsdp2.fully_shard(nn.Embedding(6, 4, sparse=True))
    with pytest.raises((fsdp2.FSDPError, RuntimeError), match="sparse"):
        model(torch.arange(6)).sum().backward()


@pytest.mark.parametrize("kind", [*NEITHER, Kind("Muon", local=False), Kind("SparseAdam", local=False)], ids=str)
def test_those_that_local_refuses(kind: Kind) -> None:
    with pytest.raises(FSDPNotImplementedError, match=f"{kind.name} .* so it cannot step on local shards"):
        kind.locally([nn.Parameter(torch.ones(2, 2))])


def test_the_docs_list_every_one() -> None:
    text = DOCS.read_text()
    table = text[text.index("| of `torch.optim` |") :].split("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])))
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert listed - {"foreach", "fused"} == classes
