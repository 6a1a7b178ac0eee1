"""A training program under each implementation: what `throughput`, `compile` and `peers` run steps of.

Implementations of torch and fsdp2 are those of `benchmarks.implementations`. `PEERS` are other packages', each with an
adapter that knows how such a program is written there; a package is imported when its program is asked for. Every rank
has a batch of its own, so that an implementation which does not reduce gradients trains something else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.implementations import UNSHARDED, ShardingOptions, available, base_of, build_sharded
from benchmarks.models import ModelSpec, build_model
from fsdp2.plugs.transports import gloo_p2p

Step = Callable[[], torch.Tensor]
"""Forward, backward, optimizer and `zero_grad`; returns this rank's loss."""
StepOfBatch = Callable[[torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

EXCHANGES = "exchanges"

# Implementation -> the adapter, whose `program(name, model, mesh=, options=, make_optimizer=)` is a `StepOfBatch`.
PEERS = {
    "simplefsdp": "benchmarks.peers.simple_fsdp",
    "deepspeed": "benchmarks.peers.deepspeed_zero3",
    "megatron": "benchmarks.peers.megatron_wrapper",
    "megatron-experimental": "benchmarks.peers.megatron_experimental",
}
# Implementation -> the package that has it.
PACKAGES = {
    "simplefsdp": "torchtitan",
    "deepspeed": "deepspeed",
    "megatron": "megatron-fsdp",
    "megatron-experimental": "megatron-fsdp",
}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An ordinary program's AdamW.

    `eps` is as large as gradients are: otherwise a step would hide that gradients are summed, not averaged, or clipped.
    """
    return torch.optim.AdamW(parameters, lr=1e-5, eps=1.0, foreach=True)


def batch_of(spec: ModelSpec, rank: int) -> torch.Tensor:
    """What `rank` trains on: `(batch_rows, dim)`, fp32."""
    return torch.randn(spec.batch_rows, spec.dim, generator=torch.Generator().manual_seed(rank))


def training_step(
    name: str, spec: ModelSpec, *, mesh: DeviceMesh, options: ShardingOptions, make_optimizer: MakeOptimizer = adamw
) -> Step:
    """A model of shape `spec` under implementation `name`, ready to train on this rank's batch.

    Raises ValueError for an unknown name, ImportError for a package that is not installed, and what a peer raises.
    """
    if name == EXCHANGES:
        return _exchanges(spec, mesh, options)
    batch = batch_of(spec, mesh.get_rank())
    adapter = imported(name)
    if adapter is not None:
        step = adapter.program(name, build_model(spec), mesh=mesh, options=options, make_optimizer=make_optimizer)
        return lambda: step(batch)
    model = build_sharded(name, spec, mesh=mesh, options=options)
    return program_of(model, make_optimizer, batch.to(options.param_dtype) if base_of(name) == UNSHARDED else batch)


def _exchanges(spec: ModelSpec, mesh: DeviceMesh, options: ShardingOptions) -> Step:
    """What must travel in a step: gathers in the dtype of the computation, gradients added up in fp32; by units."""
    group, ranks = mesh.get_group(), mesh.size()
    model = build_model(spec)
    sizes = [sum(each.numel() for each in block.parameters()) for block in model.blocks]
    sizes.append(sum(each.numel() for each in model.parameters()) - sum(sizes))
    parts = [torch.zeros(-(-size // ranks), dtype=options.param_dtype) for size in sizes]
    wholes = [torch.zeros(ranks * part.numel(), dtype=options.param_dtype) for part in parts]
    sums = [torch.zeros(part.numel()) for part in parts]
    times = 1 if options.reshard_after_forward is False else 2

    def step() -> torch.Tensor:
        for part, whole, total in zip(parts, wholes, sums, strict=True):
            works: list[Any] = []
            for _ in range(times):
                gloo_p2p.all_gather(whole, part, group, works)
                works.pop().wait()
            gloo_p2p.reduce_scatter(total, whole, dist.ReduceOp.AVG, group, works)
            works.pop().wait()
        return sums[0]

    return step


def imported(name: str) -> Any:
    """The adapter of another package's implementation, None for torch's and ours; the package is imported then.

    Raises ValueError for an unknown name, ImportError for a package that is not installed.
    """
    if base_of(name) in PEERS:
        return importlib.import_module(PEERS[base_of(name)])
    available(name)
    return None


def program_of(model: nn.Module, make_optimizer: MakeOptimizer, batch: torch.Tensor) -> Step:
    """An ordinary program that trains `model`, which returns its loss."""
    optimizer = make_optimizer(model.parameters())

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
