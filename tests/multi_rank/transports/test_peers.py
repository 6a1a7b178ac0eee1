"""Collectives as sends and receives between peers: on gloo, the form that every other test of this folder runs on."""

from __future__ import annotations

import _thread
import copy
import functools
import itertools
import operator
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import FSDPRuntimeError, FSDPValueError, fully_shard
from fsdp2.core.transport import VARIABLE, Alone, Native, transport_of
from fsdp2.plugs.transports import gloo_p2p as peers
from tests.harness import multi_rank

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def finished(collective: Callable[..., None], *args: Any, waits: int = 1) -> None:
    """``collective``, waited for; again, which changes nothing, if ``waits`` says so."""
    works: list[dist.Work] = []
    collective(*args, works)
    for _ in range(waits):
        for work in works:
            work.wait()


def summed(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """In their order."""
    return functools.reduce(operator.add, terms)


def content(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).mul(7).to(dtype)


@pytest.mark.parametrize("numel", [0, 1, 5, 70_001])
@multi_rank(2, 4)
def test_a_gather_moves_every_byte(numel: int, world_size: int) -> None:
    for dtype in (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64):
        output = torch.zeros(world_size * numel, dtype=dtype)
        finished(peers.all_gather, output, content(dist.get_rank(), numel, dtype), world())
        expected = torch.cat([content(rank, numel, dtype) for rank in range(world_size)])
        assert torch.equal(output, expected), dtype


@pytest.mark.full
@multi_rank(2, 4)
def test_a_gather_from_its_own_place_in_the_output(world_size: int) -> None:
    output, rank = torch.zeros(3 * world_size), dist.get_rank()
    part = output.split(3)[rank]
    part.copy_(content(rank, 3, torch.float32))
    finished(peers.all_gather, output, part, world())
    assert torch.equal(output, torch.cat([content(each, 3, torch.float32) for each in range(world_size)]))


@pytest.mark.full  # 9 to 20 s: more ranks than cores
@multi_rank(16, timeout=300)
def test_many_ranks_train_as_one(world_size: int) -> None:
    """Beyond the 8 that other tests have: sums, uneven rows, a rank without rows."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 3))
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model)
    assert model[0].weight.device_mesh.size() == 16
    for step in range(2):
        batches = [torch.randn(4, 9, generator=torch.Generator().manual_seed(16 * step + each)) for each in range(16)]
        model(batches[dist.get_rank()]).square().sum().backward()
        (sum(plain(each).square().sum() for each in batches) / 16).backward()  # type: ignore[union-attr]
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), its.grad)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 5, 70_001])
@multi_rank(2, 4)
def test_narrow_terms_are_added_in_the_dtype_of_the_output(
    numel: int, mean: bool, dtype: torch.dtype, world_size: int
) -> None:
    """The same bits as if they had been cast before they were sent."""
    rank, found = dist.get_rank(), []
    input = content(rank, world_size * numel, dtype)
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    for sent in (input, input.float()):
        output = torch.full((numel,), float("nan"))
        finished(peers.reduce_scatter, output, sent, op, world())
        found.append(output)
    assert torch.equal(*found) and not found[0].isnan().any()


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 5, 70_001])
@multi_rank(2, 4)
def test_terms_are_added_in_rank_order(numel: int, mean: bool, world_size: int) -> None:
    rank = dist.get_rank()
    for dtype in FLOATS:
        input = content(rank, world_size * numel, dtype)
        output = torch.full((numel,), float("nan"), dtype=dtype)
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        finished(peers.reduce_scatter, output, input, op, world(), waits=2)
        sent = [content(each, world_size * numel, dtype) for each in range(world_size)]
        expected = summed(each[rank * numel : (rank + 1) * numel] for each in sent)
        assert torch.equal(output, expected / world_size if mean else expected), dtype
        assert torch.equal(input, content(rank, world_size * numel, dtype)), "gradients are only read"


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 3, 5, 70_001])
@multi_rank(2, 3, 4)
def test_a_sum_over_all_has_the_same_bits_everywhere(numel: int, mean: bool, world_size: int) -> None:
    for dtype in FLOATS:
        output = content(dist.get_rank(), numel, dtype)
        finished(peers.all_reduce, output, dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM, world(), waits=2)
        expected = summed(content(each, numel, dtype) for each in range(world_size))
        assert torch.equal(output, expected / world_size if mean else expected), dtype
    assert not numel or not peers.LINES[world()].kept


@pytest.mark.full
@multi_rank(2, 4)
def test_many_are_in_flight_beside_messages_of_the_user(world_size: int) -> None:
    rank, numel = dist.get_rank(), 1000
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    works: list[list[dist.Work]] = []
    gathered, reduced = [], []
    for index in range(6):
        gathered.append(torch.zeros(world_size * numel))
        reduced.append(torch.zeros(numel))
        works += [[], []]
        peers.all_gather(gathered[-1], content(rank + 10 * index, numel, torch.float32), world(), works[-2])
        mine = torch.zeros(numel)
        messages = [dist.isend(torch.full((numel,), float(rank)), right), dist.irecv(mine, left)]
        input = content(rank + 10 * index, world_size * numel, torch.float32)
        peers.reduce_scatter(reduced[-1], input, dist.ReduceOp.SUM, world(), works[-1])
        for message in messages:
            assert message is not None
            message.wait()
        assert mine.eq(left).all()
    for each in reversed(works):
        for work in each:
            work.wait()
    for index in range(6):
        everyone = [content(other + 10 * index, world_size * numel, torch.float32) for other in range(world_size)]
        torch.testing.assert_close(reduced[index], sum(each.split(numel)[rank] for each in everyone))
        parts = [content(other + 10 * index, numel, torch.float32) for other in range(world_size)]
        assert torch.equal(gathered[index], torch.cat(parts))


@pytest.mark.full
@multi_rank(2, 4)
def test_what_was_abandoned_is_mistaken_for_nothing(world_size: int) -> None:
    """Exchanges that nobody waits for, on every rank, as after an exception; alike in size to what follows."""
    rank, numel = dist.get_rank(), 50_000
    for step in range(20):
        abandoned: list[dist.Work] = []
        peers.all_gather(torch.zeros(world_size * numel), torch.full((numel,), -1.0), world(), abandoned)
        peers.reduce_scatter(
            torch.zeros(numel), torch.full((world_size * numel,), -1.0), dist.ReduceOp.SUM, world(), abandoned
        )
        del abandoned
        works: list[dist.Work] = []
        output, total = torch.zeros(world_size * numel), torch.zeros(numel)
        peers.all_gather(output, content(rank + step, numel, torch.float32), world(), works)
        peers.reduce_scatter(total, torch.ones(world_size * numel), dist.ReduceOp.SUM, world(), works)
        for work in works:
            work.wait()
        parts = [content(other + step, numel, torch.float32) for other in range(world_size)]
        assert torch.equal(output, torch.cat(parts)) and total.eq(world_size).all()
        assert not peers.LINES[world()].kept, "nothing stays once later exchanges are done"


@multi_rank(3)
def test_what_failed_is_not_waited_for_again(world_size: int) -> None:
    """Gloo waits for another message if it is asked for one that arrived: each later use took the group's timeout."""
    timeout = timedelta(seconds=4)
    group = dist.new_group(timeout=timeout)
    works: list[dist.Work] = []
    if dist.get_rank() < world_size - 1:  # the last rank is busy with something else
        peers.all_gather(torch.zeros(world_size * 5), torch.ones(5), group, works)
        with pytest.raises(RuntimeError, match=r"Timed out|closed|reset|closure"):
            works[0].wait()
        for _ in range(3):
            begun = time.monotonic()
            with pytest.raises(FSDPRuntimeError, match="has failed before"):
                works[0].wait()
            assert time.monotonic() - begun < timeout.total_seconds() / 2
    dist.barrier()
    dist.destroy_process_group(group)


class InterruptedWork:
    """A message: Ctrl-C shows when it has arrived."""

    def __init__(self, message: dist.Work) -> None:
        self.message = message

    def wait(self) -> None:
        """Until it has arrived; then Ctrl-C."""
        self.message.wait()
        raise KeyboardInterrupt


@multi_rank(2)
def test_a_wait_that_was_interrupted_goes_on_where_it_was() -> None:
    """Ctrl-C during a wait is raised when the message has arrived: that one must not be waited for again."""
    works: list[Any] = []
    output, rank = torch.zeros(10), dist.get_rank()
    peers.all_gather(output, torch.full((5,), float(rank)), world(), works)
    (exchange,) = works
    exchange._messages[0] = InterruptedWork(exchange._messages[0])
    with pytest.raises(KeyboardInterrupt):
        exchange.wait()
    assert exchange.wait() and torch.equal(output, torch.arange(2.0).repeat_interleave(5))
    assert not peers.LINES[world()].kept


@pytest.mark.parametrize("half", [0, 1])
@multi_rank(2, 3, 4)
def test_a_sum_whose_wait_was_interrupted_goes_on_where_it_was(half: int, world_size: int) -> None:
    works: list[Any] = []
    output = content(dist.get_rank(), 12, torch.float32)
    launch = peers.Exchange.launch
    launched = 0

    def interrupted(exchange: Any, *args: Any) -> None:
        nonlocal launched
        launch(exchange, *args)
        if launched == half:
            exchange._messages[-1] = InterruptedWork(exchange._messages[-1])
        launched += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers.Exchange, "launch", interrupted)
        peers.all_reduce(output, dist.ReduceOp.SUM, world(), works)
        (exchange,) = works
        if half == 0 or world_size > 2:  # two ranks send each other everything, at once
            with pytest.raises(KeyboardInterrupt):
                exchange.wait()
        assert exchange.wait()
    assert torch.equal(output, summed(content(each, 12, torch.float32) for each in range(world_size)))


