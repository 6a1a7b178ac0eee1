"""`accumulate`: gradients of several microbatches, reduced with the last: the setters that it takes, as one block."""

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
    """A block for the forward and backward of one microbatch of several, of which the ``last`` reduces the sum.

        for index, batch in enumerate(microbatches):
            with fsdp2.accumulate(model, last=index == len(microbatches) - 1):
                (loss_of(model, batch) / len(microbatches)).backward()
        optimizer.step()

    All sharded modules at and below ``module`` take part, those too whose parameters only the last microbatch uses, or
    only an earlier one. What belongs to modules elsewhere does not: weights tied to theirs are reduced by each
    microbatch, to the same sum. The settings of before are back after the block, also after an exception. Blocks nest:
    a microbatch is the last if it is for all of them, or `set_requires_gradient_sync` had no reductions before.

    All ranks must enter the same blocks. No communication by itself.

    Args:
        module: any; sharded itself, or containing sharded ones.
        last: whether this is the last microbatch.
        kept: what waits between microbatches. ``"unsharded"``: whole gradients, without communication; memory of the
            model's size in the dtype that they add up in. ``"sharded"``: each microbatch is reduce-scattered, and with
            replicas (HSDP) the last one all-reduces the sum.

    Raises:
        FSDPTypeError, FSDPValueError: another kind of argument.
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
    below = set(states)  # a group that others own has gradients of other modules
    return list(dict.fromkeys(group for state in states for group in state.unit if group.sharers[0] in below))


@contextmanager
def _accumulating(groups: list[FSDPParamGroup], last: bool, kept: Kept) -> Iterator[None]:
    before = [(group, _synchronization(group.settings)) for group in groups]
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
