"""`@multi_rank(2, 4)`: a test whose body runs on every rank.

Owns the link between pytest and the worker pools: world sizes become a parameter of the test, arguments go to
the ranks, output and failures come back.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any

import pytest

from tests.harness.device import CPU, DEVICE
from tests.harness.messages import Status
from tests.harness.pool import DEFAULT_TIMEOUT_S, WorkerPool, WorkerPools
from tests.harness.report import RanksFailed
from tests.harness.threads import BREAKS_WITH_NEW_THREADS, OnThreads, Threads, arguments_on_threads, run_on_threads


def multi_rank(
    *world_sizes: int, full: Collection[int] = (), timeout: float = DEFAULT_TIMEOUT_S
) -> Callable[[Callable[..., Any]], Any]:
    """Runs a test function on every rank, with `torch.distributed` initialised (gloo), once per world size.

    The arguments of the function are pytest's as usual: parameters and fixtures, pickled to the ranks (so
    `tmp_path` is the same folder on all of them). `world_size` is one of them for who asks. A rank may call
    `pytest.skip`; the test is then skipped if all ranks agree.

    Args:
        world_sizes: Numbers of ranks; they show in the test's id as `2ranks`, `4ranks`. Where the package of the
            test has an `ON_THREADS`, it may say that the smallest number runs on threads as well: `2threads`.
        full: Further numbers of ranks, which only the full suite runs.
        timeout: Seconds until all ranks are stopped and their stacks shown.

    Example:
        >>> @multi_rank(2, 4)
        ... @pytest.mark.parametrize("rows", [8, 97])
        ... def test_rows(rows, world_size):
        ...     assert dist.get_world_size() == world_size
    """

    def decorate(body: Callable[..., Any]) -> Any:
        @functools.wraps(body)
        def run_on_ranks(**arguments: Any) -> None:
            pools: WorkerPools = arguments.pop("pools")
            world_size = arguments["world_size"]
            if "world_size" not in own.parameters:
                arguments.pop("world_size")
            if isinstance(world_size, Threads):
                arguments = arguments_on_threads(body, world_size, arguments)
                run_for_pytest(pools.threads, run_on_threads, arguments, timeout)
                if BREAKS_WITH_NEW_THREADS:
                    pools.threads.stop()
            else:
                run_for_pytest(pools[world_size], body, arguments, timeout)

        own = inspect.signature(body)
        if "monkeypatch" in own.parameters:
            raise TypeError(
                f"{body.__qualname__}: the fixture would patch this process, not the ranks; "
                "use `with pytest.MonkeyPatch.context() as patch:` in the body"
            )
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("pools", "world_size")]
        asked = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()]
        run_on_ranks.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            asked + [p for p in added if p.name not in own.parameters]
        )
        run_on_ranks.rank_body = body  # type: ignore[attr-defined]
        sizes = others_full(sorted((*world_sizes, *full)), world_sizes)
        on_threads: OnThreads | None = getattr(_package_of(body), "ON_THREADS", None)
        if on_threads is not None and DEVICE == CPU:  # a device has one thread for the backwards of all
            sizes += on_threads.size_for(body, min(world_sizes))
        decorated = pytest.mark.parametrize("world_size", sizes, ids=_name_of_size)(run_on_ranks)
        return pytest.mark.multi_rank(decorated)

    return decorate


def _package_of(body: Callable[..., Any]) -> ModuleType:
    return importlib.import_module(body.__module__.rpartition(".")[0])


def _name_of_size(size: int) -> str:
    return f"{size}threads" if isinstance(size, Threads) else f"{size}ranks"


def others_full(values: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """``values`` to parametrize a test with; those that are not in ``short`` are run by the full suite only."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.full) for value in values]


def run_for_pytest(pool: WorkerPool, body: Callable[..., Any], arguments: dict[str, Any], timeout: float) -> None:
    """Runs `body` on all ranks of `pool`; a failure becomes pytest's, output of the ranks is printed."""
    try:
        pool.run_job(body, (), arguments, timeout=timeout)
    except RanksFailed as failure:
        if all(outcome.status is Status.SKIPPED for outcome in failure.outcomes.values()):
            pytest.skip(failure.outcomes[0].summary)
        message = str(failure)
    else:
        message = ""
    finally:
        for rank, output in enumerate(pool.output):
            if output:
                print(f"----- output of rank {rank} -----\n{output.rstrip()}")
    if message:
        pytest.fail(message, pytrace=False)
