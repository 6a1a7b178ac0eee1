"""Parameters that modules keep beside registering them: in lists, dicts, attributes and views. Beside the plain model.

torch's own ``fully_shard`` computes with what they were before, and loses their gradients.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, FSDPValueError, full_parameters, fully_shard, unwrap
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gather, gradients_of


class Keeps(nn.Module):
    """Uses the same weight from where it is registered, and from where it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(3, 5), nn.Linear(5, 3)
        self.in_list: list[Any] = ["first", self.linear.weight]
        self.in_dict = {"bias": self.other.bias, "scale": 2.0}
        self.__dict__["alone"] = self.other.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(self.linear(x)) + self.in_dict["bias"] * self.in_dict["scale"]
        return x + self.in_list[1].sum() + (self.alone**2).sum()  # type: ignore[no-any-return]


def arguments_of(kind: str) -> dict[str, Any]:
    if kind == "replicas":
        return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    return {"kept": {"reshard_after_forward": False}, "offload": {"offload_policy": CPUOffloadPolicy()}}.get(kind, {})


@multi_rank(4)
@pytest.mark.parametrize("kind", ["plain", "kept", "replicas", "offload"])
def test_what_is_kept_is_gathered_and_has_gradients(kind: str) -> None:
    torch.manual_seed(0)
    plain = Keeps()
    model = fully_shard(copy.deepcopy(plain), **arguments_of(kind))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)
    model.reshard()
    assert model.in_list[1] is model.linear.weight, "also where optimizers look for it"
    with full_parameters(model):
        assert model.in_dict["bias"] is model.other.bias
    unwrap(model)
    assert model.alone is model.other.weight and type(model.alone) is nn.Parameter


@pytest.mark.full
@multi_rank(2)
def test_what_is_taken_out_or_overwritten_is_left_to_the_program() -> None:
    model = fully_shard(Keeps())
    expected = [model.linear.weight, model.other.bias]
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()  # the root stays unsharded until its backward
        model.in_list[1] = torch.zeros(1)
        model.in_dict["bias"] = torch.zeros(3)
        model(torch.ones(2, 3)).sum().backward()
    model.in_list.clear()
    model.in_dict.clear()
    model.unshard()
    model.reshard()
    assert not model.in_list and [model.linear.weight, model.other.bias] == expected


class KeepsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.columns = [self.linear.weight.t()]


@multi_rank(2)
def test_a_view_that_is_kept_is_refused() -> None:
    model = KeepsAView()
    with pytest.raises(FSDPValueError, match=r"KeepsAView keeps a view of parameter 'linear.weight' .* 'columns'"):
        fully_shard(model)
    assert type(model.linear.weight) is nn.Parameter


@multi_rank(2)
def test_two_parameters_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(FSDPValueError, match=r"'0.weight' and '1.weight' are two, and share their memory.*tie"):
        fully_shard(model)
    model[1].weight = model[0].weight
    fully_shard(model)
    assert model[1].weight is model[0].weight


class Keeping(nn.Module):
    """Blocks that are sharded by themselves, in a root that keeps their parameters; and one that keeps the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.everything = list(self.parameters())
        self.by_name = OrderedDict(self.named_parameters())
        self.nested = {"decayed": [self.first.weight, deque([self.second.weight])]}
        self.second.roots = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.everything[0] * self.second.roots[0]  # type: ignore[no-any-return, operator, index]


@multi_rank(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_what_a_root_keeps_of_its_blocks_and_a_block_of_its_root(reshards: bool) -> None:
    torch.manual_seed(0)
    plain = Keeping()
    model = copy.deepcopy(plain)
    for module in (model.first, model.second, model):
        fully_shard(module, reshard_after_forward=reshards)
    x = torch.ones(2, 3)
    for _ in range(2):
        for each in (plain, model):
            each(x).square().sum().backward()
        found = nn.utils.clip_grad_norm_(model.everything, 1e-2)
        expected = nn.utils.clip_grad_norm_(plain.everything, 1e-2)
        assert gather(found).item() == pytest.approx(expected.item(), rel=1e-5)
        for each in (plain, model):
            with torch.no_grad():
                for parameter in each.by_name.values():
                    parameter.sub_(parameter.grad)  # type: ignore[arg-type]
                each.nested["decayed"][0].mul_(0.9)
                each.nested["decayed"][1][0].mul_(0.8)
            each.zero_grad()
        assert [id(each) for each in model.everything] == [id(each) for each in model.parameters()]
        for name, parameter in model.named_parameters():
            assert torch.allclose(gather(parameter), plain.get_parameter(name), atol=1e-6), name


class Holder(tuple[Any, ...]):
    __slots__ = ()


HOLDERS: list[Callable[[nn.Parameter], Any]] = [
    lambda w: (w, 2.0), lambda w: {w}, lambda w: Holder([w]), lambda w: [(w, 1)], lambda w: {"a": {w}},
    lambda w: {w: 1.0}, lambda w: frozenset([w]),
]  # fmt: skip


@multi_rank(2)
@pytest.mark.parametrize("index", range(len(HOLDERS)))
def test_a_holder_that_cannot_be_seen_to_is_named(index: int) -> None:
    model = nn.Linear(3, 5)
    model.held = HOLDERS[index](model.weight)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"keeps parameter 'weight' in its attribute 'held', inside of a .*list"):
        fully_shard(model)


@multi_rank(2)
def test_a_holder_is_named_once_and_what_lies_beside_it_is_seen_to() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model[0].held = [(model[0].weight, model[0].bias), model[0].weight]  # type: ignore[assignment]
    with pytest.warns(
        UserWarning, match=r"'0?\.?weight' and 1 more in its attribute 'held', inside of a tuple"
    ) as said:
        fully_shard(model[0])
        fully_shard(model)
    assert len(said) == 1
    assert model[0].held[1] is model[0].weight  # type: ignore[index]


@multi_rank(2)
def test_a_detached_alias_is_refused() -> None:
    model = nn.Linear(3, 5)
    model.start = model.weight.detach()
    with pytest.raises(FSDPValueError, match=r"keeps a view of parameter 'weight' in its attribute 'start'"):
        fully_shard(model)
    model.start = model.weight.detach().clone()
    fully_shard(model)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:
            self.w.detach().numpy()
        elif x.sum() > 10:
            raise KeyError(self.w)
        return x @ self.w


@multi_rank(2)
def test_errors_that_hold_parameters_are_not_printed_and_memory_that_was_handed_out_is_named() -> None:
    model = fully_shard(nn.Sequential(fully_shard(Looks())))
    with pytest.raises(KeyError):
        model(torch.full((2, 3), 5.0))
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(FSDPRuntimeError, match=r"cannot be freed.*numpy.*detach\(\).clone\(\)"):
        model(torch.full((2, 3), 50.0))
