"""A pytest plugin for runs on a planted fault, ``-p extras.mutants.hurried``: ranks that hang are soon given up."""

from __future__ import annotations

from typing import Any

from tests.harness import pool

SECONDS = 15.0

_collect = pool.WorkerPool._collect


def _collect_soon(self: pool.WorkerPool, *, timeout: float, grace: float) -> Any:
    return _collect(self, timeout=min(timeout, SECONDS), grace=min(grace, 0.2))


pool.WorkerPool._collect = _collect_soon  # type: ignore[method-assign]
