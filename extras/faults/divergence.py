"""Ranks that diverge while they train, in 42 ways: rank 1 does something that the others do not."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from extras.faults.model import ORDER, Net, Trained
from extras.torch_gaps.registry import Case, Trial

AREA = "Ranks that diverge"
WAYS: dict[str, tuple[Callable[[Trained, bool], None], int]] = {}
"""By name: what rank 1 (True) and the others (False) do, after a step that all have done; and how many ranks."""


class Named(Exception):
    """All as it should be: the error named ranks and modules, and the next step was right."""


class Ended(Exception):
    """A collective of the program's own was ended, as ranks waited in it that another one waits for."""


class Broke(Exception):
    """What rank 1 throws in some cases."""


def way(name: str, ranks: int = 2) -> Callable[[Callable[[Trained, bool], None]], Callable[[Trained, bool], None]]:
    """Register a way to diverge."""

    def register(function: Callable[[Trained, bool], None]) -> Callable[[Trained, bool], None]:
        WAYS[name] = function, ranks
        return function

    return register


def _running(name: str, ranks: int = 2, **attributes: object) -> None:
    """Rank 1 runs a model with other ``attributes``, in a step and in an evaluation."""

    def train(trained: Trained, is_other: bool) -> None:
        if is_other:
            _set(trained.model, attributes)
        try:
            trained.checked_loss().backward()
            trained.train()
        finally:
            _set(trained.model, {"order": ORDER, "checkpointed": (), "cut_after": None})

    def evaluate(trained: Trained, is_other: bool) -> None:
        if is_other:
            _set(trained.model, attributes)
        try:
            with torch.no_grad():
                trained.checked_loss()
        finally:
            _set(trained.model, {"order": ORDER, "checkpointed": (), "cut_after": None})

    WAYS[f"{name}, in a step"] = train, ranks
    WAYS[f"{name}, in an evaluation"] = evaluate, ranks


def _set(model: Net, attributes: dict[str, object]) -> None:
    for name, value in attributes.items():
        setattr(model, name, value)


_running("two blocks in another order", order=(0, 2, 1, 3))
_running("all blocks in reverse", order=ORDER[::-1])
_running("a block is skipped", order=(0, 1, 3))
_running("the first block is skipped", order=(1, 2, 3))
_running("a block runs twice", order=(0, 1, 1, 2, 3))
_running("an early exit", cut_after=1)
_running("two blocks in another order, 4 ranks", 4, order=(0, 2, 1, 3))


@way("a block is checkpointed")
def _checkpointed(trained: Trained, is_other: bool) -> None:
    trained.model.checkpointed = (1,) if is_other else ()
    trained.train()
    trained.model.checkpointed = ()


@way("a forward without its backward")
def _no_backward(trained: Trained, is_other: bool) -> None:
    loss = trained.loss()
    if not is_other:
        loss.backward()


@way("an evaluation more")
def _one_more(trained: Trained, is_other: bool) -> None:
    if is_other:
        trained.evaluate()
    trained.train()


@way("a step more, then the end")
def _left(trained: Trained, is_other: bool) -> None:
    trained.train()
    if is_other:
        trained.train()
    dist.barrier()


def _failing(name: str, where: str) -> None:
    def diverge(trained: Trained, is_other: bool) -> None:
        def fail(*_: object) -> None:
            if is_other:
                raise Broke

        block = trained.model.blocks[1]
        if where == "forward":
            handle = block.register_forward_hook(fail)
        elif where == "backward":
            handle = block.register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
        else:
            handle = None
        try:
            loss = trained.loss()
            if where == "loss":
                fail()
            loss.backward()
        except Broke:
            trained.model.zero_grad()
        finally:
            if handle is not None:
                handle.remove()
        trained.train()

    WAYS[name] = diverge, 2


_failing("an exception in a forward, and the next batch", "forward")
_failing("an exception in a backward, and the next batch", "backward")
_failing("an exception in the loss, and the next batch", "loss")


def _setting(name: str, *arguments: object, block: int | None = None, ranks: int = 2) -> None:
    def diverge(trained: Trained, is_other: bool) -> None:
        module = trained.model if block is None else trained.model.blocks[block]
        setter = trained.trial.api.method(module, name)
        if is_other:
            setter(*arguments)
        trained.train()
        trained.train()

    WAYS[f"{name}{arguments} while training"] = diverge, ranks


