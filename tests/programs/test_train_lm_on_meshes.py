"""`train_lm.py` on meshes of two axes and with what saves memory: the losses of one axis, and one run over all meshes.

All of it belongs to `make test-full`: each program imports torch and trains in new processes (the times stand beside).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launching import EXAMPLES, command, losses, output_of

pytestmark = pytest.mark.full

# The rate rises all the time, so that it depends on the step alone and not on how many there will be.
ARGUMENTS = [
    *("--steps", "24", "--batch", "8", "--context", "64", "--learning-rate", "1e-2", "--warmup-steps", "100"),
    *("--log-every", "1", "--evaluate-every", "0", "--sample-bytes", "0"),
]
# The same numbers are added up in another order, in fp32, over 24 steps: measured 2e-7.
TOLERANCE = 1e-5


def train(run_dir: Path, *extra: str, ranks: int) -> dict[int, float]:
    """Run it to its end; return all its losses by step."""
    output_of("train_lm.py", *ARGUMENTS, "--run-dir", str(run_dir), *extra, ranks=ranks)
    return losses(run_dir)


@pytest.fixture(scope="module")
def one_axis(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses on 2 ranks, sharded. About 12 s."""
    return train(tmp_path_factory.mktemp("runs") / "one-axis", ranks=2)


@pytest.mark.parametrize(
    "mesh", [["--replicate", "2"], ["--tp", "2"], ["--replicate", "2", "--tp", "2"]], ids=["hsdp", "tp", "hsdp-tp"]
)
def test_every_mesh_of_four_ranks_has_the_losses_of_one_axis(
    mesh: list[str], one_axis: dict[int, float], tmp_path: Path
) -> None:
    """About 15 s each."""
    assert train(tmp_path / "run", *mesh, ranks=4) == pytest.approx(one_axis, rel=TOLERANCE)


@pytest.mark.parametrize("option", ["--offload", "--activation-checkpoint"])
def test_saving_memory_changes_no_bit(option: str, one_axis: dict[int, float], tmp_path: Path) -> None:
    """About 12 s each."""
    assert train(tmp_path / "run", option, ranks=2) == one_axis


@pytest.mark.parametrize("options", [[], ["--activation-checkpoint"], ["--accumulate", "2"]], ids=["", "ac", "two"])
def test_compiled_it_has_the_losses_of_eager(options: list[str], one_axis: dict[int, float], tmp_path: Path) -> None:
    """About 25 s each. (Graphs reduce with gloo's own operations, and add in their order.)"""
    compiled = train(tmp_path / "run", "--compile", "aot_eager", *options, ranks=2)
    assert compiled == pytest.approx(one_axis, rel=TOLERANCE)


def test_everything_together_in_bfloat16(one_axis: dict[int, float], tmp_path: Path) -> None:
    """About 15 s."""
    options = ["--tp", "2", "--param-dtype", "bfloat16", "--offload", "--activation-checkpoint"]
    # bfloat16 has 8 bits: single roundings of 0.4 %, which average out over a batch (measured 0.2 %).
    assert train(tmp_path / "run", *options, ranks=4) == pytest.approx(one_axis, rel=1e-2)


def test_one_run_goes_on_over_four_meshes(one_axis: dict[int, float], tmp_path: Path) -> None:
    """About 40 s."""
    run = tmp_path / "run"
    train(run, "--steps", "6", ranks=2)
    train(run, "--resume", "--steps", "12", "--replicate", "2", ranks=4)
    train(run, "--resume", "--steps", "18", "--replicate", "1", "--tp", "2", ranks=4)
    found = train(run, "--resume", "--steps", "24", "--tp", "1", ranks=4)
    assert sorted(found) == list(range(1, 25))
    assert found == pytest.approx(one_axis, rel=TOLERANCE)


@pytest.mark.parametrize("mesh", [["--replicate", "2"], ["--tp", "2"]], ids=["hsdp", "tp"])
def test_the_check_against_the_unsharded_training(mesh: list[str]) -> None:
    """With the norms of gradients, which show a factor that AdamW hides. About 25 s each."""
    check = [sys.executable, str(EXAMPLES / "train_check.py"), "--steps", "10", "--ranks", "4", *mesh]
    done = subprocess.run(check, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mesh_that_does_not_fit_the_ranks_is_one_line(tmp_path: Path) -> None:
    """About 6 s."""
    arguments = [*ARGUMENTS, "--run-dir", str(tmp_path / "run"), "--replicate", "3"]
    done = subprocess.run(command("train_lm.py", *arguments, ranks=2), capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    expected = "train_lm.py: error: --replicate 3 and --tp 1 need a multiple of 3 ranks, and there are 2: start 3"
    assert expected in done.stderr
    assert "UserError" not in done.stderr
