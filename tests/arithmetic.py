"""Runs the tests of arithmetic on every vector width that this processor has, with one thread and with two.

`make test-full` runs it after the suite: `python -m tests.arithmetic`, with arguments for pytest. What the suite runs
itself, the widest vectors and one thread, is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

WIDTHS = ("default", "avx2", "avx512")
"""Values of `ATEN_CPU_CAPABILITY`, each of which includes those before it."""

FILES = (
    "tests/unit/test_bits.py",
    "tests/unit/test_reference.py",
    "tests/unit/core/test_reduce.py",
    "tests/unit/test_clip_grad_of_plain_tensors.py",
    "tests/multi_rank/combinations/test_drawn_programs.py",
    "tests/multi_rank/optimizers/test_clip_grad.py",
    "tests/multi_rank/optimizers/test_clipped_training.py",
    "tests/multi_rank/optimizers/test_local_optimizer.py",
    "tests/multi_rank/optimizers/test_optimizers.py",
    "tests/multi_rank/parameters/test_tied_across_groups.py",
    "tests/multi_rank/placements/test_owned.py",
    "tests/multi_rank/placements/test_ragged_tensors.py",
    "tests/multi_rank/placements/test_row_blocks.py",
    "tests/multi_rank/precision/test_gradients_as_they_are.py",
    "tests/multi_rank/precision/test_policies_per_parameter.py",
    "tests/multi_rank/reduction/test_gradient_reduction.py",
    "tests/multi_rank/strategies/test_strategies.py",
    "tests/multi_rank/training/test_double_backward.py",
    "tests/multi_rank/training/test_matches_reference.py",
    "tests/parity/test_mixed_precision.py",
)
"""All that compare numbers with those of an unsharded model, or of torch's, by every kind of reduction and of step."""

LEFT_OUT = "not (four_ranks or 4ranks)"  # half of the time, and on four ranks nothing is compared by bits


def settings() -> list[tuple[str, int]]:
    """Widths and numbers of threads that the suite itself does not run with."""
    widest = torch.backends.cpu.get_cpu_capability().lower()
    widths = WIDTHS[: WIDTHS.index(widest) + 1] if widest in WIDTHS else ("default",)
    every = [(width, threads) for width in widths for threads in (1, 2)]
    return [each for each in every if each != (widest, 1)]


def main() -> int:
    """The number of settings that a test fails with."""
    failed = []
    for width, threads in settings():
        print(f"----- ATEN_CPU_CAPABILITY={width}, {threads} threads", flush=True)
        # Ranks share few cores: a thread that waits for another one must not keep its core.
        own = {"ATEN_CPU_CAPABILITY": width, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "pytest", "-k", LEFT_OUT, *FILES, *sys.argv[1:]]
        if subprocess.run(command, env={**os.environ, **own}).returncode:
            failed.append((width, threads))
    if failed:
        print(f"tests of arithmetic failed with (ATEN_CPU_CAPABILITY, threads): {failed}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
