"""Training programs for `recording`: each a few iterations in which the engine takes another path.

All run on one of several simulated ranks; `record` runs one, once per session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import Owned, _torch, full_parameters, fully_shard, register_fsdp_forward_method
from tests.harness.fake import fake_world
from tests.harness.happens_before import TraceEvent
from tests.harness.models import FROZEN, PARTLY_USED, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.recording.meshes import MESHES
from tests.harness.recording.mishaps import MISHAPS
from tests.harness.recording.offload import OFFLOADED
from tests.harness.recording.recorder import Recorder, recording
from tests.harness.recording.settings import SETTINGS
from tests.harness.recording.training import STEPS, Branches, Stack, Training, write_whole

Scenario = Callable[[Recorder], None]
train = Training.of_stack

# ---- whole steps, several models -------------------------------------------------------------------------


def _case(case: ModelCase, recorder: Recorder) -> None:
    Training.of_case(recorder, case).steps()


def plain(recorder: Recorder) -> None:
    """Nothing special."""
    train(recorder).steps()


def direct(recorder: Recorder) -> None:
    """Parameters that are gathered in place, of rows that divide evenly and not."""
    train(recorder, Stack(512, 514)).steps()


def _owned_by_turns(parameter: nn.Parameter) -> Owned | None:
    """Of a `Stack`: matrices that are not square on rank 1, which records, square ones on rank 2; no biases."""
    if parameter.dim() < 2:
        return None
    return Owned(2 if parameter.shape[0] == parameter.shape[1] else 1)


def owned(recorder: Recorder, model: Stack | None = None, **options: Any) -> None:
    """Whole matrices on one rank, which are packed with the others."""
    train(recorder, model, shard_placement_fn=_owned_by_turns, **options).steps()


def never_resharded(recorder: Recorder) -> None:
    """Unsharded from forward to backward."""
    train(recorder, reshard_after_forward=False).steps()


def root_resharded(recorder: Recorder) -> None:
    """The root's parameters are gathered again for backward, like all others."""
    train(recorder, reshard_after_forward=True).steps()


def checkpointed_blocks(recorder: Recorder) -> None:
    """Whole blocks, hooks included, run again in backward."""
    train(recorder, Stack(outside=True)).steps()


def checkpointed_layers(recorder: Recorder) -> None:
    """The layers in a block run again in backward."""
    train(recorder, Stack(inside=True)).steps()


