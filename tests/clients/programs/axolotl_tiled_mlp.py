"""axolotl's tiled MLP: a custom autograd function that runs several backwards of a layer inside its own.

Usage:
    torchrun --nproc-per-node 2 axolotl_tiled_mlp.py [--reshard-after-forward] [--on-mlp]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from absent import stand_in_for
from torch.distributed.fsdp import fully_shard
from transformers_trainer import make_whole, samples
from trial import Report, finish, gradient_norm, implementation, mean_over_ranks, part

stand_in_for("addict", "art", "axolotl_contribs_mit", "colorama", "deepspeed", "evaluate", "posthog")

from axolotl.monkeypatch.tiled_mlp.patch import patch_tiled_mlp  # noqa: E402

STEPS, TILES, RATE = 4, 3, 0.5


def main() -> None:
    """Train both, of which only the sharded one is tiled, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reshard-after-forward", action="store_true")
    parser.add_argument("--on-mlp", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    reference: Any = make_whole()
    model = deepcopy(reference)
    # One row each: axolotl's tiles are wrong for more, with no sharding at all (it takes them for contiguous).
    rows = samples()[: STEPS * dist.get_world_size()].chunk(STEPS)
    expected = train(reference, rows)
    patch_tiled_mlp("llama", cfg_num_shards=TILES)
    for layer in model.model.layers:
        if options.on_mlp:
            fully_shard(layer.mlp, reshard_after_forward=options.reshard_after_forward)
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward)
    fully_shard(model)
    report = Report(implementation(model))
    rank, size = dist.get_rank(), dist.get_world_size()
    found = train(model, [part(each, rank, size) for each in rows])
    for ours, theirs in zip(found, expected, strict=True):
        report.add("loss", ours[0], theirs[0])
        report.add("gradient norm", ours[1], theirs[1])
    report.add_parameters(model, reference)
    # No state dict: axolotl makes the sharded module an attribute of its MLP, hence its child, and the tree a cycle.
    finish(report)


def train(model: Any, batches: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    """Losses and gradient norms by step. Collective."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = []
    for rows in batches:
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        found.append((mean_over_ranks(loss), gradient_norm(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


if __name__ == "__main__":
    main()
