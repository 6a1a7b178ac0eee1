"""Programs drawn from seeds, each trained beside the plain model: whatever may be combined is, somewhere.

The programs of the seeds of `helpers.drawn.seeds` have every two features together that may be so. Where drawing has
changed, `python -m tests.multi_rank.combinations.helpers.drawn.features 2500 225` searches them anew. An eighth of
them, all meshes and features among it, run in every `make test`; the others take 140 seconds, and run in
`make test-full`.

`FSDP2_DRAWN=5000 python -m pytest tests/multi_rank/combinations/test_drawn_programs.py -k many` runs that many of each
mesh; `FSDP2_DRAWN_FROM` is the first seed. A failure says its mesh and seed: `run(draw(mesh, seed))` is that program.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.harness import multi_rank
from tests.multi_rank.combinations.helpers.drawn.features import covered, excluded, features
from tests.multi_rank.combinations.helpers.drawn.programs import MESHES, draw
from tests.multi_rank.combinations.helpers.drawn.seeds import SEEDS
from tests.multi_rank.combinations.helpers.drawn.training import run

BATCH = 6
MANY = int(os.environ.get("FSDP2_DRAWN", "60"))
FIRST = int(os.environ.get("FSDP2_DRAWN_FROM", "1000"))

pytestmark = pytest.mark.every_combination

Batch = tuple[str, tuple[int, ...]]


def batches(mesh: str, seeds: Sequence[int]) -> list[Batch]:
    return [(mesh, tuple(seeds[start : start + BATCH])) for start in range(0, len(seeds), BATCH)]


COVERING = {mesh: batches(mesh, SEEDS[mesh]) for mesh in MESHES}
SHORT = [(mesh, seeds[1::2]) for mesh in MESHES for _, seeds in COVERING[mesh][1::4]]
LONG = [batch for mesh in MESHES for index, batch in enumerate(COVERING[mesh]) if index % 4 != 1]
LONG += [(mesh, seeds[::2]) for mesh in MESHES for _, seeds in COVERING[mesh][1::4]]
LONG += [batch for mesh in MESHES for batch in batches(mesh, range(FIRST, FIRST + MANY))]


def run_batch(mesh: str, seeds: tuple[int, ...]) -> None:
    """Some programs; the first that fails ends it, as the ranks may be out of step afterwards."""
    for seed in seeds:
        program = draw(mesh, seed)
        try:
            run(program)
        except Exception as error:
            raise AssertionError(f"drawn program of mesh {mesh!r}, seed {seed}: {error}\n{program}") from error


def ids(value: object) -> str:
    return str(value[0]) if isinstance(value, tuple) else str(value)


@multi_rank(2)
@pytest.mark.parametrize(("mesh", "seeds"), [each for each in SHORT if each[0] == "1d_2"], ids=ids)
def test_drawn_programs_train_like_the_plain_model_on_two_ranks(mesh: str, seeds: tuple[int, ...]) -> None:
    run_batch(mesh, seeds)


@multi_rank(4)
@pytest.mark.parametrize(("mesh", "seeds"), [each for each in SHORT if each[0] != "1d_2"], ids=ids)
def test_drawn_programs_train_like_the_plain_model_on_four_ranks(mesh: str, seeds: tuple[int, ...]) -> None:
    run_batch(mesh, seeds)


# Eleven minutes for the default number.
@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize(("mesh", "seeds"), [each for each in LONG if each[0] == "1d_2"], ids=ids)
def test_many_drawn_programs_on_two_ranks(mesh: str, seeds: tuple[int, ...]) -> None:
    run_batch(mesh, seeds)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize(("mesh", "seeds"), [each for each in LONG if each[0] != "1d_2"], ids=ids)
def test_many_drawn_programs_on_four_ranks(mesh: str, seeds: tuple[int, ...]) -> None:
    run_batch(mesh, seeds)


def test_every_feature_is_drawn() -> None:
    """What the seeds of the short tests cover, printed with ``-s``: every two features that are not excluded."""
    counts = Counter(feature for mesh in MESHES for seed in SEEDS[mesh] for feature in features(draw(mesh, seed)))
    together, found = covered(SEEDS)
    often = {mesh: [seed for each, seeds in SHORT if each == mesh for seed in seeds] for mesh in MESHES}
    assert sorted(together - covered(often)[0]) == []
    possible = [pair for pair in itertools.combinations(sorted(together), 2) if not excluded(pair)]
    missing = sorted(set(possible) - found)
    for feature in sorted(counts):
        alone = sum(feature in pair for pair in missing)
        print(f"{counts[feature]:5} programs, {alone:3} pairs missing  {feature}")
    total = sum(map(len, SEEDS.values()))
    print(f"{total} programs; {len(possible) - len(missing)} of {len(possible)} pairs")
    assert not missing
    assert total >= 200
    assert len({feature for feature in counts if feature.startswith("set ")}) == 17


def test_what_is_excluded_is_never_drawn() -> None:
    """And every feature of many programs is one of the short ones."""
    together, found = covered({mesh: range(FIRST, FIRST + 300) for mesh in MESHES})
    assert not sorted(pair for pair in found if excluded(pair))
    assert together <= covered(SEEDS)[0]


def test_programs_are_functions_of_their_seeds() -> None:
    for mesh in MESHES:
        assert draw(mesh, 3) == draw(mesh, 3) != draw(mesh, 4)
