"""Parameters in torch.cond, while_loop and scan, which take no two tensors of one storage: told, with what to do."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from fsdp2 import FSDPRuntimeError, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import assert_sharded_same, gradients_of, tolerance_for
from tests.harness.shared.ways import WAYS


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)


class Chosen(Two):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))


class Repeated(Two):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.b(self.a(x))), (torch.tensor(0), x))[1]


class Scanned(Two):
    def forward(self, x: Tensor) -> Any:
        def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            following = torch.tanh(self.a(carry) + self.b(x))
            return following, following.clone()

        return scan(step, torch.zeros(3), x)[1]


@pytest.mark.parametrize("kind", [Chosen, Repeated, Scanned])
@multi_rank(2)
def test_two_parameters_of_a_group_are_told(kind: type[Two]) -> None:
    model = fully_shard(kind())
    with pytest.raises(FSDPRuntimeError, match=r"share a storage.*self\.weight\.clone\(\)"):
        model(torch.ones(2, 3))


class ChosenWithClones(Two):
    def forward(self, x: Tensor) -> Any:
        (v, c), (w, d) = ([each.clone() for each in layer.parameters()] for layer in (self.a, self.b))
        linear = nn.functional.linear
        return torch.cond(x.sum() > 0, lambda x: linear(x, v, c), lambda x: linear(x, w, d), (x,))


class ChosenSubmodules(Two):
    def forward(self, x: Tensor) -> Any:
        a, b = ({name: each.clone() for name, each in layer.named_parameters()} for layer in (self.a, self.b))
        call = torch.func.functional_call
        return torch.cond(x.sum() > 0, lambda x: call(self.a, a, (x,)), lambda x: call(self.b, b, (x,)), (x,))


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ChosenWithClones, ChosenSubmodules])
@multi_rank(2, 4)
def test_clones_are_differentiated_alike(world_size: int, kind: type[Two], way: str) -> None:
    model = kind()
    reference = copy.deepcopy(model)
    fully_shard(model, **WAYS[way]())
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo
            outputs = [each(x) for each in (model, reference)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    tolerance = tolerance_for(world_size)
    assert_sharded_same("gradients", gradients_of(model), gradients_of(reference), tolerance=tolerance)
