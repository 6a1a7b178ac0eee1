"""`python -m benchmarks.programs`: whole steps of programs as people write them, under torch's `fully_shard` and ours.

What a benchmark of the plain step does not show: models that are frozen in turns, gradients that the program reads or
writes, several backwards for a step. On the fake process group, so that no figure contains communication. Calls of
Python functions and built-in ones are exact; times are CPU times of the calling thread, and ratios are taken within a
repetition. Each program does the same under both, with no line changed but the import (and, of ours,
`fsdp2.compat.install()` for torch's clipping).
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.counts import PythonCallCounter
from benchmarks.host_time import garbage_collector_off
from benchmarks.implementations import SHARDING_MODULES, clipping_of, fake_process_group
from benchmarks.samples import spread
from benchmarks.tables import Table

BLOCKS, LAYERS, DIM = 8, 6, 16
WARM_UP_STEPS = 6
Step = Callable[[], None]


class Block(nn.Sequential):
    """Linear layers, recomputed in backward if ``recomputes``."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__(*(nn.Linear(DIM, DIM) for _ in range(LAYERS)))
        self.recomputes = recomputes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        below = super().forward
        return checkpoint(below, inputs, use_reentrant=False) if self.recomputes else below(inputs)


@dataclass(frozen=True, slots=True)
class Library:
    """What a program imports.

    Attributes:
        name: of the implementation.
    """

    name: str

    def model(
        self, *, recomputes: bool = False, trains: Callable[[str], bool] | None = None, **dtypes: torch.dtype
    ) -> Any:
        """`BLOCKS` sharded blocks and their root.

        Args:
            recomputes: whether blocks are activation checkpoints.
            trains: whether a parameter does, by its name; None: all do.
            dtypes: of the `MixedPrecisionPolicy`, if there is one.
        """
        library = importlib.import_module(SHARDING_MODULES[self.name])
        options = {"mp_policy": library.MixedPrecisionPolicy(**dtypes)} if dtypes else {}
        model = nn.Sequential(*(Block(recomputes) for _ in range(BLOCKS)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains is None or trains(name))
        for block in model:
            library.fully_shard(block, **options)
        return library.fully_shard(model, **options)


def loss_of(model: nn.Module) -> torch.Tensor:
    """Of one forward."""
    return torch.as_tensor(model(torch.ones(2, DIM, requires_grad=True)).sum())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Over the parameters that train."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])


def _ordinary(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[nn.Module], torch.Tensor] = loss_of,
    with_gradients: Callable[[nn.Module], object] = lambda model: None,
    after: Callable[[], object] = lambda: None,
    keeps_zeros: bool = False,
    backwards: int = 1,
) -> Step:
    """Backwards, something that is done with the gradients, the optimizer's step, something after it."""
    made = adamw(model) if optimizer is None else optimizer

    def step() -> None:
        for _ in range(backwards):
            loss(model).backward()
        with_gradients(model)
        made.step()
        made.zero_grad(set_to_none=not keeps_zeros)
        after()

    return step


def plain(library: Library) -> Step:
    return _ordinary(library.model())


def zeros(library: Library) -> Step:
    return _ordinary(library.model(), keeps_zeros=True)


