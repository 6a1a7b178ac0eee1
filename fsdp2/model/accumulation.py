"""`accumulate`: adds up the gradients of several microbatches and reduces them with the last, in place of setters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from torch import nn

from fsdp2.arguments import checked
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.options import GroupSettings
from fsdp2.core.state import states_below
from fsdp2.errors import FSDPRuntimeError

Kept = Literal["unsharded", "sharded"]


@checked()
def accumulate(module: nn.Module, *, last: bool, kept: Kept = "unsharded") -> AbstractContextManager[None]:
    """A block for the forward and backward of one of several microbatches; the ``last`` one reduces the sum.

        for index, batch in enumerate(microbatches):
            with fsdp2.accumulate(model, last=index == len(microbatches) - 1):
                (loss_of(model, batch) / len(microbatches)).backward()
        optimizer.step()

    All sharded modules at and below ``module`` take part, also those whose parameters only some of the microbatches
    use. Parameters of modules elsewhere do not: each microbatch reduces weights that are tied to theirs, which gives
    the same sum. After the block, also after an exception, the settings are as before. Blocks nest: a microbatch is
    the last if it is the last for all of them, unless `set_requires_gradient_sync` had turned reductions off before.

    All ranks must enter the same blocks. The block itself communicates nothing.

    Args:
        module: any; sharded itself, or containing sharded ones.
        last: whether this is the last microbatch.
        kept: what waits between microbatches. ``"unsharded"``: full gradients, without communication; they take
            memory of the model's size in the dtype that they add up in. ``"sharded"``: each microbatch is
            reduce-scattered, and with replicas (HSDP) the last one all-reduces the sum.

    Raises:
        FSDPTypeError, FSDPValueError: an argument is of another kind.
        FSDPRuntimeError: nothing at or below ``module`` is sharded.
    """
    return _accumulating(_groups_below(module), last, kept)


def _groups_below(module: nn.Module) -> list[FSDPParamGroup]:
    states = states_below(module)
    if not states:
        raise FSDPRuntimeError(
            f"accumulate() was given a {type(module).__name__} that contains no sharded module: call it on what "
            "fully_shard was called on, or on a module that contains it."
        )
    # A group with tied weights belongs to its first sharer. If that is elsewhere, it holds others' gradients too.
    below = set(states)
    return list(dict.fromkeys(group for state in states for group in state.unit if group.sharers[0] in below))


@contextmanager
def _accumulating(groups: list[FSDPParamGroup], last: bool, kept: Kept) -> Iterator[None]:
    before = [(group, _synchronization(group.settings)) for group in groups]
    # A copy that is made inside of the block gets the settings of before the outermost block.
    outermost = [group for group in groups if group.settings_outside is None]
    try:
        for group in outermost:
            group.settings_outside = group.settings
        for group, (reduces, all_reduces) in before:
            _synchronize(group, reduces and (last or kept == "sharded"), all_reduces and last)
        yield
    finally:
        for group, settings in before:
            _synchronize(group, *settings)
        for group in outermost:
            group.settings_outside = None


def _synchronization(settings: GroupSettings) -> tuple[bool, bool]:
    return settings.requires_gradient_sync, settings.requires_all_reduce


def _synchronize(group: FSDPParamGroup, reduces: bool, all_reduces: bool) -> None:
    settings = group.settings
    if _synchronization(settings) != (reduces, all_reduces):
        group.configure(dataclasses.replace(settings, requires_gradient_sync=reduces, requires_all_reduce=all_reduces))
