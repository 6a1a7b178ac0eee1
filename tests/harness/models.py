"""The models that multi-rank tests train: small, seeded, each with a reason to be here.

Owns the modules and their data. A `ModelCase` travels to the ranks by pickling, so its functions live at the
top level of this file. No dropout and no batch statistics: each rank's arithmetic is a function of its batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_ROWS = 4
VOCABULARY = 64
SEQUENCE = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets of one rank, one step, one microbatch."""

    inputs: Tensor
    targets: Tensor

    def to(self, dtype: torch.dtype | None, device: torch.device) -> Batch:
        """The batch on `device`, with floating-point inputs in `dtype` as mixed precision casts them."""
        if not self.inputs.is_floating_point():
            dtype = None
        return Batch(self.inputs.to(device, dtype), self.targets.to(device))


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model, its data and how it is wrapped.

    Attributes:
        name: Shows in test ids.
        make_model: Makes the modules; call `build`, which seeds.
        make_batch: Batch from a seeded generator.
        unit_names: FQNs of the submodules to shard on their own, bottom-up; the root comes after them.
        loss_of: Loss (fp32 scalar) from the model's output and the targets.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    unit_names: tuple[str, ...]
    loss_of: Callable[[Tensor, Tensor], Tensor]

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int = 0) -> nn.Module:
        """The model: the same parameters wherever it is built with this seed. Leaves the global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model()

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules to wrap, in the order to wrap them: submodules bottom-up, then `model` itself."""
        return [model.get_submodule(name) for name in self.unit_names] + [model]

    def batch(self, seed: int, step: int, rank: int, micro: int = 0) -> Batch:
        """The data of `rank` in microbatch `micro` of `step`: a function of these numbers alone."""
        return self.make_batch(batch_generator(seed, step, rank, micro))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Forward: scalar loss of `model` on `batch`, in fp32 whatever the model computes in."""
        return self.loss_of(model(batch.inputs).float(), batch.targets)


def batch_generator(seed: int, step: int, rank: int, micro: int = 0) -> torch.Generator:
    """A generator that differs in every argument (each below 1,000)."""
    return torch.Generator().manual_seed(((seed * 1000 + step) * 1000 + rank) * 1000 + micro + 1)


# ---- MLPs ----------------------------------------------------------------------------------------


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for in_features, out_features in itertools.pairwise(sizes):
        layers += [nn.Linear(in_features, out_features), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def _even_mlp() -> nn.Module:
    return _mlp(32, 64, 64, 16)


def _uneven_mlp() -> nn.Module:
    return _mlp(13, 97, 33, 1)


def _vectors(generator: torch.Generator, in_features: int, out_features: int) -> Batch:
    return Batch(
        torch.randn(BATCH_ROWS, in_features, generator=generator),
        torch.randn(BATCH_ROWS, out_features, generator=generator),
    )


def _even_vectors(generator: torch.Generator) -> Batch:
    return _vectors(generator, 32, 16)


def _uneven_vectors(generator: torch.Generator) -> Batch:
    return _vectors(generator, 13, 1)


# ---- transformer ---------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal multi-head self-attention over `(batch, sequence, width)`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))


class SwiGLU(nn.Module):
    """Gated feed-forward layer; its hidden size is chosen uneven."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-6)
        self.feed_forward = SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Tiny decoder-only language model; `tied` shares the embedding with the head, inside the root's unit."""

    def __init__(self, *, blocks: int = 3, width: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads=4, hidden=43) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tied_transformer() -> nn.Module:
    return Transformer(blocks=2, tied=True)


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (BATCH_ROWS, SEQUENCE + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def _next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- convolutions --------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Convolutions and group norm: parameters of four dimensions, small first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(6, 10, 3, stride=2), nn.GroupNorm(2, 10), nn.SiLU())
        self.head = nn.Linear(10, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean(dim=(2, 3)))


def _images(generator: torch.Generator) -> Batch:
    return Batch(
        torch.randn(BATCH_ROWS, 3, 9, 9, generator=generator),
        torch.randint(5, (BATCH_ROWS,), generator=generator),
    )


# ---- parts without gradients ---------------------------------------------------------------------


def _frozen_mlp() -> nn.Module:
    """The first unit has no trainable parameter, the second a trainable weight and a frozen bias."""
    model = _mlp(32, 64, 64, 16)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class PartlyUsed(nn.Module):
    """A layer and a whole branch that forward never touches: their gradients are None on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({"used": nn.Linear(32, 24), "unused": nn.Linear(32, 24)})
        self.skipped = nn.Linear(24, 24)
        self.last = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first["used"](x)))


MLP = ModelCase("mlp", _even_mlp, _even_vectors, ("0", "2", "4"), F.mse_loss)
UNEVEN_MLP = ModelCase("uneven_mlp", _uneven_mlp, _uneven_vectors, ("0", "2", "4"), F.mse_loss)
TRANSFORMER = ModelCase("transformer", Transformer, _tokens, ("blocks.0", "blocks.1", "blocks.2"), _next_token_loss)
TIED = ModelCase("tied", _tied_transformer, _tokens, ("blocks.0", "blocks.1"), _next_token_loss)
CONV = ModelCase("conv", ConvNet, _images, ("stem", "body"), F.cross_entropy)
FROZEN = ModelCase("frozen", _frozen_mlp, _even_vectors, ("0", "2"), F.mse_loss)
PARTLY_USED = ModelCase("partly_used", PartlyUsed, _even_vectors, ("skipped", "last"), F.mse_loss)

MODEL_CASES = (MLP, UNEVEN_MLP, TRANSFORMER, TIED, CONV, FROZEN, PARTLY_USED)
