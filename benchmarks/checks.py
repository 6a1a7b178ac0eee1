"""`python -m benchmarks.checks`: what each check of a step costs, and what would be left without any of them.

One model under fsdp2, on the fake process group; a repetition runs a step with every check, one without each, and one
without any, in an order that rotates, beside torch's `fully_shard` and the unsharded model. A step of the same model
that is not measured comes right before each, for caches forget what another has not touched. CPU time of forward and
backward; differences are taken within a repetition. A check is left out by putting a function in its place that says
at once that nothing has changed: no program should do that.

What any implementation needs, whatever it does, is the row `HOOKS_ALONE`: the unsharded model with a hook where each
group's forward and backward begin and end, in which parameters are registered and gradients taken and set, and nothing
else happens.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.host_time import FORWARD_AND_BACKWARD, WARM_UP_STEPS, garbage_collector_off
from benchmarks.implementations import UNSHARDED, ShardingOptions, fake_process_group
from benchmarks.models import SMALL_PARAMETERS, StackedBlocks
from benchmarks.step import Phase, Trainer
from benchmarks.tables import Table
from fsdp2.core.gather import GroupStorage
from fsdp2.core.gradients import GradientBucket, GradientBuffer
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import Registrations
from fsdp2.core.reduce import GradientReducer
from fsdp2.core.structure import Structure

Left = tuple[type[Any], str, Callable[..., Any]]


def _says(answer: object) -> Callable[..., Any]:
    return lambda *_: answer


CHECKS: dict[str, tuple[Left, ...]] = {
    "sharded parameters were replaced, frozen or moved": ((Registrations, "hold_sharded", _says(True)),),
    "sharded parameters were written since they were gathered": ((FSDPParamGroup, "written", _says((0, 0))),),
    "their .data was set": ((FSDPParamGroup, "refuse_set_data", _says(None)),),
    "unsharded parameters were replaced or frozen": ((Registrations, "hold_unsharded", _says(True)),),
    "unsharded parameters were written": ((GroupStorage, "changed", _says(None)),),
    "modules were added or replaced": ((Structure, "has_changed", _says(False)),),
    "a backward that no hook noticed left gradients": ((GradientReducer, "has_gradients", _says(False)),),
    "somebody keeps gradients of the last step": ((GradientBuffer, "is_free", _says(True)),),
    "users have hooks on parameters": (
        (GradientBucket, "_have_tensor_hooks", _says(False)),
        (GradientBucket, "_call_hooks", _says(None)),
    ),
}
"""What is looked for in every step -> what is put in the place of the look."""
ALL = "all of them"
HOOKS_ALONE = "unsharded, with hooks that do nothing"


class _EndOfBackward(torch.autograd.Function):
    """Identity on the input of a group, in whose backward the group's is over."""

    @staticmethod
    def forward(ctx: Any, hooks: HooksAlone, inputs: torch.Tensor) -> torch.Tensor:
        ctx.hooks = hooks
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.hooks.end_backward()
        return (None, *gradients)


