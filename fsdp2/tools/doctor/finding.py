"""`Finding`: one thing that the doctor has looked at, and what to do about it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "problem"]
"""A problem stops or spoils runs, a warning slows them, a note is to be known."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer.

    Attributes:
        topic: "torch", "ulimit", ...
        level: how bad it is.
        what: a sentence.
        remedy: what to do; "" if nothing is to be done.
        values: what was measured or read, by name, with units in the names.
    """

    topic: str
    level: Level
    what: str
    remedy: str = ""
    values: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings. ``str()`` shows them, what is bad at the end.

    Attributes:
        findings: in the order that they were made.
    """

    findings: Sequence[Finding]

    def of(self, level: Level) -> list[Finding]:
        """Those of one level."""
        return [each for each in self.findings if each.level == level]

    @property
    def is_well(self) -> bool:
        """Whether there is no problem."""
        return not self.of("problem")

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps({"well": self.is_well, "findings": [asdict(each) for each in self.findings]}, indent=2)

    def __str__(self) -> str:
        width = max((len(each.topic) for each in self.findings), default=0)
        lines = [line for each in self.findings for line in _lines(each, width)]
        counts = [f"{len(self.of(level))} {level}s" for level in ("problem", "warning") if self.of(level)]
        said = f"found: {', '.join(counts)}" if counts else "nothing is wrong"
        return "\n".join([*lines, "", said.replace("1 problems", "1 problem").replace("1 warnings", "1 warning")])


_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "problem": "PROBLEM"}


def _lines(finding: Finding, width: int) -> list[str]:
    head = f"{_MARKS[finding.level]}  {finding.topic:<{width}}  "
    body = textwrap.wrap(finding.what, 100) or [""]
    remedy = textwrap.wrap(finding.remedy, 98)
    indent = " " * len(head)
    return [head + body[0], *(indent + line for line in body[1:]), *(f"{indent}> {line}" for line in remedy)]
