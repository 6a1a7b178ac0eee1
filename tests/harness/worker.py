"""The life of one worker process: one rank, many tests.

Owns what happens on the worker's side of the pipe (see `messages`). Knows nothing of pytest's collection or
of the other ranks; the parent (`pool`) decides about timeouts and restarts, and kills workers without asking.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import util as assertion_util
from _pytest.config import _prepareconfig

from tests.harness import gloo_race
from tests.harness.device import use_device_if_asked
from tests.harness.meshes import LastingMeshes
from tests.harness.messages import Job, Outcome, Status, WorkerSetup
from tests.harness.pooling import pool_if_asked
from tests.harness.state import THREADS, ProcessState, seed_everything

STACK_SIGNAL = signal.SIGUSR1
# Longer than any test: the parent's own timeout must strike first, since it reports all stacks.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_PR_SET_PDEATHSIG = 1


def worker_main(connection: Connection, setup: WorkerSetup) -> None:
    """Serves jobs until the parent closes the pipe. Runs in a fresh process, forked from the fork server.

    Sends a passed outcome when ready. All workers of a pool must run the same jobs in the same order.
    """
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it kills the workers
    _redirect_output(setup)
    stack_file = open(setup.stack_path, "wb", buffering=0)  # noqa: SIM115 (open as long as the process)
    faulthandler.enable(stack_file)
    faulthandler.register(STACK_SIGNAL, stack_file, all_threads=True)
    os.chdir(setup.root)
    torch.set_num_threads(THREADS)
    _rewrite_assertions(setup)
    pool_if_asked()
    use_device_if_asked()
    gloo_race.install()
    store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False)
    state = ProcessState.capture()
    meshes = LastingMeshes()
    meshes.install(setup.world_size)
    gc.freeze()  # the collection after each test then skips the thousands of objects of torch itself
    connection.send(Outcome(Status.PASSED))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_attempt(functools.partial(_run_body, job, setup, store), job.warning_filters))
        connection.recv()
        connection.send(_attempt(functools.partial(_tear_down, state, meshes), job.warning_filters))


def _run_body(job: Job, setup: WorkerSetup, store: dist.Store) -> bytes:
    """Makes the default process group of this job, runs the body; returns the pickled result."""
    body = _find_body(job)
    os.environ.update(_environment_of(job))
    args, kwargs = pickle.loads(job.arguments)
    seed_everything(job.seed)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"job{job.number}", store),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return pickle.dumps(body(*args, **kwargs))


def _tear_down(state: ProcessState, meshes: LastingMeshes) -> bytes:
    """Destroys the process groups and puts torch's global state back."""
    gloo_race.forget()
    gc.collect()  # models in reference cycles go while their process groups still exist
    if dist.is_initialized():
        dist.destroy_process_group()
    meshes.end_test()
    state.restore()
    gc.freeze()  # what is left now stays: Dynamo alone brings more objects than a collection should look at each time
    return b""


def _environment_of(job: Job) -> dict[str, str]:
    """What the tests of a package want: its `ENVIRONMENT`, if it has one."""
    package = importlib.import_module(job.module.rpartition(".")[0] or job.module)
    environment: dict[str, str] = getattr(package, "ENVIRONMENT", {})
    return environment


def _find_body(job: Job) -> Callable[..., Any]:
    """The function named by `job`; what `multi_rank` made of it, if anything, is undone."""
    function = getattr(importlib.import_module(job.module), job.qualname)
    return getattr(function, "rank_body", function)


def _attempt(action: Callable[[], bytes], filters: tuple[Any, ...]) -> Outcome:
    """Runs `action` under the parent's warning filters; whatever it raises becomes an outcome."""
    lost: list[str] = []
    try:
        with _warning_filters(filters), _unraisable_collected(lost):
            value = action()
        if lost:
            return _outcome(Status.FAILED, summary="an exception was raised and lost", details="".join(lost))
        return _outcome(Status.PASSED, value=value)
    except pytest.skip.Exception as skip:
        return _outcome(Status.SKIPPED, summary=str(skip))
    except BaseException as error:
        summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        own = traceback.format_exception(type(error), error, _without_harness(error.__traceback__))
        return _outcome(Status.FAILED, summary=summary, details="".join(own))


def _outcome(status: Status, **fields: Any) -> Outcome:
    sys.stdout.flush()
    sys.stderr.flush()
    return Outcome(status, finished_at=time.monotonic(), **fields)


def _without_harness(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without its leading frames in this file."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    return rest or trace


@contextlib.contextmanager
def _warning_filters(filters: tuple[Any, ...]) -> Iterator[None]:
    """Applies entries of another process's `warnings.filters`, first entry first."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(filters):
            warnings.filterwarnings(
                action,
                message="" if message is None else getattr(message, "pattern", message),
                category=category,
                module="" if module is None else getattr(module, "pattern", module),
                lineno=line,
            )
        yield


@contextlib.contextmanager
def _unraisable_collected(lost: list[str]) -> Iterator[None]:
    """Exceptions that Python can only print (in `__del__`, in weak reference callbacks) end in `lost`."""

    def keep(unraisable: Any) -> None:
        where = f"{unraisable.err_msg or 'Exception ignored in'}: {unraisable.object!r}\n"
        error = (unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)
        lost.append(where + "".join(traceback.format_exception(*error)))

    previous, sys.unraisablehook = sys.unraisablehook, keep
    try:
        yield
    finally:
        sys.unraisablehook = previous


def _redirect_output(setup: WorkerSetup) -> None:
    """Sends this process's standard output and error, C++'s as well as Python's, to its output file."""
    descriptor = os.open(setup.output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (open as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _rewrite_assertions(setup: WorkerSetup) -> None:
    """Makes a plain `assert` in test modules show its values, as it does in the parent."""
    config = _prepareconfig(["--noconftest", f"--rootdir={setup.root}", f"-c{setup.root / 'pyproject.toml'}"])

    def explain(operator: str, left: object, right: object) -> str | None:
        hook = config.hook.pytest_assertrepr_compare
        for lines in hook(config=config, op=operator, left=left, right=right):
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    assertion_util._reprcompare = explain


def _die_with_parent() -> None:
    """Has the kernel kill this process when the fork server ends, which ends with the pytest process.

    Elsewhere than on Linux, a worker that hangs outlives a pytest process that was killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
