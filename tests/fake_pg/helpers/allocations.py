"""What the CPU's allocator did in a training run, as torch's profiler has it: the truth for estimates of memory.

`allocator_peaks` runs real operators on real tensors, and reads the profiler's own record of every allocation and
release; it shares nothing with the estimate (`estimated_peaks`) but the model and the call that shards it. One process,
as rank 0 of simulated ranks, whose collectives move nothing; memory does not depend on values.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, accumulate, auto_shard
from fsdp2.tools.estimating.estimate import estimate
from tests.harness.fake import fake_world
from tests.harness.llama import Llama, LlamaSize, next_token_loss

PHASES = ("forward", "backward", "optimizer step")
STEPS = 3
"""The last one is looked at: orders are known then, and buffers and states are there."""


class Perceptron(nn.Module):
    """Blocks of linear layers with biases, of widths that divide unevenly, between two others."""

    def __init__(self, width: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Dense(width, hidden) for _ in range(blocks))
        self.outputs = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, width); result: (batch, 10)."""
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x)


class Dense(nn.Module):
    """Two layers with a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, width), and so is the result."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Convolutions(nn.Module):
    """Images: convolutions, normalization, pooling."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Convolution(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, 3, height, width); result: (batch, 10)."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Convolution(nn.Module):
    """With a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (batch, channels, height, width), and so is the result."""
        return x + torch.relu(self.convolution(self.norm(x)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, its samples, and its loss, of the output and the samples."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    dtype: torch.dtype
    loss: Callable[..., Tensor]
    block: str


def _mean(output: Tensor, inputs: Tensor) -> Tensor:
    return output.float().square().mean()


LENGTH = 96
MODELS = {
    "perceptron": Kind(partial(Perceptron, 515, 1403, 4), (515,), torch.float32, _mean, "Dense"),
    "wide": Kind(partial(Perceptron, 512, 1536, 3), (512,), torch.float32, _mean, "Dense"),
    "llama": Kind(
        partial(Llama, LlamaSize(128, 344, 4, 4, 2, 1000), LENGTH), (LENGTH,), torch.int64, next_token_loss, "Block"
    ),
    "llama-wide": Kind(
        partial(Llama, LlamaSize(512, 1376, 2, 8, 8, 2000), LENGTH), (LENGTH,), torch.int64, next_token_loss, "Block"
    ),
    "convolutions": Kind(partial(Convolutions, 96, 4), (3, 24, 24), torch.float32, _mean, "Convolution"),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "sgd momentum foreach": partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True),
}
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bfloat16 throughout": MixedPrecisionPolicy(torch.bfloat16),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run. Names are keys of the tables above; the rest are arguments of `fsdp2.estimate`."""

    model: str
    mesh: tuple[int, ...]
    strategy: str | None
    policy: str
    offloads: bool
    accumulation: int
    kept: str
    checkpoints: bool
    optimizer: str
    samples: int

    @property
    def kind(self) -> Kind:
        """The model."""
        return MODELS[self.model]

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return torch.Size(self.mesh).numel()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the mesh's dims."""
        return ("shard",) if len(self.mesh) == 1 else ("replicate", "shard")

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """As programs do."""
        arguments: dict[str, Any] = {} if self.strategy is None else {"strategy": self.strategy}
        offload = CPUOffloadPolicy() if self.offloads else None
        kind, policy = self.kind, POLICIES[self.policy]
        return auto_shard(
            model, mesh, blocks=kind.block, min_bytes=0, mp_policy=policy, offload_policy=offload, **arguments
        )


def allocator_peaks(run: Run) -> dict[str, int]:
    """The most bytes that the allocator had given out in each phase of the last step of ``run``."""
    with fake_world(run.ranks):
        mesh = init_device_mesh("cpu", run.mesh, mesh_dim_names=run.names)
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
                _train(run, mesh)
        finally:
            if was_enabled:
                gc.enable()
    return _peaks(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


def _train(run: Run, mesh: DeviceMesh) -> None:
    kind = run.kind
    torch.manual_seed(0)
    model = kind.make()
    if run.checkpoints:
        for block in model.blocks:  # type: ignore[union-attr]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[operator]
    model = run.shard(model, mesh)
    optimizer = OPTIMIZERS[run.optimizer](list(model.parameters()))
    shape = (run.samples, *kind.sample)
    batch = torch.zeros(shape, dtype=torch.int64) if kind.dtype is torch.int64 else torch.randn(shape)
    for step in range(STEPS):
        for index in range(run.accumulation):
            with accumulate(model, last=index == run.accumulation - 1, kept=run.kept):  # type: ignore[arg-type]
                with _phase(step, "forward"):
                    loss = kind.loss(model(batch), batch)
                with _phase(step, "backward"):
                    loss.backward()
                    del loss
        with _phase(step, "optimizer step"):
            optimizer.step()
        model.zero_grad()


def _phase(step: int, name: str) -> record_function:
    return record_function(f"step {step} {name}")


def _peaks(events: list[Any]) -> dict[str, int]:
    """Of the profiler's events: releases are allocations of negative bytes."""
    spans = {name: [] for name in PHASES}  # type: dict[str, list[tuple[int, int]]]
    for event in events:
        name = event.name().removeprefix(f"step {STEPS - 1} ")
        if name in spans and name != event.name():
            spans[name].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return {name: max(_highest(memory, *span) for span in found) for name, found in spans.items()}


def _highest(memory: list[tuple[int, int]], start: int, end: int) -> int:
    """The most at any time from ``start`` to ``end``: what was there before, and what came."""
    before = sum(nbytes for when, nbytes in memory if when < start)
    during = [nbytes for when, nbytes in memory if start <= when <= end]
    return max(itertools.accumulate(during, initial=before))


def estimated_peaks(run: Run) -> dict[str, int]:
    """What `fsdp2.estimate` says of ``run``, of the same phases."""
    kind = run.kind
    samples = run.samples * run.ranks * run.accumulation
    found = estimate(
        kind.make,
        run.mesh,
        batch=torch.empty((samples, *kind.sample), dtype=kind.dtype, device="meta"),
        optimizer=OPTIMIZERS[run.optimizer],
        hardware="cpu",
        shard=run.shard,
        blocks=kind.block,
        checkpointing="blocks" if run.checkpoints else "none",
        accumulation=run.accumulation,
        kept=run.kept,  # type: ignore[arg-type]
        loss=kind.loss,
    )
    return {name: phase.nbytes for name, phase in found.phases.items()}


def drawn_runs(seed: int, count: int) -> list[Run]:
    """``count`` runs in which every choice is as likely as another.

    Convolutions in float32 only: in bfloat16 oneDNN takes scratch memory of its own, which an estimate does not see.
    """
    random = Random(seed)
    found = []
    for _ in range(count):
        model = random.choice(list(MODELS))
        policies = ["float32"] if model == "convolutions" else list(POLICIES)
        found.append(
            Run(
                model=model,
                mesh=random.choice([(2,), (4,), (8,), (64,), (2, 4), (4, 2), (2, 32)]),
                strategy=random.choice([None, "zero1", "zero2", "zero3", "replicate"]),
                policy=random.choice(policies),
                offloads=random.random() < 0.25,
                accumulation=random.choice([1, 1, 2, 3]),
                kept=random.choice(["unsharded", "sharded"]),
                checkpoints=random.random() < 0.4,
                optimizer=random.choice(list(OPTIMIZERS)),
                samples=random.choice([1, 2, 5]),
            )
        )
    return found
