"""The class of a sharded module is what the program has made of it by now, and what that class cannot do is loud."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from tests.harness import multi_rank

X = torch.ones(1, 3)


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, self.weight, self.bias)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Inherits(nn.Linear):
    pass


class Bare(nn.Module):
    """Without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))


@contextmanager
def forward_of(kind: type) -> Iterator[None]:
    with mock.patch.object(kind, "forward", doubled):
        yield


@pytest.mark.parametrize("patched", [nn.Linear, Own, Inherits, Bare])
@multi_rank(2, 4)
def test_the_forward_that_a_class_has_by_now_runs(world_size: int, patched: type[nn.Module]) -> None:
    torch.manual_seed(0)
    kinds = {nn.Linear: (nn.Linear, Inherits, Own)}.get(patched, (patched,))
    for kind in kinds:
        model: Any = kind() if kind is Bare else kind(3, 2)  # type: ignore[call-arg, arg-type]
        expected = nn.functional.linear(X, model.weight, model.bias).detach()
        fully_shard(model)
        for _ in range(2):
            with forward_of(patched):
                output = model(X)
            assert torch.equal(output, 2 * expected)
            output.sum().backward()
            if kind is not Bare:
                assert torch.equal(model(X), expected)


class SaysItsOwnType(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super(type(self), self).forward(x)


class Counts(nn.Linear):
    calls = 0
    seen: list[int] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        type(self).seen.append(1)
        return super().forward(x)


@multi_rank(2)
def test_super_of_its_own_type_is_loud() -> None:
    """As under torch: the class of a sharded module derives from the module's own."""
    model = fully_shard(SaysItsOwnType(3, 2))
    with pytest.raises(RecursionError):
        model(X)


@multi_rank(2)
def test_counters_of_a_class_that_is_named_count() -> None:
    Counts.calls, plain = 0, Counts(3, 2)
    Counts.seen.clear()
    model = fully_shard(Counts(3, 2))
    for each in (model, plain, model):
        each(X)
    assert Counts.calls == model.calls == len(Counts.seen) == 3
