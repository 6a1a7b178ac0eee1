"""Training in actors of Ray: processes that the program does not start itself.

Usage:
    python ray_workers.py [--setup-hook package.function]
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import ray
import torch
import torch.distributed as dist
from trial import (
    Report,
    batch,
    build,
    gradient_norm,
    implementation,
    mean_over_ranks,
    mean_squared_error,
    part,
    train_unsharded,
)

STEPS, RATE, WORKERS = 3, 0.2, 2
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the user's home


@ray.remote(num_cpus=0)
class Worker:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def address(self) -> str:
        """Where the others find this one."""
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return f"tcp://127.0.0.1:{self.store.port}"

    def train(self, port: int) -> tuple[str, list[tuple[float, float]]]:
        """Whose `FSDPModule` the model was made; losses and gradient norms by step."""
        from torch.distributed.fsdp import fully_shard

        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=WORKERS)
        model = build()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        found = []
        for step in range(STEPS):
            inputs, targets = (part(tensor, self.rank, WORKERS) for tensor in batch(step))
            loss = mean_squared_error(model, inputs, targets)
            loss.backward()
            found.append((mean_over_ranks(loss), gradient_norm(model)))
            optimizer.step()
            optimizer.zero_grad()
        return implementation(model), found


def main() -> None:
    """Train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setup-hook")
    options = parser.parse_args()
    environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": ":".join(path_of_programs())}}
    if options.setup_hook:
        environment["worker_process_setup_hook"] = options.setup_hook
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    workers: list[Any] = [Worker.remote(rank) for rank in range(WORKERS)]  # type: ignore[attr-defined]
    port = int(ray.get(workers[0].address.remote()).rpartition(":")[2])
    results = ray.get([each.train.remote(port) for each in workers])
    ray.shutdown()
    report = Report(results[0][0])
    reference = build()
    losses, norms = train_unsharded(
        reference,
        torch.optim.SGD(reference.parameters(), lr=RATE),
        [batch(step) for step in range(STEPS)],
        mean_squared_error,
    )
    for (loss, norm), expected_loss, expected_norm in zip(results[0][1], losses, norms, strict=True):
        report.add("loss", loss, expected_loss)
        report.add("gradient norm", norm, expected_norm)
    report.write()


def path_of_programs() -> list[str]:
    """Where the workers find `trial`, and what this process finds."""
    return [os.path.dirname(os.path.abspath(__file__)), *filter(None, sys.path)]


if __name__ == "__main__":
    main()
