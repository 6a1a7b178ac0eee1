"""A batch that one rank cannot use: all ranks leave that step, and train on with the next one.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/skip_bad_batches.py

Every fifth batch of one rank is bad: its numbers are not finite, which a check in the model raises for. Without
`set_recovery` the other ranks would wait for that rank, and the watchdog would name it after 10 seconds; here they are
told at once. No rank steps in that step, so all have the same parameters afterwards.

All ranks are on the CPU: ranks leave a step together where they exchange by gloo.

Prints which steps were left, and the loss, which falls.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2

STEPS = 30


class Net(nn.Module):
    """A network that refuses inputs that are not finite, in its own forward: there it is noticed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 32) to (n, 8)."""
        if not x.isfinite().all():
            raise ValueError("a batch that is not finite")
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    model.set_recovery("drop_step", abort_together=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    losses, left = [], []
    for step in range(STEPS):
        inputs = torch.randn(64, 32)
        targets = inputs[:, :8].sin()
        if step % 5 == 2 and rank == step % dist.get_world_size():
            inputs[3, 4] = float("nan")
        try:
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
        except (ValueError, fsdp2.FSDPRuntimeError):  # its own, or another rank's
            left.append(step)
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if rank == 0:
        print(f"the steps {left} were left; loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end")
    assert left == list(range(2, STEPS, 5)) and losses[-1] < losses[0] / 2
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
