"""Classes that programs derive from `nn.Parameter`: sharded and unsharded parameters are of them, too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, Owned, RowBlocks, fully_shard, unwrap
from tests.harness import multi_rank
from tests.harness.parity.extensions import OneArgument


class Packed(nn.Parameter):
    """Does something in another way than tensors do."""

    def half(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError


class Marked(nn.Parameter):
    """Is made with an argument, and has a method of its own."""

    rate: float

    def __new__(cls, data: Tensor, rate: float = 2.0) -> Marked:
        made: Any = super().__new__(cls, data)
        made.rate = rate
        return made  # type: ignore[no-any-return]

    def scaled(self) -> Tensor:
        return self * self.rate


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Marked(torch.randn(size, 3))
        self.bias = nn.Parameter(torch.randn(size))
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [type(self.weight), type(self.bias)]
        return x @ self.weight.scaled().T + self.bias


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scale(5), nn.Linear(5, 3), Scale(3))


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for unit in (model[0], model):
        fully_shard(unit, **options)
    return model


def batch_of(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.5}]
    for parameter in model.parameters():
        groups[not isinstance(parameter, Marked)]["params"].append(parameter)  # type: ignore[attr-defined]
    return torch.optim.AdamW(groups, lr=0.1)


def assert_kept(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        is_marked = name in ("0.weight", "2.weight")
        assert isinstance(parameter, Marked) is is_marked and isinstance(parameter, nn.Parameter), name
        assert not is_marked or parameter.rate == 2.0, name  # type: ignore[attr-defined]


def assert_trains_as_unsharded(model: nn.Sequential, world_size: int) -> None:
    whole = build()
    optimizers = [decayed(each) for each in (whole, model)]
    for _ in range(3):
        for rank in range(world_size):
            (whole(batch_of(rank)).square().mean() / world_size).backward()
        model(batch_of(dist.get_rank())).square().mean().backward()
        assert model[0].seen == model[2].seen == [Marked, nn.Parameter], "in forward"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.allclose(parameter.full_tensor(), other, rtol=1e-4, atol=1e-5), name  # type: ignore[attr-defined]


def on_rank_1(parameter: nn.Parameter) -> Owned:
    return Owned(1)


def in_blocks(parameter: nn.Parameter) -> RowBlocks | None:
    return RowBlocks(1) if parameter.ndim > 1 else None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy()},
        {"shard_placement_fn": on_rank_1},
        {"shard_placement_fn": in_blocks},
    ],
    ids=["default", "kept", "offloaded", "owned", "blocks"],
)
@multi_rank(2, 4)
def test_optimizers_are_grouped_by_class(options: dict[str, Any], world_size: int) -> None:
    model = shard(build(), **options)
    assert_kept(model)
    assert isinstance(model[0].weight, DTensor) and isinstance(model[0].weight.scaled(), DTensor)
    assert_trains_as_unsharded(model, world_size)


@multi_rank(2)
def test_conversions_copies_and_unwrapping_keep_it(world_size: int) -> None:
    model = shard(build())
    model(batch_of(0)).sum().backward()
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        assert_kept(model)
    model.zero_grad()
    model.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    assert_kept(copied)
    assert_trains_as_unsharded(copied, world_size)
    for each in pickle.loads(pickle.dumps(list(model.parameters()))):
        assert isinstance(each, DTensor), "as pickles of plain parameters, without the class"
    assert_trains_as_unsharded(model, world_size)
    assert_kept(unwrap(model))
    assert type(model[0].weight) is Marked


@multi_rank(2)
def test_on_meta_and_initialized() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scale(5))
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter)
    torch.manual_seed(0)
    for (name, parameter), shape in zip(model.named_parameters(), [(5, 3), (5,)], strict=True):
        assert torch.equal(parameter.full_tensor(), nn.init.trunc_normal_(torch.empty(shape))), name  # type: ignore[attr-defined]
    assert isinstance(model[0].weight, Marked)


@multi_rank(2)
def test_a_class_that_changes_what_tensors_do_is_named() -> None:
    """It may do so with values that are not there, as of quantized weights; frozen ones are in no optimizer's group."""
    layer = nn.Linear(3, 3)
    layer.weight = Packed(layer.weight.detach())
    with pytest.warns(UserWarning, match=r"'weight' of Linear is of the class Packed.* attributes stay"):
        fully_shard(layer)
    assert not isinstance(layer.weight, Packed)
    frozen = nn.Linear(3, 3)
    frozen.weight = Packed(frozen.weight.detach(), requires_grad=False)
    fully_shard(frozen)


@multi_rank(2)
def test_what_a_tensor_subclass_is_made_of_is_no_attribute_of_the_programs() -> None:
    """Else the unsharded parameter would have the values from before `fully_shard`, and the sharded one kept them."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 6, bias=False)
    model = nn.Linear(4, 6, bias=False)
    model.weight = nn.Parameter(OneArgument(plain.weight.detach().clone()))
    model.weight.note = "kept"  # type: ignore[attr-defined]
    fully_shard(model)
    assert "_inner" not in vars(model.weight) and model.weight.note == "kept"  # type: ignore[attr-defined]
    x = torch.ones(2, 4)
    for _ in range(3):
        for each in (plain, model):
            each(x).square().sum().backward()
            with torch.no_grad():
                each.weight.sub_(each.weight.grad, alpha=0.05)
            each.zero_grad()
        assert torch.allclose(model(x), plain(x), atol=1e-6)
    model.unshard()
    assert model.weight.note == "kept"  # type: ignore[attr-defined]
