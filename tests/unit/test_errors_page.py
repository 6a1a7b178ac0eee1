"""docs/errors.md is what the source says, and finds what a user sees."""

from __future__ import annotations

import re

import pytest
from torch import nn

import fsdp2
from extras.errors import PAGE, messages, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m extras.errors"


def test_a_message_is_found_by_its_text() -> None:
    with pytest.raises(fsdp2.FSDPError) as raised:
        fsdp2.compile_report(nn.Linear(2, 2))
    patterns = {each: ".*".join(map(re.escape, each.text.split("…"))) for each in messages()}
    (found,) = [each for each, pattern in patterns.items() if re.fullmatch(pattern, str(raised.value))]
    assert found.error == type(raised.value).__name__ and found.where == "compiled/report.py"


def test_all_classes_are_there() -> None:
    assert len(messages()) > 250
    assert {each.error for each in messages()} == {
        "FSDPNotImplementedError",
        "FSDPRuntimeError",
        "FSDPTypeError",
        "FSDPValueError",
    }
