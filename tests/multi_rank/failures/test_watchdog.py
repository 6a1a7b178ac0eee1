"""Ranks that diverge while they run: all of them raise, in seconds, and name both places; then they go on together."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, flight_record, fully_shard, set_watchdog
from fsdp2.core.transport import NATIVE, VARIABLE
from fsdp2.plugs.watchdog.thread import Watchdog
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of
from tests.harness.shared.ways import WAYS

SECONDS = 0.5


class Blocks(nn.Module):
    """Blocks of equal size, to be run in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, order: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        """Through the blocks in ``order``."""
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return self.head(x)


def batch() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(11 + dist.get_rank()))


def step(model: nn.Module, order: Sequence[int] = (0, 1, 2, 3)) -> None:
    model(batch(), order).square().mean().backward()


@contextmanager
def watched() -> Iterator[None]:
    set_watchdog(SECONDS)
    try:
        yield
    finally:
        set_watchdog(10.0)


def sharded(hybrid: bool = False) -> Blocks:
    arguments = WAYS["hybrid" if hybrid else "default"]()
    model = Blocks()
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    return model


def goes_on(model: Blocks) -> None:
    """A step afterwards has the gradients of a model to which nothing has happened."""
    model.zero_grad()
    step(model)
    plain, world_size = Blocks(), dist.get_world_size()
    for rank in range(world_size):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(11 + rank))
        (plain(x).square().mean() / world_size).backward()
    assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)


def swapped(model: Blocks, rank: int) -> None:
    step(model, (0, 2, 1, 3) if rank else (0, 1, 2, 3))


def without_gradients(model: Blocks, rank: int) -> None:
    with torch.no_grad():
        model(batch(), (3, 2, 1, 0) if rank % 2 else (0, 1, 2, 3))


def failed_in_forward(model: Blocks, rank: int) -> None:
    def fail(*args: Any) -> None:
        if rank == 1:
            raise ValueError("a batch that cannot be read")

    handle = model.blocks[2].register_forward_hook(fail)
    try:
        step(model)
    except ValueError:
        step(model, (3, 2, 1, 0))
    finally:
        handle.remove()


def failed_in_backward(model: Blocks, rank: int) -> None:
    def fail(*args: Any) -> None:
        if rank == 1:
            raise ValueError("a gradient that is not finite")

    handle = model.blocks[1].register_full_backward_hook(fail)
    try:
        step(model)
        if rank != 1:
            step(model)
    except ValueError:
        step(model)
    finally:
        handle.remove()


def scaled(model: Blocks, rank: int) -> None:
    if rank == 1:
        model.blocks[1].set_gradient_divide_factor(3.0)
    try:
        step(model)
    finally:
        model.blocks[1].set_gradient_divide_factor(float(dist.get_world_size()))


def not_reduced(model: Blocks, rank: int) -> None:
    model.set_requires_gradient_sync(rank != 1)
    try:
        step(model)
        step(model)
    finally:
        model.set_requires_gradient_sync(True)


def resharded_otherwise(model: Blocks, rank: int) -> None:
    model.blocks[2].set_reshard_after_forward(rank != 1)
    try:
        step(model)
    finally:
        model.blocks[2].set_reshard_after_forward(True)


SHORT = (swapped, without_gradients, failed_in_forward, failed_in_backward, scaled, not_reduced)
HYBRID = (swapped, failed_in_backward, not_reduced)
CASES = [
    *[(each, False) for each in SHORT],
    pytest.param(resharded_otherwise, False, marks=pytest.mark.full),
    *[pytest.param(each, True, marks=pytest.mark.full) for each in HYBRID],
]


@pytest.mark.parametrize(("diverge", "hybrid"), CASES)
@multi_rank(4)
def test_all_ranks_raise_the_same_and_go_on(diverge: Callable[[Blocks, int], None], hybrid: bool) -> None:
    model = sharded(hybrid)
    step(model)
    begun = time.monotonic()
    with watched():
        with pytest.raises(FSDPRuntimeError, match=r"can never meet|all that it waits for wait as well") as raised:
            diverge(model, dist.get_rank())
        assert time.monotonic() - begun < 15
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, str(raised.value))
        assert set(said) == {said[0]}, said
        assert "test_watchdog.py:" in said[0] and "step" in said[0]
        if diverge is without_gradients:  # equal blocks are not taken for one another
            assert all(f"the all-gather of 'blocks.{index}'" in said[0] for index in (0, 3))
        if diverge in (failed_in_forward, failed_in_backward):
            assert "an exception had left its step" in said[0].partition("  rank 1: ")[2].splitlines()[0]
        for _ in range(2):
            goes_on(model)


