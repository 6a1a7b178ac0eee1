"""SIGKILL at drawn moments of saving: what was committed last is there, bit by bit, and nothing else stays."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.checkpoint import Checkpoints
from tests.harness.checkpoints import anew, assert_equal, begin, processes, saved, snapshot
from tests.harness.multi_rank import others_full
from tests.harness.report import RanksFailed

STEPS = 40


def reference(file: Path) -> None:
    """The state after each step of a run that nobody stops."""
    run = begin("1d")
    states = {0: snapshot(run)}
    for index in range(STEPS):
        run.step(index)
        states[index + 1] = snapshot(run)
    torch.save(states, file)


def saves_for_ever(folder: Path, asynchronous: bool, keep_last: int | None) -> None:
    run = begin("1d")
    checkpoints = Checkpoints(folder, run.model, run.optimizer, keep_last=keep_last)
    start = checkpoints.restore()
    for index in range(start, STEPS):
        run.step(index)
        checkpoints.save(index + 1, asynchronous=asynchronous)
        (folder / f"done-{index}").touch()
    while True:
        time.sleep(1)


def restores(folder: Path, file: Path, least: int) -> int:
    run = begin("1d", seed=1)
    checkpoints = Checkpoints(folder, run.model, run.optimizer)
    step = checkpoints.restore()
    assert step >= least, f"{step} of {least} that were committed"
    if step:
        states: dict[int, dict[str, Any]] = torch.load(file, weights_only=False)
        assert_equal(states[step], snapshot(run))
    checkpoints.save(step + 1)
    assert not [*folder.glob(".*")]
    return step


def kill_later(folder: Path, pids: list[int], seconds: float) -> None:
    """Once saving has begun, and ``seconds`` later."""
    while not [*folder.glob(".step-*")]:
        time.sleep(0.001)
    time.sleep(seconds)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the pool kills the others as soon as one is dead
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reference") / "states.pt"
    anew(2, reference, file)
    return file


@pytest.mark.parametrize("seed", others_full(range(30), range(2)))  # 2 s each
def test_the_last_committed_step_is_there(seed: int, states: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    asynchronous, keep_last = seed % 2 == 0, draw.choice([None, 1, 2])
    victims = draw.choice([[0], [1], [0, 1]])
    folder = tmp_path / "run"
    with processes(2) as pool:
        pool.start()
        pids = [pool.pids[each] for each in victims]
        killer = threading.Thread(target=kill_later, args=(folder, pids, draw.random() * 0.4), daemon=True)
        killer.start()
        with pytest.raises(RanksFailed):
            pool.run(saves_for_ever, folder, asynchronous, keep_last, timeout=60.0, grace=0.0)
        killer.join()
    # A save has returned on some rank: synchronous ones are committed then, of asynchronous ones the one before is.
    done = max((int(name[5:]) + 1 for name in saved(folder) if name.startswith("done-")), default=0)
    found = anew(2, restores, folder, states, max(0, done - 1) if asynchronous else done)
    assert found[0] == found[1]
    steps = {name for name in saved(folder) if name.startswith("step-")}
    assert f"step-{found[0] + 1:08d}" in steps
