"""Fixtures and hooks of the whole suite: worker pools, simulated ranks, a clean torch for every test."""

from __future__ import annotations

import gc
import os

# Before torch is imported, here and, inherited, in the workers: the machine has few cores and many ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from tests.harness.covering import thin_out
from tests.harness.fake import FakeWorlds
from tests.harness.parts import asked_part, part_of
from tests.harness.pool import WorkerPools, start_fork_server
from tests.harness.pooling import pool_if_asked
from tests.harness.state import THREADS, ProcessState, forget_meshes, seed_everything

# Warnings are errors (pyproject.toml), here and on the ranks, but for these of torch's own.
TOLERATED_WARNINGS: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--part``."""
    parser.addoption("--part", default="", metavar="K/10", help="run this fixed tenth of the selected tests")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark that `multi_rank` sets, and the tolerated warnings; pools memory if asked to."""
    config.addinivalue_line("markers", "multi_rank: runs on several worker processes (set by @multi_rank)")
    for warning in TOLERATED_WARNINGS:
        config.addinivalue_line("filterwarnings", warning)
    pool_if_asked()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops most combinations of parameters, and leaves others to the full suite."""
    dropped = {id(item) for item in thin_out(item for item in items if isinstance(item, pytest.Function))}
    items[:] = [item for item in items if id(item) not in dropped]
    if text := config.option.part:
        items[:] = [item for item in items if part_of(item.nodeid) == asked_part(text)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Has the fork server import torch while the first tests run, if any selected test needs ranks."""
    if session.config.option.collectonly:
        return
    if any("pools" in getattr(item, "fixturenames", ()) for item in session.items):
        start_fork_server()


@pytest.fixture(scope="session")
def pools() -> Iterator[WorkerPools]:
    """Worker pools by world size; `pools[2].run(body, ...)` returns the results by rank."""
    pools = WorkerPools()
    yield pools
    pools.stop()


@pytest.fixture(scope="session")
def process_state() -> ProcessState:
    """The state of this process before the first test."""
    torch.set_num_threads(THREADS)
    return ProcessState.capture()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Lets collections pass over what the tests before have left, as imports and caches: seconds, where tests count."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_torch(process_state: ProcessState) -> Iterator[None]:
    """Seeds this process and puts torch's global state back after the test."""
    seed_everything(0)
    yield
    process_state.restore()
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()
        pytest.fail("the test left a process group behind; use fake_world or simulate")


@pytest.fixture
def simulate() -> Iterator[FakeWorlds]:
    """`simulate(world_size, rank=0)`: this process is that rank of a `fake_world` until the test ends.

    A second call leaves the first world, so one test can look at all ranks in turn.
    """
    with ExitStack() as stack:
        yield FakeWorlds(stack)
