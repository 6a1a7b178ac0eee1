"""`examples/fsdp1_program.py`, unchanged, under torch's FSDP1 and under fsdp2, each going on from what the other saved.

All of it belongs to `make test-full`: about 10 s for each run of two ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.launching import EXAMPLES, output_of

PROGRAM = "fsdp1_program.py"


def losses(printed: str) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    return {line.partition(":")[0]: [float(line.split()[3].rstrip(",")), float(line.split()[6])] for line in lines}


def ours(*arguments: str) -> dict[str, list[float]]:
    return losses(output_of("-m", "fsdp2.compat", str(EXAMPLES / PROGRAM), *arguments, ranks=2))


def torchs(*arguments: str) -> dict[str, list[float]]:
    return losses(output_of(PROGRAM, *arguments, ranks=2))


@pytest.mark.full  # 40 s
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_each_goes_on_from_what_the_other_saved(strategy: str, tmp_path: Path) -> None:
    saved = {name: tmp_path / name for name in ("torch", "fsdp2")}
    for each in saved.values():
        each.mkdir()
    options = ("--strategy", strategy)
    expected = torchs(*options, "--checkpoint", str(saved["torch"]))
    found = ours(*options, "--checkpoint", str(saved["fsdp2"]))
    assert found.keys() == expected.keys() == {f"step {step}" for step in range(6)}
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, abs=2e-4), step
    rest = {step: values for step, values in expected.items() if step in ("step 3", "step 4", "step 5")}
    for again in (
        ours(*options, "--resume", str(saved["torch"])),
        torchs(*options, "--resume", str(saved["fsdp2"])),
        ours(*options, "--resume", str(saved["fsdp2"])),
    ):
        assert again.keys() == rest.keys()
        for step, values in rest.items():
            assert again[step] == pytest.approx(values, abs=2e-4), step
    whole = [torch.load(each / "whole.pt") for each in saved.values()]
    assert list(whole[0]) == list(whole[1])
    for name, value in whole[0].items():
        torch.testing.assert_close(whole[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.full  # 10 s
def test_in_half_precision() -> None:
    assert "step 5" in ours("--bf16")
