"""Lists, dicts and objects that a module is passed: what it writes into them is there afterwards."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import Tolerance
from tests.multi_rank.training.helpers import assert_same_gradients, differentiate

WIDTH = 6
SUMS = Tolerance(rtol=1e-5, atol=1e-6, reason="the gradients of a tensor with several uses add up in another order")
HALF = Tolerance(rtol=0.1, atol=0.05, reason="bf16 beside fp32")


@dataclass
class Cache:
    """What is passed from block to block."""

    scale: Tensor
    keys: list[Tensor] = field(default_factory=list)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        y = torch.tanh(self.linear(x))
        skips.append(y)
        return y


class Up(Down):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return self.linear(x) + skips.pop()  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Skips go through a list, to which blocks append and of which others pop."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.down = nn.ModuleList(Down() for _ in range(2))
        self.up = nn.ModuleList(Up() for _ in range(2))

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        for block in self.down:
            x = checkpoint(block, x, skips, use_reentrant=False) if self.recompute else block(x, skips)
        for block in self.up:
            x = block(x, skips)
        return x.square().mean()


def batch(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_unet_trains_like_the_reference(recompute: bool) -> None:
    torch.manual_seed(0)
    model = UNet(recompute)
    plain = copy.deepcopy(model)
    for block in (*model.down, *model.up, model):
        fully_shard(block)

    def loss_of(each: nn.Module, rank: int) -> Tensor:
        skips: list[Tensor] = []
        loss: Tensor = each(batch(rank), skips)
        assert skips == [], "blocks popped what blocks had appended"
        return loss

    differentiate(model, plain, loss_of)
    assert_same_gradients(model, plain, tolerance=SUMS)


class Pair(NamedTuple):
    x: Tensor
    items: list[Tensor]


class Writes(nn.Module):
    """Adds to whatever it is passed, replaces a part of it, and may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor, passed: Any) -> Tensor:
        y = self.linear(x)
        if isinstance(passed, list):
            passed.append(y)
        elif isinstance(passed, (dict, UserDict)):
            passed["written"] = y
        elif isinstance(passed, Pair):
            passed.items.append(y)
        else:
            passed.keys.append(y)
        if self.fails:
            raise ValueError("on purpose")
        return y


def contents(passed: Any) -> list[Tensor]:
    if isinstance(passed, (dict, UserDict)):
        return list(passed.values())
    if isinstance(passed, Cache):
        return [passed.scale, *passed.keys]
    return [passed.x, *passed.items] if isinstance(passed, Pair) else list(passed)


PASSED: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x],
    "dict": lambda x: {"x": x},
    "user dict": lambda x: UserDict(x=x),
    "dataclass": lambda x: Cache(x),
    "list in a tuple": lambda x: Pair(x, []),
}


@multi_rank(2)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("kind", PASSED)
def test_the_callers_own_container_has_what_was_written_and_what_it_had(kind: str, fails: bool) -> None:
    """Also where tensors in it were cast, and require gradients: the caller finds its own tensors again."""
    model = fully_shard(Writes(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    mine = torch.ones(2, WIDTH, requires_grad=True) * 2
    passed = PASSED[kind](mine)
    model.fails = fails
    try:
        model(mine, passed)
    except ValueError:
        assert fails
    before, written = contents(passed)
    assert before is mine, "fp32, as the caller put it there"
    assert written.dtype is torch.bfloat16 and written.requires_grad


class OwnNames(nn.Linear):
    """Names of its own that helpers of fsdp2 have had."""

    def _configure(self, x: Tensor) -> Tensor:
        return x * 2

    def _groups(self, x: Tensor) -> Tensor:
        return x + 1

    def _states(self) -> str:
        return "mine"

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        assert c is x and x.note == "kept" and self._states() == "mine"  # type: ignore[attr-defined]
        return super().forward(self._groups(self._configure(x)))


@pytest.mark.parametrize("half", [False, True])
@multi_rank(2)
def test_one_tensor_passed_twice_is_one_inside_and_methods_of_the_module_are_its_own(half: bool) -> None:
    torch.manual_seed(0)
    plain = OwnNames(WIDTH, WIDTH)
    policy = MixedPrecisionPolicy(torch.bfloat16) if half else MixedPrecisionPolicy()
    model = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    model.set_requires_gradient_sync(True)
    for module in (plain, model):
        x = batch(0).requires_grad_()
        x.note = "kept"  # type: ignore[attr-defined]
        module(x, x).square().mean().backward()
    assert_same_gradients(model, plain, tolerance=HALF if half else SUMS)


class ReadsNote(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.note  # type: ignore[attr-defined, no-any-return]


@multi_rank(2)
def test_attributes_of_the_only_argument_are_there_inside() -> None:
    torch.manual_seed(0)
    plain = ReadsNote(WIDTH, WIDTH)
    model = fully_shard(copy.deepcopy(plain))
    for module in (plain, model):
        x = batch(0).requires_grad_() * 1
        x.note = 3  # type: ignore[attr-defined]
        module(x).square().mean().backward()
    assert_same_gradients(model, plain, tolerance=SUMS)


@multi_rank(2)
def test_a_gradient_from_before_is_named() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model(batch(0)).sum().backward()
    with pytest.warns(UserWarning, match=r"'weight' of Linear has a gradient.*zero_grad\(\)"):
        fully_shard(model)
    assert model.weight.grad is None


class Attention(nn.Linear):
    """Writes its keys into a cache that is passed."""

    def forward(self, x: Tensor, cache: Tensor, *, scratch: Tensor) -> Tensor:
        keys = super().forward(x)
        cache[:, 1] = keys.detach().sum(1)
        scratch.add_(1)
        return keys


@multi_rank(2)
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_what_a_module_writes_into_a_cast_input_reaches_the_callers(guard: Any) -> None:
    torch.manual_seed(0)
    plain = Attention(WIDTH, WIDTH)
    model = fully_shard(copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with guard():
        caches = []
        for module in (plain, model):
            x, cache, scratch = batch(0), torch.zeros(len(batch(0)), 3), torch.zeros(2)
            for _ in range(2):
                module(x, cache, scratch=scratch)
            assert cache.dtype == torch.float32 and scratch.tolist() == [2.0, 2.0]
            caches.append(cache.detach())
        torch.testing.assert_close(*caches, rtol=0.05, atol=0.05)  # bf16 has three digits
        assert caches[1][:, 1].any() and not caches[1][:, ::2].any()
