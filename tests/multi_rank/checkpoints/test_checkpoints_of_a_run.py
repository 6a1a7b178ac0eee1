"""`Checkpoints`: a run's folders, asynchronous saves, what is kept and what is found again."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint import (
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    Checkpoints,
    RandomState,
    SaveFailed,
)
from tests.harness.checkpoints import Run, anew, assert_equal, begin, saved, snapshot


class Loader:
    """What knows its place in the data of a rank."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Parts:
    """A run with everything that it saves."""

    def __init__(self, folder: Path, *, seed: int = 0, **arguments: Any) -> None:
        self.run: Run = begin("1d", seed=seed)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.run.optimizer, [2, 4])
        self.loader = Loader()
        self.shared: dict[str, Any] = {"schedule": self.schedule, "best": 9.0, "table": torch.arange(3)}
        self.per_rank: dict[str, Any] = {"rng": RandomState(), "data": self.loader}
        self.checkpoints = Checkpoints(
            folder, self.run.model, self.run.optimizer, shared=self.shared, per_rank=self.per_rank, **arguments
        )

    def step(self, index: int) -> None:
        self.run.step(index)
        self.schedule.step()
        self.loader.place += 10 + dist.get_rank()
        self.shared["best"] -= 1.0
        random.random()
        torch.rand(3)

    def state(self) -> dict[str, Any]:
        found = snapshot(self.run)
        found["schedule"] = self.schedule.state_dict()
        found["values"] = {"best": self.shared["best"], "place": self.loader.place}
        found["drawn"] = {"python": random.random(), "torch": torch.rand(()).item()}
        return found


def train(folder: Path, asynchronous: bool) -> list[dict[str, Any]]:
    random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    parts = Parts(folder, keep_last=2, keep_every=4)
    assert parts.checkpoints.restore() == 0 and parts.checkpoints.report is None
    states = []
    with parts.checkpoints:
        for index in range(7):
            parts.step(index)
            parts.checkpoints.save(index + 1, asynchronous=asynchronous)
            states.append(parts.state())  # draws, which the saved generators have not
        if asynchronous:
            assert parts.checkpoints._background is not None
    dist.barrier()  # the first rank removes
    assert parts.checkpoints._background is None and parts.checkpoints.steps() == [4, 6, 7]
    return states


def restore(folder: Path, step: int | None) -> tuple[int, dict[str, Any]]:
    parts = Parts(folder, seed=1)
    found = parts.checkpoints.restore(step)
    assert parts.checkpoints.report is not None and parts.checkpoints.report.step == found
    return found, parts.state()


