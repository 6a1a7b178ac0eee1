"""`inference`: forwards reuse the unsharded parameters of the forward before, as long as nobody writes weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from fsdp2.arguments import checked
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.several_roots import roots_of
from fsdp2.core.state import FSDPState, states_below
from fsdp2.errors import FSDPRuntimeError


@checked()
def inference(module: nn.Module) -> AbstractContextManager[None]:
    """A block in which forwards, without gradients, leave parameters unsharded for the forwards that follow.

    The first forward gathers each module once. Later ones communicate nothing, so ranks may run different numbers of
    them, once all ranks have run all modules. If weights are written (by an optimizer's step, by loading a state dict,
    by a copy in place into sharded parameters), the next forward gathers again, on all ranks. After the block, also
    after an exception, everything is resharded, and settings are as before.

    Memory: the whole model, unsharded, in the dtype that it computes in. Inside of the block ``module.parameters()``
    are the unsharded ones of modules that have run: do not write these. Enter it outside of forward and backward.

    Args:
        module: any; sharded itself, or containing sharded ones.

    Raises:
        FSDPTypeError: ``module`` is not a module.
        FSDPRuntimeError: nothing at or below ``module`` is sharded, or a forward or backward is running.
    """
    states = states_below(module)
    if not states:
        raise FSDPRuntimeError(
            f"inference() was given a {type(module).__name__} that contains no sharded module: call it on what "
            "fully_shard was called on, or on a module that contains it."
        )
    return _inferring(states)


@contextmanager
def _inferring(states: list[FSDPState]) -> Iterator[None]:
    for root in roots_of(states):
        recover_if_failed(root)
        if root.is_running():
            raise FSDPRuntimeError(
                f"inference() was entered inside of a forward or backward of {root.name}: enter it before or after."
            )
    before = [(state, state.reshard_after_forward) for state in states]
    outermost = [state for state in states if not state.attributes_outside]
    try:
        # A copy that is made inside of the block gets the settings of before the outermost block.
        for state in outermost:
            state.attributes_outside = {"reshard_after_forward": state.reshard_after_forward}
        for state in states:
            state.reshard_after_forward = False
        with torch.no_grad():
            yield
    finally:
        for state, reshards in before:
            state.reshard_after_forward = reshards
        for state in outermost:
            state.attributes_outside = {}
        for root in roots_of(states):
            recover_if_failed(root)
        for group in dict.fromkeys(group for state in states for group in state.unit):
            group.reshard()
