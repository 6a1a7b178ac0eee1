"""What the user sees while a run goes on: a progress bar, lines of text, a metrics file. Rank 0 alone has it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from fsdp2 import StepMetrics


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

    def training(self, step: int, *, loss: float, learning_rate: float, measured: StepMetrics) -> None:
        """Record what is known after update `step` (counted from 1), and move the bar there."""
        self._recent_losses.append(loss)
        self._write(step, loss=loss, learning_rate=learning_rate, **without_step(measured))
        parts = [f"loss {loss:.3f}", f"lr {learning_rate:.1e}"]
        if measured.tokens_per_second is not None:
            parts.append(f"{measured.tokens_per_second:,.0f} tokens/s")
        parts.append(f"{measured.peak_memory_bytes / 2**20:,.0f} MiB")
        if measured.mfu is not None:
            parts.append(f"MFU {measured.mfu:.1%}")
        if measured.exposed_share is not None:
            parts.append(f"{measured.exposed_share:.0%} exposed")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
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

    def saved(self, step: int, path: Path) -> None:
        """Print where the checkpoint after update `step` lies."""
        self.say(f"step {step:>6}  saved {path}")

    def _write(self, step: int, **metrics: float) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()


def without_step(measured: StepMetrics) -> dict[str, float]:
    """Return what was measured, by name."""
    return {name: value for name, value in measured.to_dict().items() if name != "step"}
