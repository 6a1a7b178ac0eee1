"""Samples of several implementations, one for each repetition: as cells of a table beside torch's, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.host_time import Quartiles
from benchmarks.implementations import UNSHARDED, base_of
from benchmarks.results import Environment

REFERENCE = "torch"


def spread(samples: Sequence[float], digits: int) -> str:
    """ "median [lower quartile, upper quartile]"."""
    return Quartiles.of(samples).text(digits)


def compared(names: Sequence[str]) -> list[str]:
    """Those of `names` that stand beside torch, if it is there: all sharded ones but itself."""
    if REFERENCE not in names:
        return []
    return [name for name in names if name != REFERENCE and base_of(name) != UNSHARDED]


def ratios(samples: dict[str, list[float]], names: Sequence[str]) -> list[str]:
    """Of each that is `compared`, its samples over torch's of the same repetitions."""
    return [
        spread([mine / other for mine, other in zip(samples[name], samples[REFERENCE], strict=True)], 3)
        for name in compared(names)
    ]


def write_json(file: Path | None, **figures: object) -> None:
    """`figures` and the environment, if there is a `file`."""
    if file is not None:
        file.write_text(json.dumps({"environment": asdict(Environment.current()), **figures}))
