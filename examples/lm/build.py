"""From a size to a model ready to train: built on meta, sharded, then given its initial weights.

No process ever holds the whole model: parameters get memory only once they are shards. The initial weights
depend on the seed and on the parameter's name alone, so they are the same on any number of ranks, and the
same as the unsharded model's.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from lm.model import ModelSize, Transformer
from lm.parallelism import Meshes
from lm.tensor_parallel import tensor_parallel_plan


@dataclass(frozen=True, slots=True)
class Precision:
    """What is computed and communicated in which dtype; parameters and optimizer state are always float32."""

    compute: torch.dtype
    """Of matrix multiplications, by autocast; float32: whatever the parameters are."""
    param: torch.dtype
    """Of the gathered parameters."""
    reduce: torch.dtype
    """Of gradients where they are averaged over ranks."""


def build_sharded(
    size: ModelSize, *, seed: int, meshes: Meshes, precision: Precision, offload: bool, checkpoint_blocks: bool
) -> Transformer:
    """Build a model whose parameters are split over `meshes.tp`, then sharded over `meshes.data`. A collective.

    Each block is a group of its own, so one block's parameters are gathered while the one before computes;
    the embedding, the last norm and the head form the root's group. With `offload` the shards, their gradients
    and so the optimizer's state lie in the CPU's memory.
    """
    model = build_on_meta(size, precision.compute, checkpoint_blocks=checkpoint_blocks)
    if meshes.tp is not None:
        parallelize_module(model, meshes.tp, tensor_parallel_plan())
    # Inputs are not cast: what goes from block to block has the right dtype, and RoPE's angles stay float32.
    mp_policy = MixedPrecisionPolicy(
        param_dtype=precision.param, reduce_dtype=precision.reduce, cast_forward_inputs=False
    )
    # Pinned memory is what a GPU can copy from while it computes; without a GPU there is none.
    pinned = meshes.data.device_type != "cpu"
    offload_policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=meshes.data, mp_policy=mp_policy, offload_policy=offload_policy)
    model.to_empty(device="cpu" if offload else meshes.data.device_type)
    initialize(model, seed=seed)
    return model


def build_unsharded(size: ModelSize, *, seed: int) -> Transformer:
    """Build the same model, with the same initial weights, whole and on the CPU."""
    model = build_on_meta(size, torch.float32)
    model.to_empty(device="cpu")
    initialize(model, seed=seed)
    return model


def build_on_meta(size: ModelSize, compute_dtype: torch.dtype, *, checkpoint_blocks: bool = False) -> Transformer:
    """Build the model's structure; its parameters have shapes but no memory."""
    with torch.device("meta"):
        return Transformer(size, compute_dtype, checkpoint_blocks=checkpoint_blocks)


@torch.no_grad()
def initialize(model: Transformer, *, seed: int) -> None:
    """Fill every parameter of `model` in place. Each rank draws a whole parameter and keeps its shard."""
    for name, parameter in model.named_parameters():
        value = initial_value(name, parameter.shape, layer_count=model.size.layer_count, seed=seed)
        if isinstance(parameter, DTensor):
            # Every rank has drawn the same value, so none needs to send it (src_data_rank=None).
            local = value.to(parameter.device)
            parameter.copy_(distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None))
        else:
            parameter.copy_(value)


def initial_value(name: str, shape: torch.Size, *, layer_count: int, seed: int) -> Tensor:
    """Return what the parameter called `name` starts as: `shape`, float32, on the CPU.

    Norms start at 1, matrices normal with standard deviation 1 / sqrt(their input width); what adds to the
    residual stream is smaller by sqrt(2 * layer_count), as in GPT-2, so that depth does not swell it.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    deviation = 1 / math.sqrt(shape[1])
    if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
        deviation /= math.sqrt(2 * layer_count)
    # The CPU generator looks at 32 bits of its seed only, as many as the checksum has.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return nn.init.normal_(torch.empty(shape), std=deviation, generator=generator)
