"""Without its effect, every setting fails the tests that docs/parity.md names for it: they do show it.

That they pass with it is for the rest of the suite to show.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2
from tests.harness.parity_table import TESTS, shown_by

SETTERS = [
    *(f"FSDPModule.{name}" for name in dir(fsdp2.FSDPModule) if name.startswith("set_")),
    "FSDPModule._set_unshard_async_op",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
RECURSIVE = [
    f"FSDPModule.{name}(recurse)"
    for name in dir(fsdp2.FSDPModule)
    if name.startswith("set_") and "recurse" in inspect.signature(getattr(fsdp2.FSDPModule, name)).parameters
]
TESTS_FAILED = 1
"""pytest's exit status, unlike those of a wrong usage, of no tests, or of an error within pytest."""


@pytest.mark.full  # 33 runs of pytest, about 20 s each on two busy cores
@pytest.mark.parametrize("mutant", [*SETTERS, *RECURSIVE])
def test_tests_of_a_setter_fail_without_its_effect(mutant: str, tmp_path: Path) -> None:
    tests = shown_by(mutant)
    assert tests, f"docs/parity.md says nothing of {mutant}"
    log = tmp_path / "calls"
    log.touch()
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "tests.harness.mutant",
            "-p",
            "no:cacheprovider",
            *(f"tests/{test}" for test in tests),
        ],
        cwd=TESTS.parent,
        env=os.environ | {"FSDP2_MUTANT": mutant, "FSDP2_MUTANT_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert log.read_text(), f"no test of {mutant} calls it:\n{run.stdout}\n{run.stderr}"
    assert run.returncode == TESTS_FAILED, f"the tests of {mutant} pass without it:\n{run.stdout}\n{run.stderr}"


def test_all_settings_are_mutated() -> None:
    """Two dozen setters and more; one that is added is here by itself."""
    assert len(SETTERS) >= 25 and len(RECURSIVE) >= 8
    assert all(shown_by(mutant) for mutant in [*SETTERS, *RECURSIVE])
