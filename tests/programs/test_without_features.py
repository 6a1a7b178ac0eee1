"""Sharded modules train without the features that they do not call: each is removed in turn, and then all are."""

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
def test_models_train_without_all_features_that_they_do_not_call() -> None:
    assert "without all of them: trains" in without("all")


@pytest.mark.full  # 70 s
def test_models_train_without_each_feature_that_they_do_not_call() -> None:
    said = without()
    for feature in (*feature_modules(), "all of them"):
        assert f"without {feature}: trains" in said
