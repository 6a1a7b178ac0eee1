"""A pytest plugin that notes which lines of ``fsdp2/`` each test runs, on all ranks: ``-p extras.mutants.lines``.

``MUTANTS_LINES`` is the folder for what is noted. Each process writes one file of it: records of a test's id and of its
lines as numbers, ``file * 100_000 + line`` with the files in the order of `files`. Needs Python 3.12 or newer, whose
`sys.monitoring` has the interpreter call back for lines of these files alone.

What runs in processes that a test starts itself, as commands do, is not noted.
"""

from __future__ import annotations

import array
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.harness import pool, worker

ROOT = Path(__file__).resolve().parents[2]
LINE_OF_FILE = 100_000
TOOL = 3
"""An id of `sys.monitoring` that no debugger, profiler or coverage tool uses."""

_seen: set[int] = set()
_lock = threading.Lock()


def files(root: Path = ROOT) -> list[Path]:
    """The sources, in an order that all processes share."""
    return sorted((root / "fsdp2").rglob("*.py"))


_NUMBERS = {str(path): number * LINE_OF_FILE for number, path in enumerate(files())}


def _start(code: CodeType, offset: int) -> Any:
    """Have lines of ``code`` noted from now on, if it is ours; its starts need no more calls."""
    if _NUMBERS is not None and code.co_filename in _NUMBERS:  # (None while the interpreter ends.)
        sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.LINE)
    return sys.monitoring.DISABLE


def _line(code: CodeType, line: int) -> None:
    _seen.add(_NUMBERS[code.co_filename] + line)


def _write(test: str, seconds: float = 0.0, failed: bool = False) -> None:
    """Append what ran since the last call to this process's file."""
    with _lock:
        found = array.array("I", sorted(_seen))
        _seen.clear()
        head = json.dumps({"test": test, "seconds": seconds, "failed": failed, "lines": len(found)})
        with (Path(os.environ["MUTANTS_LINES"]) / f"{os.getpid()}.lines").open("ab") as file:
            file.write(head.encode() + b"\n" + found.tobytes())


def read(folder: Path) -> Iterator[tuple[dict[str, Any], array.array[int]]]:
    """All records: the head, and the numbers of lines."""
    for path in sorted(folder.glob("*.lines")):
        with path.open("rb") as file:
            while head := file.readline():
                record = json.loads(head)
                lines = array.array("I")
                lines.frombytes(file.read(record["lines"] * lines.itemsize))
                yield record, lines


def _note_jobs() -> None:
    """Have the parent say which test a job belongs to, and each rank write what the job ran."""
    run_job, run_body = pool.WorkerPool._run_job, worker._run_body
    folder = Path(os.environ["MUTANTS_LINES"])

    def run_job_of_test(self: pool.WorkerPool, job: Any, **limits: Any) -> Any:
        name = os.environ.get("PYTEST_CURRENT_TEST", "?").rpartition(" (")[0]
        assert self._store is not None
        (folder / f"job-{self._store.port}-{job.number}").write_text(name)
        return run_job(self, job, **limits)

    def run_body_noted(job: Any, setup: Any, store: Any) -> bytes:
        _seen.clear()
        try:
            return run_body(job, setup, store)
        finally:
            _write((folder / f"job-{setup.store_port}-{job.number}").read_text())

    pool.WorkerPool._run_job = run_job_of_test  # type: ignore[method-assign]
    worker._run_body = run_body_noted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what the test runs in this process, and its time."""
    _seen.clear()
    begin = time.perf_counter()
    failed_before = item.session.testsfailed
    result = yield
    _write(item.nodeid, time.perf_counter() - begin, item.session.testsfailed > failed_before)
    return result


if "MUTANTS_LINES" in os.environ:
    sys.monitoring.use_tool_id(TOOL, "fsdp2-lines")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, _start)
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, _line)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)
    _note_jobs()
    pool.PRELOADED.append(__name__)
