"""Programs drawn from seeds, each trained beside the plain model: whatever may be combined is, somewhere.

`FSDP2_DRAWN=5000 python -m pytest tests/multi_rank/test_drawn_programs.py -k many` runs that many of each mesh;
`FSDP2_DRAWN_FROM` is the first seed. A failure says its mesh and seed: `run(draw(mesh, seed))` is that program.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.harness import multi_rank
from tests.multi_rank.drawing import MESHES, REFUSALS, draw
from tests.multi_rank.drawn_training import run

BATCH = 6
BATCHES = {"1d_2": 3, "1d_4": 2, "hsdp": 2, "tp": 2, "dims": 2}
MANY = int(os.environ.get("FSDP2_DRAWN", "60"))
FIRST = int(os.environ.get("FSDP2_DRAWN_FROM", "1000"))

SHORT = [(mesh, batch * BATCH) for mesh in MESHES for batch in range(BATCHES[mesh])]
LONG = [(mesh, FIRST + start) for mesh in MESHES for start in range(0, MANY, BATCH)]


def run_batch(mesh: str, first: int) -> None:
    """`BATCH` programs; the first that fails ends it, as the ranks may be out of step afterwards."""
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        program = draw(mesh, seed)
        try:
            outcomes[run(program) or "trained"] += 1
        except Exception as error:
            where = f"mesh {mesh!r}, seed {seed}, after {dict(outcomes)}"
            raise AssertionError(f"drawn program of {where}: {error}\n{program}") from error
    print(f"mesh {mesh}, seeds {first} to {first + BATCH - 1}: {dict(outcomes)}")
    assert outcomes.total() == BATCH


def ids(value: object) -> str:
    return str(value)


@multi_rank(2)
@pytest.mark.parametrize(("mesh", "first"), [each for each in SHORT if each[0] == "1d_2"], ids=ids)
def test_drawn_programs_train_like_the_plain_model_on_two_ranks(mesh: str, first: int) -> None:
    run_batch(mesh, first)


@multi_rank(4)
@pytest.mark.parametrize(("mesh", "first"), [each for each in SHORT if each[0] != "1d_2"], ids=ids)
def test_drawn_programs_train_like_the_plain_model_on_four_ranks(mesh: str, first: int) -> None:
    run_batch(mesh, first)


# Ten minutes for the default number.
@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize(("mesh", "first"), [each for each in LONG if each[0] == "1d_2"], ids=ids)
def test_many_drawn_programs_on_two_ranks(mesh: str, first: int) -> None:
    run_batch(mesh, first)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize(("mesh", "first"), [each for each in LONG if each[0] != "1d_2"], ids=ids)
def test_many_drawn_programs_on_four_ranks(mesh: str, first: int) -> None:
    run_batch(mesh, first)


def test_every_feature_is_drawn() -> None:
    """What the short programs cover, printed with ``-s``; the long ones cover every feature many times."""
    covered = {"short": SHORT, "long": LONG}
    counts: dict[str, Counter[str]] = {name: Counter() for name in covered}
    for name, batches in covered.items():
        for mesh, first in batches:
            for seed in range(first, first + BATCH):
                counts[name].update(draw(mesh, seed).features())
    for feature in sorted(counts["short"] | counts["long"]):
        print(f"{counts['short'][feature]:5} {counts['long'][feature]:5}  {feature}")
    assert {f"refused {reason}" for reason in REFUSALS} <= set(counts["long"])
    of_settings = {feature for feature in counts["long"] if feature.startswith("set ")}
    assert len(of_settings) == 15
    assert of_settings <= set(counts["short"]), "a setting that `make test` never makes"


def test_programs_are_functions_of_their_seeds() -> None:
    for mesh in MESHES:
        assert draw(mesh, 3) == draw(mesh, 3) != draw(mesh, 4)
