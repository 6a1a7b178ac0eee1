"""Which bytes each rank sees at each step.

The text is cut into windows. Sample `i` of a run is a window that depends on the seed and on `i` alone, and
step `s` takes samples `s * batch .. (s + 1) * batch - 1`, so a run sees the same global batches on any number
of ranks, and a resumed run goes on exactly where it stopped. A step of 8 samples in 2 microbatches on 2 ranks:

    sample         0 1   2 3  |  4 5   6 7
    microbatch         0      |      1
    rank            0     1   |   0     1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data import Bytes
from lm.errors import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How one step's samples divide over microbatches and ranks."""

    batch: int
    accumulate: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        parts = self.accumulate * self.world_size
        if self.batch % parts:
            below = self.batch // parts * parts
            remedy = f"--batch {below} or {below + parts}" if below else f"--batch {parts}"
            raise UserError(
                f"--batch {self.batch} does not divide evenly over {self.world_size} ranks and "
                f"--accumulate {self.accumulate}: use {remedy}, or another number of either"
            )

    def samples(self, step: int, microbatch: int) -> Indices:
        """Return this rank's global sample indices: (batch / (accumulate * world_size),) int64."""
        count = self.batch // (self.accumulate * self.world_size)
        first = step * self.batch + (microbatch * self.world_size + self.rank) * count
        return np.arange(first, first + count, dtype=np.int64)


class ShuffledWindows:
    """A text as an endless sequence of samples: each window once per epoch, each epoch in its own order."""

    def __init__(self, text: Bytes, *, context: int, seed: int) -> None:
        """Cut `text`: (byte_count,) uint8 into windows of `context` inputs and one more target."""
        self._text = text
        self._context = context
        self._seed = seed
        self._window_count = (len(text) - 1) // context
        self._epoch = -1
        self._order: Indices = np.empty(0, dtype=np.int64)

    def starts(self, samples: Indices) -> Indices:
        """Return where in the text each of the global `samples` (count,) begins: (count,) int64."""
        return np.array([self._start(int(sample)) for sample in samples], dtype=np.int64)

    def batch(self, samples: Indices) -> tuple[Tensor, Tensor]:
        """Return the inputs and next-byte targets of `samples` (count,), both (count, context) int64."""
        return cut_windows(self._text, self.starts(samples), context=self._context)

    def _start(self, sample: int) -> int:
        epoch, place = divmod(sample, self._window_count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self._window_count)
        return int(self._order[place]) * self._context


def cut_windows(text: Bytes, starts: Indices, *, context: int) -> tuple[Tensor, Tensor]:
    """Cut `text` (byte_count,) at `starts` (count,) into inputs and targets, both (count, context) int64."""
    tokens = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]
