"""A small model that can take every path of the engine, and its training under a `Recorder`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, full_parameters, fully_shard
from tests.harness.models import ModelCase
from tests.harness.recording.recorder import COMPUTE, Recorder

STEPS = 4
"""Of a scenario: from the second on, orders are known and buffers are used again."""

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""Marks in the trace of every whole step."""

ROOT = "root"


class Expected(Exception):
    """What scenarios raise on purpose."""


class Block(nn.Module):
    """Two linear layers with a residual; ``inside`` checkpoints them within the block."""

    def __init__(self, width: int, hidden: int, *, inside: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, width), and so is the result."""
        return x + (checkpoint(self._layers, x, use_reentrant=False) if self.inside else self._layers(x))

    def _layers(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks between two linear layers.

    Args:
        width: also of the inputs.
        hidden: of the blocks; by default nothing divides evenly among four ranks.
        blocks: how many.
        inside: every block checkpoints its layers.
        outside: every block is checkpointed as a whole.

    Attributes:
        order: in which blocks run; each may run any number of times.
        fails: forward raises `Expected` before the last block.
    """

    def __init__(
        self, width: int = 8, hidden: int = 11, *, blocks: int = 3, inside: bool = False, outside: bool = False
    ) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden, inside=inside) for _ in range(blocks))
        self.outputs = nn.Linear(width, 3)
        self.outside = outside
        self.order: Sequence[int] = range(blocks)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, width); result: (batch, 3)."""
        x = self.inputs(x)
        for index in self.order:
            if self.fails and index == len(self.blocks) - 1:
                raise Expected
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return self.outputs(x)


class _Switch(torch.autograd.Function):
    """Go on on another stream, and in backward go back; ``waits``: each time for what the last one has done."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, recorder: Recorder, stream: int, waits: bool, held: list[Tensor]
    ) -> Tensor:
        """``x``, there."""
        ctx.recorder, ctx.before, ctx.waits, ctx.held = recorder, recorder.stream, waits, held
        _go_on(recorder, stream, waits)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """``gradient``, here, whose memory autograd keeps from others until this stream has read it."""
        _go_on(ctx.recorder, ctx.before, ctx.waits)
        ctx.held.append(gradient)
        return gradient, None, None, None, None


def _go_on(recorder: Recorder, stream: int, waits: bool) -> None:
    before, recorder.stream = recorder.stream, stream
    if waits:
        recorder.wait(stream, before, "the program")


class Branches(Stack):
    """Four blocks in two branches, the second of which computes on a stream of its own, as the user's code has it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(blocks=4)
        self._recorder = recorder
        self._stream = next(recorder.new_streams)
        self._held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """The blocks of the branches run by turns, and so do their backwards."""
        self._held.clear()
        here = other = self.inputs(x)
        for index in (0, 2):
            other = _Switch.apply(other, self._recorder, self._stream, index == 0, self._held)
            other = self.blocks[index](other)
            other = _Switch.apply(other, self._recorder, COMPUTE, index == 2, self._held)
            here = self.blocks[index + 1](here)
        return self.outputs(here + other)


@dataclass(slots=True)
class Training:
    """A sharded model, its loss on a fixed batch, and its optimizer.

    Attributes:
        model: an `FSDPModule` and, from `of_stack`, a `Stack`.
        clips: updates clip gradients, which torch does for parameters on one mesh only.
    """

    recorder: Recorder
    model: Any
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer
    clips: bool = True

    @staticmethod
    def of_stack(recorder: Recorder, model: Stack | None = None, **options: Any) -> Training:
        """Shard the blocks of ``model`` and the rest, with ``options`` of `fully_shard`."""
        model = model or Stack()
        for unit in [*model.blocks, model]:
            fully_shard(unit, **options)
        width = model.inputs.in_features
        batch = torch.ones(2, width)
        return Training.of(recorder, model, lambda: model(batch.to(model.inputs.weight.dtype)).square().sum())

    @staticmethod
    def of_case(recorder: Recorder, case: ModelCase) -> Training:
        """Shard the units of ``case``; all steps see the same batch."""
        model = case.build()
        for unit in case.units(model):
            fully_shard(unit)
        batch = case.batch(seed=0, step=0, rank=0)
        return Training.of(recorder, model, lambda: case.loss(model, batch))

    @staticmethod
    def of(recorder: Recorder, model: nn.Module, loss: Callable[[], Tensor]) -> Training:
        """Of a model that is sharded already."""
        name_unsharded(recorder, model)
        return Training(recorder, model, loss, adamw(model))

    def update(self) -> None:
        """What comes after backward: clip, step, drop the gradients."""
        name_gradients(self.recorder, self.model)
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def start_over(self) -> None:
        """After an exception: drop the iteration and go on, with something else at first."""
        self.model.reset_iter_state()
        self.optimizer.zero_grad()
        torch.ones(100)

    def steps(self, number: int = STEPS) -> None:
        """Whole iterations, with marks."""
        for _ in range(number):
            self.recorder.mark(FORWARD)
            loss = self.loss()
            self.recorder.mark(BACKWARD)
            loss.backward()
            self.recorder.mark(UPDATE)
            self.update()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The foreach form, as on devices."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)


# ---- names of buffers ------------------------------------------------------------------------------------


def name_unsharded(recorder: Recorder, model: nn.Module) -> None:
    """Let ``recorder`` know every unsharded buffer by the name of its module, from the module's first forward on."""
    for name, module in _sharded_modules(model):

        def name_now(module: nn.Module, args: object, name: str = name) -> None:
            for parameter in _own_parameters(module):
                recorder.name(parameter, name)

        module.register_forward_pre_hook(name_now)


def name_gradients(recorder: Recorder, model: nn.Module) -> None:
    """Let ``recorder`` know the buffer that every group's reduced gradients lie in now: see `gradients_of`."""
    for name, module in _sharded_modules(model):
        for parameter in _own_parameters(module):
            if parameter.grad is not None:
                recorder.name(parameter.grad, gradients_of(name))


def gradients_of(name: str) -> str:
    """What the sharded-gradient buffer of the group of module ``name`` is called."""
    return f"gradients of {name}"


def _sharded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name or ROOT, module


def _own_parameters(module: nn.Module) -> list[Tensor]:
    """Those of ``module`` and of its submodules that are not sharded on their own."""
    found = [parameter for parameter in module._parameters.values() if parameter is not None]
    for child in module.children():
        if not isinstance(child, FSDPModule):
            found += _own_parameters(child)
    return found


def write_whole(training: Training) -> None:
    """Write to all parameters while they are whole."""
    with torch.no_grad(), full_parameters(training.model):
        for parameter in training.model.parameters():
            parameter.add_(0.01)