@multi_rank(2, 4)
def test_ctrl_c_during_a_launch_leaves_it_whole(world_size: int) -> None:
    """Messages are begun from C, where no signal is looked at: it shows when all are begun; the exchange is good."""
    works: list[Any] = []
    output, rank = torch.zeros(3 * world_size), dist.get_rank()
    part = output.split(3)[rank]
    part.copy_(content(rank, 3, torch.float32))

    def interrupted(receives: Iterator[Any], sends: Iterator[Any]) -> Iterator[Any]:
        ctrl_c = map(_thread.interrupt_main, [signal.SIGINT])
        return filter(functools.partial(operator.is_not, None), itertools.chain(receives, ctrl_c, sends))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(peers, "chain", interrupted)
            peers.all_gather(output, part, world(), works)
    finally:
        signal.signal(signal.SIGINT, before)
    for work in works:
        work.wait()
    assert torch.equal(output, torch.cat([content(each, 3, torch.float32) for each in range(world_size)]))
    assert not peers.LINES[world()].broken


def plan_of(model: nn.Module) -> str:
    return str(model._get_fsdp_state().unit[0].plan)  # type: ignore[operator]


@pytest.mark.full
@multi_rank(2)
def test_the_environment_selects_the_form_and_the_plan_says_which() -> None:
    losses = []
    for value, is_said in (("", True), ("native", False)):
        os.environ[VARIABLE] = value
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(5, 3))
        output = model(torch.ones(2, 5) * (dist.get_rank() + 1)).square().sum()
        output.backward()
        losses.append([output.detach(), *(parameter.grad.to_local() for parameter in model.parameters())])
        assert ("peer to peer" in plan_of(model)) is is_said
    assert all(torch.equal(mine, other) for mine, other in zip(*losses, strict=True))
    assert type(transport_of(world(), CPU)) is Native and type(transport_of(None, CPU)) is Alone


@multi_rank(2)
def test_ranks_that_chose_different_forms_are_told() -> None:
    if dist.get_rank() == 0:
        os.environ[VARIABLE] = "native"
    model = fully_shard(nn.Linear(5, 3))
    with pytest.raises(FSDPRuntimeError, match="peer to peer"):
        model(torch.ones(2, 5))


@multi_rank(2)
def test_an_unknown_form_is_refused() -> None:
    os.environ[VARIABLE] = "fast"
    model = fully_shard(nn.Linear(5, 3))
    with pytest.raises(FSDPValueError, match="FSDP2_COMM must be 'native' or unset, got 'fast'"):
        model(torch.ones(2, 5))
