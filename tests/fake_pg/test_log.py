"""`FSDP2_LOG`: what is logged of each word, on which logger; and that nothing is tapped where it is not set."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import FSDPValueError, fully_shard
from fsdp2.api.logger import VARIABLE, WORDS, _OfRank
from fsdp2.core.root import FSDPRoot
from fsdp2.core.state import states_below
from fsdp2.tools.observing.taps import Tap
from tests.harness import FakeWorlds
from tests.harness.internals import groups_of

NAMES = ("fsdp2", *(f"fsdp2.{word}" for word in WORDS))


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """As they were before."""
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in NAMES]
    handlers = list(logging.getLogger("fsdp2").handlers)
    yield
    for logger, level in before:
        logger.setLevel(level)
    logging.getLogger("fsdp2").handlers[:] = handlers


def trained(steps: int = 2) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
    return model


def said(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == f"fsdp2.{word}"]


def test_off_nothing_is_tapped_and_nothing_said(simulate: FakeWorlds, caplog: pytest.LogCaptureFixture) -> None:
    simulate(4)
    model = trained()
    engine: list[Any] = [*states_below(model), *groups_of(model), states_below(model)[0].root]
    assert not [name for each in engine for name, value in vars(each).items() if isinstance(value, Tap)]
    assert not caplog.records


def test_each_word(simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    simulate(4)
    monkeypatch.setenv(VARIABLE, "plan, order,comm,memory")
    trained()
    (plan,) = said(caplog, "plan")
    assert plan.startswith("Sequential:\ngroup ") and re.search(r"\n0-1 +Linear +2 x 72 .* fp32 +4 +freed ", plan), plan
    assert said(caplog, "order") == ["Sequential: groups are gathered in this order: 0, 1"], "once"
    comm = said(caplog, "comm")
    assert len(comm) == 2 * 2 * (2 + 1)
    assert comm[0] == (
        "forward 1, forward of Sequential: all-gather of '0', 320 bytes (240 sent) in 1 buffer over 4 ranks"
    ).replace("forward 1", comm[0].split(",")[0])
    assert sum("reduce-scatter" in line for line in comm) == 4
    assert sum(", ahead" in line for line in comm) >= 2
    memory = said(caplog, "memory")
    assert len(memory) == 2 and re.fullmatch(
        r"forward \d+: 0\.\d{3} MiB unsharded and staged at most, [\d.]+ MiB of the process at most so far", memory[0]
    )


def test_every_line_has_the_rank_in_front(
    simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(4)
    monkeypatch.setenv(VARIABLE, "plan")
    model: Any = fully_shard(nn.Linear(8, 8, bias=False))
    model(torch.ones(2, 8)).sum().backward()
    (record,) = [each for each in caplog.records if each.name == "fsdp2.plan"]
    first, *others = _OfRank("%(name)s: %(message)s").format(record).splitlines()
    assert first == "[rank 0] fsdp2.plan: Linear:"
    assert len(others) == 3 and all(each.startswith("[rank 0] ") for each in others)


def test_only_what_is_asked_for(
    simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(4, rank=1)
    monkeypatch.setenv(VARIABLE, "order,plan")
    trained()
    assert {each.name for each in caplog.records} == {"fsdp2.order"}, "the plan is said by the first rank"


def test_another_word_is_refused_at_once(simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(4)
    monkeypatch.setenv(VARIABLE, "plan,all")
    with pytest.raises(FSDPValueError, match=r"FSDP2_LOG takes words out of plan, order, comm, memory, .* got 'all'"):
        fully_shard(nn.Linear(2, 2))


def test_a_root_around_another_logs_once(
    simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(4)
    monkeypatch.setenv(VARIABLE, "comm")
    inner = trained(steps=1)
    caplog.clear()
    outer: Any = nn.Sequential(inner, nn.Linear(8, 8))
    fully_shard(outer)
    outer(torch.ones(2, 8)).sum().backward()
    assert isinstance(states_below(outer)[0].root, FSDPRoot)
    assert len(said(caplog, "comm")) == (2 + 1) * 2 + (1 + 1), "two layers, and the root's own, which stays"