def two_dtypes(recorder: Recorder) -> None:
    """Two buffers per group."""
    model = Stack()
    for block in model.blocks:
        block.up.register_parameter("scale", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        block.up.register_forward_hook(lambda module, args, output: output * module.scale.sum().float())
    train(recorder, model).steps()


def one_group_for_both_ends(recorder: Recorder) -> None:
    """A group whose modules run first and last, and a root without a group."""
    model = Stack()
    fully_shard([model.inputs, model.outputs])
    train(recorder, model).steps()


def used_twice(recorder: Recorder) -> None:
    """Every block runs twice in a forward."""
    model = Stack()
    model.order = [0, 1, 2, 0, 1, 2]
    train(recorder, model).steps()


# ---- other iterations --------------------------------------------------------------------------------------


def accumulated_reduced(recorder: Recorder) -> None:
    """Two microbatches, both reduced: the second is added to `.grad`."""
    training = train(recorder)
    for _ in range(STEPS):
        training.loss().backward()
        training.loss().backward()
        training.update()


def accumulated_without_reshard(recorder: Recorder) -> None:
    """Parameters stay unsharded between the microbatches, and once over an optimizer step, which makes them stale."""
    training = train(recorder)
    for _ in range(STEPS):
        for last in (False, True):
            training.model.set_reshard_after_backward(last)
            training.loss().backward()
        training.update()
    training.model.set_reshard_after_backward(False)
    training.steps(2)


def several_reduces_in_flight(recorder: Recorder) -> None:
    """The last reductions of the first backward stay in flight."""
    training = train(recorder, Stack(blocks=1))
    training.model.set_reduce_scatter_max_input_buffers(3)
    for _ in range(STEPS):
        for last in (False, True):
            training.model.set_is_last_backward(last)
            training.loss().backward()
        training.update()


def unsharded_by_hand(recorder: Recorder) -> None:
    """`unshard(async_op=True)` before the forward, `reshard()` after it, and both without any forward."""
    training = train(recorder)
    root, blocks = training.model, training.model.blocks
    root.unshard()
    for step in range(STEPS):
        handles = [block.unshard(async_op=True) for block in blocks]
        for handle in handles[step % 2 :]:  # the forward waits for the others
            handle.wait()
        loss = training.loss()
        root.reshard()
        loss.backward()
        training.update()
        root.unshard()
        root.reshard()
        blocks[0].unshard(async_op=True)
        blocks[0].reshard()


def block_called_alone(recorder: Recorder) -> None:
    """A group is used outside the root's forward, as with a chunked loss, also after its parameters were written."""
    training = train(recorder)
    blocks, inputs = training.model.blocks, torch.ones(2, 8)
    training.loss()
    for _ in range(STEPS):
        (training.loss() + blocks[1](inputs).sum()).backward()
        training.update()
        with torch.no_grad():
            blocks[2](inputs)


def two_roots(recorder: Recorder) -> None:
    """One model computes on the output of another, in turns, as adversaries do."""
    generator, critic = train(recorder), train(recorder, Stack(width=3))
    for _ in range(STEPS):
        made = generator.model(torch.ones(2, 8))
        critic.model(made.detach()).sum().backward()
        critic.update()
        critic.model(made).sum().backward()
        critic.optimizer.zero_grad()
        generator.update()


def gradients_kept(recorder: Recorder) -> None:
    """The user holds gradients beyond `zero_grad` and writes to them later."""
    training = train(recorder)
    kept: list[Tensor] = []
    for _ in range(STEPS):
        training.loss().backward()
        for gradient in kept:
            gradient.add_(1.0)
        kept = [parameter.grad.to_local() for parameter in training.model.parameters()]
        training.update()


def two_streams(recorder: Recorder) -> None:
    """The user's own code computes on two streams: gradients belong to the one that their backward ran on."""
    train(recorder, Branches(recorder)).steps()


def written_whole(recorder: Recorder) -> None:
    """Whole parameters are written between steps, and whole gradients read while reductions are in flight."""
    training = train(recorder)
    for _ in range(STEPS):
        training.steps(1)
        write_whole(training)
        training.model.set_is_last_backward(False)
        training.loss().backward()
        with full_parameters(training.model, writeback=False, with_grads=True):
            pass
        training.model.set_is_last_backward(True)
        training.loss().backward()
        training.update()


class WrittenInside(Stack):
    """Writes some of its blocks at the start of its forward, as averages of weights do."""

    def forward(self, x: Tensor) -> Tensor:
        """The block that is gathered ahead by then stays as it is."""
        with torch.no_grad():
            for block in self.blocks[1:]:
                for parameter in block.parameters():
                    parameter.mul_(0.9)
        return super().forward(x)


def written_inside(recorder: Recorder) -> None:
    """Shards are written after the root's forward has begun, and gathered in it."""
    train(recorder, WrittenInside()).steps()


class TrainedInside(Stack):
    """Trains by itself, in a method that gathers like its forward."""

    def train_twice(self, x: Tensor, update: Callable[[], None]) -> None:
        """Two steps, as of two players of a game, of the blocks."""
        for _ in range(2):
            y = x
            for block in self.blocks:
                y = block(y)
            y.square().sum().backward()
            update()


def trained_inside(recorder: Recorder) -> None:
    """An optimizer steps after the root's method has begun, and blocks are gathered again in it."""
    model = TrainedInside()
    training = train(recorder, model)
    register_fsdp_forward_method(model, "train_twice")
    for _ in range(STEPS):
        model.train_twice(torch.ones(2, 8), training.update)


_CASES: dict[str, Scenario] = {
    case.name: partial(_case, case) for case in (TRANSFORMER, UNEVEN_MLP, TIED, FROZEN, PARTLY_USED)
}
_PROGRAMS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        plain, direct, never_resharded, root_resharded, checkpointed_blocks, checkpointed_layers, two_dtypes,
        one_group_for_both_ends, used_twice, accumulated_reduced, accumulated_without_reshard,
        several_reduces_in_flight, unsharded_by_hand, block_called_alone, two_roots, gradients_kept, two_streams,
        written_whole, written_inside, trained_inside, *MISHAPS,
    )
}  # fmt: skip
SCENARIOS: dict[str, Scenario] = {
    **_CASES,
    **_PROGRAMS,
    **MESHES,
    **SETTINGS,
    **OFFLOADED,
    "owned": owned,
    "owned_direct": lambda recorder: owned(recorder, Stack(512, 514)),
    "owned_on_neighbours": partial(owned, reshard_after_forward=2),
}
if not _torch.can_swap_memory:  # there is no pool
    SCENARIOS = {name: scenario for name, scenario in SCENARIOS.items() if not name.startswith("pooled")}


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """What is kept of a scenario: its trace, and the names of the blocks that have one. Compares by identity.

    Attributes:
        synchronizing: see `Recorder`.
    """

    trace: tuple[TraceEvent, ...]
    names: dict[int, str]
    synchronizing: tuple[tuple[str, tuple[str, ...]], ...] = ()


@cache
def record(scenario: str, *, world_size: int = 4, rank: int = 1) -> Recording:
    """Run ``scenario`` as rank ``rank`` of ``world_size``."""
    with fake_world(world_size, rank), recording() as recorder:
        SCENARIOS[scenario](recorder)
    return Recording(tuple(recorder.trace), recorder.blocks_named(), tuple(recorder.synchronizing))
