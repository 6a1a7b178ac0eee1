"""The variables that fsdp2 reads: all of them are listed, and misspelled ones are warned of."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import fsdp2
from fsdp2.tools.environment import OF_TESTS, VARIABLES, unknown, warn_of_unknown

ROOT = Path(fsdp2.__file__).parents[1]


def test_every_variable_in_the_source_is_listed() -> None:
    files = (ROOT / "fsdp2").rglob("*.py")
    found = {name for path in files for name in re.findall(r"\bFSDP2_[A-Z][A-Z0-9_]*", path.read_text())}
    known = {variable.name for variable in VARIABLES}
    assert {name for name in found if not name.startswith(OF_TESTS)} == known
    assert all(variable.means.endswith(".") and variable.takes for variable in VARIABLES)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("FSDP2_COMPAT", ["1", "0", "keep-fsdp1"], ["yes", "true"]),
        ("FSDP2_COMM", ["native"], ["nccl"]),
        ("FSDP2_LOG", ["plan", "plan, comm", "order,memory"], ["plans", "plan;comm"]),
    ],
)
def test_values(name: str, right: list[str], wrong: list[str]) -> None:
    (variable,) = [each for each in VARIABLES if each.name == name]
    assert all(map(variable.accepts, ["", *right])) and not any(map(variable.accepts, wrong))


def test_misspelled_ones_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "FSDP2_COMAPT is set, and fsdp2 reads no variable of this name. Did you mean 'FSDP2_COMPAT'? There are: "
    environment = {"FSDP2_COMAPT": "1", "FSDP2_LOG": "plan", "FSDP2_TEST_POOL": "1", "PATH": ""}
    (found,) = unknown(environment).values()
    assert found.startswith(sentence)
    monkeypatch.setenv("FSDP2_COMAPT", "1")
    with pytest.warns(UserWarning, match="Did you mean 'FSDP2_COMPAT'"):
        warn_of_unknown()
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown()
