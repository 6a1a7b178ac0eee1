"""Runs jobs until the time is over: those of right or wrong in lanes, others alone. What ended is written at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from extras.gpu_check.jobs import RIGHT, Job, Place
from extras.gpu_check.machine import ROOT, Machine
from extras.gpu_check.report import Cut, Verdict, judge, skipped

SECONDS_TO_WRITE = 5.0
"""Before the end, in which all is killed and written."""

LEAST_SECONDS = 15.0
"""Under which no job is worth its start."""

MOST_LANES = 6
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",  # stores look up the names of hosts, which waits where no server answers
    "NCCL_DEBUG": "WARN",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # servers that fork must not touch CUDA to learn whether it is there
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
}


def lanes(place: Place, machine: Machine) -> int:
    """How many jobs run beside each other."""
    return 1 if machine.is_exclusive else max(1, min(MOST_LANES, machine.cores // (1 if place.is_rehearsal else 2)))


@dataclass(slots=True)
class Running:
    """A job that has been started; ``ends`` by the clock, because of ``cut``."""

    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    ends: float
    cut: Cut

    @classmethod
    def start(cls, job: Job, place: Place, folder: Path, deadline: float) -> Running:
        """In a session of its own, so that all that it starts can be killed."""
        now = time.monotonic()
        log = folder / f"{job.name}.txt"
        environment = {"OMP_NUM_THREADS": "4", **job.environment}
        if place.is_rehearsal:
            environment["OMP_NUM_THREADS"] = "1"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                job.arguments(place),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, **environment},
                cwd=ROOT,
                start_new_session=True,
            )
        by_limit = now + job.limit_s <= deadline
        return cls(job, process, log, now, min(now + job.limit_s, deadline), Cut.LIMIT if by_limit else Cut.TIME)

    def verdict(self) -> Verdict | None:
        """What became of it; None while it runs."""
        status = self.process.poll()
        if status is None and time.monotonic() < self.ends:
            return None
        self.kill()
        seconds = time.monotonic() - self.began
        output = self.log.read_text(errors="replace")
        return judge(self.job, status, Cut.NONE if status is not None else self.cut, seconds, output)

    def kill(self) -> None:
        """With all that it has started, if anything is left of it."""
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_all(
    jobs: Sequence[Job], place: Place, machine: Machine, deadline: float, ended: Callable[[Job, Verdict], None]
) -> None:
    """Run ``jobs`` in their order until ``deadline``; ``ended`` is called with each and what became of it."""
    deadline -= SECONDS_TO_WRITE
    waiting: list[Job] = []
    for job in jobs:
        if reason := job.cannot_run(place, machine):
            ended(job, skipped(reason))
        else:
            waiting.append(job)
    running: list[Running] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                for each in list(running):
                    if (verdict := each.verdict()) is not None:
                        running.remove(each)
                        ended(each.job, verdict)
                while waiting and _may_start(waiting[0], running, place, lanes(place, machine)):
                    job = waiting.pop(0)
                    if time.monotonic() + LEAST_SECONDS > deadline:
                        ended(job, skipped("no time was left", is_for_time=True))
                    else:
                        running.append(Running.start(job, place, Path(folder), deadline))
                time.sleep(0.05)
        finally:
            for each in running:
                each.kill()


def _may_start(job: Job, running: Sequence[Running], place: Place, most: int) -> bool:
    """One that measures waits for all others, and all others for it; in a rehearsal nothing is measured."""
    is_alone = not place.is_rehearsal and any(each.kind != RIGHT for each in (job, *(each.job for each in running)))
    return len(running) < (1 if is_alone else most)
