"""Scenarios in which something goes wrong, or the user changes what was sharded. A part of `scenarios`."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fsdp2.core.transport import Native
from tests.harness.recording.recorder import Recorder
from tests.harness.recording.training import Expected, Training, adamw

train = Training.of_stack

# ---- failures ----------------------------------------------------------------------------------------------


def forward_fails(recorder: Recorder) -> None:
    """A forward raises while a block is gathered ahead and a reduction is in flight; then clean steps."""
    training = train(recorder)
    for _ in range(2):
        training.steps(2)
        training.model.set_is_last_backward(False)
        training.loss().backward()
        training.model.set_is_last_backward(True)
        training.model.fails = True
        with suppress(Expected):
            training.loss()
        training.model.fails = False
        training.optimizer.zero_grad()
    training.steps(2)


def _collective_fails(recorder: Recorder, function: str) -> None:
    training = train(recorder)
    training.steps(2)
    for successes in (0, 2):
        issue, calls = getattr(Native, function), list[object]()

        def fails(*args: Any, issue: Any = issue, calls: list[object] = calls, successes: int = successes) -> None:
            calls.append(None)
            if len(calls) > successes:
                raise Expected
            issue(*args)

        with mock.patch.object(Native, function, fails), suppress(Expected):
            training.loss().backward()
        training.optimizer.zero_grad()
        training.steps(1)
    training.steps(1)


def gather_fails(recorder: Recorder) -> None:
    """An all-gather raises (out of memory, say), the first and the third of a forward; then clean steps."""
    _collective_fails(recorder, "all_gather")


def reduce_fails(recorder: Recorder) -> None:
    """A reduction raises after it has packed, the first and the third of a backward; then clean steps."""
    _collective_fails(recorder, "reduce_scatter")


# ---- replacements --------------------------------------------------------------------------------------------


def root_taken_over(recorder: Recorder) -> None:
    """A block ran first and became a root; `reset_iter_state` puts the whole model in its place."""
    training = train(recorder)
    training.model.blocks[0](torch.ones(2, 8)).sum().backward()
    training.model.reset_iter_state()
    training.steps()


def assigned(recorder: Recorder) -> None:
    """`load_state_dict(assign=True)` replaces the sharded parameters."""
    training = train(recorder)
    for _ in range(2):
        training.steps(2)
        training.model.load_state_dict(_copied_state(training.model), assign=True)
    training.steps(2)


def _copied_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def replaced(recorder: Recorder) -> None:
    """The user registers another sharded parameter in the place of one."""
    training = train(recorder)
    for _ in range(2):
        training.steps(2)
        for layer in (training.model.inputs, training.model.blocks[1].up):
            layer.bias = nn.Parameter(layer.bias.detach().clone())
        training.optimizer = adamw(training.model)
    training.steps(2)


def replaced_in_flight(recorder: Recorder) -> None:
    """Another parameter is registered while the reduction of its group is in flight, to be added to `.grad`."""
    training = train(recorder)
    for layer in (training.model.blocks[0].up, training.model.inputs):
        training.steps(2)
        training.loss().backward()
        training.model.set_is_last_backward(False)
        training.loss().backward()
        training.model.set_is_last_backward(True)
        layer.bias = nn.Parameter(layer.bias.detach().clone())
        training.loss().backward()
        training.optimizer = adamw(training.model)
        training.update()
    training.steps(2)


def frozen_and_unfrozen(recorder: Recorder) -> None:
    """Parameters change `requires_grad`, also while the reduction of their group is in flight."""
    training = train(recorder)
    for parameter in (training.model.blocks[1].up.bias, training.model.inputs.bias):
        training.steps(2)
        for trainable in (False, True):
            training.model.set_is_last_backward(False)
            training.loss().backward()
            training.model.set_is_last_backward(True)
            parameter.requires_grad_(trainable)
            training.steps(1)


def converted(recorder: Recorder) -> None:
    """`module.double()`."""
    training = train(recorder)
    training.steps(2)
    training.model.double()
    training.optimizer = adamw(training.model)
    training.steps(2)


def deleted_in_flight(recorder: Recorder) -> None:
    """A model is dropped, once with a reduction in flight, once with an all-gather; then another is trained."""
    for reduces in (True, False):
        training = train(recorder)
        training.steps(2)
        if reduces:
            training.model.set_is_last_backward(False)
            training.loss().backward()
        else:
            training.model.blocks[0].unshard(async_op=True)
        del training
        gc.collect()
    train(recorder).steps(1)


MISHAPS = (
    forward_fails, gather_fails, reduce_fails, root_taken_over, assigned,
    replaced, replaced_in_flight, frozen_and_unfrozen, converted, deleted_in_flight,
)  # fmt: skip
