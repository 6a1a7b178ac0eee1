"""The model of one simulated rank: made without memory, checkpointed, sharded; and a stand-in for its forward.

The stand-in (`stand_in`) is for models whose forward depends on values, which do not exist: the engine runs all of its
groups in the order in which they were registered, and nothing is computed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp2 import _torch
from fsdp2.core.state import state_of, states_below
from fsdp2.errors import FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.grouping.sharding import auto_shard, choose_groups
from fsdp2.tools.estimating.request import Request

CPU = torch.device("cpu")
_ANY = 2**62


def made(make_model: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """The model, with parameters and buffers without memory. A model that exists is copied, and left as it is.

    Raises:
        FSDPTypeError: it is no module.
        FSDPValueError: it is sharded already.
    """
    model = make_model if isinstance(make_model, nn.Module) else make_model()
    if not isinstance(model, nn.Module):
        raise FSDPTypeError(f"make_model must return an nn.Module, got {type(model).__name__}.")
    if states_below(model):
        raise FSDPValueError(
            f"make_model returned a {type(model).__name__} that is sharded already, over ranks that the estimate does "
            "not know. Return the model as it was before; pass shard=, a function (model, mesh), to shard it your way."
        )
    tensors = [*model.parameters(), *model.buffers()]
    if model is not make_model and all(map(_is_as_needed, tensors)):
        return model
    # (`to_empty` cannot do this for tensors without memory: torch would swap them with others.)
    return copy.deepcopy(model, {id(each): _without_memory(each) for each in tensors})


def _is_as_needed(tensor: torch.Tensor) -> bool:
    return _torch.is_fake(tensor) and tensor.device.type == "cpu"


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor`` on the CPU, without memory."""
    if _is_as_needed(tensor):
        return tensor
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# -- activation checkpointing


def checkpoint_as(how: str, block: nn.Module) -> None:
    """Checkpoint the forward of ``block``; ``how``: "selective" or "blocks"."""
    forward = block.forward
    more: dict[str, Any] = {"context_fn": _selective} if how == "selective" else {}

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    block.forward = checkpointed  # type: ignore[method-assign]


_SAVED = ("mm", "addmm", "bmm", "_scaled_dot_product", "_flash_attention", "_efficient_attention")


def _keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products and of attention, recompute the others."""
    name = operator._schema.name.removeprefix("aten::")
    return CheckpointPolicy.MUST_SAVE if name.startswith(_SAVED) else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keeps_products)


def blocks_of(model: nn.Module, request: Request) -> list[nn.Module]:
    """The modules to checkpoint: the blocks that `auto_shard` finds, whatever their size, without single layers."""
    choice = choose_groups(model, blocks=request.blocks, mp_policy=request.mp_policy, max_bytes=_ANY, min_bytes=0)
    modules = [model.get_submodule(group.name) for group in choice.groups if group.name]
    return [module for module in modules if next(module.children(), None) is not None]


# -- sharding


def sharded(model: nn.Module, mesh: DeviceMesh, request: Request) -> nn.Module:
    """``model``, sharded over ``mesh`` as the request says.

    Raises:
        FSDPRuntimeError: the function that the user passed has not sharded it.
    """
    if request.shard is None:
        arguments: dict[str, Any] = {} if request.strategy is None else {"strategy": request.strategy}
        arguments |= {"mp_policy": request.mp_policy, "offload_policy": request.offload_policy}
        return auto_shard(model, mesh, blocks=request.blocks, **arguments)
    returned = request.shard(model, mesh)
    model = returned if isinstance(returned, nn.Module) else model
    if not states_below(model):
        raise FSDPRuntimeError(
            "the function passed as shard= has returned, and nothing in the model is sharded: it must call "
            "fsdp2.fully_shard or fsdp2.auto_shard, on the model and the mesh that it is given."
        )
    return model


# -- what stands in for a forward


class _Touch(torch.autograd.Function):
    """Reads parameters, and gives each a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        saved = zip(ctx.saved_tensors, needed, strict=True)
        return gradient, *(torch.empty_like(each) if needs else None for each, needs in saved)


def _sharded_next_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if state_of(child) is not None:
            yield child
        else:
            yield from _sharded_next_below(child)


def stand_in(model: nn.Module) -> None:
    """Let forwards of sharded modules, and of ``model``, compute nothing. They take and return a scalar."""
    for module in [model, *model.modules()]:
        if module is model or state_of(module) is not None:
            module.forward = functools.partial(_touch, module)  # type: ignore[method-assign]


def _touch(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for inner in list(_sharded_next_below(module)):
        x = inner(x)
    state = state_of(module)
    found = [] if state is None else [param.unsharded for group in state.unit for param in group.params]
    return _Touch.apply(x, *[each for each in found if each is not None])  # type: ignore[no-any-return,no-untyped-call]
