"""The model: a decoder-only transformer over bytes, and the table of its sizes.

Pre-norm blocks with RMSNorm, rotary position embeddings (RoPE), SwiGLU and grouped-query attention, as in
Llama (Touvron et al. 2023, Dubey et al. 2024). This file knows nothing of sharding: `lm/build.py` wraps the
blocks and fills in the initial weights, `lm/tensor_parallel.py` says how the matrices can be split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

VOCABULARY_SIZE = 256
ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The shape of a transformer. `head_count` queries share `kv_head_count` keys and values."""

    width: int
    layer_count: int
    head_count: int
    kv_head_count: int
    hidden_width: int

    def __post_init__(self) -> None:
        if self.width % self.head_count or self.width // self.head_count % 2:
            raise ValueError(
                f"width {self.width} over {self.head_count} heads leaves no even head width, which RoPE needs"
            )
        if self.head_count % self.kv_head_count:
            raise ValueError(f"{self.head_count} heads cannot share {self.kv_head_count} keys and values evenly")


# Parameter counts with the byte vocabulary stand beside each; tests/unit/test_examples.py checks them.
SIZES = {
    "tiny": ModelSize(width=256, layer_count=3, head_count=4, kv_head_count=4, hidden_width=704),  # 2.5 M
    "small": ModelSize(width=512, layer_count=8, head_count=8, kv_head_count=8, hidden_width=1408),  # 26 M
    "125m": ModelSize(width=768, layer_count=18, head_count=12, kv_head_count=12, hidden_width=2048),  # 128 M
    "350m": ModelSize(width=1024, layer_count=28, head_count=16, kv_head_count=16, hidden_width=2752),  # 355 M
    "1b": ModelSize(width=2048, layer_count=20, head_count=16, kv_head_count=8, hidden_width=5632),  # 0.94 B
    "3b": ModelSize(width=3072, layer_count=30, head_count=24, kv_head_count=8, hidden_width=8192),  # 3.0 B
    "8b": ModelSize(width=4096, layer_count=36, head_count=32, kv_head_count=8, hidden_width=14336),  # 7.9 B
}
DEFAULT_SIZE = "tiny"


class Attention(nn.Module):
    """Causal self-attention with rotary positions; grouped-query where keys and values have fewer heads."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_width = size.width // size.head_count
        self.shares_kv = size.kv_head_count != size.head_count
        kv_width = self.head_width * size.kv_head_count
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.output = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Mix positions. `x`: (batch, length, width); `rotation`: (2, length, head_width / 2) float32."""
        batch, length, _ = x.shape
        # As many heads as the projections give: all of them, or this tensor-parallel rank's part.
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True, enable_gqa=self.shares_kv
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): a gated hidden layer."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden_width, bias=False)
        self.up = nn.Linear(size.width, size.hidden_width, bias=False)
        self.down = nn.Linear(size.hidden_width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself. `x`: (batch, length, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normalized residual stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.RMSNorm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Add this layer's contributions to the residual stream `x`: (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Bytes in, logits for the next byte out; matrices multiply in `compute_dtype`, parameters are float32.

    With `checkpoint_blocks` only the blocks' inputs are kept for backward, which computes each block again.
    """

    def __init__(
        self, size: ModelSize, compute_dtype: torch.dtype = torch.float32, *, checkpoint_blocks: bool = False
    ) -> None:
        super().__init__()
        self.size = size
        self.compute_dtype = compute_dtype
        self.checkpoint_blocks = checkpoint_blocks
        self.embedding = nn.Embedding(VOCABULARY_SIZE, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layer_count))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `tokens`: (batch, length) int64 to logits: (batch, length, 256)."""
        rotation = rope_rotation(tokens.shape[1], self.size.width // self.size.head_count, tokens.device)
        with self._autocast(tokens.device):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = self._run(block, x, rotation)
            return self.head(self.norm(x))

    def _run(self, block: nn.Module, x: Tensor, rotation: Tensor) -> Tensor:
        if not self.checkpoint_blocks:
            return block(x, rotation)
        # Nothing in a block is random, so there is no generator's state to keep.
        return checkpoint(block, x, rotation, use_reentrant=False, preserve_rng_state=False)

    def _autocast(self, device: torch.device) -> torch.autocast:
        # No cache: it would keep every block's cast weights until the end of forward, sharded or not.
        enabled = self.compute_dtype != torch.float32
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=enabled, cache_enabled=False)


def rope_rotation(length: int, head_width: int, device: torch.device) -> Tensor:
    """Return the cosines and sines of RoPE (Su et al. 2021): (2, length, head_width / 2) float32."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROPE_BASE**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the halves of each head by its position. `x`: (batch, heads, length, head_width), any dtype."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte. `inputs`, `targets`: (batch, length) int64."""
    logits = model(inputs).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
