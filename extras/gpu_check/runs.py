"""What a check runs: a program of `programs/` on some ranks, or tests; each in processes of its own, with a limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Found = Mapping[str, Any]
LINES_OF_OUTPUT = 40
COMPLAINTS = "complaints"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """Where programs run: on ``ranks`` GPUs, or, in a rehearsal, on the CPU."""

    device: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        title: of the run.
        plants: the fault that was planted, if any: then a complaint is what is expected.
        status: of its exit; None: it was killed when its time was over.
        seconds: that it took.
        found: what it measured.
        output: the end of what it printed.
    """

    title: str
    plants: str
    status: int | None
    seconds: float
    found: Found
    output: str

    @property
    def hung(self) -> bool:
        """Whether it was killed when its time was over."""
        return self.status is None

    def complaints(self) -> list[str]:
        """What is wrong with it."""
        if self.hung:
            return [f"{self.title}: not done after {self.seconds:.0f} s, and killed; its output ends\n{self.output}"]
        found = list(self.found.get(COMPLAINTS, []))
        if not self.found:
            found = [f"exit status {self.status}; its output ends\n{self.output}"]
            return [f"{self.title}: {complaint}" for complaint in found]
        if self.plants:
            return [] if found else [f"{self.title}: passed, though a fault was planted: {self.plants}"]
        return [f"{self.title}: {complaint}" for complaint in found]


class Run(ABC):
    """A command, and how its results are read.

    Attributes:
        limit_s: Seconds after which it is killed, with all that it started.
        environment: Set beside what is inherited.
        plants: The fault that is planted, which must be found.
    """

    limit_s: int
    environment: Mapping[str, str]
    plants: str

    @property
    @abstractmethod
    def title(self) -> str:
        """What reports call it."""

    @abstractmethod
    def command(self, place: Place, results: Path) -> Sequence[str]:
        """Its arguments; it leaves what it found in the folder ``results``."""

    @abstractmethod
    def read(self, results: Path, status: int) -> Found:
        """What it found; nothing, if it left nothing."""

    def run(self, place: Place) -> Outcome:
        """Run it to its end, or to that of its time."""
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as printed:
            results = Path(folder)
            start = time.monotonic()
            process = subprocess.Popen(
                self.command(place, results),
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                cwd=ROOT,
                start_new_session=True,
            )
            status: int | None
            try:
                status = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _kill_session(process)
            seconds = time.monotonic() - start
            found = self.read(results, status) if status is not None else {}
            printed.seek(0)
            output = "\n".join(printed.read().splitlines()[-LINES_OF_OUTPUT:])
        return Outcome(self.title, self.plants, status, seconds, found, output)


def _kill_session(process: subprocess.Popen[str]) -> None:
    """End ``process`` and what it has started, if anything is left of it."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True, slots=True)
class Program(Run):
    """``programs/<name>.py``.

    Attributes:
        options: What it is told.
        several: Whether it runs on all GPUs, and not on one.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    several: bool = False
    plants: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: int = 300

    @property
    def title(self) -> str:
        """With the options, the environment and the fault."""
        told = [f"{key}={value}" for key, value in {**self.options, **self.environment}.items()]
        told += [f"planted: {self.plants}"] * bool(self.plants)
        return f"{self.name} ({', '.join(told)})" if told else self.name

    def command(self, place: Place, results: Path) -> Sequence[str]:
        """`extras.gpu_check.program`, which starts the ranks."""
        arguments = [sys.executable, "-m", "extras.gpu_check.program", self.name]
        arguments += ["--device", place.device, "--ranks", str(place.ranks if self.several else 1)]
        arguments += ["--results", str(results)]
        for key, value in self.options.items():
            arguments += ["--option", f"{key}={value}"]
        return arguments + ["--plants", self.plants] * bool(self.plants)

    def read(self, results: Path, status: int) -> Found:
        """What the first rank found, with the complaints of all."""
        ranks = [json.loads(path.read_text()) for path in sorted(results.glob("rank*.json"))]
        if not ranks or (status and not any(each[COMPLAINTS] for each in ranks)):
            return {}
        complaints = dict.fromkeys(complaint for each in ranks for complaint in each[COMPLAINTS])
        return {**ranks[0], COMPLAINTS: list(complaints)}


@dataclass(frozen=True, slots=True)
class Tests(Run):
    """Tests, by pytest; that none of them ran is a complaint."""

    paths: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    limit_s: int = 600
    plants: str = ""

    @property
    def title(self) -> str:
        """Paths and environment."""
        return " ".join((*(f"{key}={value}" for key, value in self.environment.items()), "pytest", *self.paths))

    def command(self, place: Place, results: Path) -> Sequence[str]:
        """With a report as XML."""
        return [sys.executable, "-m", "pytest", *self.paths, f"--junitxml={results / 'tests.xml'}"]

    def read(self, results: Path, status: int) -> Found:
        """How many did what, and which failed."""
        path = results / "tests.xml"
        return of_tests(path.read_text()) if path.exists() else {}


def of_tests(report: str) -> Found:
    """Read pytest's report."""
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    complaints = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        ends = {child.tag: child for child in case}
        bad = next((ends[tag] for tag in ("failure", "error") if tag in ends), None)
        if bad is not None:
            counts["failed"] += 1
            complaints.append(f"{case.get('classname')}::{case.get('name')}: {bad.get('message', '')[:500]}")
        else:
            counts["skipped" if "skipped" in ends else "passed"] += 1
    if not counts["passed"] and not complaints:
        complaints.append(f"no test ran ({counts['skipped']} were skipped)")
    return {**counts, COMPLAINTS: complaints}


@dataclass(frozen=True, slots=True)
class Suite(Run):
    """The suite of the CPU, on a machine whose GPUs it must not see."""

    limit_s: int = 3600
    plants: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: {"CUDA_VISIBLE_DEVICES": ""})
    arguments: Sequence[str] = ("-m", "not full")

    @property
    def title(self) -> str:
        """As a user would type it."""
        return "CUDA_VISIBLE_DEVICES= make test"

    def command(self, place: Place, results: Path) -> Sequence[str]:
        """Two processes of pytest, each with a report."""
        return [sys.executable, "-m", "tests", *self.arguments]

    def read(self, results: Path, status: int) -> Found:
        """Its exit status is all there is; the end of the output names what failed."""
        return {COMPLAINTS: []} if status == 0 else {}
