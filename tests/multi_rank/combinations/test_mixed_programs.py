"""Programs in which features meet, each trained beside the plain model: every two options that may be together are.

The first of these programs, which have most of the pairs, run in every `make test`; the others take a minute
and a half, and run in `make test-full`.

`FSDP2_MIXED=20000 python -m pytest tests/multi_rank/combinations/test_mixed_programs.py -k many` runs that many seeds;
`FSDP2_MIXED_FROM` is the first. A failure prints its program: `run({**PLAIN, "hooks": "forward"})` is one like it.
"""

from __future__ import annotations

import os

import pytest

from tests.harness import multi_rank
from tests.multi_rank.combinations.helpers.mixed.programs import (
    AXES,
    RULES,
    Mix,
    chosen,
    clashes,
    covering,
    draw,
    named,
    pairs,
    possible_pairs,
    printed,
    ranks_of,
)
from tests.multi_rank.combinations.helpers.mixed.training import run

OFTEN = 40
"""How many of the programs that cover all pairs run in every `make test`."""

BATCHES = {2: 12, 4: 6}
"""How many tests share the others, by their number of ranks."""

MANY = int(os.environ.get("FSDP2_MIXED", "2000"))
FIRST = int(os.environ.get("FSDP2_MIXED_FROM", "0"))
LENGTH = 50


@pytest.fixture(scope="session")
def programs() -> list[Mix]:
    """Few programs that have every two options together that may be."""
    return covering()


def run_all(mixes: list[Mix]) -> None:
    """The first that fails ends them, as ranks may be out of step afterwards."""
    for mix in mixes:
        print(f"runs {dict(mix)}", flush=True)  # what a crash leaves
        try:
            run(mix)
        except Exception as error:
            raise AssertionError(f"{printed(mix)}\n{error}") from error


@multi_rank(2)
@pytest.mark.parametrize("batch", range(4))
def test_mixed_programs_on_two_ranks(batch: int, programs: list[Mix]) -> None:
    run_all([mix for mix in programs[:OFTEN] if ranks_of(mix) == 2][batch::4])


@multi_rank(4)
def test_mixed_programs_on_four_ranks(programs: list[Mix]) -> None:
    run_all([mix for mix in programs[:OFTEN] if ranks_of(mix) == 4])


@pytest.mark.full  # 70 seconds
@multi_rank(2)
@pytest.mark.parametrize("batch", range(BATCHES[2]))
def test_the_other_mixed_programs_on_two_ranks(batch: int, programs: list[Mix]) -> None:
    run_all([mix for mix in programs[OFTEN:] if ranks_of(mix) == 2][batch :: BATCHES[2]])


@pytest.mark.full  # 30 seconds
@multi_rank(4)
@pytest.mark.parametrize("batch", range(BATCHES[4]))
def test_the_other_mixed_programs_on_four_ranks(batch: int, programs: list[Mix]) -> None:
    run_all([mix for mix in programs[OFTEN:] if ranks_of(mix) == 4][batch :: BATCHES[4]])


@pytest.mark.full  # 5 minutes for the default number
@multi_rank(2, 4)
@pytest.mark.parametrize("first", range(FIRST, FIRST + MANY, LENGTH))
def test_many_drawn_mixed_programs(first: int, world_size: int) -> None:
    mixes = [draw(seed) for seed in range(first, first + LENGTH)]
    run_all([mix for mix in mixes if ranks_of(mix) == world_size])


def test_every_pair_is_covered() -> None:
    found = covering()
    assert set().union(*map(pairs, found)) == possible_pairs()
    often = set().union(*map(pairs, found[:OFTEN]))
    assert len(often) > 0.57 * len(possible_pairs())
    never = {name for name, others in clashes(RULES).items() if name in others}
    assert {name for mix in found for name in chosen(mix)} == set(named()) - never


def test_programs_are_functions_of_their_seeds() -> None:
    assert draw(3) == draw(3) != draw(4)
    assert all(set(draw(seed)) == {"seed", *AXES} for seed in range(20))
