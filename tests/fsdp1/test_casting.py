"""Inputs are cast in whatever holds them, as torch's FSDP1 does."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fsdp2.compat.fsdp1 import FullyShardedDataParallel, MixedPrecision
from fsdp2.compat.fsdp1.casting import cast_inputs, compute_in_own_dtype
from tests.harness import FakeWorlds

HALF = torch.bfloat16


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As transformers' ModelOutput: what is set under a key is an attribute too, and `update` is refused."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("cannot use update")

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def copy(self) -> Output:
        made = type(self)()
        for key, value in self.items():
            made[key] = value
        return made


@dataclasses.dataclass
class Fields(Output):
    """As the classes that are derived from ModelOutput: dataclasses, and dicts of those fields that are there."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for name in ("logits", "loss"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str = "batch"
    rows: list[torch.Tensor] = dataclasses.field(default_factory=list)
    made: int = dataclasses.field(default=0, init=False)


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_what_holds_tensors_is_copied_with_the_tensors_cast() -> None:
    x, index = torch.ones(2), torch.ones(2, dtype=torch.long)
    output: Any = Output()
    output["logits"] = x
    found = cast_inputs(output, HALF)
    assert type(found) is Output and found["logits"].dtype is found.logits.dtype is HALF and output.logits is x
    fields = Fields(logits=x)
    found = cast_inputs(fields, HALF)
    assert type(found) is Fields and found["logits"].dtype is found.logits.dtype is HALF
    assert found.loss is None and list(found) == ["logits"] and fields.logits is fields["logits"] is x
    batch = Batch(x, rows=[x, index])
    found = cast_inputs((batch, {x, index}, Pair(x, 3), frozenset([x])), HALF)
    assert type(found[0]) is Batch and found[0].x.dtype is HALF and found[0].name == "batch"
    assert [each.dtype for each in found[0].rows] == [HALF, torch.long] and batch.x is x and batch.rows[0] is x
    assert type(found[1]) is set and {each.dtype for each in found[1]} == {HALF, torch.long}
    assert found[2].first.dtype is HALF and found[2].second == 3
    assert type(found[3]) is frozenset and {each.dtype for each in found[3]} == {HALF}


def test_what_holds_nothing_to_cast_stays_itself() -> None:
    x = torch.ones(2, dtype=HALF)
    for value in (Batch(x, rows=[x]), {x}, Fields(logits=x), [x], {"x": x}, Pair(x, 1), Batch, frozenset([x]), None):
        assert cast_inputs(value, HALF) is value


class Reads(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch: Batch) -> Batch:
        return dataclasses.replace(batch, x=self.linear(batch.x))


@pytest.mark.parametrize("own", [False, True])
def test_a_unit_that_takes_a_dataclass(own: bool, simulate: FakeWorlds) -> None:
    """Also with a module that computes in its own dtype: it returns what came in."""
    simulate(2)
    module = Reads()
    if own:
        compute_in_own_dtype([module])
        assert module(Batch(torch.ones(3, 2, dtype=HALF))).x.dtype is HALF
        return
    model = FullyShardedDataParallel(module, mixed_precision=MixedPrecision(param_dtype=HALF))
    assert model(Batch(torch.ones(3, 2))).x.dtype is HALF
