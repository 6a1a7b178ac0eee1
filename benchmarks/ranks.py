"""Real gloo ranks for a benchmark: one process each, of which every one brings back what it measured."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(world_size: int, measured: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Any]:
    """What ``measured(*arguments)`` returned on each of ``world_size`` gloo ranks, as JSON carries it.

    Each process has one thread for its own computation. Raises what one of them raised, and TimeoutError when they are
    not done after ``timeout`` seconds; then, too, no process is left.
    """
    with tempfile.TemporaryDirectory() as path:
        ranks = torch.multiprocessing.spawn(  # type: ignore[no-untyped-call]
            _run_rank, (world_size, path, measured, arguments), nprocs=world_size, join=False
        )
        _join(ranks, timeout)
        return [json.loads(_result_of(rank, path).read_text()) for rank in range(world_size)]


def _join(ranks: Any, timeout: float | None) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while not ranks.join(None if deadline is None else max(0.0, deadline - time.monotonic())):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"ranks were not done after {timeout:.0f} s")
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _run_rank(rank: int, world_size: int, path: str, measured: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", world_size), rank=rank, world_size=world_size)
    _result_of(rank, path).write_text(json.dumps(measured(*arguments)))
    # A worker of gloo that still lets go of a tensor when the interpreter ends aborts the process (torch 2.13): the
    # last collective must be one without tensors of Python's, waited for without the interpreter's lock.
    dist.barrier()
    dist.destroy_process_group()


def _result_of(rank: int, path: str) -> Path:
    return Path(path, f"{rank}.json")
