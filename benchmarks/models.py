"""The models that the benchmarks train. Pure `nn.Module`s: nothing here knows about sharding.

Two shapes matter. Many small parameters make host time visible: every microsecond is bookkeeping. Few
large, evenly divisible parameters make bytes visible: copies and peak memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a `StackedBlocks` model.

    Attributes:
        name: how reports call the model.
        blocks: number of blocks; each becomes one group, and the root another.
        params_per_block: parameters in a block. With `bias` a layer has two (an odd number leaves the last
            layer without bias), otherwise one.
        dim: size of a block's input and output.
        hidden_dim: layers alternate between `dim -> hidden_dim` and `hidden_dim -> dim`.
        bias: whether layers have biases, and the root a scale of shape `(dim,)`.
        batch_rows: rows of the input, `(batch_rows, dim)`; few, for the arithmetic is not what is measured.
    """

    name: str
    blocks: int
    params_per_block: int
    dim: int
    hidden_dim: int
    bias: bool
    batch_rows: int = 2

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.params_per_block < 1:
            raise ValueError(
                f"model '{self.name}' needs at least 1 block of 1 parameter, "
                f"got {self.blocks} blocks of {self.params_per_block}"
            )

    @property
    def groups(self) -> int:
        """Number of `fully_shard` calls: one per block and one for the root."""
        return self.blocks + 1

    @property
    def layers_per_block(self) -> int:
        return (self.params_per_block + 1) // 2 if self.bias else self.params_per_block


SMALL_PARAMETERS = ModelSpec(name="small parameters", blocks=32, params_per_block=12, dim=16, hidden_dim=16, bias=True)
# Each matrix takes 2 MiB in fp32: above the size from which fsdp2 gathers a parameter without copying it.
LARGE_PARAMETERS = ModelSpec(
    name="large parameters", blocks=4, params_per_block=2, dim=512, hidden_dim=1024, bias=False
)


def small_parameters(*, blocks: int, params_per_block: int) -> ModelSpec:
    """The host-time model: `blocks * params_per_block + 5` parameters of at most 16 x 16 elements."""
    return replace(SMALL_PARAMETERS, blocks=blocks, params_per_block=params_per_block)


class Block(nn.Module):
    """Linear layers with `tanh`, which keeps values bounded, and a residual connection."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        layers = []
        for index in range(spec.layers_per_block):
            dims = (spec.dim, spec.hidden_dim) if index % 2 == 0 else (spec.hidden_dim, spec.dim)
            has_bias = spec.bias and 2 * (index + 1) <= spec.params_per_block
            layers.append(nn.Linear(*dims, bias=has_bias))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch_rows, dim)` to the same shape."""
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return x + hidden


class StackedBlocks(nn.Module):
    """`blocks` equal blocks below a root with parameters of its own (5 with `bias`, otherwise 2)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.hidden_dim != spec.dim and spec.layers_per_block % 2:
            raise ValueError(f"model '{spec.name}': layers of different sizes must come in pairs")
        self.embed = nn.Linear(spec.dim, spec.dim, bias=spec.bias)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.blocks))
        self.head = nn.Linear(spec.dim, spec.dim, bias=spec.bias)
        self.scale = nn.Parameter(torch.ones(spec.dim)) if spec.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(batch_rows, dim)` to a scalar loss."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        if self.scale is not None:
            hidden = hidden * self.scale
        output: torch.Tensor = self.head(hidden)
        return output.sum()


def build_model(spec: ModelSpec, *, seed: int = 0) -> StackedBlocks:
    """A model whose values depend on `seed` alone, so that every implementation trains the same one."""
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = StackedBlocks(spec)
    torch.random.set_rng_state(generator_state)
    return model
