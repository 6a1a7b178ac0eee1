"""Ranks that are threads of one process, over torch's multi-threaded process group: what `MultiThreadedTestCase` runs.

It is a process group written in Python, and many projects test on it. Owns the life of the threads; the process they
live in is the one worker of a pool (see `pool`), so that a hang is killed and shown like any other.

[Note: one rank runs at a time]
    The default random generator is the process's. So that a body which seeds it and draws gets what it would get in a
    process of its own, a rank holds the baton until it waits for the others, in a collective or a barrier.
    What else is the process's (patched functions, warning filters) must not be changed across a collective: tests
    that do are left out, see `tests.parity.ON_THREADS`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.messages import Outcome, Status
from tests.harness.report import RanksFailed

BREAKS_WITH_NEW_THREADS = torch.__version__ < "2.12"
"""Whether DTensor's fake mode crashes in threads that began after others had used it and ended, as on torch 2.11."""


class _Baton(threading.local):
    """See [Note: one rank runs at a time]. Threads that are no ranks never have it."""

    lock = threading.Lock()
    is_held = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other rank runs."""
        self.lock.acquire()
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
            self.lock.release()

    def lent(self, waits: Callable[..., Any]) -> Callable[..., Any]:
        """The function ``waits``, during which other ranks may run."""

        @functools.wraps(waits)
        def waits_without(*args: Any, **kwargs: Any) -> Any:
            if not self.is_held:
                return waits(*args, **kwargs)
            self.is_held = False
            self.lock.release()
            try:
                return waits(*args, **kwargs)
            finally:
                self.lock.acquire()
                self.is_held = True

        return waits_without


_BATON = _Baton()


class Threads(int):
    """A number of ranks that are threads: ``Threads(2) == 2``."""


@dataclass(frozen=True, slots=True)
class OnThreads:
    """Which tests of a package run on threads too: what its `ON_THREADS` says to `multi_rank`.

    Attributes:
        often: tests (patterns) by file, that always do; the others in the full suite only.
        never: those that do not.
    """

    often: Mapping[str, Collection[str]]
    never: Mapping[str, Collection[str]]

    def size_for(self, body: Callable[..., Any], size: int) -> list[Any]:
        """What is added to the numbers of ranks that a test is parametrized with: none or one."""
        file = body.__module__.rpartition(".")[2]
        if body.__name__ in self.never.get(file, ()):
            return []
        is_often = any(fnmatch(body.__name__, pattern) for pattern in self.often.get(file, ()))
        return [pytest.param(Threads(size), marks=() if is_often else pytest.mark.full)]


Listener = Callable[[str, tuple[Any, ...], dist.ProcessGroup], None]
_COLLECTIVES = (
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "allreduce",
)


class _Hearing(threading.local):
    """What listens to the collectives of one thread, and whether one is running, which others are a part of."""

    listeners: tuple[Listener, ...] = ()
    is_inside = False


_HEARING = _Hearing()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """``listener`` is called with every collective that this thread issues: the group's method, arguments, the group.

    They are no operators that dispatch modes could see, unlike those of groups in C++.
    """
    before = _HEARING.listeners
    _HEARING.listeners = (*before, listener)
    try:
        yield
    finally:
        _HEARING.listeners = before


def _audible(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def audible(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if _HEARING.is_inside:
            return method(group, *args, **kwargs)
        for listener in _HEARING.listeners:
            listener(name, args, group)
        _HEARING.is_inside = True
        try:
            return method(group, *args, **kwargs)
        finally:
            _HEARING.is_inside = False

    return audible


@contextlib.contextmanager
def _threaded_world() -> Iterator[dist.Store]:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    isolate: Callable[[bool], None] = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    threaded._install_threaded_pg()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threaded.Collective, "join", _BATON.lent(threaded.Collective.join))
            for module in (threaded, dist.distributed_c10d):
                patch.setattr(module, "_store_based_barrier", _BATON.lent(module._store_based_barrier))
            for name in _COLLECTIVES:
                if name in vars(threaded.ProcessLocalGroup):
                    method = vars(threaded.ProcessLocalGroup)[name]
                    patch.setattr(threaded.ProcessLocalGroup, name, _audible(name, method))
            yield dist.HashStore()
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)


def run_on_threads(module: str, qualname: str, world_size: int, arguments: bytes) -> None:
    """Runs the body of that name on ``world_size`` threads of this process. The body of a pool's job.

    Raises:
        RanksFailed: it failed on some of them.
    """
    function = getattr(importlib.import_module(module), qualname)
    body = getattr(function, "rank_body", function)
    outcomes: dict[int, Outcome] = {}
    with _threaded_world() as store:
        threads = [
            threading.Thread(
                target=_be_rank, args=(rank, world_size, store, body, arguments, outcomes), name=f"rank {rank}"
            )
            for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    skipped = [each for each in outcomes.values() if each.status is Status.SKIPPED]
    if len(skipped) == world_size:
        pytest.skip(skipped[0].summary)
    if any(each.status is not Status.PASSED for each in outcomes.values()):
        raise RanksFailed(f"on threads in {qualname}", outcomes)


def _be_rank(
    rank: int,
    world_size: int,
    store: dist.Store,
    body: Callable[..., Any],
    arguments: bytes,
    outcomes: dict[int, Outcome],
) -> None:
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    try:
        with _BATON.held():
            dist.init_process_group("threaded", store=store, rank=rank, world_size=world_size)
            args, kwargs = pickle.loads(arguments)
            body(*args, **kwargs)
            dist.barrier()
    except BaseException as error:
        outcomes[rank] = _outcome_of(error)
        ProcessLocalGroup.exception_handle(error)  # wakes those that wait for this rank
    else:
        outcomes[rank] = Outcome(Status.PASSED)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, pytest.skip.Exception):
        return Outcome(Status.SKIPPED, summary=str(error))
    summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    status = Status.BLOCKED if isinstance(error, SystemExit) else Status.FAILED
    details = "".join(traceback.format_exception(error))
    return Outcome(status, summary=summary, details=details, finished_at=time.monotonic())


def arguments_on_threads(body: Callable[..., Any], world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What `run_on_threads` is to be called with, so that ``body(**arguments)`` runs on ``world_size`` threads."""
    if "world_size" in arguments:
        arguments = arguments | {"world_size": int(world_size)}
    return {
        "module": body.__module__,
        "qualname": body.__qualname__,
        "world_size": int(world_size),
        "arguments": pickle.dumps(((), arguments)),
    }
