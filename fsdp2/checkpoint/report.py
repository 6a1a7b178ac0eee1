"""What a load has done: `LoadReport`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded, and what was not. The same on every rank.

    Attributes:
        path: of the checkpoint: a folder or a file.
        step: the training step that it is of; None where none was saved.
        loaded: names of the parameters and buffers that were written.
        missing: names that the model has and the checkpoint has not; they are as they were.
        unexpected: names that the checkpoint has and the model has not.
        cast: of the loaded ones those that were of another dtype, with both: ``"torch.float32 -> torch.bfloat16"``.
        unwritten: parameters and buffers that are still on meta.
        unverified: names of tensors of which no checksum was compared, wholly or in part.
        optimizer: names of the parameters whose optimizer state was loaded.
        values: names of the other values that were loaded.
        bytes_read: from files, by all ranks together.
    """

    path: str
    step: int | None = None
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: dict[str, str] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    bytes_read: int = 0
