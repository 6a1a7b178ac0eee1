"""Models under torch's own FSDP1 or under the wrapper, which the same tests run.

Torch's class is imported where it is used: other tests of a process may put ours in its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.compat.fsdp1 import (
    FullyShardedDataParallel,
    ModuleWrapPolicy,
)
from tests.harness.compare import Tolerance
from tests.harness.models import UNEVEN_MLP

CPU = torch.device("cpu")
SUMS = Tolerance(rtol=1e-5, atol=1e-6, reason="flat parameters are reduced and summed in other pieces (fp32)")
both = pytest.mark.parametrize("kind", ["torch", "fsdp2"])


def class_of(kind: str) -> Any:
    """Of ``"torch"``, torch's own; of ``"fsdp2"``, ours."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    return Torchs if kind == "torch" else FullyShardedDataParallel


def wrapped(kind: str, module: nn.Module | None = None, **arguments: Any) -> Any:
    """`UNEVEN_MLP`, each layer a unit, or ``module``."""
    arguments = {"device_id": CPU, "use_orig_params": True, **arguments}
    if module is None:
        arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({nn.Linear}))
    return class_of(kind)(UNEVEN_MLP.build() if module is None else module, **arguments)


def plain_name(name: str) -> str:
    """As of the plain module."""
    return name.replace("_fsdp_wrapped_module.", "")


def backward(model: nn.Module, step: int = 0, micro: int = 0) -> Tensor:
    """A forward and backward on this rank's batch; the loss."""
    loss = UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, step, dist.get_rank(), micro))
    loss.backward()
    return loss.detach()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def whole_gradients(model: Any) -> dict[str, Tensor | None]:
    """By plain names. Collective."""
    with type(model).summon_full_params(model, writeback=False, with_grads=True):
        return {plain_name(name): None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def whole_weights(model: Any) -> dict[str, Tensor]:
    """By plain names. Collective."""
    with type(model).summon_full_params(model, writeback=False):
        return {plain_name(name): p.detach().clone() for name, p in model.named_parameters()}


def numel_here(parameter: Tensor) -> int:
    """Elements of this rank."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
