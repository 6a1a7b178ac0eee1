"""Training programs for `recording`: each a few iterations, with something that makes the engine take another path.

All run on one of several simulated ranks; `trace_of` runs one, once per session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, collectives, fully_shard
from fsdp2.state import state_of
from tests.harness.fake import fake_world
from tests.harness.models import FROZEN, PARTLY_USED, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.recording import Recorder, recording

STEPS = 4
WIDTH = 8


class Block(nn.Module):
    """Two linear layers with a residual; ``inside`` checkpoints them within the block."""

    def __init__(self, width: int, hidden: int, *, inside: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        """Shape kept."""
        return x + (checkpoint(self._layers, x, use_reentrant=False) if self.inside else self._layers(x))

    def _layers(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks between two linear layers; ``outside`` checkpoints every block as a whole."""

    def __init__(
        self, width: int = WIDTH, hidden: int = 11, *, blocks: int = 3, inside: bool = False, outside: bool = False
    ) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden, inside=inside) for _ in range(blocks))
        self.outputs = nn.Linear(width, 3)
        self.order: Sequence[int] = range(blocks)
        self.outside = outside
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, width); result: (batch, 3). Fails before the last block if ``fails``."""
        x = self.inputs(x)
        for index in self.order:
            if self.fails and index == len(self.blocks) - 1:
                raise _Expected
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return self.outputs(x)


class _Expected(Exception):
    """What scenarios raise on purpose."""


class Training:
    """A sharded model, its optimizer, and one iteration."""

    def __init__(
        self, recorder: Recorder, model: Stack | None = None, *, reshard_after_forward: bool | None = None
    ) -> None:
        self.recorder = recorder
        self.model = Stack() if model is None else model
        self.inputs = torch.ones(2, self.model.inputs.in_features)
        for unit in [*self.model.blocks, self.model]:
            fully_shard(unit, reshard_after_forward=reshard_after_forward)
        name_buffers(recorder, self.model)
        self.optimizer = adamw(self.model)

    def forward(self) -> Tensor:
        """The loss."""
        return self.model(self.inputs).square().sum()

    def update(self) -> None:
        """What comes after backward."""
        update(self.model, self.optimizer)

    def steps(self, number: int = STEPS) -> None:
        """Whole iterations."""
        for _ in range(number):
            self.recorder.mark("forward")
            loss = self.forward()
            self.recorder.mark("backward")
            loss.backward()
            self.recorder.mark("update")
            self.update()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The foreach form, as on devices."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip, step, drop the gradients; before that, give the buffers of the gradients their names."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def name_buffers(recorder: Recorder, model: nn.Module) -> None:
    """Let the recorder know which blocks are unsharded buffers: each gets the name of its module."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_Namer(recorder, name or "root"))


class _Namer:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __call__(self, module: nn.Module, args: object) -> None:
        for parameter in _own_parameters(module):
            self.recorder.name(parameter, self.name)


def _own_parameters(module: nn.Module) -> list[Tensor]:
    """Those of ``module`` and of submodules that are not sharded on their own."""
    found = list(module._parameters.values())
    for child in module.children():
        if not isinstance(child, FSDPModule):
            found += _own_parameters(child)
    return [parameter for parameter in found if parameter is not None]


# ---- scenarios: plain training of several models -------------------------------------------------------

Scenario = Callable[[Recorder], None]


def _train_case(case: ModelCase, recorder: Recorder) -> None:
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit)
    name_buffers(recorder, model)
    optimizer = adamw(model)
    for step in range(STEPS):
        recorder.mark("forward")
        loss = case.loss(model, case.batch(0, step, 0))
        recorder.mark("backward")
        loss.backward()
        recorder.mark("update")
        update(model, optimizer)


def plain(recorder: Recorder) -> None:
    """Nothing special."""
    Training(recorder).steps()


def direct(recorder: Recorder) -> None:
    """Parameters that are gathered in place, of rows that divide evenly and not."""
    Training(recorder, Stack(512, 514, blocks=2)).steps()


def never_resharded(recorder: Recorder) -> None:
    """Unsharded from forward to backward."""
    Training(recorder, reshard_after_forward=False).steps()


def root_resharded(recorder: Recorder) -> None:
    """The root's parameters are gathered again for backward."""
    Training(recorder, reshard_after_forward=True).steps()


def checkpointed_blocks(recorder: Recorder) -> None:
    """Whole blocks, hooks included, run again in backward."""
    Training(recorder, Stack(outside=True)).steps()


def checkpointed_layers(recorder: Recorder) -> None:
    """The layers in a block run again in backward."""
    Training(recorder, Stack(inside=True)).steps()