class Told(logging.Handler):
    """What the logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.messages.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    told = Told()
    logging.getLogger("fsdp2").addHandler(told)
    try:
        yield told.messages
    finally:
        logging.getLogger("fsdp2").removeHandler(told)


@multi_rank(2)
def test_a_rank_that_is_slow_is_only_told_of() -> None:
    model = sharded()
    step(model)
    with heard() as told, watched():
        if dist.get_rank() == 1:
            time.sleep(6 * SECONDS)
        step(model)
        goes_on(model)
    if dist.get_rank() == 0:
        (message,) = [each for each in told if "rank 1 has not come to it yet" in each]  # once for each wait
        assert "test_watchdog.py:" in message and "in test_a_rank_that_is_slow_is_only_told_of" in message


@multi_rank(2)
def test_collectives_of_torchs_own_are_left_to_their_timeout() -> None:
    """They carry no name: a rank that waits there is not judged."""
    with pytest.MonkeyPatch.context() as patch, watched():
        patch.setenv(VARIABLE, NATIVE)
        model = sharded()
        step(model)
        if dist.get_rank() == 1:
            time.sleep(5 * SECONDS)
        goes_on(model)


@multi_rank(2)
def test_a_barrier_that_is_waited_for_meanwhile_is_no_deadlock() -> None:
    """Rank 1 evaluates alone while rank 0 waits in a barrier: as with checkpoints and loaders of one rank."""
    model = sharded()
    step(model)
    with watched():
        if dist.get_rank() == 1:
            time.sleep(5 * SECONDS)
        dist.barrier()
        goes_on(model)


@multi_rank(2)
def test_different_collectives_of_torchs_own_are_named_and_ended() -> None:
    """Nobody waits in an exchange: what each rank is in, others never come to. Groups of their own, which end there."""
    model = sharded()
    step(model)
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=40)) for _ in range(2)]
    begun = time.monotonic()
    with heard() as told, watched(), pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2), group=groups[dist.get_rank()])
    assert time.monotonic() - begun < 20
    (said,) = [each for each in told if "and all that it waits for wait as well" in each]
    assert said.count("waits for torch.distributed.all_reduce()") == 2 and "which is ended" in said
    with pytest.raises(FSDPRuntimeError, match="all that it waits for wait as well"):
        step(model)
    goes_on(model)


@multi_rank(2)
def test_one_collective_after_the_other_is_no_wait() -> None:
    """Whenever the thread looks, both ranks are in an all-reduce; and then one of them computes for long."""
    model = sharded()
    step(model)
    with heard() as told, watched():
        until = time.monotonic() + 5 * SECONDS
        goes = torch.ones(1)
        while goes:
            goes = torch.tensor(float(time.monotonic() < until))
            dist.all_reduce(goes, op=dist.ReduceOp.MIN)
        assert not told
        if dist.get_rank() == 1:
            time.sleep(6 * SECONDS)
        dist.all_reduce(torch.ones(2))
        goes_on(model)
    if dist.get_rank() == 0:
        (message,) = [each for each in told if "has waited for torch.distributed.all_reduce()" in each]
        assert "rank 1 has not come to it yet (it runs test_watchdog.py:" in message


@multi_rank(2)
def test_other_plans_are_told_while_the_other_rank_trains_another_model() -> None:
    """A model that only one rank runs for the first time: the comparison of plans meets something else."""
    model, other = sharded(), sharded()
    step(model)
    with watched(), pytest.raises(FSDPRuntimeError, match="the comparison of the plans of Blocks"):
        if dist.get_rank() == 1:
            step(other)
        else:
            step(model)
    goes_on(model)
    goes_on(other)


@pytest.mark.full
@multi_rank(2)
def test_it_may_be_off() -> None:
    set_watchdog(0)
    try:
        model = sharded()
        goes_on(model)
    finally:
        set_watchdog(10.0)


@multi_rank(2)
def test_the_flight_record_names_the_last_exchanges() -> None:
    model = sharded()
    for _ in range(3):
        step(model)
    found = flight_record()
    (begun,) = found.groups.values()
    last = {each.label for each in begun[-10:]}
    assert last >= {f"the reduction of '{name}'" for name in ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "Blocks")}
    assert "the all-gather of 'blocks.0'" in last
    assert begun[-1].phase == "backward of Blocks"
    assert "the reduction of 'blocks.3'" in str(found)
    assert json.loads(found.to_json())["rank"] == dist.get_rank()


@pytest.mark.parametrize("hybrid", [False, True])
@multi_rank(4)
def test_roots_of_one_kind_are_told_apart(hybrid: bool) -> None:
    """Each block is a root of its own, and all have one name: a rank that runs another first, or later, is told so."""
    arguments = WAYS["hybrid" if hybrid else "default"]()
    last = dist.get_rank() == 3
    if last:
        fully_shard(nn.Linear(6, 6), **arguments)  # which is never run, and is no reason for an error
    torch.manual_seed(0)
    blocks = [fully_shard(nn.Linear(6, 6), **arguments) for _ in range(3)]
    blocks[0](batch()).sum().backward()
    with pytest.raises(FSDPRuntimeError, match=r"(?s)different modules of the class Linear.*is number \d+ of \d+ "):
        blocks[2 if last else 1](batch())
    for block in blocks:
        block(batch()).sum().backward()
    if hybrid:
        return  # the ranks that do not shard with the last one do not meet it in forward
    with watched(), pytest.raises(FSDPRuntimeError, match=r"another one of it: of another root"):
        for index in (0, 2, 1) if last else (0, 1, 2):
            blocks[index](batch())
    for block in blocks:
        block(batch()).sum().backward()


@multi_rank(2)
def test_a_restarted_program_reads_nothing_of_the_one_before() -> None:
    """The store of an elastic launcher outlives its ranks."""
    before = Watchdog(60.0, None, print)
    before.stop()
    before._store.set("verdict/0", "of ranks that are gone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        after = Watchdog(60.0, None, print)
        after.stop()
    assert before._store.check(["verdict/0"]) and not after._store.check(["verdict/0"])
