"""What a run leaves on disk.

runs/lm/options.json              the options it was started with
        metrics.jsonl             one line a logged step, one a held-out loss
        loss.png, metrics.png
        checkpoints/step-00000200 one folder each, of fsdp2.checkpoint
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from lm.errors import UserError


class RunDirectory:
    """The paths of one run under `path`. Only rank 0 calls what writes; every rank may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.picture = path / "loss.png"
        self.costs = path / "metrics.png"
        self._options = path / "options.json"
        self.checkpoints = path / "checkpoints"

    def start_new(self, options: Mapping[str, object]) -> Path | None:
        """Make the folder and write `options`; return where a former run was moved to, if there was one.

        Raises:
            UserError: the folder holds something else than a run.
        """
        former = None
        if self._is_in_use():
            numbered = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
            former = next(path for path in numbered if not path.exists())
            self.path.rename(former)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._write_options(options)
        return former

    def resume(self, options: Mapping[str, object], *, step: int) -> None:
        """Write `options`, and drop the metrics written after `step`: the resumed run writes them again."""
        self._write_options(options)
        lines = self.metrics.read_text().splitlines(keepends=True) if self.metrics.exists() else []
        complete = (line for line in lines if line.endswith("\n"))
        self.metrics.write_text("".join(line for line in complete if json.loads(line)["step"] <= step))

    def _write_options(self, options: Mapping[str, object]) -> None:
        self._options.write_text(json.dumps(options, indent=2) + "\n")

    def read_options(self) -> dict[str, object]:
        """Return the options the run was last started or resumed with."""
        return json.loads(self._options.read_text())

    def read_metrics(self) -> list[dict[str, float]]:
        """Return the lines of the metrics file, in the order written."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def require_checkpoint(self) -> None:
        """Raise `UserError` where there is nothing to go on from."""
        if not any(self.checkpoints.glob("step-*/manifest.json")):
            raise UserError(
                f"--resume: there is no checkpoint under {self.path}; name the run with --run-dir, "
                "or start a new one without --resume"
            )

    def _is_in_use(self) -> bool:
        """Whether there is a run in the folder; raises where there is something else."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return False
        if not self._options.exists():
            raise UserError(f"{self.path} exists and holds no run of this program: name another --run-dir")
        return True
