"""docs/parity.md tells the truth: its tests exist, nothing that torch offers is left out, its counts are right."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Iterator
from functools import cache

import fsdp2
from tests.harness import torch_api
from tests.harness.parity_table import DIFFERENCES, DOCUMENT, DOCUMENTED, TESTS, VERSIONS, rows, rows_of, shown_by

# A test that waits for hardware or for a version of torch says so; no other may be skipped, and none may fail.
NEVER = {"skip", "skipif", "xfail"}


def test_the_counts_are_those_of_the_tables() -> None:
    documented = rows_of(DOCUMENTED)
    same = sum(row.verdict == "same" for row in documented)
    counts = (
        f"**{len(rows())} rows: {same} as torch documents, {len(documented) - same} better; {len(rows_of(VERSIONS))} "
        f"where torch's versions differ; {len(rows_of(DIFFERENCES))} where we differ on purpose.**"
    )
    assert counts in DOCUMENT.read_text(), f"docs/parity.md should say: {counts}"


def test_every_table_has_rows_and_every_row_all_columns() -> None:
    for table, columns in ((DOCUMENTED, 4), (VERSIONS, 4), (DIFFERENCES, 5)):
        assert rows_of(table)
        assert [row.cells for row in rows_of(table) if len(row.cells) != columns or not all(row.cells)] == []
    assert len(rows_of(DOCUMENTED) + rows_of(VERSIONS) + rows_of(DIFFERENCES)) == len(rows())


def test_no_row_stands_twice() -> None:
    seen = [row.cells[:2] for row in rows()]
    assert sorted(seen) == sorted(set(seen))


def test_every_row_is_the_same_or_says_how_it_is_better() -> None:
    wrong = [row.cells for row in rows_of(DOCUMENTED) if not re.fullmatch(r"same|better: \S.*", row.verdict)]
    assert wrong == []


def test_every_row_names_tests_and_nothing_else() -> None:
    written = {row.cells[:2]: " ".join(f"`{test}`" for test in row.tests) for row in rows()}
    assert [row.cells for row in rows() if not row.tests or written[row.cells[:2]] != row.cells[-1]] == []


# ---- the tests that are named --------------------------------------------------------------------


@cache
def module_of(file: str) -> ast.Module:
    return ast.parse((TESTS / file).read_text())


def marks_of(nodes: list[ast.expr]) -> Iterator[str]:
    """Every name and attribute in the expressions that decorate a test, or make a ``pytestmark``."""
    for node in (each for top in nodes for each in ast.walk(top)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def problem_with(test: str) -> str | None:
    """Why a named test shows nothing, if it does not."""
    file, name = test.split("::")
    if not (TESTS / file).exists():
        return "no such file"
    body = module_of(file).body
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(found) != 1 or not name.startswith("test_"):
        return "no such test"
    of_module = [
        node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets)
    ]
    needs_hardware = file.startswith("gpu/")
    marks = [*found[0].decorator_list, *([] if needs_hardware else of_module)]
    return "skipped, or may fail" if NEVER & set(marks_of(marks)) else None


def test_every_named_test_exists_and_is_not_skipped() -> None:
    named = sorted({test for row in rows() for test in row.tests})
    problems = {test: problem_with(test) for test in named}
    assert {test: problem for test, problem in problems.items() if problem is not None} == {}


# ---- everything that torch offers ----------------------------------------------------------------


def test_everything_that_the_installed_torch_offers_has_a_row() -> None:
    told = {name for row in rows_of(DOCUMENTED) for name in row.names}
    told |= {name.split("(")[0].split(".")[0] for name in told}
    assert [item for item in torch_api.items() if item not in told] == []


def test_every_row_is_about_something_that_ours_has() -> None:
    for row in rows_of(DOCUMENTED):
        assert row.names, f"{row.cells[0]} is no name"
        name, *arguments = row.names
        value = operator.attrgetter(name)(fsdp2)
        assert all(argument[len(name) + 1 : -1] in inspect.signature(value).parameters for argument in arguments), name


def test_the_shown_by_an_argument_are_those_of_its_rows() -> None:
    """What `tests/mutations` builds on."""
    recurse = shown_by("FSDPModule.set_requires_all_reduce(recurse)")
    assert recurse == ["parity/test_hsdp.py::test_requires_all_reduce_recurses_unless_told_not_to"]
    assert set(recurse) < set(shown_by("FSDPModule.set_requires_all_reduce"))
    assert shown_by("FSDPModule.set_nothing") == []