_setting("set_requires_gradient_sync", False)
_setting("set_reshard_after_forward", False, block=1)
_setting("set_reshard_after_backward", False)
_setting("set_gradient_divide_factor", 3.0, block=1)
_setting("set_force_sum_reduction_for_comms", True)
_setting("set_is_last_backward", False)
_setting("set_reduce_scatter_unused_params", True)
_setting("set_unshard_in_backward", False, block=0)
_setting("set_requires_all_reduce", False, ranks=4)


@way("a prefetch list")
def _prefetch(trained: Trained, is_other: bool) -> None:
    blocks = trained.model.blocks
    if is_other:
        trained.trial.api.method(blocks[0], "set_modules_to_forward_prefetch")([blocks[2], blocks[3]])
    try:
        trained.train()
    finally:
        trained.trial.api.method(blocks[0], "set_modules_to_forward_prefetch")([])


@way("a block is frozen while training")
def _frozen(trained: Trained, is_other: bool) -> None:
    if is_other:
        trained.model.blocks[1].requires_grad_(False)
    trained.train()


@way("a block is converted while training")
def _converted(trained: Trained, is_other: bool) -> None:
    if is_other:
        trained.model.blocks[1].bfloat16()
    trained.loss().backward()


@way("an unshard() by hand")
def _unsharded(trained: Trained, is_other: bool) -> None:
    if is_other:
        trained.trial.api.method(trained.model.blocks[2], "unshard")()
    trained.train()


@way("two backwards of one graph")
def _retained(trained: Trained, is_other: bool) -> None:
    loss = trained.loss()
    loss.backward(retain_graph=True)
    if is_other:
        loss.backward()
    else:
        trained.train()


@way("a barrier of the program's own")
def _barrier(trained: Trained, is_other: bool) -> None:
    if is_other:
        dist.barrier()
    trained.train()


@way("full_tensor() on one rank")
def _full_tensor(trained: Trained, is_other: bool) -> None:
    if is_other:
        next(iter(trained.model.parameters())).full_tensor()  # type: ignore[attr-defined]
    trained.train()


@way("clipping left out on one rank")
def _clipping(trained: Trained, is_other: bool) -> None:
    trained.train()
    if not is_other:
        torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0)
    trained.train()


@way("a batch of another size")
def _uneven(trained: Trained, is_other: bool) -> None:
    trained.model(torch.ones(9 if is_other else 2, 8)).sum().backward()


@way("slow for 15 seconds")
def _slow(trained: Trained, is_other: bool) -> None:
    until = time.monotonic() + (15 if is_other else 0)
    while time.monotonic() < until:  # computes: a rank that sleeps would be taken for one that hangs
        torch.ones(100).sum()
    trained.train()


@way("its process is killed")
def _killed(trained: Trained, is_other: bool) -> None:
    if is_other:
        os.kill(os.getpid(), signal.SIGKILL)
    trained.train()
    trained.train()


@way("its process is stopped")
def _stopped(trained: Trained, is_other: bool) -> None:
    if is_other:
        os.kill(os.getpid(), signal.SIGSTOP)
    trained.train()
    trained.train()


ENDS = (
    "its process is killed",
    "its process is stopped",
    "a barrier of the program's own",
    "full_tensor() on one rank",
    "clipping left out on one rank",
    "a step more, then the end",
)
"""After which the process group is of no use."""


def case_of(name: str) -> Case:
    """The program of one way."""
    diverge, ranks = WAYS[name]

    def program(trial: Trial) -> None:
        trained = Trained(trial, hybrid=ranks == 4)
        trained.train()
        trained.model.zero_grad()
        named = ""
        begun = time.monotonic()
        try:
            diverge(trained, trial.rank == 1)
            if name not in ENDS:
                trained.train()  # who was through meets the others here
        except Exception as error:
            seconds = time.monotonic() - begun
            if "Application timeout caused pair closure" in str(error) and name in ENDS:
                raise Ended from error
            is_named = type(error).__name__ == "FSDPRuntimeError" and re.search(r"rank \d", str(error))
            if not is_named or seconds > 20:
                raise
            named = f"after {seconds:.0f} s: {error}"
        if name not in ENDS and "while training" not in name:
            trained.expect_right_gradients()
        if named:
            raise Named(named)

    return Case(name, AREA, name, (), ranks, program)
