"""The core trains without any of the features: each is removed in turn, with what needs it, and then all are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs.without_features import feature_modules


def without(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.programs.without_features", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.full  # 30 s
def test_the_core_trains_without_all_features() -> None:
    assert "without all of them: trains" in without("all")


@pytest.mark.full  # 70 s
def test_the_core_trains_without_each_feature() -> None:
    said = without()
    for feature in (*feature_modules(), "all of them"):
        assert f"without {feature}: trains" in said
