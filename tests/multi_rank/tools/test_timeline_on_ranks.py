"""`fsdp2.timeline` on gloo ranks: who is late, what waits for it, what travels, and what happens when ranks differ."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import FSDPRuntimeError, fully_shard
from fsdp2.plugs.transports import gloo_p2p
from fsdp2.tools.observing.taps import Tap
from tests.harness import multi_rank
from tests.harness.internals import groups_of

WIDTH, BLOCKS = 16, 3
DELAY = 0.1
ATTEMPTS = 8
SEEN = 0.8 * DELAY
"""Of an injected delay: what the others have done meanwhile they need not wait for."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def sharded(**options: Any) -> Any:
    model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def stepping(model: Any) -> Callable[[], None]:
    """A training step, run twice, so that orders are known."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


def is_untouched(model: Any) -> bool:
    """Whether no tap is left."""
    found = [group.__dict__ for group in groups_of(model)] + [group.reducer.__dict__ for group in groups_of(model)]
    found += [group.comm.__dict__ for group in groups_of(model) if group.comm is not None]
    return not any(isinstance(value, Tap) for each in found for value in each.values())


@contextmanager
def late_in_backward(block: nn.Module) -> Iterator[None]:
    """This rank sleeps in the backward of ``block``, before its gradients are reduced."""

    def sleeps(gradient: torch.Tensor) -> None:
        time.sleep(DELAY)

    handle = block.register_forward_hook(lambda module, args, output: output.register_hook(sleeps) and None)
    yield
    handle.remove()


def eventually(attempt: Callable[[], str]) -> None:
    """``attempt``, on all ranks, finds nothing wrong on the first one, at once or later: others use the machine too."""
    for _ in range(ATTEMPTS):
        found = [attempt() if dist.get_rank() == 0 else attempt() and ""]
        dist.broadcast_object_list(found)
        if not found[0]:
            return
    raise AssertionError(found[0])


@multi_rank(2, full=(4,))  # 2 s
def test_the_rank_that_sleeps_before_its_reduction_is_named(world_size: int) -> None:
    model = sharded()
    step = stepping(model)
    late = world_size - 1

    def attempt() -> str:
        sleeps = late_in_backward(model.blocks[1]) if dist.get_rank() == late else nullcontext()
        with sleeps, fsdp2.timeline(model) as timeline:
            step()
            step()
        assert is_untouched(model)
        if dist.get_rank():
            return ""
        slowest = timeline.slowest
        assert slowest is not None and len(timeline.ranks) == world_size
        assert all(each.steps == 2 and each.step_seconds >= SEEN for each in timeline.ranks)
        assert timeline.ranks[late].busy["backward", "blocks.1"] >= DELAY, "whatever else the machine does"
        is_named = (slowest.rank, slowest.what, slowest.name) == (late, "backward", "blocks.1")
        is_waited_for = all(each.exposed_seconds >= SEEN for each in timeline.ranks if each.rank != late)
        if not (is_named and is_waited_for and slowest.where_seconds >= SEEN):
            return str(timeline)
        assert re.search(rf"Rank {late} is the slowest.*in the backward of 'blocks\.1'", str(timeline))
        return ""

    eventually(attempt)


@multi_rank(2)
def test_a_gather_that_is_delayed_is_exposed() -> None:
    """On rank 1, what it sends of one group's all-gather leaves late."""
    model = sharded()
    step = stepping(model)
    launch = gloo_p2p.Exchange.launch

    def late(exchange: gloo_p2p.Exchange, *args: Any) -> None:
        if dist.get_rank() == 1 and exchange.label.text == "the all-gather of 'blocks.2'":
            time.sleep(DELAY)
        launch(exchange, *args)

    def attempt() -> str:
        with mock.patch.object(gloo_p2p.Exchange, "launch", late), fsdp2.timeline(model) as timeline:
            step()
        if dist.get_rank():
            return ""
        waits = [each for each in timeline.report.records[0].spans if each.what == "wait for all-gather"]
        is_exposed = sum(each.seconds for each in waits if each.name == "blocks.2") >= SEEN
        slowest = timeline.slowest
        assert slowest is not None
        is_named = (slowest.rank, slowest.what, slowest.name) == (1, "pack and launch", "blocks.2")
        return "" if is_exposed and is_named else str(timeline)

    eventually(attempt)


@multi_rank(4)
def test_bytes_over_shards_and_replicas() -> None:
    """A block of 16 * 16 + 16 elements over 2 shards: rows of 8 and 8, no padding but to 32 bytes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    step = stepping(model)
    with fsdp2.timeline(model) as timeline:
        step()
    if dist.get_rank() == 0:
        nbytes = 4 * (WIDTH * WIDTH + WIDTH)
        for record in timeline.report.records:
            for name in ("blocks.0", "blocks.1", "blocks.2"):
                spans = [each for each in record.spans if each.name == name and each.nbytes]
                gathers = [each for each in spans if each.what == "all-gather"]
                assert [(each.nbytes, each.sent_bytes) for each in gathers] == [(nbytes, nbytes // 2)] * 2
                (scatter,) = [each for each in spans if each.what == "reduce-scatter"]
                (reduced,) = [each for each in spans if each.what == "all-reduce"]
                # Besides gradients travels which parameters have one: 2 more elements, padded to 32 bytes a rank.
                assert nbytes < scatter.nbytes <= nbytes + 2 * 32
                assert scatter.sent_bytes == scatter.nbytes // 2 == reduced.nbytes == reduced.sent_bytes
                assert scatter.end <= reduced.begin


@multi_rank(4)
def test_ranks_of_a_group_are_observed_together() -> None:
    """Two pairs, each with a model of its own; the first rank of each pair gets what both have seen."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))
    model = sharded(mesh=mesh["shard"])
    step = stepping(model)
    with fsdp2.timeline(model, group=mesh.get_group("shard")) as timeline:
        step()
    rank = dist.get_rank()
    assert [each.rank for each in timeline.ranks] == ([rank, rank + 1] if rank % 2 == 0 else [rank])


