"""Backwards that a program asks for gradients of sharded parameters, which are leaves of no module's autograd graph.

The unsharded parameters are those leaves. ``loss.backward(inputs=parameters)`` gets them as inputs too, and the engine
reduces their gradients as in any backward. `torch.autograd.grad` is refused: it would return no gradient, or only that
of a penalty on the shards. Refused too is ``expand_as``, by which programs look for the node that accumulates a
parameter's gradient: a hook there would never be called.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.core.hooks import STATE
from fsdp2.core.param import fsdp_param_of
from fsdp2.core.running import frames_from
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError

_PIPELINING, _DEPTH = "torch.distributed.pipelining.stage", 10
_EXPAND = torch.ops.aten.expand.default


def serve() -> list[_torch.Undo]:
    """Look at the inputs of every backward from now on."""
    return [_torch.replace_run_backward(_run_backward), _torch.handle_operators({_EXPAND: _expand})]


def _run_backward(run: Callable[..., Any], outputs: Any, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
    """Run a backward (``accumulate_grad``) or `torch.autograd.grad`, with unsharded parameters among its inputs."""
    if not accumulate_grad and _PIPELINING in sys.modules:
        _refuse_split_backward()
    *front, inputs = args[:4]
    params = [param for each in inputs if (param := fsdp_param_of(each)) is not None]
    params = [param for param in params if param.unsharded is not None and param.unsharded.requires_grad]
    if not params:
        return run(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
    unsharded = [param.unsharded for param in params]
    if accumulate_grad:
        return run(outputs, *front, (*inputs, *unsharded), *args[4:], accumulate_grad=True, **kwargs)
    (allow_unused,) = args[4:]
    found = run(outputs, *front, (*inputs, *unsharded), True, accumulate_grad=False, **kwargs)
    asked, of_unsharded = found[: len(inputs)], found[len(inputs) :]
    reached = [param.path for param, gradient in zip(params, of_unsharded, strict=True) if gradient is not None]
    if reached:
        raise FSDPNotImplementedError(
            f"torch.autograd.grad was asked for the gradient of the sharded parameter '{reached[0]}', which is in no "
            "autograd graph, as its module computes with the unsharded one: what came through the module would be "
            "missing. Call backward() instead, which reduces it into .grad. The backward of an autograd.Function (an "
            "adjoint, as torchdiffeq's) may do that too, if it returns None for the parameters."
        )
    if not allow_unused and any(gradient is None for gradient in asked):
        index = next(index for index, gradient in enumerate(asked) if gradient is None)
        raise RuntimeError(
            f"The differentiated tensor at index {index} was not used in the graph. Set allow_unused=True if that is "
            "meant."
        )
    return asked


def _refuse_split_backward() -> None:
    """Refuse the input half of a zero-bubble schedule's backward, if pipelining takes a sharded stage for a plain one.

    At its end our modules would reshard and reduce, and miss the gradients that the weight half computes.

    Raises:
        FSDPRuntimeError: this is such a backward.
    """
    # Outside of `stage_backward_input`, pipelining asks for gradients of inputs once more: before a run, to see shapes.
    is_split = False
    for frame in itertools.islice(frames_from(sys._getframe(1)), _DEPTH):
        is_split |= frame.f_code.co_name == "stage_backward_input"
        if not is_split or frame.f_globals.get("__name__") != _PIPELINING or "self" not in frame.f_locals:
            continue
        stage = getattr(frame.f_locals["self"], "submod", None)
        if not isinstance(stage, nn.Module) or isinstance(stage, frame.f_globals["FSDPModule"]):
            return
        sharded = next((name or "itself" for name, each in stage.named_modules() if STATE in each.__dict__), None)
        if sharded is not None:
            raise FSDPRuntimeError(
                "torch.distributed.pipelining split the backward of a stage into one for inputs and one for weights, "
                f"and does not know that its module is sharded ({type(stage).__name__}: {sharded}): gradients would be "
                "lost. Call fsdp2.compat.install() first, and fully_shard on the stage's module itself, after the "
                "layers in it; or take a schedule that does not split backwards, as Schedule1F1B."
            )
        return


def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse ``parameter.expand_as(parameter)``, whose one use is to find the node that accumulates its gradient."""
    tensor, size = args[:2]
    if isinstance(tensor, _torch.OwnOperators):
        return tensor.run_operator(func, args, kwargs)
    param = fsdp_param_of(tensor)
    if param is not None and tensor.requires_grad and torch.is_grad_enabled() and tuple(size) == tuple(tensor.shape):
        raise FSDPNotImplementedError(
            f"the sharded parameter '{param.path}' was expanded to its own shape, as programs do that look for the "
            "autograd node of its gradient: it is in no autograd graph, and a hook there would never be called. Use "
            "parameter.register_post_accumulate_grad_hook(hook)."
        )
    return _torch.run_unhandled(func, args, kwargs)
