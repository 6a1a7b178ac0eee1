"""Sampling text from the model."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

from lm.distributed import Ranks

TEMPERATURE = 0.8


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, *, byte_count: int, context: int, seed: int, ranks: Ranks) -> bytes:
    """Return `prompt` and `byte_count` bytes more. A collective: every rank computes the same text.

    Each forward gathers the parameters from all ranks, so all take part, with rank 0's choice of byte. The
    input always has `context` bytes: what is padded comes after the byte that counts, and causal attention
    never looks there.
    """
    text = bytearray(prompt or b"\n")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(byte_count):
        recent = text[-context:]
        padded = bytes(recent) + bytes(context - len(recent))
        tokens = torch.tensor(list(padded), device=ranks.device).unsqueeze(0)
        logits = model(tokens)[0, len(recent) - 1].float().cpu()
        choice = torch.multinomial((logits / TEMPERATURE).softmax(dim=-1), 1, generator=generator)
        choice = choice.to(ranks.device)
        dist.broadcast(choice, src=0)
        text.append(int(choice))
    return bytes(text)
