"""Programs of FSDP1 drawn from seeds, each trained beside the plain model: whatever may be combined is, somewhere.

A failure says its ranks and seed, and what was drawn: ``run(draw(seed, ranks))`` is that program.
"""

from __future__ import annotations

import os

import pytest

from tests.fsdp1.helpers.drawn import KINDS, POLICIES, draw, run
from tests.harness import EXACT, multi_rank, others_full

BATCH = 5
SHORT = {2: range(20), 4: range(10)}
MANY = int(os.environ.get("FSDP1_DRAWN", "200"))
LONG = range(1000, 1000 + MANY)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself


def run_batch(seeds: range, world_size: int) -> None:
    """Some programs; the first that fails ends it, as the ranks may be out of step afterwards."""
    for seed in seeds:
        drawn = draw(seed, world_size)
        try:
            run(drawn)
        except Exception as error:
            raise AssertionError(f"seed {seed} on {world_size} ranks: {error}\n{drawn}") from error


def batches(seeds: range) -> list[range]:
    return [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]


@multi_rank(2)
@pytest.mark.parametrize("seeds", others_full(batches(SHORT[2]), batches(SHORT[2])[:1]), ids=str)  # 3 s each
def test_drawn_programs_on_two_ranks(seeds: range, world_size: int) -> None:
    run_batch(seeds, world_size)


@pytest.mark.full  # 8 s each
@multi_rank(4)
@pytest.mark.parametrize("seeds", batches(SHORT[4]), ids=str)
def test_drawn_programs_on_four_ranks(seeds: range, world_size: int) -> None:
    run_batch(seeds, world_size)


# Three minutes for the default number.
@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("seeds", batches(LONG), ids=str)
def test_many_drawn_programs_on_two_ranks(seeds: range, world_size: int) -> None:
    run_batch(seeds, world_size)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("seeds", batches(LONG[: MANY // 2]), ids=str)
def test_many_drawn_programs_on_four_ranks(seeds: range, world_size: int) -> None:
    run_batch(seeds, world_size)


def test_the_short_programs_have_everything() -> None:
    """Every value of what is drawn, bitwise comparisons among them."""
    drawn = [draw(seed, world_size) for world_size, seeds in SHORT.items() for seed in seeds]
    assert {kind for each in drawn for kind in each.blocks} == set(KINDS)
    assert {each.policy for each in drawn} == set(POLICIES)
    assert len({each.strategy for each in drawn}) == 5 and len({each.mixed for each in drawn}) == 4
    assert len({each.ignored for each in drawn}) == 4 and len({each.reload for each in drawn}) == 4
    assert len({each.optimizer for each in drawn}) == len({each.start for each in drawn}) == 3
    for name in ("tokens", "tied", "repeated", "by_group", "sync_each", "use_orig_params", "checkpointed", "offload"):
        assert {getattr(each, name) for each in drawn} == {False, True}, name
    assert {each.micro for each in drawn} == {1, 2, 3} and {each.max_norm for each in drawn} == {None, 0.05, 100.0}
    assert sum(each.tolerance is EXACT for each in drawn) >= 5


def test_programs_are_functions_of_their_seeds() -> None:
    assert draw(3, 2) == draw(3, 2) != draw(4, 2)
