"""Parameters that modules keep beside registering them: in lists, dicts, attributes and views. Beside the plain model.

torch's own ``fully_shard`` computes with what they were before, and loses their gradients.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, FSDPValueError, full_parameters, fully_shard, unwrap
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of


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
