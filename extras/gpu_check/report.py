"""The report: what became of each job on one machine. Markdown to read, and JSON, which has all figures."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from extras.gpu_check.jobs import Job, Place
from extras.gpu_check.machine import Machine
from extras.gpu_check.says import COMPLAINTS, SKIPPED, WHAT, said_in

JSON, MARKDOWN = "report.json", "report.md"
MOST_LINES, MOST_BYTES = 200, 1_000_000
LONGEST_COMPLAINT, LONGEST_FIGURES, LONGEST_OUTPUT, MOST_COMPLAINTS = 1500, 300, 4000, 20
LINES_OF_OUTPUT = 15
PASSED, FAILED, SKIPPED_JOB = "passed", "failed", "skipped"


class Cut(enum.Enum):
    """What ended a job, if not itself."""

    NONE = "it ended"
    LIMIT = "its limit"
    TIME = "the end of the time for all"


@dataclass(slots=True)
class Verdict:
    """What became of a job.

    Attributes:
        status: "passed", "failed" or "skipped".
        reasons: why, if it did not pass.
        said: what it found, part by part.
        seconds: that it took.
        output: the end of what it printed, if it did not pass.
        is_for_time: whether it was skipped, or cut off, because the time for all was over.
    """

    status: str
    reasons: list[str] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""
    is_for_time: bool = False


def skipped(reason: str, *, is_for_time: bool = False) -> Verdict:
    """Of a job that was not started."""
    return Verdict(SKIPPED_JOB, [reason], is_for_time=is_for_time)


def judge(job: Job, status: int | None, cut: Cut, seconds: float, output: str) -> Verdict:
    """What became of ``job``, which ended with ``status`` and has printed ``output``."""
    said = said_in(output)
    end = "\n".join(output.splitlines()[-LINES_OF_OUTPUT:])[-LONGEST_OUTPUT:]
    reasons = [f"{each[WHAT]}: {complaint}" for each in said for complaint in each.get(COMPLAINTS, ())]
    if cut is Cut.LIMIT:
        reasons.append(f"not done after {seconds:.0f} s, and killed")
    elif cut is Cut.TIME and not reasons:
        reason = f"the time for all was over; {len(said)} parts had passed in {seconds:.0f} s"
        return Verdict(SKIPPED_JOB, [reason], said, seconds, end, is_for_time=True)
    elif cut is Cut.NONE and not reasons:
        reasons += [f"exit status {status}"] * bool(status)
        reasons += ["it said nothing"] * (job.says and not said and not status)
    if reasons:
        kept = [reason[:LONGEST_COMPLAINT] for reason in reasons[:MOST_COMPLAINTS]]
        kept += [f"and {len(reasons) - len(kept)} more"] * (len(reasons) > len(kept))
        return Verdict(FAILED, kept, said, seconds, end)
    without = [each[SKIPPED] for each in said if SKIPPED in each]
    if said and len(without) == len(said):
        return Verdict(SKIPPED_JOB, list(dict.fromkeys(without)), said, seconds)
    return Verdict(PASSED, [], said, seconds)


class Report:
    """Verdicts by the names of jobs, of one run.

    Attributes:
        verdicts: what is known so far.
    """

    def __init__(self, folder: Path, machine: Machine, place: Place, jobs: Sequence[Job]) -> None:
        self._folder = folder
        self._machine = machine
        self._place = place
        self._jobs = jobs
        self.verdicts: dict[str, Verdict] = {}

    def add(self, job: Job, verdict: Verdict) -> None:
        """Keep ``verdict``, in both files, at once: the next job may take the machine down."""
        self.verdicts[job.name] = verdict
        self._folder.mkdir(parents=True, exist_ok=True)
        _replace(self._folder / JSON, self.json())
        _replace(self._folder / MARKDOWN, self.markdown())

    def json(self) -> str:
        """Everything, or, if that is too long, everything but outputs, or but what was said."""
        found = {name: asdict(verdict) for name, verdict in self.verdicts.items()}
        text = ""
        for left_out in ("", "output", "said"):
            for each in found.values():
                each.pop(left_out, None)
            text = json.dumps({"machine": self._machine.to_json(), "device": self._place.device, "jobs": found})
            if len(text.encode()) < MOST_BYTES:
                break
        return text

    def markdown(self) -> str:
        """Of all jobs: a table, then what is wrong, then what was measured; cut off where it is too long."""
        lines = [*self._head(), *self._table(), *self._wrong(), *self._measured()]
        if len(lines) > MOST_LINES:
            left = len(lines) - MOST_LINES + 2
            lines = [*lines[: MOST_LINES - 2], "", f"{left} lines are left out: {JSON} has everything."]
        return "\n".join(lines) + "\n"

    def _head(self) -> list[str]:
        machine = self._machine
        where = "a rehearsal on the CPU, whose figures are of no worth" if self._place.is_rehearsal else "on GPUs"
        counts = ", ".join(f"{self.count(status)} {status}" for status in (PASSED, FAILED, SKIPPED_JOB))
        missing = len(self._jobs) - len(self.verdicts)
        return [
            f"# fsdp2: {where}",
            "",
            f"{_devices(machine.gpu_names)}; torch {machine.torch}, CUDA {machine.cuda}, NCCL {machine.nccl}, "
            f"driver {machine.driver}, Python {machine.python}, {machine.cores} cores; commit {machine.commit}",
            "",
            f"{counts}{f', {missing} not ended yet' * bool(missing)}. Please send this file and {JSON} with an issue.",
            "",
        ]

    def _table(self) -> list[str]:
        lines = ["| job | asks | became | s |", "| --- | --- | --- | --- |"]
        for job in self._jobs:
            verdict = self.verdicts.get(job.name)
            seconds = f"{verdict.seconds:.0f}" if verdict is not None and verdict.seconds else ""
            lines.append(f"| {job.name} | {job.asks} | {_became(verdict)} | {seconds} |")
        return lines

    def _wrong(self) -> list[str]:
        lines = []
        for job in self._jobs:
            verdict = self.verdicts.get(job.name)
            if verdict is None or verdict.status != FAILED:
                continue
            lines += ["", f"## {job.name}: failed", "", f"It means: {job.means}", ""]
            lines += [f"- {_one_line(reason, LONGEST_COMPLAINT)}" for reason in verdict.reasons]
            if not any(each.get(COMPLAINTS) for each in verdict.said):
                lines += ["", "```", *verdict.output.replace("```", "'''").splitlines(), "```"]
        return lines

    def _measured(self) -> list[str]:
        lines = []
        for job in self._jobs:
            verdict = self.verdicts.get(job.name)
            if verdict is not None and verdict.said:
                lines += ["", f"## {job.name}: said", ""]
                lines += _summary(verdict.said)
        return lines

    def count(self, *statuses: str) -> int:
        """How many jobs have one of ``statuses``."""
        return sum(verdict.status in statuses for verdict in self.verdicts.values())


FIGURES = {
    "ms": "ms", "host_ms": "host, ms", "tokens_per_s": "tokens/s", "mfu": "MFU", "allocated_gib": "allocated, GiB",
    "reserved_gib": "reserved, GiB", "retries": "retries",
}  # fmt: skip
"""Of the Llama step, in the report's table."""

