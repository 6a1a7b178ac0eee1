"""What the user sees while a run goes on: a progress bar, lines of text, a metrics file. Rank 0 alone has it."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from types import TracebackType

import torch
from tqdm import tqdm


class Reporter:
    """Writes metrics and shows progress; does nothing where it is not `enabled`."""

    def __init__(self, metrics: Path, *, first_step: int, total_steps: int, enabled: bool) -> None:
        self._enabled = enabled
        self._file = metrics.open("a") if enabled else None
        # disable=None: no bar where standard error is not a terminal; the lines of text remain.
        self._bar = tqdm(
            initial=first_step,
            total=total_steps,
            unit="step",
            dynamic_ncols=True,
            disable=None if enabled else True,
        )
        self._tokens = 0
        # Of the last reading of the clock; evaluations and checkpoints move it on, so the rate leaves them out.
        self._since = time.perf_counter()
        self._recent_losses: list[float] = []

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """Print `text` above the progress bar."""
        if self._enabled:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def count(self, tokens: int) -> None:
        """Count `tokens` as trained on, for the rate."""
        self._tokens += tokens

    def training(
        self, step: int, *, loss: float, learning_rate: float, gradient_norm: float, memory_bytes: int
    ) -> None:
        """Record what is known after update `step` (counted from 1), and move the bar there."""
        now = time.perf_counter()
        tokens_per_second = self._tokens / (now - self._since)
        self._tokens, self._since = 0, now
        self._recent_losses.append(loss)
        self._write(
            step,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            tokens_per_second=tokens_per_second,
            memory_bytes=memory_bytes,
        )
        self._bar.set_postfix_str(
            f"loss {loss:.3f}, lr {learning_rate:.1e}, {tokens_per_second:,.0f} tokens/s, "
            f"{memory_bytes / 2**20:,.0f} MiB",
            refresh=False,
        )
        self._bar.update(step - self._bar.n)

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out `loss` (nats per byte) after update `step`; print it.

        The training loss printed beside it is the mean since the last such line.
        """
        self._write(step, held_out_loss=loss)
        training_loss = sum(self._recent_losses) / max(1, len(self._recent_losses))
        self._recent_losses.clear()
        self.say(
            f"step {step:>6}  training {training_loss / math.log(2):.3f}  "
            f"held out {loss / math.log(2):.3f} bits per byte"
        )
        self._since = time.perf_counter()

    def saved(self, step: int, path: Path) -> None:
        """Print where the checkpoint after update `step` lies."""
        self.say(f"step {step:>6}  saved {path}")
        self._since = time.perf_counter()

    def _write(self, step: int, **metrics: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has had: on its GPU, or of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
