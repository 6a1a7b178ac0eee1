"""Modules that torch has made otherwise than by a class with a forward of its own: traced and scripted ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp2 import FSDPNotImplementedError, fully_shard
from tests.harness import multi_rank
from tests.multi_rank.training.helpers import assert_same_gradients


def traced() -> nn.Module:
    """A `torch.fx.GraphModule`, whose class and forward are generated."""
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)))


def scripted_inside() -> nn.Module:
    """With a `torch.jit.ScriptModule` that has no parameters."""
    with warnings.catch_warnings():  # torch 2.15 calls it deprecated
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        scripted = torch.jit.script(nn.GELU())
    return nn.Sequential(nn.Linear(4, 5), scripted, nn.Linear(5, 3))


def exported() -> nn.Module:
    plain = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))
    return torch.export.export(plain, (torch.ones(2, 4),)).module()


def traced_inside() -> nn.Module:
    return nn.Sequential(traced(), nn.Tanh(), nn.Linear(3, 3))


@multi_rank(2)
@pytest.mark.parametrize("make", [traced, scripted_inside, exported, traced_inside])
def test_they_train_like_the_plain_model(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain, model = make(), make()  # torch cannot copy exported ones
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    for step in range(2):
        x = torch.full((2, 4), 0.3 + step)  # the same on all ranks
        for each in (model, plain):
            each(x).square().mean().backward()
        assert_same_gradients(model, plain, f"in step {step}")
        with torch.no_grad():
            for each in (model, plain):
                torch._foreach_mul_(list(each.parameters()), 0.9)
                each.zero_grad()


@multi_rank(2)
def test_parameters_of_a_scripted_module_are_refused_by_name() -> None:
    """Before anything is sharded; ignored ones stay as they are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    with pytest.raises(FSDPNotImplementedError, match=r"'1\.weight' of Sequential belongs to a torch.jit.ScriptModule"):
        fully_shard(model)
    fully_shard(model, ignored_params=set(scripted.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None and scripted.weight.grad is not None
