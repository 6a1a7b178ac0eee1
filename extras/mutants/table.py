"""What came of planted faults, as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def table(file: Path) -> str:
    """By folder how many were found, and by what; then each that was not."""
    every: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    counts: Counter[tuple[str, str]] = Counter()
    for each in every:
        counts[each["mutant"]["path"].split("/")[1], _fate(each)] += 1
    fates = ("short", "full", "no test runs the line", "survived")
    lines = [
        "| folder | faults | found by the short suite | by the full one alone | no test runs the line | survived |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for folder in sorted({folder for folder, _ in counts}):
        numbers = [counts[folder, fate] for fate in fates]
        lines.append(f"| `{folder}/` | {sum(numbers)} | " + " | ".join(map(str, numbers)) + " |")
    for fate, title in (("full", "Found by the full suite alone"), *((fate, fate) for fate in fates[2:])):
        lines += ["", f"{title.capitalize()}:", ""]
        lines += [f"- `{each['name']}`{_by(each)}" for each in every if _fate(each) == fate]
    return "\n".join(lines)


def _fate(found: dict[str, Any]) -> str:
    if found["killed_by"] or found["ended"]:
        return "short" if found["short"] else "full"
    return "survived" if found["running"] else "no test runs the line"


def _by(found: dict[str, Any]) -> str:
    return f": `{found['killed_by']}`" if found["killed_by"] else ""
