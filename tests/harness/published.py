"""Published training runs that estimates of time are held against: what was run and measured, and where it is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.tools.estimating.estimate import estimate
from fsdp2.tools.estimating.result import Estimate
from tests.harness.llama import SIZES, Llama, LlamaSize, next_token_loss

TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
MEGATRON = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html"

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Published:
    """One run.

    Attributes:
        name: for what is printed.
        source: where it is published.
        tokens_per_second: of one rank, as it was measured.
        size: of the model, in `SIZES`.
        length: tokens of a sample.
        samples: of all ranks, in a step.
        arguments: of `fsdp2.estimate`.
        gibibytes: peak memory of a rank, where that was measured.
        make: makes the model.
    """

    name: str
    source: str
    tokens_per_second: int
    size: str
    length: int
    samples: int
    arguments: dict[str, Any] = field(default_factory=dict)
    gibibytes: float | None = None
    make: Callable[[LlamaSize, int], nn.Module] = Llama

    def estimate(self) -> Estimate:
        """What is said of it before it is run."""
        make: Callable[[], nn.Module] = partial(self.make, SIZES[self.size], self.length)
        batch = torch.empty(self.samples, self.length, dtype=torch.int64, device="meta")
        given = {"batch": batch, "loss": next_token_loss, "mp_policy": POLICY, "remedies": False}
        return estimate(make, **{**given, **self.arguments})

    def estimated_tokens_per_second(self, found: Estimate) -> float:
        """Of one rank."""
        assert found.time is not None
        ranks = torch.Size(found.mesh.values()).numel()  # type: ignore[arg-type]
        return self.samples * self.length / ranks / found.time.seconds


def with_tensor_parallelism(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan's Llama: tensor and sequence parallelism over "tp", then shards over "shard"."""
    tp = mesh["tp"]
    parallelize_module(
        model,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(
            block,
            tp,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "w1": ColwiseParallel(input_layouts=Shard(1)),
                "w3": ColwiseParallel(input_layouts=Shard(1)),
                "w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        fully_shard(block, mesh=mesh["shard"], mp_policy=POLICY)
    fully_shard(model.embedding, mesh=mesh["shard"], mp_policy=POLICY)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh["shard"], mp_policy=POLICY)


_KEPT = ("mm", "_scaled_dot_product", "reduce_scatter_tensor")


def _keeping_every_second_product() -> Any:
    """torchtitan's selective checkpointing: attention is kept, of matrix products the first, the third, ..."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator._schema.name.rpartition("::")[2]
        if name == "mm":
            counts[context.is_recompute] += 1
        kept = name.startswith(_KEPT) and not (name == "mm" and counts[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def llama_of_torchtitan(size: LlamaSize, length: int) -> nn.Module:
    """With blocks that are checkpointed as torchtitan's are with ``selective_ac_option = "op"``."""
    model = Llama(size, length)
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=_keeping_every_second_product
        )
    return model


_TITAN_8B = {"hardware": "h100-hbm2e-8x"}
_COMPILED = {**_TITAN_8B, "compiled": True}

RUNS = (
    Published(
        "torchtitan 8B on 8",
        TORCHTITAN,
        5762,
        "8B",
        8192,
        16,
        {"mesh_shape": 8, **_TITAN_8B},
        82.4,
        llama_of_torchtitan,
    ),
    Published(
        "torchtitan 8B on 8, compiled",
        TORCHTITAN,
        6667,
        "8B",
        8192,
        16,
        {"mesh_shape": 8, **_COMPILED},
        77.0,
        llama_of_torchtitan,
    ),
    Published(
        "torchtitan 8B on 128",
        TORCHTITAN,
        5605,
        "8B",
        8192,
        256,
        {"mesh_shape": 128, **_TITAN_8B},
        67.0,
        llama_of_torchtitan,
    ),
    Published(
        "torchtitan 8B on 128, compiled",
        TORCHTITAN,
        6514,
        "8B",
        8192,
        256,
        {"mesh_shape": 128, **_COMPILED},
        62.0,
        llama_of_torchtitan,
    ),
    Published(
        "torchtitan 8B on 8, compiled, float8",
        TORCHTITAN,
        8532,
        "8B",
        8192,
        16,
        {"mesh_shape": 8, "matmul_dtype": torch.float8_e4m3fn, **_COMPILED},
        76.8,
        llama_of_torchtitan,
    ),
    Published(
        "torchtitan 70B on 256, compiled, float8",
        TORCHTITAN,
        829,
        "70B",
        8192,
        512,
        {
            "mesh_shape": (32, 8),
            "mesh_dim_names": ("shard", "tp"),
            "shard": with_tensor_parallelism,
            "hardware": "h100-hbm2e-8x",
            "checkpointing": "blocks",
            "compiled": True,
            "matmul_dtype": torch.float8_e4m3fn,
        },
        71.9,
    ),
    Published(
        "Megatron 8B on 8, float8",
        MEGATRON,
        14451,
        "8B",
        8192,
        16,  # two of the sixteen microbatches of a step, which are all alike
        {
            "mesh_shape": 8,
            "hardware": "h100-8x",
            "accumulation": 2,
            "kept": "sharded",
            "compiled": True,
            "matmul_dtype": torch.float8_e4m3fn,
        },
    ),
)