@multi_rank(2)
def test_a_rank_that_does_not_enter_is_named_within_seconds() -> None:
    model = sharded()
    step = stepping(model)
    if dist.get_rank() == 0:
        begin = time.monotonic()
        with (
            pytest.raises(FSDPRuntimeError, match=r"entered on rank 0 and not on rank 1 within 0\.3 s"),
            fsdp2.timeline(model, timeout=0.3),
        ):
            pytest.fail("it was entered")
        assert time.monotonic() - begin < 5
    assert is_untouched(model)
    dist.barrier()
    with fsdp2.timeline(model) as timeline:  # and another time they meet
        step()
    assert len(timeline.ranks) == (2 if dist.get_rank() == 0 else 1)


@multi_rank(2)
def test_a_rank_that_does_not_leave_is_named_within_seconds() -> None:
    model = sharded()
    step = stepping(model)
    timeline = fsdp2.timeline(model)
    timeline.__enter__()
    assert timeline._meeting is not None
    timeline._meeting._seconds = 0.3  # not sooner, as the machine may be busy
    step()
    if dist.get_rank() == 0:
        with pytest.raises(FSDPRuntimeError, match="rank 1 did not leave it"):
            timeline.__exit__(None, None, None)
        assert [each.rank for each in timeline.ranks] == [0], "what it has seen itself"
    dist.barrier()
    if dist.get_rank() == 1:
        timeline.__exit__(None, None, None)
    assert is_untouched(model)


@multi_rank(2)
def test_an_exception_on_all_ranks_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = sharded()
    step = stepping(model)

    def fails(module: nn.Module, args: Any) -> None:
        raise ValueError("on purpose")

    handle = model.blocks[1].register_forward_pre_hook(fails)
    timeline = fsdp2.timeline(model)
    with pytest.raises(ValueError, match="on purpose"), timeline:
        step()
    handle.remove()
    assert is_untouched(model)
    assert timeline.report.records[0].failure == "ValueError: on purpose"
    path = tmp_path / f"{dist.get_rank()}.json"
    timeline.save(path)  # each rank has its own
    assert json.loads(path.read_text())["traceEvents"]
    with fsdp2.timeline(model) as after:
        step()
    assert not after.report.records[0].failure


@multi_rank(2)
def test_contexts_inside_of_each_other_and_models_beside_each_other(tmp_path: Path) -> None:
    one, other = sharded(), sharded()
    steps = [stepping(one), stepping(other)]
    with fsdp2.timeline([one, other]) as both:
        with fsdp2.timeline(one) as inner:
            for step in steps:
                step()
        steps[0]()
    assert is_untouched(one) and is_untouched(other)
    assert {each.name for each in inner.groups} == {"blocks.0", "blocks.1", "blocks.2"}
    assert {each.name for each in both.groups} == {
        f"Model#{index}/blocks.{block}" for index in range(2) for block in range(BLOCKS)
    }
    counts = {each.name: each.gathers.count * 3 for each in both.groups}  # steps: forwards after an update
    assert counts["Model#0/blocks.0"] == 4 and counts["Model#1/blocks.0"] == 2
    both.save(tmp_path / "both.json")
    assert (tmp_path / "both.json").exists() or dist.get_rank() == 1, "the first rank writes"


@multi_rank(2)
def test_metrics_beside_a_timeline_count_what_it_counts(tmp_path: Path) -> None:
    model = sharded()
    step = stepping(model)
    lines: list[str] = []
    with fsdp2.metrics(model, write=lines.append, file=tmp_path / "metrics.jsonl") as metrics:
        with fsdp2.timeline(model) as timeline:
            step()
            began = time.perf_counter()
            found = metrics.step(tokens=8, loss=torch.tensor(0.5), gradient_norm=torch.tensor(2.0))
        with metrics.paused(), torch.no_grad():
            model(torch.ones(2, WIDTH))
            time.sleep(DELAY)
        step()
        second = metrics.step()
    assert found is not None and second is not None
    mine = next(each for each in timeline.ranks if each.rank == dist.get_rank())
    assert found.sent_bytes == mine.sent_bytes == second.sent_bytes
    assert found.exposed_share is not None and 0 < found.exposed_share < 1
    assert second.seconds < time.perf_counter() - began - DELAY, "what was paused does not count"
    assert is_untouched(model)
    assert len(lines) == (2 if dist.get_rank() == 0 else 0)
    if dist.get_rank() == 0:
        first, _ = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        assert first["step"] == 1 and first["loss"] == 0.5 and first["gradient_norm"] == 2.0
        assert first["sent_bytes"] == mine.sent_bytes and first["tokens_per_second"] > 0
