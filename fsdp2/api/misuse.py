"""Explains errors of sharded parameters that are used where nothing has gathered them, beside DTensor's own messages.

All of this runs after an error. It reads off the call stack what the user's program was doing.

[Note: explained errors]
    DTensor refuses to compute with plain tensors in C++, where it cannot be patched, and a method of a module that is
    called directly has no frame of ours around it. So the explanation is raised where the error leaves a call of a
    sharded module; if it leaves the program, ``sys.excepthook`` prints the explanation after it. Calls without an error
    cost nothing more.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.hooks import STATE
from fsdp2.core.param import FSDPParam, fsdp_param_of
from fsdp2.core.running import CALLS, frames_from, methods_of
from fsdp2.core.trees import tensors_in
from fsdp2.errors import FSDPError, FSDPRuntimeError, FSDPTypeError
from fsdp2.plugs.parameters.whole_operators import is_ours

_DATA_PARALLEL = nn.parallel.DistributedDataParallel.__init__.__code__.co_filename
_MIXED = "got mixed torch.Tensor and DTensor"
_ALIASING = "Input-to-input aliasing detected"
_NOT_RESIZABLE = "Trying to resize storage that is not resizable"
_CALL = nn.Module.__call__.__name__
_RAGGED = "dealt out otherwise than torch.chunk does"

Running = Sequence[tuple[Any, FrameType]]
"""Objects whose methods are running, each with the frame of the method, the innermost first."""


def explain_errors() -> list[_torch.Undo]:
    """Explain errors of DTensor that sharded parameters cause, from now on. Returns functions that undo this."""
    if sys.excepthook is not _excepthook:
        _Hook.former, sys.excepthook = sys.excepthook, _excepthook
    collectives = dict.fromkeys(_torch.collective_operators(), _refuse_collective)
    return [_print_errors_alone, _torch.handle_operators(collectives)]


def _print_errors_alone() -> None:
    if sys.excepthook is _excepthook and _Hook.former is not None:
        sys.excepthook, _Hook.former = _Hook.former, None


class _Hook:
    """The state of our ``sys.excepthook``.

    Attributes:
        former: the hook before ours; None before the first `fully_shard`.
        runs: whether ours is running. The former hook may call ours again, if a program has put it in front since.
    """

    former: Callable[..., None] | None = None
    runs = False


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that leaves the program, and below it the explanation if there is one."""
    if _Hook.runs or _Hook.former is None:
        sys.__excepthook__(kind, error, trace)
        return
    _Hook.runs = True
    try:
        _Hook.former(kind, error, trace)
    finally:
        _Hook.runs = False
    explained = explanation_of(error)
    if explained is not None:
        print(f"{type(explained).__name__}: {explained}", file=sys.stderr)


# ---- operators -----------------------------------------------------------------------------------


def explanation_of(error: BaseException) -> FSDPError | None:
    """The error to raise instead of ``error``; None if there is nothing to explain.

    It explains that a sharded parameter met plain tensors, or that unsharded parameters were used in a way that their
    memory does not allow.
    """
    said = " ".join(each for each in error.args if isinstance(each, str))  # other arguments may be tensors
    if _ALIASING in said or _NOT_RESIZABLE in said:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_in_call = any(STATE in self.__dict__ for self, _ in methods_of(frames))
        return _of_memory(said) if is_in_call else None
    is_ragged = isinstance(error, FSDPError) and _RAGGED in said
    if not is_ragged and (type(error) is not RuntimeError or _MIXED not in said):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    outside = frames[-1].f_back if frames else None
    running = [*methods_of(frames), *methods_of(frames_from(outside))]
    calls = [(self, frame) for self, frame in running if isinstance(self, nn.Module)]
    params = _parameters_at(frames[0] if frames else None, calls)
    if not params or (is_ragged and not calls):  # outside of modules the error's own message is right
        return None
    names = " or ".join([f"'{param.path}'" for param in params[:3]] + ["others"] * (len(params) > 3))
    cause = _cause(params[0], calls)
    if len({param.group for param in params}) > 1:
        return FSDPRuntimeError(f"one of the sharded parameters {names} met plain tensors ({error}) {cause}")
    return FSDPRuntimeError(
        f"parameter {names} of {params[0].group_name} is sharded, and met plain tensors ({error}) {cause}"
    )


def _of_memory(said: str) -> FSDPError:
    if _ALIASING in said:
        return FSDPRuntimeError(
            "torch.cond, while_loop or scan was given tensors that share a storage, as unsharded parameters do with "
            "all of their group. Take clones of them before the call, which are differentiated alike, weight = "
            "self.weight.clone(); to call a submodule with its clones, torch.func.functional_call(module, clones, "
            "inputs)."
        )
    return FSDPRuntimeError(
        "the memory of unsharded parameters cannot be freed any more, for a forward has handed it out: "
        "weight.detach().numpy() does that, and share_memory_(). Take a copy, weight.detach().clone().numpy(), and "
        "shard the model anew."
    )