def two_dtypes(recorder: Recorder) -> None:
    """Two buffers per group."""
    model = Stack()
    for block in model.blocks:
        block.up.register_parameter("scale", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        block.up.register_forward_hook(lambda module, args, output: output * module.scale.sum().float())
    Training(recorder, model).steps()


# ---- scenarios: other iterations -----------------------------------------------------------------------


def accumulated_reduced(recorder: Recorder) -> None:
    """Two microbatches, both reduced: the second is added to `.grad`."""
    training = Training(recorder)
    for _ in range(STEPS):
        training.forward().backward()
        training.forward().backward()
        training.update()


def accumulated_unsharded(recorder: Recorder) -> None:
    """Two microbatches, of which only the last communicates."""
    training = Training(recorder)
    for _ in range(STEPS):
        for last in (False, True):
            training.model.set_requires_gradient_sync(last)
            training.forward().backward()
        training.update()


def accumulated_without_reshard(recorder: Recorder) -> None:
    """Parameters stay unsharded between the microbatches; the optimizer makes them stale."""
    training = Training(recorder)
    for _ in range(STEPS):
        for last in (False, True):
            training.model.set_reshard_after_backward(last)
            training.model.set_is_last_backward(last)
            training.forward().backward()
        training.update()
    training.model.set_reshard_after_backward(False)
    training.steps(2)


def two_forwards(recorder: Recorder) -> None:
    """Two forwards, then one backward of both."""
    training = Training(recorder)
    for _ in range(STEPS):
        (training.forward() + training.forward()).backward()
        training.update()


def interleaved(recorder: Recorder) -> None:
    """As in a pipeline: the second forward runs before the first backward."""
    training = Training(recorder)
    for _ in range(STEPS):
        first, second = training.forward(), training.forward()
        first.backward()
        second.backward()
        training.update()


def evaluated_between(recorder: Recorder) -> None:
    """A forward without gradients before and after each training step."""
    training = Training(recorder)
    for _ in range(STEPS):
        with torch.no_grad():
            training.forward()
        training.steps(1)
        training.forward()  # with gradients on, but no backward


def reduced_late(recorder: Recorder) -> None:
    """Reductions stay in flight after the first backward."""
    training = Training(recorder)
    for _ in range(STEPS):
        for last in (False, True):
            training.model.set_is_last_backward(last)
            training.forward().backward()
        training.update()


def two_reduces_in_flight(recorder: Recorder) -> None:
    """More overlap than by default, and groups whose second reduction finds their first still under way."""
    training = Training(recorder, Stack(blocks=1))
    training.forward()
    root = state_of(training.model).root  # type: ignore[union-attr]
    root.comm.max_pending_reduces = 2  # type: ignore[union-attr]
    for _ in range(STEPS):
        for last in (False, True):
            training.model.set_is_last_backward(last)
            training.forward().backward()
        training.update()


def order_changes(recorder: Recorder) -> None:
    """What was gathered ahead is not always used."""
    training = Training(recorder)
    for order in ([0, 1, 2], [2, 1, 0], [2, 1], [0, 1, 2], [1, 0, 1, 2], [0, 1, 2]):
        training.model.order = order
        training.steps(1)


def used_twice(recorder: Recorder) -> None:
    """Every block runs twice in a forward."""
    training = Training(recorder)
    training.model.order = [0, 1, 2, 0, 1, 2]
    training.steps()


def unsharded_by_hand(recorder: Recorder) -> None:
    """`unshard(async_op=True)` before the forward, `reshard()` after it, and once without any forward."""
    training = Training(recorder)
    for step in range(STEPS):
        handles = [block.unshard(async_op=True) for block in training.model.blocks]
        for handle in handles[step % 2 :]:
            handle.wait()  # the others are waited for by the forward
        loss = training.forward()
        training.model.reshard()
        loss.backward()
        training.update()
        training.model.unshard()
        training.model.reshard()
        training.model.blocks[0].unshard(async_op=True)
        training.model.blocks[0].reshard()


def block_called_alone(recorder: Recorder) -> None:
    """A group is used outside the root's forward, as with a chunked loss, after its parameters were written."""
    training = Training(recorder)
    training.forward()
    for _ in range(STEPS):
        loss = training.forward()
        loss = loss + training.model.blocks[1](training.inputs).sum()
        loss.backward()
        training.update()
        with torch.no_grad():
            training.model.blocks[2](training.inputs)


def gradients_kept(recorder: Recorder) -> None:
    """The user holds gradients beyond `zero_grad` and reads them later."""
    training = Training(recorder)
    kept: list[Tensor] = []
    for _ in range(STEPS):
        training.forward().backward()
        for gradient in kept:
            gradient.add_(1.0)
        kept = [p.grad.to_local() for p in training.model.parameters()]  # type: ignore[union-attr]
        training.update()


def stepped_in_backward(recorder: Recorder) -> None:
    """An optimizer per parameter, which steps as soon as its gradient has been reduced."""
    training = Training(recorder)
    for parameter in training.model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=True)
        parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad()))  # type: ignore[arg-type,misc]
    for _ in range(STEPS):
        training.forward().backward()


