"""The kinds of optimizer that the tests build, and what they need around them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2.optim import set_local_steps
from tests.harness import Tolerance, tolerance_for
from tests.harness.compare import FUSED
from tests.harness.models import ModelCase

Parameters = list[nn.Parameter]
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]


def loss_of(case: ModelCase, model: nn.Module, step: int = 0) -> Tensor:
    """The loss on this rank's batch of ``step``."""
    return case.loss(model, case.batch(0, step, dist.get_rank()))


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    """The plainest: no state."""
    return torch.optim.SGD(parameters, lr=0.1)


def sgd_momentum(parameters: Parameters) -> torch.optim.Optimizer:
    """State that is none before the first step."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw_foreach(parameters: Parameters) -> torch.optim.Optimizer:
    """All parameters in one call."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=True)


def adamw_for_loop(parameters: Parameters) -> torch.optim.Optimizer:
    """One parameter at a time, with a third state tensor."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=False, amsgrad=True)


def adamw_fused(parameters: Parameters) -> torch.optim.Optimizer:
    """One kernel for all."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True)


def adagrad(parameters: Parameters) -> torch.optim.Optimizer:
    """Has state from its construction on."""
    return torch.optim.Adagrad(parameters, lr=1e-2, eps=1e-3)


def rmsprop(parameters: Parameters) -> torch.optim.Optimizer:
    """Three state tensors."""
    return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True, eps=1e-3)


def two_groups(parameters: Parameters) -> torch.optim.Optimizer:
    """The usual split: no weight decay on vectors, and another learning rate."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def tolerance_of(make: MakeOptimizer, world_size: int) -> Tolerance | None:
    """What the optimizer's kernels and the number of ranks leave room for."""
    return FUSED if make is adamw_fused else tolerance_for(world_size)


EVERY_KIND = [sgd, sgd_momentum, adamw_foreach, adamw_for_loop, adamw_fused, adagrad, rmsprop, two_groups]


def distributed_like(model: nn.Module, source: nn.Module) -> dict[str, Tensor]:
    """The values of ``source``, sharded as in ``model``."""
    values = source.state_dict()
    return {
        name: distribute_tensor(values[name], target.device_mesh, target.placements, src_data_rank=None)
        for name, target in model.state_dict().items()
    }


def copy_values(source: nn.Module, target: nn.Module) -> None:
    """Writes the values of plain ``source`` into sharded ``target``."""
    with torch.no_grad():
        for mine, value in zip(target.parameters(), distributed_like(target, source).values(), strict=True):
            mine.copy_(value)


def local_like(plain: torch.optim.Optimizer, *, flat: bool = False) -> torch.optim.Optimizer:
    """What `fsdp2.optim.local` makes of the class, the parameter groups and the arguments of ``plain``."""
    taken = inspect.signature(type(plain)).parameters
    arguments = {name: value for name, value in plain.defaults.items() if name in taken}
    return fsdp2.optim.local(type(plain), [dict(group) for group in plain.param_groups], flat=flat, **arguments)


@contextmanager
def through_dtensor() -> Iterator[None]:
    """Optimizers of torch step as with torch's own `fully_shard`, on DTensors: what ours are compared with."""
    set_local_steps(False)
    try:
        yield
    finally:
        set_local_steps(True)


def assert_states_same(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    """State dicts of the same structure, with the same values of the same kinds, and shards of the same strides."""
    mine, plain = actual.state_dict(), expected.state_dict()
    assert mine["param_groups"] == plain["param_groups"]
    assert mine["state"].keys() == plain["state"].keys()
    for index, state in plain["state"].items():
        assert list(mine["state"][index]) == list(state)
        for name, value in state.items():
            found = mine["state"][index][name]
            assert type(found) is type(value), name
            if isinstance(value, DTensor):
                assert (found.placements, found.shape) == (value.placements, value.shape), name
                assert found.to_local().stride() == value.to_local().stride(), name
                found, value = found.to_local(), value.to_local()
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, name


def number_of_runs(optimizer: torch.optim.Optimizer) -> int:
    """On how many flat tensors, each of several parameters, the optimizer stepped last."""
    return len(optimizer.runs())