@pytest.mark.full  # 10 s each
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_is_found_again(asynchronous: bool, tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    states = anew(2, train, run, asynchronous)
    assert saved(run) == {"step-00000004", "step-00000006", "step-00000007"}
    for step in (None, 4):
        for rank, (found, state) in enumerate(anew(2, restore, run, step)):
            assert found == (step or 7)
            assert_equal(states[rank][found - 1], state)
    with pytest.raises(Exception, match=r"of another number of ranks[\s\S]*per_rank: 2 in the checkpoint, 1 now"):
        anew(1, restore, run, None)


def keep_what_they_have(folder: Path) -> None:
    parts = Parts(folder, seed=1)
    parts.loader.place = 77
    with pytest.raises(CheckpointMismatch, match='per_rank_missing="keep" leaves each rank what it has'):
        parts.checkpoints.restore()
    assert parts.checkpoints.restore(per_rank_missing="keep") == 7
    assert parts.loader.place == 77 and parts.shared["best"] == 2.0
    with pytest.raises(CheckpointIncomplete, match=r"has no checkpoint of step 5; it has \[4, 6, 7\]"):
        parts.checkpoints.restore(5)


def test_another_number_of_ranks_keeps_what_it_has(tmp_path: Path) -> None:
    anew(2, train, tmp_path / "run", False)
    anew(3, keep_what_they_have, tmp_path / "run")


def leftovers(folder: Path) -> list[str]:
    """A killed save, a killed replacement, a killed removal."""
    if dist.get_rank() == 0:
        (folder / ".step-00000009.writing").mkdir(parents=True)
        (folder / ".step-00000003.removing").mkdir()
        (folder / "notes").mkdir()
    dist.barrier()
    parts = Parts(folder)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp2").addHandler(handler)
    parts.step(0)
    parts.checkpoints.save(5)
    first = snapshot(parts.run)
    parts.step(1)
    parts.checkpoints.save(5)
    if dist.get_rank() == 0:
        (folder / "step-00000005").rename(folder / ".step-00000005.old")
    dist.barrier()
    other = Parts(folder, seed=1)
    assert other.checkpoints.restore() == 5
    assert not [*folder.glob(".*")]
    assert_equal(snapshot(parts.run), snapshot(other.run))
    assert first.keys() == snapshot(other.run).keys()
    logging.getLogger("fsdp2").removeHandler(handler)
    return lines


def test_what_killed_processes_left_is_removed_and_told(tmp_path: Path) -> None:
    lines = anew(2, leftovers, tmp_path)
    assert lines[1] == []
    assert [line.rpartition("/")[2][:40] for line in lines[0]] == [
        ".step-00000003.removing, which a process",
        ".step-00000009.writing, which a process ",
        "step-00000005 is back: a save that was t",
    ]
    assert saved(tmp_path) == {"step-00000005", "notes"}


def of_the_moment(folder: Path) -> None:
    """What is trained while it is written is not in it; errors come out later, on all ranks, and nothing is lost."""
    parts = Parts(folder)
    parts.step(0)
    parts.checkpoints.save(1, asynchronous=True)
    then = snapshot(parts.run)
    for index in range(1, 4):
        parts.step(index)
    parts.checkpoints.wait()
    staging = parts.checkpoints._background.staging  # type: ignore[union-attr]
    memory = {key: kept.local.data_ptr() for key, kept in staging._kept.items()}
    parts.checkpoints.save(2, asynchronous=True)
    parts.checkpoints.save(3, asynchronous=True)  # waits for the one before
    assert {key: kept.local.data_ptr() for key, kept in staging._kept.items()} == memory, "kept between saves"
    parts.checkpoints.wait()
    other = Parts(folder, seed=1)
    assert other.checkpoints.restore(1) == 1
    assert_equal(then, snapshot(other.run))

    if dist.get_rank() == 1:
        parts.per_rank["data"] = _Unpicklable()
    parts.checkpoints.save(4, asynchronous=True)
    for ask in ("wait", "nothing to wait for any more"):
        if ask == "wait":
            with pytest.raises(SaveFailed, match=r"was not saved: rank 1: .*no way"):
                parts.checkpoints.wait()
        else:
            parts.checkpoints.wait()
    parts.per_rank["data"] = parts.loader
    parts.checkpoints.save(5, asynchronous=True)
    parts.checkpoints.close()
    assert parts.checkpoints.steps() == [1, 2, 3, 5]
    parts.checkpoints.save(6)
    parts.checkpoints.save(7, asynchronous=True)  # starts anew
    parts.checkpoints.close()


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("no way")


@pytest.mark.full  # 5 s
def test_an_asynchronous_save_is_of_its_moment(tmp_path: Path) -> None:
    anew(2, of_the_moment, tmp_path)
    assert saved(tmp_path) == {f"step-{step:08d}" for step in (1, 2, 3, 5, 6, 7)}


def wrong_arguments(folder: Path) -> None:
    run = begin("1d")
    for arguments, says in [
        ({"keep_last": 0}, "Checkpoints takes an int >= 1, or None as 'keep_last', got 0"),
        ({"keep_every": "all"}, "as 'keep_every', got 'all'"),
    ]:
        with pytest.raises((ValueError, TypeError), match=says):
            Checkpoints(folder, run.model, run.optimizer, **arguments)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"names in shared and per_rank are strings without dots; got 'a\.b'"):
        Checkpoints(folder, run.model, shared={"a.b": 1}).save(1)
    with pytest.raises(CheckpointError, match="an optimizer holds a parameter of shape"):
        Checkpoints(folder, run.model, torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)).save(1)
    with pytest.raises(ValueError, match="an int >= 0 as 'step'"):
        Checkpoints(folder, run.model).save(-1)


def test_wrong_arguments(tmp_path: Path) -> None:
    anew(1, wrong_arguments, tmp_path / "run")
    assert not (tmp_path / "run").exists()