NO_FIGURES = (WHAT, COMPLAINTS, "names", "losses", "seconds", "torch", "name")


def _summary(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Llama steps as a table; cases beside torch in one line; a line for each other part with figures."""
    steps = [each for each in said if "ms" in each]
    lines = []
    if steps:
        columns = {key: name for key, name in FIGURES.items() if any(key in each for each in steps)}
        lines += [f"| {' | '.join(('', *columns.values()))} |", "| --- " * (len(columns) + 1) + "|"]
        for each in steps:
            cells = [f"{each[key]:.4g}" if key in each else "" for key in columns]
            lines.append(f"| {' | '.join((each[WHAT], *cells))} |")
    cases = [each for each in said if "of_torch" in each]
    if cases:
        same = sum(each["of_torch"] == 0 for each in cases)
        jittered = [each["jittered"] for each in cases if "jittered" in each]
        line = f"- {same} of {len(cases)} cases equal torch's to the bit"
        line += f"; {sum(each == 0 for each in jittered)} of {len(jittered)} are the same with delays" * bool(jittered)
        lines.append(line)
        lines += [f"- {each[WHAT]}: off by {each['of_torch']:.2g}" for each in cases if each["of_torch"] > 0]
    for each in said:
        if each in steps or each in cases:
            continue
        figures = {key: value for key, value in each.items() if key not in NO_FIGURES}
        if figures:
            lines.append(f"- {_one_line(each[WHAT], 150)}: `{_one_line(json.dumps(figures), LONGEST_FIGURES)}`")
    return lines


def _became(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not ended yet"
    if verdict.status == SKIPPED_JOB:
        return f"skipped: {_one_line('; '.join(verdict.reasons), LONGEST_FIGURES)}"
    parts = len([each for each in verdict.said if SKIPPED not in each])
    without = len(verdict.said) - parts
    return f"{verdict.status}, {parts} parts" + f" ({without} skipped)" * bool(without)


def _one_line(text: str, longest: int) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= longest else f"{text[:longest]} ..."


def _devices(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def _replace(path: Path, text: str) -> None:
    """Write it whole or not at all."""
    beside = path.with_suffix(path.suffix + ".new")
    beside.write_text(text)
    beside.replace(path)
