"""What happens beside training in a drawn program: evaluations, state dicts, failures, copies, unwrapping."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import fsdp2
from tests.harness.compare import assert_same
from tests.multi_rank.combinations.helpers.drawn.model import inputs
from tests.multi_rank.combinations.helpers.drawn.programs import Event

if TYPE_CHECKING:
    from tests.multi_rank.combinations.helpers.drawn.training import Sharded


class Mishap(Exception):
    """Raised on purpose."""


def happen(sharded: Sharded, event: Event) -> None:
    """Let the event happen. Called on all ranks."""
    action = event.action
    if action.startswith("load"):
        _load(sharded, action)
    elif action == "save":
        saved = sharded.model.state_dict()
        assert all(not isinstance(value, nn.Parameter) for value in saved.values())
    elif action == "reshard":
        for module in sharded.units[event.target]:
            module.reshard()
    elif action.startswith("unshard"):
        handle = sharded.units[event.target][0].unshard(async_op=action != "unshard")
        if action == "unshard_wait":
            handle.wait()
    elif action in ("eval", "inference"):
        _evaluate(sharded, event)
    elif action == "again":
        sharded.builder.wrap(sharded.model)
    elif action.startswith("copy"):
        _copy(sharded, goes_on=action == "copy_on")
    elif action == "unwrap":
        _unwrap(sharded, event)
    else:
        _fail(sharded, event)


def _evaluate(sharded: Sharded, event: Event) -> None:
    x, _, use = inputs(sharded.program, event.step, 9, 0, sharded.builder.data_rank)
    with torch.inference_mode() if event.action == "inference" else torch.no_grad():
        sharded.forward(x, use, event.step)


# ---- failures ------------------------------------------------------------------------------------


def _fail(sharded: Sharded, event: Event) -> None:
    """An exception on all ranks, in the forward or the backward of a block."""
    block = sharded.model.blocks[event.target]

    def fail(*args: object) -> None:
        raise Mishap

    x, y, use = inputs(sharded.program, event.step, 8, 0, sharded.builder.data_rank)
    skipped = sharded.program.model.skipped[event.step] == event.target
    with _hooked(block.feed, event.action, fail):
        try:
            F.mse_loss(sharded.forward(x, use, event.step).float(), y).backward()
        except Mishap:
            pass
        else:
            assert skipped or event.action == "fail_backward", "the mishap was lost"
    sharded.root.reset_iter_state()
    sharded.optimizer.zero_grad()


@contextlib.contextmanager
def _hooked(module: nn.Module, action: str, fail: Callable[..., None]) -> Iterator[None]:
    def forward_hook(module: nn.Module, args: Any, output: Any) -> None:
        if action == "fail_forward":
            fail()
        elif output.requires_grad:
            output.register_hook(fail)

    handle = module.register_forward_hook(forward_hook)
    try:
        yield
    finally:
        handle.remove()


# ---- state dicts ---------------------------------------------------------------------------------


def _load(sharded: Sharded, action: str) -> None:
    """Through a state dict, while the parameters hold something else."""
    model = sharded.model
    if action == "load_full":
        options = StateDictOptions(full_state_dict=True, strict=False)
        state = get_model_state_dict(model, options=options)
    else:
        state = model.state_dict()
    state = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in sharded.handles.values():
            parameter.mul_(0)
    if action == "load_full":
        _load_ragged(sharded, state)
        set_model_state_dict(model, state, options=options)
    else:
        model.load_state_dict(state, assign=action == "load_assign" and _may_replace(sharded))
    sharded.refresh()


def _load_ragged(sharded: Sharded, state: dict[str, Tensor]) -> None:
    """Takes out of ``state`` what torch cannot deal out, and loads it as docs/how-to/row-blocks.md says."""
    for name, parameter in sharded.model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, fsdp2.RaggedDTensor) and name in state:
            whole = state.pop(name)
            with torch.no_grad():
                parameter.copy_(fsdp2.RaggedDTensor.from_whole(whole, parameter.device_mesh, parameter.placements))


def _may_replace(sharded: Sharded) -> bool:
    """Optimizers lose an ignored parameter that is replaced, and every replaced one loses its hooks."""
    return sharded.model.own is None and not sharded.program.in_backward


# ---- copies, unwrapping --------------------------------------------------------------------------


class Left:
    """A sharded model that training has left: nothing may change it any more."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: value.clone() for name, value in self._values().items()}

    def _values(self) -> dict[str, Tensor]:
        values = {}
        for name, parameter in self._model.named_parameters():
            values[name] = _local(parameter.detach())
            if parameter.grad is not None:
                values[f"gradient of {name}"] = _local(parameter.grad)
        return values

    def check(self) -> None:
        """Compare with what it was when it was left."""
        assert_same("parameters of the model that was left", self._values(), self._before)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(sharded: Sharded, *, goes_on: bool) -> None:
    """A deep copy of model and optimizer; training goes on with it, or with the original."""
    sharded.rest()
    copied, optimizer = copy.deepcopy((sharded.model, sharded.optimizer))
    sharded.left.append(Left(sharded.model if goes_on else copied))
    if goes_on:
        if copied.own is not None:  # torch copies plain parameters without their gradients
            copied.own.grad = copy.deepcopy(sharded.model.own.grad)
        sharded.optimizer = optimizer
        sharded.take(copied)


def _unwrap(sharded: Sharded, event: Event) -> None:
    """To a plain model, which must be the reference's, and back, with the same optimizer."""
    is_told = event.target % 2 == 0
    fsdp2.unwrap(sharded.model, optimizers=[sharded.optimizer] if is_told else ())
    assert not any(isinstance(module, fsdp2.FSDPModule) for module in sharded.model.modules())
    sharded.compare_whole({name: value.detach() for name, value in sharded.model.named_parameters()})
    sharded.builder.wrap(sharded.model)
    sharded.take(sharded.model)
    sharded.prepare()
    sharded.repeat_settings(event.step)