def mixed_precision(library: Library) -> Step:
    return _ordinary(library.model(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def two_groups(library: Library) -> Step:
    model = library.model()
    groups = [[each for each in model.parameters() if (each.dim() > 1) is decays] for decays in (True, False)]
    parts = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    return _ordinary(model, optimizer=torch.optim.AdamW(parts))


def few_train(library: Library) -> Step:
    return _ordinary(library.model(trains=lambda name: name.endswith("bias")))


def recomputed(library: Library) -> Step:
    return _ordinary(library.model(recomputes=True))


def accumulated(library: Library) -> Step:
    return _ordinary(library.model(), backwards=4)


def without_sync(library: Library) -> Step:
    model = library.model()
    optimizer = adamw(model)

    def step() -> None:
        for index in range(4):
            model.set_requires_gradient_sync(index == 3)
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clipped(library: Library) -> Step:
    clip = clipping_of(library.name)
    return _ordinary(library.model(), with_gradients=lambda model: clip(model.parameters(), 1.0))


def norms_are_read(library: Library) -> Step:
    return _ordinary(library.model(), with_gradients=lambda model: [each.grad.norm() for each in model.parameters()])


def written(library: Library) -> Step:
    return _ordinary(library.model(), with_gradients=lambda model: [each.grad.mul_(0.5) for each in model.parameters()])


def replaced(library: Library) -> Step:
    def halve(model: nn.Module) -> None:
        for each in model.parameters():
            assert each.grad is not None
            each.grad = each.grad * 0.5

    return _ordinary(library.model(), with_gradients=halve)


def scaled(library: Library) -> Step:
    model = library.model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def averaged(library: Library) -> Step:
    model = library.model()
    averages = [each.detach().clone() for each in model.parameters()]

    def follow() -> None:
        with torch.no_grad():
            for average, each in zip(averages, model.parameters(), strict=True):
                average.lerp_(each.detach(), 0.1)

    return _ordinary(model, after=follow)


def evaluated(library: Library) -> Step:
    model = library.model()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            loss_of(model)
        model.train()

    return _ordinary(model, after=evaluate)


def two_forwards(library: Library) -> Step:
    return _ordinary(library.model(), loss=lambda model: loss_of(model) + loss_of(model))


def frozen_in_turns(library: Library) -> Step:
    maker, judge = library.model(), library.model()
    optimizers = adamw(maker), adamw(judge)

    def step() -> None:
        for trains, optimizer in zip((False, True), optimizers, strict=True):
            judge.requires_grad_(trains)
            made = maker(torch.ones(2, DIM))
            judge(made.detach() if trains else made).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def stepped_in_backward(library: Library) -> Step:
    model = library.model()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(hook)
    return lambda: loss_of(model).backward()


PROGRAMS: dict[str, Callable[[Library], Step]] = {
    "AdamW": plain,
    "zero_grad(set_to_none=False)": zeros,
    "bf16, reduced in fp32": mixed_precision,
    "two parameter groups": two_groups,
    "only biases train": few_train,
    "activation checkpointing": recomputed,
    "4 backwards, each reduced": accumulated,
    "4 backwards, the last reduced": without_sync,
    "clip_grad_norm_": clipped,
    "the norm of each gradient is read": norms_are_read,
    "gradients are written in place": written,
    "gradients are replaced": replaced,
    "SGD, GradScaler": scaled,
    "an average of the weights, by hand": averaged,
    "a forward without gradients after it": evaluated,
    "two forwards, one backward": two_forwards,
    "two models, one frozen in turns": frozen_in_turns,
    "SGD per parameter, in backward": stepped_in_backward,
}
"""What a step does -> how it is made."""


def calls_of(step: Step) -> int:
    """Of Python functions and built-in ones, in one step after some."""
    for _ in range(WARM_UP_STEPS):
        step()
    counter = PythonCallCounter()
    with garbage_collector_off(), counter:
        step()
    return counter.calls


def _seconds(steps: Sequence[Step], repetitions: int) -> Iterator[list[float]]:
    for _ in range(repetitions):
        found = []
        for step in steps:
            start = time.thread_time()
            step()
            found.append(time.thread_time() - start)
        yield found


def measure(names: Sequence[str], *, world_size: int, repetitions: int) -> str:
    """The table as text."""
    table = Table(
        f"A step of {BLOCKS} blocks of {LAYERS} layers, fake process group of {world_size}, torch {torch.__version__}; "
        f"ratios of CPU time: median [quartiles] of {repetitions} interleaved repetitions",
        ["", *(f"calls, {name}" for name in SHARDING_MODULES), "fsdp2/torch", "CPU time, fsdp2/torch"],
    )
    for name in names:
        with fake_process_group(world_size):
            steps = [PROGRAMS[name](Library(each)) for each in SHARDING_MODULES]
            calls = dict(zip(SHARDING_MODULES, map(calls_of, steps), strict=True))
            with garbage_collector_off():
                times = list(_seconds(steps, repetitions))
        ratios = [ours / theirs for theirs, ours in times]
        cells = (str(calls["torch"]), str(calls["fsdp2"]), f"{calls['fsdp2'] / calls['torch']:.2f}")
        table.add(name, *cells, spread(ratios, digits=2))
    return table.render()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME", help="programs")
    parser.add_argument("--world-size", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--repetitions", type=int, default=20, help="interleaved timed steps (default: 20)")
    options = parser.parse_args(arguments)
    print(measure(options.only, world_size=options.world_size, repetitions=options.repetitions))


if __name__ == "__main__":
    main()