def _cause(param: FSDPParam, calls: Running) -> str:
    """The cause of the error and the remedy, as sentences for its message."""
    if not calls:
        return (
            "Give the other tensor the same placements, distribute_tensor(tensor, parameter.device_mesh, "
            "parameter.placements); or compute with the whole, parameter.full_tensor() (all ranks must call it), or "
            "with this rank's part, parameter.to_local()."
        )
    owners = [module for sharer in param.group.sharers for module in sharer.modules]
    position = next((index for index, (module, _) in enumerate(calls) if module in owners), None)
    owner = _name(owners[0])
    if position is None:
        module, frame = calls[-1]
        method = "forward" if frame.f_code.co_name in (*CALLS, _CALL) else frame.f_code.co_name
        around = next((each for each, _ in calls if STATE in each.__dict__), None)
        other = (
            f"call fully_shard on {_name(module)} too, bottom-up"
            if around is None
            else f"leave out fully_shard of it, so that a call of {_name(around)} gathers it"
        )
        return (
            f"{_name(module)}.{method}() was called, and only a call of {owner}, which fully_shard was "
            f"called on, gathers it. Call that module; or {other}; or call "
            f"unshard() of that {owner} before, and reshard() after."
        )
    module, _ = calls[position]
    methods = [frame.f_code.co_name for each, frame in calls if each is module]
    if CALLS.intersection(methods):
        return (
            f"It happened inside a call of {owner}, which gathers its parameters: this is a gradient, or a parameter "
            "that was resharded meanwhile, as by reshard(); leave that out, or call unshard() after it."
        )
    method = methods[-1]
    if method == "forward":
        return (
            f"{owner}.forward() was called directly, past the hooks that gather the parameters. Call the module "
            "itself: module(...), not module.forward(...)."
        )
    return (
        f"{owner}.{method}() was called, and only a call of the module, module(...), gathers its parameters. Call "
        f"fsdp2.register_fsdp_forward_method(module, '{method}') once after fully_shard; or module.unshard() before, "
        "and module.reshard() after."
    )


def _parameters_at(frame: FrameType | None, calls: Running) -> list[FSDPParam]:
    """The sharded parameters that the innermost ``frame`` holds; else those of the innermost module that has any.

    If that module has none of its own, they are parameters of modules below it, if possible those whose names occur in
    its code.
    """
    values = [] if frame is None else list(frame.f_locals.values())
    found = [fsdp_param_of(each) for each in values if isinstance(each, DTensor)]
    held = list(dict.fromkeys(each for each in found if each is not None))
    if held:
        return held
    for module, reader in calls:
        named = [(name, fsdp_param_of(parameter)) for name, parameter in module.named_parameters()]
        below = [(name, param) for name, param in named if param is not None]
        own = [param for name, param in below if "." not in name]
        words = {*reader.f_code.co_names, *map(str, reader.f_code.co_consts)}
        read = [param for name, param in below if words.issuperset(name.split("."))]
        if below:
            return own or read or [param for _, param in below]
    return []


def _refuse_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a collective of torch.distributed on sharded parameters; run any other."""
    for each in tensors_in((*args, *kwargs.values())):
        if not isinstance(each, DTensor):
            continue
        refuse_data_parallel()
        param = fsdp_param_of(each)
        if param is not None or is_ours(each):
            what = f"a tensor of shape {tuple(each.shape)}" if param is None else f"parameter '{param.path}'"
            raise FSDPTypeError(
                f"{what} is sharded, and cannot be passed to a collective ({func}). Pass this rank's part, "
                "tensor.to_local(), or the whole, tensor.full_tensor() (all ranks must call it)."
            )
    return _torch.run_unhandled(func, args, kwargs)


def refuse_data_parallel() -> None:
    """Refuse ``DistributedDataParallel`` around a sharded module, if the caller is inside of its constructor.

    Raises:
        FSDPTypeError: the caller is.
    """
    for frame in frames_from(sys._getframe()):
        if frame.f_code.co_filename == _DATA_PARALLEL and any(
            isinstance(self, nn.parallel.DistributedDataParallel) for self, _ in methods_of([frame])
        ):
            raise FSDPTypeError(
                "DistributedDataParallel got a model that fully_shard was called on, which averages its gradients "
                "over all ranks itself: leave DistributedDataParallel out. For replicas of shards pass a mesh of "
                "two dims, init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')), "
                "for replicas only, strategy='replicate'."
            )


def _name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")
