"""``python -m extras.gloo_race [SECONDS]``: torch alone crashes where a tensor dies in Python while gloo lets go of it.

gloo runs a collective on a thread of its own, which holds the tensors until a moment after the result is there. If the
last reference in Python goes in that moment, torch frees the tensor twice: "free(): double free detected", "corrupted
double-linked list", or a segmentation fault, sooner or later. `DTensor.full_tensor()` is such a place: its padded input
dies right after the exchange. fsdp2's own exchanges on gloo are sends and receives, which have no such thread.

Nothing of fsdp2 is imported. One process, a world of one rank. Prints how often it went well, and how it ended.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time

import torch
import torch.distributed as dist

DELAYS = (0.0, 1e-5, 3e-5, 1e-4)
"""Longest times in seconds between the launch and the end of the tensor."""

EXCHANGES = 1000


def _exchange(store: str, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    name, generator, end, count = dist.group.WORLD.group_name, random.Random(0), time.monotonic() + seconds, 0
    collectives = torch.ops._c10d_functional
    while time.monotonic() < end:
        longest = generator.choice(DELAYS)
        for _ in range(EXCHANGES):
            sent = torch.ones(64)
            gathered = collectives.all_gather_into_tensor(sent, 1, name)
            until = time.perf_counter() + generator.random() * longest
            while time.perf_counter() < until:
                pass
            del sent
            collectives.wait_tensor(gathered)
        count += EXCHANGES
        print(f"\r{count} exchanges", end="", flush=True)


def main() -> None:
    """Runs it in a process of its own, which may crash."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=_exchange, args=(f"{folder}/store", seconds))
        process.start()
        process.join()
    print(f"\ntorch {torch.__version__}: exit status {process.exitcode}")


if __name__ == "__main__":
    main()
