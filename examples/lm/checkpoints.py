"""The run's checkpoints: what is saved beside model and optimizer, and what must be the same when a run goes on."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn as nn

from fsdp2.checkpoint import Checkpoints
from lm.errors import UserError


class RunCheckpoints:
    """`fsdp2.checkpoint.Checkpoints` of a run that is trained on one text. Every rank has one, and calls it alike."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        fingerprint: int,
        keep: int,
        asynchronous: bool,
    ) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._asynchronous = asynchronous
        self._shared = {"fingerprint": fingerprint}
        self._checkpoints = Checkpoints(path, model, optimizer, shared=self._shared, keep_last=keep)

    def save(self, step: int) -> Path:
        """Save weights, the optimizer's state and the text's fingerprint as of `step` updates; return where."""
        self._checkpoints.save(step, asynchronous=self._asynchronous)
        return self._path / f"step-{step:08d}"

    def restore(self) -> int:
        """Fill model and optimizer from the newest complete checkpoint; return its step.

        Raises:
            UserError: the run was trained on another text.
        """
        step = self._checkpoints.restore()
        if self._shared["fingerprint"] != self._fingerprint:
            raise UserError(
                "--resume: the text is not the one this run was trained on (other files, or another Python); "
                "name the same --data, or start a new run"
            )
        return step

    def close(self) -> None:
        """Wait for a save that is under way; raises what it raised."""
        self._checkpoints.close()
