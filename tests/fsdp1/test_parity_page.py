"""docs/parity-fsdp1.md tells the truth: all that the installed torch offers has a row, and named tests exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import nn

from fsdp2.compat import fsdp1
from fsdp2.compat.fsdp1 import comm_hooks, policies
from tests.fsdp1.helpers import api
from tests.fsdp1.helpers.both import CPU, class_of
from tests.harness import FakeWorlds
from tests.harness.parity_table import TESTS, rows
from tests.harness.torch_api import assert_takes_the_same

DOCUMENT = TESTS.parent / "docs" / "parity-fsdp1.md"
WRAPPER = "FullyShardedDataParallel"
PRIVATE = (
    *("_has_params", "_is_root", "_flat_param", "_handle", "_all_handles", "_unshard"),
    *("_assert_state", "_comm_hook", "_comm_hook_state"),
)
"""Of the wrapper: what other people's programs read."""
OF_HANDLES = ("FlatParamHandle.shard_metadata",)
NEVER = {"skip", "skipif", "xfail"}


@pytest.fixture
def theirs(simulate: FakeWorlds) -> Any:
    """A wrapper of torch's."""
    simulate(2)
    made = class_of("torch")(nn.Linear(2, 2), device_id=CPU, use_orig_params=True)
    assert made.check_is_root()  # some attributes are made when it is known
    return made


def offered(instance: Any) -> set[str]:
    attributes = (*api.attributes(instance), "sharding_strategy")
    return {*api.items(), *(f"{WRAPPER}.{name}" for name in attributes)}


def told() -> set[str]:
    return {name for row in rows(DOCUMENT) for name in row.names}


def test_everything_that_the_installed_torch_offers_has_a_row(theirs: Any) -> None:
    assert sorted(offered(theirs) - told()) == []


def test_every_row_is_about_something_that_torch_has(theirs: Any) -> None:
    private = {f"{WRAPPER}.{name}" for name in PRIVATE if hasattr(theirs, name)}
    assert sorted(told() - offered(theirs) - private - set(OF_HANDLES)) == []


def test_every_row_has_its_columns_and_says_what_it_is_here() -> None:
    assert len(rows(DOCUMENT)) > 100
    for row in rows(DOCUMENT):
        assert len(row.cells) == 3 and row.names, row.cells
        assert re.match(r"same|differs: \S|refused: \S", row.cells[1]), row.cells
        assert row.tests and " ".join(f"`{test}`" for test in row.tests) == row.cells[2], row.cells


def test_nothing_has_two_rows() -> None:
    """But for a name beside its arguments."""
    seen = [name for row in rows(DOCUMENT) for name in (row.names[1:] or row.names)]
    assert sorted(seen) == sorted(set(seen))


@cache
def module_of(file: str) -> ast.Module:
    return ast.parse((TESTS / file).read_text())


def problem_with(test: str) -> str | None:
    """Why a named test shows nothing, if it does not."""
    file, name = test.split("::")
    if not (TESTS / file).exists():
        return "no such file"
    found = [each for each in module_of(file).body if isinstance(each, ast.FunctionDef) and each.name == name]
    if len(found) != 1 or not name.startswith("test_"):
        return "no such test"
    marks = {each.attr for top in found[0].decorator_list for each in ast.walk(top) if isinstance(each, ast.Attribute)}
    return f"marked as {NEVER & marks}" if NEVER & marks else None


def test_every_named_test_exists_and_is_not_skipped() -> None:
    named = sorted({test for row in rows(DOCUMENT) for test in row.tests})
    problems = {test: problem_with(test) for test in named}
    assert {test: problem for test, problem in problems.items() if problem is not None} == {}


# ---- signatures -------------------------------------------------------------------------------------


def ours_of(name: str) -> Any:
    """Where a program finds it."""
    return next(getattr(each, name) for each in (fsdp1, policies, comm_hooks) if hasattr(each, name))


def test_every_name_is_offered_here() -> None:
    for name in api.public_names():
        assert ours_of(name) is not None, name


def methods() -> list[str]:
    wrapper = class_of("torch")
    names = [name for name in vars(wrapper) if name[0] != "_" and callable(getattr(wrapper, name))]
    return [name for name in names if name not in ("named_parameters", "named_buffers", "forward")]  # of any arguments


def test_methods_take_the_same() -> None:
    for method in ("__init__", *methods()):
        assert_takes_the_same(getattr(class_of("torch"), method), getattr(fsdp1.FullyShardedDataParallel, method))


FUNCTIONS = {
    name: value
    for name, value in api.public_names().items()
    if (inspect.isfunction(value) or name in ("CustomPolicy", "ModuleWrapPolicy", "DefaultState", "LowPrecisionState"))
}


def test_functions_take_the_same() -> None:
    for name, function in FUNCTIONS.items():
        ours: Callable[..., Any] = ours_of(name)
        assert_takes_the_same(function, ours)
