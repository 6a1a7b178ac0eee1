"""Messages and docstrings name pages of the documentation by their titles, for who installs a package has no docs/."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2._remedies import PAGES
from tests.harness.documents import DOCS, ROOT

FILES = sorted((ROOT / "fsdp2").rglob("*.py"))
NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
NAMED = re.compile(r"(?<!\w)'([A-Z](?:[^']|'(?!\s))*)'\s+in\s+the\s+documentation")


def title(page: Path) -> str:
    """The first heading, as the navigation shows it."""
    return page.read_text().split("\n", 1)[0].removeprefix("# ").replace("`", "")


IN_NAVIGATION = {title(DOCS / name): name for name in re.findall(r"[\w/-]+\.md", NAVIGATION) if (DOCS / name).exists()}


def strings(path: Path) -> Iterator[str]:
    """The texts of a file, docstrings and parts of formatted ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_that_messages_name_are_in_the_navigation_under_these_titles(name: str) -> None:
    (named,) = NAMED.findall(PAGES[name])
    assert IN_NAVIGATION[named] == name


def test_every_page_that_is_named_anywhere_is_in_the_navigation() -> None:
    named = {re.sub(r"\s+", " ", each) for path in FILES for text in strings(path) for each in NAMED.findall(text)}
    assert len(named) > 5 and named - IN_NAVIGATION.keys() == set()
    mentions = sum(len(re.findall(r"in\s+the\s+documentation", text)) for path in FILES for text in strings(path))
    assert mentions == sum(len(NAMED.findall(text)) for path in FILES for text in strings(path))


def test_no_text_names_a_file_of_the_repository() -> None:
    texts = {(path, text) for path in FILES for text in strings(path)}
    assert [(path.name, text) for path, text in texts if re.search(r"docs/[\w/-]+\.md", text)] == []