# ---- scenarios: failures and replacements --------------------------------------------------------------


def forward_fails(recorder: Recorder) -> None:
    """A forward raises; a reduction may still be in flight; then clean steps."""
    training = Training(recorder)
    for _ in range(2):
        training.steps(2)
        training.model.set_is_last_backward(False)
        training.forward().backward()
        training.model.set_is_last_backward(True)
        training.model.fails = True
        with suppress(_Expected):
            training.forward()
        training.model.fails = False
        training.optimizer.zero_grad()
    training.steps(2)


def backward_fails(recorder: Recorder) -> None:
    """A backward raises while a reduction is in flight; then clean steps."""
    training = Training(recorder)
    for fails_at in (0, 1):
        training.steps(2)
        calls = count()

        def fail(gradient: Tensor) -> None:
            raise _Expected

        handle = training.model.blocks[fails_at].register_forward_hook(
            lambda module, args, output, fail=fail: output.register_hook(fail) and None  # type: ignore[misc]
        )
        with suppress(_Expected):
            training.forward().backward()
        handle.remove()
        assert next(calls) == 0
        training.optimizer.zero_grad()
    training.steps(2)


def parameters_replaced(recorder: Recorder) -> None:
    """The user loads with `assign=True`, and freezes and unfreezes, while a reduction may be in flight."""
    training = Training(recorder)
    for _ in range(2):
        training.steps(2)
        state = {name: value.detach().clone() for name, value in training.model.state_dict().items()}
        training.model.load_state_dict(state, assign=True)
        training.steps(2)
        training.model.blocks[1].up.bias.requires_grad_(False)  # type: ignore[union-attr]
        training.steps(1)
        training.model.blocks[1].up.bias.requires_grad_(True)  # type: ignore[union-attr]
        training.model.set_is_last_backward(False)
        training.forward().backward()
        training.model.set_is_last_backward(True)
        training.model.blocks[1].up.bias.requires_grad_(False)  # type: ignore[union-attr]
        training.forward().backward()
        training.model.blocks[1].up.bias.requires_grad_(True)  # type: ignore[union-attr]
        training.update()


def converted(recorder: Recorder) -> None:
    """`module.to(dtype)` and back."""
    training = Training(recorder)
    training.steps(2)
    training.model.double()
    training.inputs = training.inputs.double()
    training.optimizer = adamw(training.model)
    training.steps(2)


def root_taken_over(recorder: Recorder) -> None:
    """A block ran first and became a root; `reset_iter_state` puts the whole model in its place."""
    training = Training(recorder)
    training.model.blocks[0](training.inputs).sum().backward()
    training.model.reset_iter_state()
    training.steps()


def reduce_fails(recorder: Recorder) -> None:
    """A reduction raises after it has packed (out of memory, say); then clean steps."""
    training = Training(recorder)
    training.steps(2)
    original = collectives.reduce_scatter_mean

    def fail(*args: object, **kwargs: object) -> None:
        collectives.reduce_scatter_mean = original
        raise _Expected

    collectives.reduce_scatter_mean = fail  # type: ignore[assignment]
    with suppress(_Expected):
        training.forward().backward()
    training.optimizer.zero_grad()
    training.steps(2)


CASES = {case.name: case for case in (TRANSFORMER, UNEVEN_MLP, TIED, FROZEN, PARTLY_USED)}
PROGRAMS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        plain, direct, never_resharded, root_resharded, checkpointed_blocks, checkpointed_layers, two_dtypes,
        accumulated_reduced, accumulated_unsharded, accumulated_without_reshard, two_forwards, interleaved,
        evaluated_between, reduced_late, two_reduces_in_flight, order_changes, used_twice, unsharded_by_hand,
        block_called_alone, gradients_kept, stepped_in_backward, forward_fails, backward_fails, parameters_replaced,
        converted, root_taken_over, reduce_fails,
    )
}  # fmt: skip
SCENARIOS = (*CASES, *PROGRAMS)


@cache
def trace_of(scenario: str, *, world_size: int = 4, rank: int = 1) -> Recorder:
    """Run ``scenario`` and return what was recorded."""
    with fake_world(world_size, rank), recording() as recorder:
        if scenario in CASES:
            _train_case(CASES[scenario], recorder)
        else:
            PROGRAMS[scenario](recorder)
    return recorder
