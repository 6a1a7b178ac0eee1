"""Plain parameters that an optimizer steps beside sharded ones, and that nothing reduces: they drift apart over ranks.

This happens in a model whose blocks were sharded, while `fully_shard` was never called on the model itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.state import state_of
from fsdp2.errors import FSDPRuntimeError

_SHOWN = 5


def refuse_outside(optimizer: Optimizer, groups: Iterable[FSDPParamGroup]) -> None:
    """Refuse a step of plain parameters with a gradient of this rank alone, beside the sharded ones of ``groups``.

    Parameters in `ignored_params`, in a ``DistributedDataParallel``, or with a hook pass: that may reduce them.

    Raises:
        FSDPRuntimeError: there are such parameters. It names them, and the module to call `fully_shard` on.
    """
    if not any(group.mesh.shard_size * group.mesh.replicate_size > 1 for group in groups):
        return
    outside = {each for group in optimizer.param_groups for each in group["params"] if _is_of_one_rank(each)}
    if not outside:
        return
    # An optimizer knows no modules, so names are looked up among all modules of the process.
    found = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))  # once for each optimizer
    modules: list[nn.Module] = [each for each in found if "_parameters" in each.__dict__]  # __init__ has begun
    for module in modules:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            outside.difference_update(module.parameters())
        state = state_of(module)
        if state is not None:
            outside.difference_update(state.ignored_params)
    holders = [each for each in modules if not outside.isdisjoint(each._parameters.values())]
    if not outside or not holders:
        return
    sharded = {module for group in groups for sharer in group.sharers for module in sharer.modules}
    around = [each for each in modules if not sharded.isdisjoint(each.modules()) and holders[0] in set(each.modules())]
    forgotten = min(around, key=lambda each: sum(1 for _ in each.modules()), default=holders[0])
    names = [name for name, parameter in forgotten.named_parameters() if parameter in outside]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    kind = type(forgotten).__name__
    raise FSDPRuntimeError(
        f"the optimizer steps parameters of {kind} that fully_shard was not called on, beside sharded ones: "
        f"{', '.join(names[:_SHOWN])}{more}. Each rank has its own gradient of them, so that their values would part. "
        f"Call fully_shard on the {kind} too, after its parts. If something else reduces them, or ranks shall differ, "
        "pass them to that call in ignored_params."
    )


def _is_of_one_rank(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is plain and has a gradient that nothing is known to reduce."""
    is_plain = not isinstance(parameter, DTensor) and parameter.requires_grad and parameter.grad is not None
    return is_plain and not (_torch.post_accumulate_grad_hooks(parameter) or _torch.tensor_hooks(parameter))
