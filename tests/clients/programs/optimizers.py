"""Optimizers of the `pytorch_optimizer` package, on sharded parameters as they are.

What works element by element must train like the unsharded model. What looks at whole matrices or norms is compared
with torch's own `fully_shard` only (by the test): it sees DTensors there too, and may do with them what it does.

Usage:
    torchrun --nproc-per-node 2 optimizers.py [--on-shards] NAME ...

With ``--on-shards``, on the local shards, by `fsdp2.optim.local`: what DTensor cannot run, and is elementwise.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from pytorch_optimizer import load_optimizer
from torch.distributed.fsdp import fully_shard
from trial import Report, batch, build, finish, gradient_norm, implementation, mean_over_ranks, mean_squared_error, part

import fsdp2

STEPS = 4
# Not element by element: they project, or take norms and means of whole parameters.
WHOLE = {"apollo", "conda", "fira", "galore", "scalableshampoo", "scion"}
LOW_RANK: dict[str, Any] = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}


def main() -> None:
    """Train with each, and report."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    report = Report()
    saved = {}
    names = sys.argv[1:]
    locally = names[0] == "--on-shards"
    for name in names[1:] if locally else names:
        reference, model = build(), build()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        report.implementation = implementation(model)
        kind = load_optimizer(name)
        optimizers = []
        for each in (model, reference):
            torch.manual_seed(0)
            matrices = [parameter for parameter in each.parameters() if parameter.ndim == 2]
            others = [parameter for parameter in each.parameters() if parameter.ndim != 2]
            projected = LOW_RANK if name == "galore" else {}
            groups = [{"params": matrices, **projected}, {"params": others}]
            if locally and each is model:
                optimizers.append(fsdp2.optim.local(kind, groups, lr=1e-2, elementwise=True))
            else:
                optimizers.append(kind(groups, lr=1e-2))
        for step in range(STEPS):
            inputs, targets = batch(step)
            loss = mean_squared_error(model, part(inputs, rank, size), part(targets, rank, size))
            loss.backward()
            expected = mean_squared_error(reference, inputs, targets)
            expected.backward()
            found, norm = mean_over_ranks(loss), gradient_norm(model)
            apart = name in WHOLE
            report.add(f"loss of {name}", found, found if apart else expected.item())
            report.add(f"gradient norm of {name}", norm, norm if apart else gradient_norm(reference))
            for each in optimizers:
                each.step()
                each.zero_grad()
        saved |= {f"{name} {key}": value.full_tensor() for key, value in model.state_dict().items()}
    report.save(saved)
    finish(report)


if __name__ == "__main__":
    main()
