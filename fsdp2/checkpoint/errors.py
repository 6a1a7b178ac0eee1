"""What goes wrong with checkpoints. The same class and text on every rank, naming path, rank and cause."""

from __future__ import annotations

from fsdp2.errors import FSDPRuntimeError


class CheckpointError(FSDPRuntimeError):
    """Base of all below. Training may go on after any of them, unless the message says otherwise."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint does not fit the model, the optimizer or the ranks; nothing was loaded.

    The message has a table of all differences.
    """


class CheckpointDamaged(CheckpointError):
    """A file is missing, cut short, of another checkpoint, or holds other bytes than were written."""


class CheckpointIncomplete(CheckpointError):
    """There is no complete checkpoint where one is to be read: no such folder, or a save did not come to its end."""


class SaveFailed(CheckpointError):
    """A checkpoint could not be written. The folder of before, the model and the optimizer are untouched."""