class HooksAlone:
    """The hooks of one group that does nothing."""

    def __init__(self, module: nn.Module, owners: Sequence[nn.Module]) -> None:
        self._places = [
            (owner._parameters, name, parameter)
            for owner in owners
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward)

    def _register(self, *_: object) -> None:
        for mapping, name, parameter in self._places:
            mapping[name] = parameter

    def _begin_forward(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> Any:
        self._register()
        return _EndOfBackward.apply(self, *inputs) if inputs[0].requires_grad else None

    def _end_forward(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(self._register)
        self._register()

    def end_backward(self) -> None:
        """Take the gradients, set them."""
        self._register()
        gradients = []
        for _, _, parameter in self._places:
            gradients.append(parameter.grad)
            parameter.grad = None
        for (_, _, parameter), gradient in zip(self._places, gradients, strict=True):
            parameter.grad = gradient


def with_hooks_alone(model: StackedBlocks) -> None:
    """Hang such hooks on ``model``, for the groups that it is sharded in. Nothing ends the root's backward."""
    blocks = list(model.blocks)
    in_blocks = {module for block in blocks for module in block.modules()}
    HooksAlone(model, [module for module in model.modules() if module not in in_blocks])
    for block in blocks:
        HooksAlone(block, list(block.modules()))


@contextlib.contextmanager
def without(checks: Sequence[str]) -> Iterator[None]:
    """Leave ``checks`` out, while inside."""
    with contextlib.ExitStack() as stack:
        for check in checks:
            for owner, name, instead in CHECKS[check]:
                stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def _seconds(trainer: Trainer, left_out: Sequence[str]) -> float:
    for phase in (*FORWARD_AND_BACKWARD, Phase.ZERO_GRAD):
        trainer.run(phase)
    gc.collect()
    with without(left_out):
        start = time.thread_time()
        for phase in FORWARD_AND_BACKWARD:
            trainer.run(phase)
        seconds = time.thread_time() - start
    trainer.run(Phase.ZERO_GRAD)
    return seconds


def measure(repetitions: int, world_size: int) -> dict[str, list[float]]:
    """Seconds of forward and backward: of `UNSHARDED`, torch, fsdp2, without each check, and of `HOOKS_ALONE`."""
    with fake_process_group(world_size) as mesh:
        options = ShardingOptions(world_size=world_size)
        made = {
            name: Trainer(name, SMALL_PARAMETERS, mesh=mesh, options=options) for name in (UNSHARDED, "torch", "fsdp2")
        }
        made[HOOKS_ALONE] = with_hooks = Trainer(UNSHARDED, SMALL_PARAMETERS, mesh=mesh, options=options)
        assert isinstance(with_hooks.model, StackedBlocks)
        with_hooks_alone(with_hooks.model)
        for trainer in made.values():
            trainer.warm_up(WARM_UP_STEPS)
        contenders: dict[str, tuple[Trainer, Sequence[str]]] = {name: (each, ()) for name, each in made.items()}
        contenders |= {check: (made["fsdp2"], (check,)) for check in CHECKS}
        contenders[ALL] = (made["fsdp2"], tuple(CHECKS))
        names = list(contenders)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        with garbage_collector_off():
            for repetition in range(repetitions):
                first = repetition % len(names)
                for name in (*names[first:], *names[:first]):
                    seconds[name].append(_seconds(*contenders[name]))
    return seconds


def _table(seconds: dict[str, list[float]]) -> Table:
    groups = SMALL_PARAMETERS.groups
    pairs = {name: list(zip(each, seconds[UNSHARDED], strict=True)) for name, each in seconds.items()}
    over = {name: [mine - plain for mine, plain in each] for name, each in pairs.items()}

    def ratio(name: str) -> float:
        return statistics.median(mine / other for mine, other in zip(over[name], over["torch"], strict=True))

    table = Table(
        f"Forward and backward of {groups} groups of {SMALL_PARAMETERS.params_per_block} small parameters; "
        f"medians of {len(seconds['torch'])} interleaved steps",
        ["", "us per group", "over unsharded / torch's"],
        notes=["of a check: what a step takes less without it, and what it is then over the unsharded model"],
    )
    for name in (UNSHARDED, HOOKS_ALONE, "torch", "fsdp2"):
        us = 1e6 * statistics.median(seconds[name]) / groups
        table.add(name, f"{us:.0f}", "" if name == UNSHARDED else f"{ratio(name):.3f}")
    for name in (*CHECKS, ALL):
        less = [mine - without_it for mine, without_it in zip(seconds["fsdp2"], seconds[name], strict=True)]
        table.add(f"check: {name}", f"{1e6 * statistics.median(less) / groups:.1f}", f"{ratio(name):.3f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=100, help="interleaved steps of each (default: 100)")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    given = parser.parse_args(arguments)
    print(_table(measure(given.repetitions, given.world_size)).render())


if __name__ == "__main__":
    main()
