"""The baseline: a table of how often each byte follows each other byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm.data import Bytes
from lm.model import VOCABULARY_SIZE

COUNTED_AT_ONCE = 1 << 22
"""Pairs counted in one go: bounds the memory, since each pair takes eight bytes there."""


@dataclass(frozen=True, slots=True)
class BigramTable:
    """`bits[previous, next]`: the cost in bits of one byte after another, (256, 256) float64."""

    bits: NDArray[np.float64]

    @classmethod
    def fit(cls, text: Bytes) -> BigramTable:
        """Count the pairs of `text` (byte_count,), each pair once more than seen (add-one smoothing)."""
        counts = np.ones(VOCABULARY_SIZE**2, dtype=np.int64)
        for start in range(0, len(text) - 1, COUNTED_AT_ONCE):
            piece = text[start : start + COUNTED_AT_ONCE + 1].astype(np.int64)
            counts += np.bincount(piece[:-1] * VOCABULARY_SIZE + piece[1:], minlength=VOCABULARY_SIZE**2)
        table = counts.reshape(VOCABULARY_SIZE, VOCABULARY_SIZE)
        return cls(bits=np.log2(table.sum(axis=1, keepdims=True)) - np.log2(table))

    def bits_per_byte(self, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
        """Return the mean cost of `targets`, each after the byte of `inputs` at its place (same shapes)."""
        return float(self.bits[inputs, targets].mean())
