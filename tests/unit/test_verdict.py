"""Whether ranks that wait can go on: the judgement alone, on what ranks might tell."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.core.places import label
from fsdp2.plugs.transports.gloo_p2p import tag_of
from fsdp2.plugs.watchdog.release import first_number
from fsdp2.plugs.watchdog.states import COLLECTIVE, Begun, LineState, State, WaitingRank
from fsdp2.plugs.watchdog.verdict import Silence, judge
from tests.unit.helpers import for_each

WORLD = (0, 1, 2)
LABELS = {"gather a": 1, "gather b": 2, "reduce a": 3}


def rank(
    number: int,
    begun: Sequence[str] = (),
    *,
    waits: bool = False,
    call: Sequence[int] = (),
    called: str = "torch.distributed.barrier()",
    broken: tuple[int, ...] = (),
    line: str = "world",
    ranks: tuple[int, ...] = WORLD,
) -> State:
    """A rank that has begun exchanges over ``ranks``, and waits for the last of them."""
    recent = tuple(Begun(index, each, LABELS[each], 7, "forward of Net") for index, each in enumerate(begun))
    waiting = WaitingRank(line, len(begun) - 1, begun[-1], LABELS[begun[-1]], 12.0) if waits else None
    if call:
        waiting = WaitingRank(COLLECTIVE, None, called, len(called), 12.0, tuple(call))
    return State(
        number,
        1,
        7,
        "forward of Net",
        at=f"train.py:{number} in main",
        waiting=waiting,
        lines={line: LineState(ranks, len(begun), broken, recent)},
    )


def test_a_state_survives_the_store() -> None:
    state = rank(1, ["gather a", "gather b"], waits=True, broken=(0,))
    assert State.from_json(state.to_json()) == state
    plain = rank(2, call=(0, 2))
    assert State.from_json(plain.to_json()) == plain


def test_another_exchange_in_its_place_is_never_met() -> None:
    known = {0: rank(0, ["gather a", "gather a"], waits=True), 1: rank(1, ["gather a", "gather b"], waits=True)}
    verdict = judge(0, known)
    assert verdict.raises
    assert "ranks 0 and 1 can never meet: rank 0 waits for gather a" in verdict.text
    assert "rank 1 has begun gather b in its place" in verdict.text
    assert "call set_divergence('join') on one root" in verdict.text and "join_step()" in verdict.text
    assert "train.py:0 in main" in verdict.text and "train.py:1 in main" in verdict.text, "both are shown"


def test_the_same_of_other_sizes_is_never_met() -> None:
    other = rank(1, ["gather a"], waits=True)
    line = other.lines["world"]
    changed = LineState(line.ranks, 1, (), (Begun(0, "gather a", 99, 7, "forward of Net"),))
    verdict = judge(0, {0: rank(0, ["gather a"], waits=True), 1: State(1, 1, 7, "x", lines={"world": changed})})
    assert verdict.raises and "of other sizes or scales" in verdict.text


def test_a_launch_that_was_interrupted_is_never_met() -> None:
    verdict = judge(0, {0: rank(0, ["gather a"], waits=True), 1: rank(1, ["gather a"], broken=(0,))})
    assert verdict.raises and "an exception on rank 1 has interrupted" in verdict.text


def test_who_runs_the_programs_own_code_may_come() -> None:
    known = {0: rank(0, ["gather a"], waits=True), 1: rank(1, ["gather a"], waits=True), 2: rank(2)}
    verdict = judge(0, known)
    assert not verdict.raises and verdict.complete
    assert "rank 2 has not come to it yet (it runs train.py:2 in main)" in verdict.text


def test_whoever_waits_for_one_that_runs_may_go_on() -> None:
    """Rank 1 is in a barrier that rank 2 may come to; rank 0 waits for rank 1."""
    known = {0: rank(0, ["gather a"], waits=True, ranks=(0, 1)), 1: rank(1, call=(1, 2), ranks=(0, 1)), 2: rank(2)}
    assert not judge(0, known).raises


def test_a_barrier_that_waits_for_who_waits_is_a_deadlock() -> None:
    known = {0: rank(0, ["gather a"], waits=True, ranks=(0, 1)), 1: rank(1, call=(0, 1), ranks=(0, 1))}
    verdict = judge(0, known)
    assert verdict.raises and "all that it waits for wait as well" in verdict.text
    assert "rank 1: step 7, forward of Net; waits for torch.distributed.barrier(), for 12 s" in verdict.text


def test_a_circle_over_several_groups_is_a_deadlock() -> None:
    """0 waits for 1 in one group, 1 for 2 in another, 2 for 0 in a third."""

    def waits(number: int, line: str, ranks: tuple[int, ...], others: Sequence[tuple[str, tuple[int, ...]]]) -> State:
        state = rank(number, ["gather a"], waits=True, line=line, ranks=ranks)
        lines = {**state.lines, **{key: LineState(members, 0) for key, members in others}}
        return State(number, 1, 7, "forward", waiting=state.waiting, lines=lines)

    groups = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
    known = {
        0: waits(0, "a", groups["a"], [("c", groups["c"])]),
        1: waits(1, "b", groups["b"], [("a", groups["a"])]),
        2: waits(2, "c", groups["c"], [("b", groups["b"])]),
    }
    assert judge(0, known).raises
    known[2] = State(2, 1, 7, "forward", at="train.py:9 in load", lines={"b": LineState((1, 2), 0)})
    assert not judge(0, known).raises, "rank 2 loads a batch"


@for_each(
    ("silence", "raises", "complete"),
    [
        (Silence.GONE, True, True),
        (Silence.NOT_YET, False, False),
        (Silence.NOT_STARTED, False, True),
        (Silence.BUSY, False, True),
    ],
)
def test_ranks_that_do_not_answer(silence: Silence, raises: bool, complete: bool) -> None:
    known = {0: rank(0, ["gather a"], waits=True), 1: rank(1, ["gather a"], waits=True), 2: silence}
    verdict = judge(0, known)
    assert (verdict.raises, verdict.complete) == (raises, complete)
    assert verdict.gone == ((2,) if raises else ())
    if complete:
        assert f"rank 2 {silence.value}" in verdict.text


def test_a_collective_of_torchs_own_may_end_by_itself() -> None:
    """What it waits for is not known: with NCCL, with more than 8 ranks on gloo, or where the environment says so."""
    native = State(0, 1, 7, "forward", waiting=WaitingRank("", None, "gather a", 1, 60.0))
    verdict = judge(0, {0: native})
    assert not verdict.raises and verdict.complete
    waits = rank(1, ["gather a"], waits=True, ranks=(0, 1))
    assert not judge(1, {0: native, 1: waits}).raises


def test_who_is_about_to_raise_comes() -> None:
    raising = State(1, 1, 7, "forward", waiting=WaitingRank("world", 0, "gather b", 2, 9.0), stopped=True)
    assert not judge(0, {0: rank(0, ["gather a"], waits=True), 1: raising, 2: rank(2)}).raises


def test_an_exchange_that_all_have_begun_is_slow_not_stuck() -> None:
    """A transfer takes as long as it takes."""
    known = {each: rank(each, ["gather a"], waits=True) for each in WORLD}
    verdict = judge(0, known)
    assert not verdict.raises and verdict.complete
    assert "rank 0 waits for gather a, which all ranks have begun" in verdict.text


def test_a_collective_that_all_have_begun_is_slow_not_stuck() -> None:
    """Ranks 1 and 2 exchange something large; rank 0 waits for rank 1."""
    known = {
        0: rank(0, ["gather a"], waits=True, ranks=(0, 1)),
        1: rank(1, call=(1, 2), ranks=(0, 1)),
        2: rank(2, call=(1, 2)),
    }
    verdict = judge(0, known)
    assert not verdict.raises and verdict.complete
    assert "rank 1 waits for torch.distributed.barrier(), which all ranks have begun" in verdict.text


def test_different_collectives_of_torchs_own_are_a_deadlock() -> None:
    """Nobody waits for an exchange of ours: the optimizer's on one rank, and on the others what comes after it."""
    known = {0: rank(0, call=WORLD), 1: rank(1, call=WORLD, called="torch's clip_grad_norm_()"), 2: rank(2, call=WORLD)}
    for each in WORLD:
        verdict = judge(each, known)
        assert verdict.raises and "and all that it waits for wait as well" in verdict.text
    known[1] = rank(1)
    verdict = judge(0, known)
    assert not verdict.raises and verdict.complete, "it evaluates, or loads"
    assert "rank 1 has not come to it yet (it runs train.py:1 in main)" in verdict.text
    assert not judge(0, {each: rank(each, call=WORLD) for each in WORLD}).raises, "a large one"


def test_what_a_verdict_has_ended_is_taken_for_nothing_that_follows() -> None:
    """Messages that nobody waits for any more may be under way, and have the tags of their numbers."""
    named = label("the all-gather of 'blocks.0'")
    numbers = [first_number(epoch) + number for epoch in range(50) for number in range(2000)]
    assert numbers == sorted(numbers)
    assert len({tag_of(named, number) for number in numbers}) == len(numbers)
