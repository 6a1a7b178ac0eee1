"""Lists, dicts and objects that a module is passed: what it writes into them is there afterwards."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import Tolerance, assert_sharded_same, gradients_of

WIDTH = 6
SUMS = Tolerance(rtol=1e-5, atol=1e-6, reason="the gradients of a tensor with several uses add up in another order")
HALF = Tolerance(rtol=0.1, atol=0.05, reason="bf16 beside fp32")
BF16 = Tolerance(rtol=3e-2, atol=3e-3, reason="the sum of two gradients of bf16, each rounded before or after the sum")


@dataclass
class Cache:
    """What is passed from block to block."""

    scale: Tensor
    keys: list[Tensor] = field(default_factory=list)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skips: list[Tensor], state: dict[str, Any], cache: Cache) -> Tensor:
        y = torch.tanh(self.linear(x) * cache.scale + state["first"])
        skips.append(y)
        state["last"] = y
        cache.keys.append(x)
        return y


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return self.linear(x) + skips.pop()


class UNet(nn.Module):
    """Skips go through a list, a state through a dict, keys through an object; each block pops or adds."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.down = nn.ModuleList(Down() for _ in range(2))
        self.up = nn.ModuleList(Up() for _ in range(2))

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        state: dict[str, Any] = {"first": x * 0.5}
        cache = Cache(x.mean(0))
        for block in self.down:
            x = (
                checkpoint(block, x, skips, state, cache, use_reentrant=False)
                if self.recompute
                else block(x, skips, state=state, cache=cache)
            )
        for block in self.up:
            x = block(x, skips)
        assert len(cache.keys) >= 2 and state["last"].shape == x.shape
        return (x + state["last"] + cache.keys[1] + cache.keys[0]).float().square().mean()


def batch(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


@multi_rank(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_unet_trains_like_the_reference(dtype: torch.dtype | None, recompute: bool, world_size: int) -> None:
    torch.manual_seed(0)
    model = UNet(recompute)
    plain = copy.deepcopy(model).to(dtype or torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in (*model.down, *model.up):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)

    def run(each: nn.Module, rank: int) -> None:
        x = batch(rank)
        skips: list[Tensor] = []
        if each is plain:
            x = x.to(dtype or torch.float32)
        each(x, skips).backward()
        assert skips == [], "blocks popped what blocks had appended"

    run(model, dist.get_rank())
    expected: dict[str, Tensor] = {}
    for rank in range(world_size):
        plain.zero_grad()
        run(plain, rank)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            expected[name] = expected.get(name, 0) + parameter.grad.float() / world_size
    tolerance = SUMS if dtype is None else BF16
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=tolerance)  # type: ignore[arg-type]


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
    assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=HALF if half else SUMS)


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
    assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUMS)


@multi_rank(2)
def test_a_gradient_from_before_is_named() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model(batch(0)).sum().backward()
    with pytest.warns(UserWarning, match=r"'weight' of Linear has a gradient.*zero_grad\(\)"):
        fully_shard(model)
    assert model.weight.grad is None


@multi_rank(2)
def test_a_forward_that_is_replaced_after_sharding_runs() -> None:
    """As kernels are patched into torch's own classes."""
    model = fully_shard(nn.Linear(WIDTH, WIDTH))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.t() * 3)
        output = model(batch(0))
    model.unshard()
    assert torch.allclose(output, batch(0) @ model.weight.t() * 3)
    model.reshard()


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
