"""The report: what became of each check on one machine. JSON to go on from, Markdown to read and to send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from extras.gpu_check.check import Check, Verdict
from extras.gpu_check.machine import Machine

JSON, MARKDOWN = "report.json", "report.md"
LONGEST_COMPLAINT = 6000


class Report:
    """Verdicts by the names of checks, of one machine, torch and commit.

    Attributes:
        verdicts: what is known so far.
    """

    def __init__(self, folder: Path, machine: Machine, checks: Sequence[Check]) -> None:
        self._folder = folder
        self._machine = machine
        self._checks = checks
        self.verdicts: dict[str, Verdict] = {}

    def resume(self) -> bool:
        """Take up the report in the folder, if it is of this machine, torch and commit."""
        path = self._folder / JSON
        if not path.exists():
            return False
        found = json.loads(path.read_text())
        if found["machine"] != json.loads(json.dumps(self._machine.to_json())):
            return False
        self.verdicts = {name: Verdict(**verdict) for name, verdict in found["checks"].items()}
        return True

    def is_done(self, check: Check) -> bool:
        """Whether it has run, whatever became of it."""
        verdict = self.verdicts.get(check.name)
        return verdict is not None and verdict.status != "cannot run"

    def add(self, check: Check, verdict: Verdict) -> None:
        """Keep ``verdict``, in both files, at once: the next check may take the machine down."""
        self.verdicts[check.name] = verdict
        self._folder.mkdir(parents=True, exist_ok=True)
        checks = {name: asdict(verdict) for name, verdict in self.verdicts.items()}
        text = json.dumps({"machine": self._machine.to_json(), "checks": checks}, indent=1)
        _replace(self._folder / JSON, text)
        _replace(self._folder / MARKDOWN, self.markdown())

    def markdown(self) -> str:
        """Of all checks: a table, then what is wrong, then what was measured."""
        machine = self._machine
        lines = [
            "# fsdp2 on GPUs",
            "",
            f"{_devices(machine.gpu_names)}; torch {machine.torch}, CUDA {machine.cuda}, NCCL {machine.nccl}, "
            f"driver {machine.driver}, Python {machine.python}; commit {machine.commit}",
            "",
            "| | check | asks | became |",
            "| --- | --- | --- | --- |",
        ]
        for check in self._checks:
            verdict = self.verdicts.get(check.name)
            lines.append(f"| {check.number} | {check.name} | {check.asks} | {_became(verdict)} |")
        for check in self._checks:
            verdict = self.verdicts.get(check.name)
            if verdict is not None and verdict.status in ("failed", "hung"):
                lines += ["", f"## {check.number}. {check.name}: {verdict.status}", ""]
                lines += [f"Expected: {check.expected}", "", f"It means: {check.means}", ""]
                for complaint in verdict.complaints:
                    lines += ["```", complaint[-LONGEST_COMPLAINT:].replace("```", "'''"), "```"]
        for check in self._checks:
            verdict = self.verdicts.get(check.name)
            if verdict is not None and any(map(_numbers, verdict.found.values())):
                lines += ["", f"## {check.number}. {check.name}: measured", ""]
                for title, found in verdict.found.items():
                    lines += [f"- {title}: `{json.dumps(_numbers(found))}`"] * bool(_numbers(found))
        return "\n".join(lines) + "\n"

    def count(self, *statuses: str) -> int:
        """How many checks have one of ``statuses``."""
        return sum(verdict.status in statuses for verdict in self.verdicts.values())


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in ("complaints", "names", "losses")}


def _became(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not run yet"
    if verdict.status == "cannot run":
        return f"cannot run: {verdict.complaints[0]}"
    return f"{verdict.status}, {verdict.seconds:.0f} s"


def _devices(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def _replace(path: Path, text: str) -> None:
    """Write it whole or not at all."""
    beside = path.with_suffix(path.suffix + ".new")
    beside.write_text(text)
    beside.replace(path)
