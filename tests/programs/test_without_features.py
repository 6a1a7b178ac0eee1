"""The core trains without any of the features: each is removed in turn, with what needs it, and then all are."""

from __future__ import annotations

import subprocess
import sys

from tests.programs.without_features import feature_modules


def test_the_core_trains_without_each_feature() -> None:
    command = [sys.executable, "-m", "tests.programs.without_features"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for feature in (*feature_modules(), "all of them"):
        assert f"without {feature}: trains" in ran.stdout
