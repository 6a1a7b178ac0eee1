"""Processes of ranks, forked from a server that has imported torch once: a further one costs no import.

Nothing here, and nothing in the server, may touch CUDA: a process that has cannot be forked to use it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

PRELOADED = ["fsdp2", "torch.distributed.fsdp", "torch.distributed.checkpoint", "benchmarks.implementations"]
SECONDS_TO_END = 15.0
"""For other ranks, once one has failed."""


def start(target: Callable[..., Any], ranks: int, *arguments: Any) -> list[BaseProcess]:
    """``target(rank, *arguments)`` in a process each."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes: list[BaseProcess] = [context.Process(target=target, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def wait(processes: Sequence[BaseProcess]) -> int:
    """Until all have ended, or one has failed and the others have had their time; the exit status."""
    end = float("inf")
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + SECONDS_TO_END)
        time.sleep(0.05)
    kill(processes)
    return next((abs(process.exitcode) for process in processes if process.exitcode), 0)


def kill(processes: Sequence[BaseProcess]) -> None:
    """End them now."""
    for process in processes:
        process.kill()
        process.join()
