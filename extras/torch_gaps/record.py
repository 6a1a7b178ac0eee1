"""The record of outcomes, extras/torch_gaps/outcomes.json, and the table of docs/beyond.md that shows it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from extras.torch_gaps.registry import Case
from extras.torch_gaps.run import Outcome

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("outcomes.json")
DOCUMENT = ROOT / "docs" / "beyond.md"
BEGIN, END = "<!-- torch-gaps: begin -->", "<!-- torch-gaps: end -->"
OURS = "fsdp2 on "
# Case -> torch version, or `OURS` and a torch version -> outcome.
Record = dict[str, dict[str, Outcome]]


def read() -> Record:
    """What has been recorded so far."""
    if not RECORD.exists():
        return {}
    stored = json.loads(RECORD.read_text())
    return {
        name: {version: Outcome(**outcome) for version, outcome in outcomes.items()}
        for name, outcomes in stored.items()
    }


def key_of(implementation: str, version: str) -> str:
    """Under what the outcomes of an implementation on torch ``version`` are recorded."""
    return version if implementation == "torch" else f"{OURS}{version}"


def merged(record: Record, cases: dict[str, Case], version: str, outcomes: dict[str, Outcome]) -> Record:
    """``record`` with ``outcomes`` as those of ``version``, see `key_of`; cases that no longer exist are dropped."""
    result: Record = {}
    for name in cases:
        found = dict(record.get(name, {}))
        if name in outcomes:
            found[version] = outcomes[name]
        if found:
            result[name] = dict(sorted(found.items()))
    return result


def write(record: Record, cases: dict[str, Case]) -> None:
    """Writes the record and the table between the markers of the document.

    Raises:
        ValueError: the document has no markers.
    """
    stored = {
        name: {version: {"kind": each.kind, "detail": each.detail} for version, each in outcomes.items()}
        for name, outcomes in record.items()
    }
    RECORD.write_text(json.dumps(stored, indent=1) + "\n")
    before, after = _around_the_table()
    DOCUMENT.write_text(f"{before}{BEGIN}\n{render(record, cases)}\n{END}{after}")


def shown() -> str:
    """The table as it stands in the document."""
    text = DOCUMENT.read_text()
    before, after = _around_the_table()
    return text[len(before) + len(BEGIN) : len(text) - len(after) - len(END)].strip("\n")


def render(record: Record, cases: dict[str, Case]) -> str:
    """The table, a part for each area: a row per recorded case, a column per torch version, and one for fsdp2."""
    keys = {key for outcomes in record.values() for key in outcomes}
    versions = sorted((key for key in keys if not key.startswith(OURS)), key=_as_numbers)
    ours = sorted((key for key in keys if key.startswith(OURS)), key=_as_numbers)
    lines = [_summary(record, versions + ours)]
    titles = [*(f"torch {version}" for version in versions), *(["fsdp2"] if ours else [])]
    for area in dict.fromkeys(case.area for case in cases.values()):
        rows = [case for case in cases.values() if case.area == area and case.name in record]
        lines += ["", f"### {area}", ""]
        lines += [_row(["a user wants", *titles, "related issues"])]
        lines += [_row(["---"] * (len(titles) + 2))]
        for case in rows:
            outcomes = record[case.name]
            cells = [*_cells(outcomes, versions), *([_cell_of_ours(outcomes, ours)] if ours else [])]
            lines += [_row([case.title, *cells, " ".join(case.asked)])]
    return "\n".join(lines)


def _summary(record: Record, versions: list[str]) -> str:
    counts = []
    for version in versions:
        kinds = [outcomes[version].kind for outcomes in record.values() if version in outcomes]
        each = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds, key=kinds.count)))
        name = f"fsdp2 on torch {version.removeprefix(OURS)}" if version.startswith(OURS) else f"torch {version}"
        counts.append(f"{name}, {len(kinds)} cases: {each}.")
    return "\n".join(f"- {line}" for line in counts)


def _cells(outcomes: dict[str, Outcome], versions: list[str]) -> Iterable[str]:
    return [_cell(outcomes[version]) if version in outcomes else "not run" for version in versions]


def _cell_of_ours(outcomes: dict[str, Outcome], keys: list[str]) -> str:
    """One cell for all torch versions where they agree in kind, that of the newest."""
    found = {key: outcomes[key] for key in keys if key in outcomes}
    if len({each.kind for each in found.values()}) > 1:
        return "; ".join(f"{_cell(each)} (torch {key.removeprefix(OURS)})" for key, each in found.items())
    return _cell(list(found.values())[-1]) if found else "not run"


def _cell(outcome: Outcome) -> str:
    if not outcome.detail:
        return outcome.kind
    detail = outcome.detail.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    # Names in backquotes are literal: nothing is escaped inside.
    parts = detail.split("`")
    parts[1::2] = [part.replace("\\_", "_").replace("\\*", "*").replace("&lt;", "<") for part in parts[1::2]]
    joint = ": " if outcome.kind == "no such option" else " "
    return f"**{outcome.kind}**{joint}{'`'.join(parts)}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _as_numbers(version: str) -> list[int]:
    return [int(part) for part in version.removeprefix(OURS).split(".")]


def _around_the_table() -> tuple[str, str]:
    text = DOCUMENT.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{DOCUMENT.name} needs one line '{BEGIN}' and one '{END}'")
    before, rest = text.split(BEGIN)
    return before, rest.split(END)[1]
