"""Persistent worker processes, one per rank, that run the bodies of multi-rank tests.

Owns the processes, their timeouts and their restarts; knows nothing of pytest. See `messages` for the
protocol and `worker` for the other end of the pipe.

[Note: fork server]
    Workers are forked from Python's fork server, which imports torch once (2-3 s, beside the first tests)
    and stays single-threaded; a worker is then up in tens of milliseconds and shares torch's memory with
    its siblings. That makes the simplest reaction to a failed test affordable: kill all ranks and fork new
    ones, whatever state the failure left behind. Passed tests keep the workers.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.messages import Command, Job, Outcome, Status, WorkerSetup, read_from
from tests.harness.report import RanksFailed
from tests.harness.worker import STACK_SIGNAL, worker_main

REPOSITORY = Path(__file__).resolve().parents[2]
PRELOADED = [
    "tests.harness.worker",
    "tests.harness.training",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",  # imported by torch.optim and DTensor on first use
]
DEFAULT_TIMEOUT_S = 60.0
# How long ranks may go on after one failed: enough for a slower rank to show the same failure.
GRACE_S = 2.0
START_TIMEOUT_S = 120.0
MAX_THREADS = 100


def start_fork_server() -> None:
    """Starts importing torch in the fork server; returns at once. Does nothing where it already runs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Without it gloo looks up the host's name, which takes seconds where name servers do not answer.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Asks NVML, not CUDA, whether there is a GPU: a fork server that touched CUDA could not fork users of it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


@dataclass(frozen=True, slots=True)
class Worker:
    """The parent's view of one rank."""

    setup: WorkerSetup
    process: BaseProcess
    connection: Connection

    def receive(self) -> Outcome:
        """The next message of this worker, or the news of its death. Blocks."""
        try:
            outcome: Outcome = self.connection.recv()
            return outcome
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=5)
            code = self.process.exitcode
            cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            stack = read_from(self.setup.stack_path)
            return Outcome(Status.DIED, summary=cause, details=stack, finished_at=time.monotonic())


