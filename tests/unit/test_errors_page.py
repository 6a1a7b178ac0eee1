"""docs/errors.md is what the source says, has what is raised, and finds what a user sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import fsdp2
import fsdp2.checkpoint
from extras.errors import PAGE, PASSED_ON, Message, messages, page, sites
from fsdp2.plugs.watchdog.states import Begun, LineState, State, WaitingRank
from fsdp2.plugs.watchdog.verdict import Silence, judge

PASS_ON = {
    "checkpoint/ranks.py": "the class and text of another rank's error",
    "checkpoint/saving.py": "what has kept a rank from saving",
    "compat/fsdp1/inspection.py": "a name that there is not, to hasattr",
    "compiled/entry.py": "a reason of compiled/support.py",
    "compiled/tracing.py": "the same",
    "core/places.py": "what the watchdog has found",
    "plugs/transports/gloo_p2p.py": "the text of Lost",
    "model/torch_view.py": "a name that there is not, to hasattr",
    "grouping/config.py": "an error with its file before it",
}
"""Files that raise what was said elsewhere, and what that is: not one of them has a text of its own there."""


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m extras.errors"


def test_no_error_is_made_of_which_the_page_says_nothing() -> None:
    unknown = [site for site in sites() if not any(re.search(r"\w{3}", text) for text in site.texts)]
    assert [f"{site.where}:{site.line}" for site in unknown if site.where not in PASS_ON] == [], (
        "extras/errors.py cannot follow these: write the text where the error is made, or add the functions that make "
        "it to PASSED_ON there"
    )
    assert {site.where for site in unknown} == set(PASS_ON)


def test_functions_whose_texts_are_passed_on_have_some() -> None:
    listed = {(each.where, each.error) for each in messages()}
    assert PASSED_ON.keys() <= listed


def found(error: BaseException | str) -> list[Message]:
    """The rows of the page that ``error`` is one of."""
    said, kind = re.sub(r"\s+", " ", str(error)), type(error).__name__
    parts = {each: re.sub(r"\s+", " ", each.text).split("…") for each in messages()}
    patterns = {each: ".*".join(map(re.escape, of_one)) for each, of_one in parts.items()}
    return [
        each
        for each, pattern in patterns.items()
        if re.fullmatch(pattern, said) and (isinstance(error, str) or each.error == kind)
    ]


def raised(action: Callable[[], object]) -> fsdp2.FSDPError:
    with pytest.raises(fsdp2.FSDPError) as caught:
        action()
    return caught.value


def test_a_message_is_found_by_its_text() -> None:
    (row,) = found(raised(lambda: fsdp2.compile_report(nn.Linear(2, 2))))
    assert row.where == "compiled/report.py"


def test_messages_made_of_parts_are_found(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    cases: dict[str, Callable[[], object]] = {
        "checkpoint/whole.py": lambda: fsdp2.checkpoint.load_full(model, {}),
        "checkpoint/source.py": lambda: fsdp2.checkpoint.load(tmp_path / "nowhere", model),
        "arguments.py": lambda: fsdp2.set_watchdog("soon"),  # type: ignore[arg-type]
    }
    for where, action in cases.items():
        error = raised(action)
        assert where in {row.where for row in found(error)}, error


def test_what_the_watchdog_says_is_found() -> None:
    def waits(rank: int, label: str) -> State:
        lines = {"world": LineState((0, 1), 1, (), (Begun(0, label, len(label), 7, "forward of Net"),))}
        return State(
            rank, 1, 7, "forward of Net", waiting=WaitingRank("world", 0, label, len(label), 12.0), lines=lines
        )

    for other in (waits(1, "another gather"), waits(1, "a gather"), Silence.GONE):
        verdict = judge(0, {0: waits(0, "a gather"), 1: other})
        rows = [row for row in found(verdict.text) if row.where == "plugs/watchdog/verdict.py"]
        assert rows or not verdict.raises, verdict.text
        assert "call join_step()" in verdict.text or "and join_step()" in verdict.text or not verdict.raises


def test_all_classes_are_there() -> None:
    assert len(messages()) > 500
    assert {each.error for each in messages()} == {
        "AttributeError",
        "CheckpointDamaged",
        "CheckpointError",
        "CheckpointIncomplete",
        "CheckpointMismatch",
        "FSDPAssertionError",
        "FSDPNotImplementedError",
        "FSDPRuntimeError",
        "FSDPTypeError",
        "FSDPValueError",
        "ImportError",
        "a warning",
        "logged",
        "SaveFailed",
        "UsageError",
        "ValueError",
    }
