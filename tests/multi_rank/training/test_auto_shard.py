"""Models sharded by `auto_shard` train like the unsharded reference, whatever the groups."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2 import FSDPModule, auto_shard
from tests.harness import Reference, adamw, multi_rank
from tests.harness.compare import tolerance_for
from tests.harness.models import CONV, SEQUENCE, TIED, TRANSFORMER, VOCABULARY, Batch, ModelCase
from tests.harness.training import assert_trains_like

SPLIT = {"max_bytes": 8000, "min_bytes": 1000}


class Summarizer(nn.Module):
    """Encoder and decoder of torch's layers; the embedding is a module of both and the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Side(decodes=False)
        self.decoder = Side(decodes=True)
        self.decoder.embedding = self.encoder.embedding
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(20, 24))
        self.out = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.head(self.decoder(tokens, self.encoder(tokens.flip(1))))))


class Side(nn.Module):
    """One half of it."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 20)
        self.position = nn.Parameter(torch.randn(SEQUENCE, 20))
        layer = nn.TransformerDecoderLayer if decodes else nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(layer(20, 2, 30, dropout=0.0, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor, *memory: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x, *memory)
        return x


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (3, SEQUENCE + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


SUMMARIZER = ModelCase("summarizer", Summarizer, _tokens, (), _loss)

GROUPS: dict[str, tuple[ModelCase, dict[str, object], int]] = {
    "blocks": (TRANSFORMER, {"min_bytes": 0}, 4),
    "tied": (TIED, SPLIT, 12),
    "by size": (CONV, {"min_bytes": 0}, 4),
    "shared, split": (SUMMARIZER, {"max_bytes": 3000, "min_bytes": 1000}, 8),
}


@multi_rank(2, full=[4])  # 6 cases more, 5 s
@pytest.mark.parametrize("name", GROUPS)
def test_trains_like_the_reference(name: str, world_size: int) -> None:
    case, sizes, groups = GROUPS[name]
    model = auto_shard(case.build(), **sizes)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == groups
    optimizer = adamw(list(model.parameters()))
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2)
def test_torchs_encoder_evaluates_as_without_sharding() -> None:
    """Its fast path looks at the first layer's parameters before that is called."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)).eval()
    model = auto_shard(copy.deepcopy(plain), min_bytes=0)
    assert isinstance(model[0].layers[0], FSDPModule)
    x = torch.randn(3, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [2]])  # left-aligned, as the fast path wants it
    for grad in (True, False):
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
            expected = plain[0](x, src_key_padding_mask=padding)
            found = model[0](x, src_key_padding_mask=padding)
            torch.testing.assert_close(found[~padding], expected[~padding])
