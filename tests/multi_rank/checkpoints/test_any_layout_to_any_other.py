"""From any layout to any other: parameters, buffers, states, hyperparameters, bit by bit, and the steps that follow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint import load, save
from tests.harness.checkpoints import LAYOUTS, OPTIMIZERS, anew, assert_equal, begin, snapshot
from tests.harness.multi_rank import others_full

BEFORE, AFTER = 3, 6


def save_and_go_on(layout: str, kind: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, save, train on: what was saved, and where that led to."""
    run = begin(layout, kind)
    for index in range(BEFORE):
        run.step(index)
    then = snapshot(run)
    save(folder / "saved", run.model, run.optimizer, step=BEFORE)
    assert_equal(then, snapshot(run))
    for index in range(BEFORE, BEFORE + AFTER):
        run.step(index)
    return then, snapshot(run)


def load_and_go_on(layout: str, kind: str, folder: Path, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load into another model, train on: what was loaded, and where that led to."""
    run = begin(layout, kind, seed=1, device=device)
    if device == "meta":
        run.model.table = torch.ones(3)  # a buffer that is not persistent: no checkpoint has it
    report = load(folder / "saved", run.model, run.optimizer)
    assert report.step == BEFORE and not report.missing and not report.unexpected
    found = snapshot(run)
    for index in range(BEFORE, BEFORE + AFTER):
        run.step(index)
    return found, snapshot(run)


def size_of(layout: str, wanted: int) -> int:
    """The ranks that a layout runs on."""
    return {"plain": 1, "tp": 4, "hybrid": 4}.get(layout, wanted)


def trip(before: tuple[str, str, int], after: tuple[str, str, int], folder: Path, device: str = "cpu") -> None:
    """Save in one world, load in another."""
    saved = anew(before[2], save_and_go_on, before[0], before[1], folder)
    loaded = anew(after[2], load_and_go_on, after[0], after[1], folder, device)
    for found, _ in loaded:
        assert_equal(saved[0][0], found)
    if before == after:
        for rank, (_, then) in enumerate(loaded):
            assert_equal(saved[rank][1], then)


SAME = ["1d", "tp"]  # 4 s each


@pytest.mark.parametrize("layout", others_full([name for name in LAYOUTS if name != "torch"], SAME))
def test_a_run_goes_on_as_if_it_had_not_been_stopped(layout: str, tmp_path: Path) -> None:
    place = (layout, "adamw", size_of(layout, 2))
    trip(place, place, tmp_path, device="cpu" if layout in ("plain", "tp") else "meta")


@pytest.mark.full
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_each_optimizer_goes_on(kind: str, tmp_path: Path) -> None:
    place = ("owned" if kind == "owners" else "1d", kind, 2)
    trip(place, place, tmp_path)


@pytest.mark.full  # 2 s each
@pytest.mark.parametrize("seed", range(40))
def test_drawn_pairs(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    layouts = [name for name in LAYOUTS if name != "torch"]
    alike = draw.choice(
        [
            ["adamw", "local", "flat", "offloaded"],
            ["groups", "groups turned", "two"],
            ["momentum"],
            ["amsgrad"],
            ["sgd"],
        ]
    )
    ends = []
    for _ in range(2):
        layout = draw.choice(layouts)
        ends.append((layout, draw.choice(alike), size_of(layout, draw.choice([1, 2, 3, 4]))))
    trip(ends[0], ends[1], tmp_path)


def go_on_after_saving(when: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same training with a save in the middle of it, and without."""
    found = []
    for saves in (False, True):
        run = begin("1d")
        rank = dist.get_rank()
        for index in range(3):
            if when == "step 0" and saves and index == 0:
                save(folder / when, run.model, run.optimizer)
            run.model.set_requires_gradient_sync(when != "accumulating")
            run.backward(10 + index, rank)
            if when in ("backward", "accumulating") and saves and index == 1:
                save(folder / when, run.model, run.optimizer)
            run.model.set_requires_gradient_sync(True)
            if when == "evaluation":
                run.model.eval()
                with torch.no_grad():
                    run.model(torch.arange(7))
                if saves and index == 1:
                    save(folder / when, run.model, run.optimizer)
                run.model.train()
            run.step(index)
        found.append(snapshot(run))
    return found[0], found[1]


@pytest.mark.full
@pytest.mark.parametrize("when", ["step 0", "backward", "accumulating", "evaluation"])
def test_a_save_changes_no_bit_of_the_training_after_it(when: str, tmp_path: Path) -> None:
    for without, with_save in anew(2, go_on_after_saving, when, tmp_path):
        assert_equal(without, with_save)
