"""A decoder like Llama 3, with torch alone: what estimates are tried on. Sizes by name in `SIZES`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LlamaSize:
    """Sizes of one model.

    Attributes:
        dim: width of the residual stream.
        hidden: width of the feed-forward layers.
        layers: blocks.
        heads: of queries.
        kv_heads: of keys and values.
        vocabulary: tokens.
    """

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


SIZES = {
    "tiny": LlamaSize(64, 172, 3, 4, 2, 256),
    "8B": LlamaSize(4096, 14336, 32, 32, 8, 128256),
    "70B": LlamaSize(8192, 28672, 80, 64, 8, 128256),
}


class Attention(nn.Module):
    """Causal, with rotary positions and grouped keys."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.width = size.dim // size.heads
        self.wq = nn.Linear(size.dim, size.heads * self.width, bias=False)
        self.wk = nn.Linear(size.dim, size.kv_heads * self.width, bias=False)
        self.wv = nn.Linear(size.dim, size.kv_heads * self.width, bias=False)
        self.wo = nn.Linear(size.heads * self.width, size.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """``x``: (batch, length, dim); ``rotation``: (length, width / 2), complex."""
        batch, length, _ = x.shape
        query, key, value = (layer(x).view(batch, length, -1, self.width) for layer in (self.wq, self.wk, self.wv))
        query, key = rotated(query, rotation), rotated(key, rotation)
        repeats = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """``x``: (batch, length, heads, width), turned as complex numbers, in float32 and back."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).type_as(x)


class Block(nn.Module):
    """Attention and a gated feed-forward layer."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)
        self.attention = Attention(size)
        self.w1 = nn.Linear(size.dim, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.dim, bias=False)
        self.w3 = nn.Linear(size.dim, size.hidden, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """``x``: (batch, length, dim), and so is the result."""
        x = x + self.attention(self.attention_norm(x), rotation)
        inner = self.feed_forward_norm(x)
        return x + self.w2(F.silu(self.w1(inner)) * self.w3(inner))


class Llama(nn.Module):
    """The whole model. Returns logits."""

    def __init__(self, size: LlamaSize, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.output = nn.Linear(size.dim, size.vocabulary, bias=False)
        rotation = torch.ones(length, size.dim // size.heads // 2, dtype=torch.complex64)
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (batch, length); result: (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.output(self.norm(x))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy in float32, as torchtitan's."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(0, 1))