class WorkerPool:
    """`world_size` processes that run one function at a time, on all ranks.

    Example:
        >>> pool = WorkerPool(2)
        >>> pool.run(torch.distributed.get_rank)
        [0, 1]
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.output: list[str] = []
        self._workers: list[Worker] = []
        self._jobs = 0
        self._ran: deque[str] = deque(maxlen=8)
        self._store: dist.TCPStore | None = None
        self._scratch: Path | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no worker runs."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT_S,
        grace: float = GRACE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `body(*args, **kwargs)` on every rank, inside a fresh default process group (gloo).

        Args:
            body: A function at the top level of an importable module; arguments and results are pickled.
            timeout: Seconds after which all ranks are stopped, with their stacks in the message.
            grace: Seconds that the other ranks have after one failed.

        Returns:
            The results by rank.

        Raises:
            RanksFailed: The body failed, was skipped or blocked on some rank.
        """
        return self.run_job(body, args, kwargs, timeout=timeout, grace=grace)

    def run_job(
        self,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        grace: float = GRACE_S,
    ) -> list[Any]:
        """`run`, for bodies whose own keyword arguments may be named `timeout` or `grace`."""
        job = self._make_job(body, args, kwargs)
        self.start()
        try:
            results = self._run_job(job, timeout=timeout, grace=grace)
            if self._leaks_threads():
                self.stop()
            return results
        except BaseException:
            # Ranks may be anywhere, in a failure as after Ctrl-C: see [Note: fork server].
            self.stop()
            raise

    def _leaks_threads(self) -> bool:
        """Whether the workers have gathered threads of process groups that are gone, as up to torch 2.12 they do."""
        threads = Path(f"/proc/{self.pids[0]}/task")
        return threads.exists() and sum(1 for _ in threads.iterdir()) > MAX_THREADS

    def _run_job(self, job: Job, *, timeout: float, grace: float) -> list[Any]:
        """Both halves of the protocol in `messages`; returns the results by rank."""
        offsets = [worker.setup.output_path.stat().st_size for worker in self._workers]
        self._send(job)
        outcomes = self._collect(timeout=timeout, grace=grace)
        self.output = [
            read_from(worker.setup.output_path, offset) for worker, offset in zip(self._workers, offsets, strict=True)
        ]
        _require_passed(outcomes, f"in {job.qualname}", self._ran)
        self._send(Command.TEAR_DOWN)
        torn_down = self._collect(timeout=timeout, grace=grace)
        _require_passed(torn_down, f"destroying process groups after {job.qualname}", self._ran)
        self._ran.append(f"{job.module}.{job.qualname}")
        return [pickle.loads(outcomes[rank].value) for rank in range(self.world_size)]

    def _send(self, message: Job | Command) -> None:
        """Sends `message` to every rank; a dead one shows when its outcome is collected."""
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):
                worker.connection.send(message)

    def start(self) -> None:
        """Starts the workers where none run. All ranks start at the same time."""
        if self._workers:
            return
        start_fork_server()
        self._scratch = Path(tempfile.mkdtemp(prefix="fsdp2-tests-"))
        timeout = timedelta(seconds=START_TIMEOUT_S)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._workers = [self._start_worker(rank, self._store.port, self._scratch) for rank in range(self.world_size)]
        for worker in self._workers:
            self._require_ready(worker)

    def _require_ready(self, worker: Worker) -> None:
        """Waits for the first message of a worker."""
        first = worker.receive() if worker.connection.poll(START_TIMEOUT_S) else None
        if first is None or first.status is not Status.PASSED:
            output = read_from(worker.setup.output_path)
            self.stop()
            raise RuntimeError(f"worker of rank {worker.setup.rank} did not start: {first}\n{output}")

    def stop(self) -> None:
        """Kills the workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.connection.close()
        self._workers, self._store = [], None
        self._ran.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch)
            self._scratch = None

    def _start_worker(self, rank: int, store_port: int, scratch: Path) -> Worker:
        setup = WorkerSetup(rank, self.world_size, store_port, REPOSITORY, scratch)
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=worker_main, args=(theirs, setup), daemon=True)
        process.start()
        theirs.close()  # the worker's death then reads as the end of the pipe
        return Worker(setup, process, ours)

    def _make_job(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        if "." in body.__qualname__:
            raise TypeError(
                f"{body.__qualname__} runs in other processes, which find it by name: "
                "make it a function at the top level of its module"
            )
        try:
            arguments = pickle.dumps((args, kwargs))
        except Exception as error:
            raise TypeError(f"an argument of {body.__qualname__} cannot be pickled for the ranks: {error}") from error
        self._jobs += 1
        return Job(self._jobs, body.__module__, body.__qualname__, arguments, tuple(warnings.filters))

    def _collect(self, *, timeout: float, grace: float) -> dict[int, Outcome]:
        """One outcome per rank; ranks that sent none in time are `BLOCKED`, with their stacks."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        limit = f"after the test's timeout of {timeout:g} s"
        while len(outcomes) < self.world_size:
            running = [worker for worker in self._workers if worker.setup.rank not in outcomes]
            left = max(0.0, deadline - time.monotonic())
            ready = wait([worker.connection for worker in running], timeout=left)
            if not ready:
                return outcomes | _blocked(running, limit)
            for worker in (w for w in self._workers if w.connection in ready):
                outcome = outcomes[worker.setup.rank] = worker.receive()
                if outcome.status in (Status.FAILED, Status.DIED) and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    limit = f"{grace:g} s after the first failure"
        return outcomes


def _blocked(workers: list[Worker], limit: str) -> dict[int, Outcome]:
    """Outcomes of workers that still run, with the stacks of their threads."""
    for worker in workers:
        os.kill(worker.process.pid or 0, STACK_SIGNAL)
    _wait_until_written([worker.setup.stack_path for worker in workers])
    return {
        worker.setup.rank: Outcome(
            Status.BLOCKED,
            summary=f"still running {limit}",
            details=read_from(worker.setup.stack_path),
            finished_at=time.monotonic(),
        )
        for worker in workers
    }


def _wait_until_written(paths: list[Path], *, timeout: float = 3.0) -> None:
    """Waits for what faulthandler writes in the signal handler: milliseconds, more on a busy machine."""
    deadline = time.monotonic() + timeout
    before: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(0.1)
        sizes = [path.stat().st_size for path in paths]
        if sizes == before and all(sizes):
            return
        before = sizes


def _require_passed(outcomes: dict[int, Outcome], doing: str, before: Collection[str]) -> None:
    if any(outcome.status is Status.DIED for outcome in outcomes.values()) and before:
        doing += f"; its process has run before: {', '.join(before)}"  # which may be what it died of
    if any(outcome.status is not Status.PASSED for outcome in outcomes.values()):
        raise RanksFailed(doing, outcomes)


class WorkerPools(dict[int, WorkerPool]):
    """Pools by world size, made on first use: `pools[2].run(body)`."""

    @functools.cached_property
    def threads(self) -> WorkerPool:
        """One worker, for ranks that are threads of it."""
        return WorkerPool(1)

    def __missing__(self, world_size: int) -> WorkerPool:
        self[world_size] = WorkerPool(world_size)
        return self[world_size]

    def stop(self) -> None:
        """Kills all workers of all pools."""
        for pool in (*self.values(), *([self.threads] if "threads" in vars(self) else [])):
            pool.stop()
