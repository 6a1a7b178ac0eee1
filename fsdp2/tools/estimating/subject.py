"""The model of one simulated rank: made without memory, checkpointed, sharded; and what stands in for its forward.

What stands in (`stand_in`) is for models whose forward depends on values that are not there: the engine runs all of
its groups, in the order in which they were registered, and nothing is computed.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
LEAST_DEPTH = 12
"""Of a list of blocks that may be shortened."""

_ANY = 2**62


def made(make_model: Callable[[], nn.Module] | nn.Module) -> nn.Module:
    """The model, its parameters and buffers without memory. A model that exists already is copied, and left as it is.

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
    # (`to_empty` cannot, of tensors without memory: torch would swap them with others.)
    return copy.deepcopy(model, {id(each): _without_memory(each) for each in tensors})


def _is_as_needed(tensor: torch.Tensor) -> bool:
    return _torch.is_fake(tensor) and tensor.device.type == "cpu"


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """As ``tensor``, on the CPU."""
    if _is_as_needed(tensor):
        return tensor
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# -- fewer blocks


def depth_of(model: nn.Module) -> int | None:
    """How many blocks that are all alike follow each other; None if there are few, or lists of other lengths beside."""
    lengths = {len(each) for each in _lists_of_blocks(model)}
    return lengths.pop() if len(lengths) == 1 else None


def shorten(model: nn.Module, depth: int) -> None:
    """Keep the first ``depth`` of these blocks."""
    for blocks in list(_lists_of_blocks(model)):
        for name in list(blocks._modules)[depth:]:
            del blocks._modules[name]


def _lists_of_blocks(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    is_long = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= LEAST_DEPTH
    if is_long and len({_shape_of(each) for each in module.children()}) == 1:
        yield module  # type: ignore[misc]
        return
    for child in module.children():
        yield from _lists_of_blocks(child)


def _shape_of(module: nn.Module) -> tuple[Any, ...]:
    named = module.named_parameters(remove_duplicate=False)
    parameters = [(name, each.shape, each.dtype, each.requires_grad) for name, each in named]
    return type(module), *parameters


# -- activation checkpointing


class Switch:
    """Whether blocks are checkpointed, which may change between steps.

    Attributes:
        how: as in `estimate`.
        runs: called around what a block computes, with that.
    """

    def __init__(self, how: str) -> None:
        self.how = how
        self.runs: Callable[[Callable[[], Any]], Any] = lambda compute: compute()

    def around(self, block: nn.Module) -> None:
        """Let ``block``'s forward be checkpointed as ``how`` says."""
        forward = block.forward

        @functools.wraps(forward)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if self.how == "none":
                return forward(*args, **kwargs)

            def compute(*args: Any, **kwargs: Any) -> Any:
                return self.runs(lambda: forward(*args, **kwargs))

            more: dict[str, Any] = {"context_fn": _selective} if self.how == "selective" else {}
            return checkpoint(compute, *args, use_reentrant=False, **more, **kwargs)

        block.forward = checkpointed  # type: ignore[method-assign]


_SAVED = ("mm", "addmm", "bmm", "_scaled_dot_product", "_flash_attention", "_efficient_attention")


def _keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Results of matrix products and of attention are kept, the others are computed once more."""
    name = operator._schema.name.removeprefix("aten::")
    return CheckpointPolicy.MUST_SAVE if name.startswith(_SAVED) else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keeps_products)


def blocks_of(model: nn.Module, request: Request) -> list[nn.Module]:
    """What is checkpointed: what `auto_shard` takes for blocks, whatever their size, but for single layers."""
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


@dataclass(slots=True)
class Call:
    """One call of a sharded module, or of the model.

    Attributes:
        module: which.
        inner: the calls inside of it.
        passes: its output is that of the last call inside.
    """

    module: nn.Module
    inner: list[Call] = field(default_factory=list)
    passes: bool = False


def _called(model: nn.Module) -> list[nn.Module]:
    return [model, *(module for module in model.modules() if module is not model and state_of(module) is not None)]


class Replaced:
    """Forwards of modules that others stand in for, until `put_back`."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let ``module`` run ``forward``."""
        self._before.append((module, module.__dict__.get("forward")))
        module.forward = forward  # type: ignore[method-assign]

    def put_back(self) -> None:
        """As it was."""
        for module, forward in self._before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
        self._before = []


def calls_of(model: nn.Module, run: Callable[[], object]) -> Call:
    """Which sharded modules ``run``, a forward of ``model``, calls."""
    outermost = Call(model)
    stack, outputs, replaced = [outermost], [0], Replaced()
    for module in _called(model):
        replaced.replace(module, _recorded(module, stack, outputs))
    try:
        run()
    finally:
        replaced.put_back()
    return outermost.inner[0]


def _recorded(module: nn.Module, stack: list[Call], outputs: list[int]) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = Call(module)
        stack[-1].inner.append(call)
        stack.append(call)
        outputs.append(0)
        output = forward(*args, **kwargs)
        stack.pop()
        storage = _storage_of(output)
        call.passes = bool(call.inner) and storage == outputs.pop() != 0
        outputs[-1] = storage
        return output

    return recorded


def _storage_of(output: Any) -> int:
    """The identity of the memory of the first tensor of ``output``; 0 if there is none."""
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return _torch.storage_of(output) if isinstance(output, torch.Tensor) else 0


def calls_as_registered(model: nn.Module) -> Call:
    """What `calls_of` would find, if modules are called in the order in which they were registered."""
    return Call(model, [calls_as_registered(each) for each in _sharded_next_below(model)])


def _sharded_next_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if state_of(child) is not None:
            yield child
        else:
            yield from _sharded_next_below(child)


def stand_in(model: nn.Module, outermost: Call) -> Replaced:
    """Let ``model``'s forward make the calls of ``outermost`` and compute nothing. It takes and returns a scalar."""
    coming: dict[nn.Module, list[Call]] = {module: [] for module in _called(model)}

    def collect(call: Call) -> None:
        coming[call.module].append(call)
        for each in call.inner:
            collect(each)

    collect(outermost)
    replaced = Replaced()
    for module, calls in coming.items():
        replaced.replace(module, _touching(module, itertools.cycle(calls or [Call(module)])))
    return replaced


def _touching(module: nn.Module, calls: Iterator[Call]) -> Callable[[torch.Tensor], torch.Tensor]:
    state = state_of(module)

    def touched(x: torch.Tensor) -> torch.Tensor:
        found = [] if state is None else [param.unsharded for group in state.unit for param in group.params]
        return _Touch.apply(x, *[each for each in found if each is not None])  # type: ignore[no-any-return,no-untyped-call]

    def forward(x: torch.Tensor) -> torch.Tensor:
        call = next(calls)
        if call.passes:
            x = touched(x)
        for each in call.inner:
            x = each.module(x)
        return x if call.passes else touched(x)

    return forward


def can_stand_in(model: nn.Module) -> bool:
    """Whether whole parameters are plain tensors (those of tensor parallelism are not)."""
    groups = [group for state in states_below(model) for group in state.unit]
    return all(param.sharding.unsharded_spec is None for group in groups for param in group.params)
