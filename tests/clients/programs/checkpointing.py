"""`torch.distributed.checkpoint`: state dicts of model and optimizer, saved, loaded into another model, trained on.

Usage:
    torchrun --nproc-per-node 2 checkpointing.py FOLDER
"""

from __future__ import annotations

import sys
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trial import (
    Model,
    Report,
    batch,
    build,
    finish,
    gradient_norm,
    implementation,
    mean_over_ranks,
    mean_squared_error,
    part,
    train_unsharded,
)

STEPS = 3
Pair = tuple[nn.Module, torch.optim.Optimizer]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def make(model: Model) -> Pair:
    """A sharded model and its optimizer, which keeps state from step to step."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def other() -> Pair:
    """A model of other values, on meta first: what loads must fill in everything."""
    with torch.device("meta"):
        model = Model()
    pair = make(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return pair


def train(pair: Pair, first: int) -> list[tuple[float, float]]:
    """Losses and gradient norms of the steps from ``first``."""
    model, optimizer = pair
    found = []
    for step in range(first, first + STEPS):
        inputs, targets = (part(each, dist.get_rank(), dist.get_world_size()) for each in batch(step))
        loss = mean_squared_error(model, inputs, targets)
        loss.backward()
        found.append((mean_over_ranks(loss), gradient_norm(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def through_sharded_files(pair: Pair, folder: str) -> Pair:
    """`dcp.save` and `dcp.load`, each rank its shards."""
    model, optimizer = pair
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    fresh, fresh_optimizer = other()
    model_state, optimizer_state = get_state_dict(fresh, fresh_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(fresh, fresh_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return fresh, fresh_optimizer


def through_whole_state(pair: Pair, folder: str) -> Pair:
    """Full state dicts on rank 0, broadcast into the other model from there."""
    model, optimizer = pair
    model_state = get_model_state_dict(model, options=FULL)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert bool(model_state) == (dist.get_rank() == 0)
    assert not any(isinstance(value, DTensor) for value in model_state.values())
    fresh, fresh_optimizer = other()
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # The setters write into what they are given.
    set_model_state_dict(fresh, dict(model_state), options=loading)
    set_optimizer_state_dict(fresh, fresh_optimizer, deepcopy(optimizer_state), options=loading)
    return fresh, fresh_optimizer


def through_module_methods(pair: Pair, folder: str) -> Pair:
    """`load_state_dict(assign=True)` of the module, and that of the optimizer."""
    model, optimizer = pair
    fresh, fresh_optimizer = other()
    fresh.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.05)
    fresh_optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    return fresh, fresh_optimizer


def main() -> None:
    """Train, move to another model, train on, and report; each way in turn."""
    dist.init_process_group("gloo")
    ways = (through_sharded_files, through_whole_state, through_module_methods)
    reference = build()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.05)
    steps = [batch(step) for step in range(STEPS * (1 + len(ways)))]
    expected = list(zip(*train_unsharded(reference, optimizer, steps, mean_squared_error), strict=True))
    pair = make(build())
    report = Report(implementation(pair[0]))
    found = train(pair, 0)
    for index, way in enumerate(ways):
        pair = way(pair, sys.argv[1])
        found += train(pair, STEPS * (1 + index))
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        report.add("loss", loss, expected_loss)
        report.add("gradient norm", norm, expected_norm)
    report.add_parameters(pair[0], reference)
    finish(report)


if __name__ == "__main__":
    main()
