"""The loss on text the model was not trained on."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from lm.batches import Indices, cut_windows
from lm.data import Bytes
from lm.distributed import Ranks
from lm.parallelism import Arrangement


def spread_windows(text: Bytes, *, context: int, count: int) -> Indices:
    """Return the starts of up to `count` windows spread evenly over `text`, none overlapping: (count,)."""
    last = len(text) - context - 1
    return np.linspace(0, last, min(count, last // context + 1)).astype(np.int64)


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    text: Bytes,
    starts: Indices,
    *,
    context: int,
    rows: int,
    ranks: Ranks,
    arrangement: Arrangement,
) -> float:
    """Return the mean loss in nats per byte over the windows of `text` that begin at `starts` (count,).

    A collective: every rank calls it and takes part in every forward, `rows` windows at a time, with windows
    of no weight where there are too few to go round.
    """
    data_rank = arrangement.data_rank(ranks.rank)
    nats = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for first in range(0, len(starts), rows * arrangement.data_world_size):
        mine = first + data_rank * rows + np.arange(rows)
        counted = torch.from_numpy(mine < len(starts)).to(ranks.device)
        inputs, targets = cut_windows(text, starts[np.minimum(mine, len(starts) - 1)], context=context)
        logits = model(inputs.to(ranks.device)).float()
        losses = F.cross_entropy(logits.transpose(1, 2), targets.to(ranks.device), reduction="none")
        nats += losses.double().mean(dim=1)[counted].sum()
    # Each of the `tp` ranks that share a batch has counted it.
    return ranks.sum([nats])[0] / arrangement.tp / len(starts)
