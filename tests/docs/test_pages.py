"""The pages of docs/ and README.md: links lead somewhere, nothing public is missing, pictures are the engine's."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fsdp2
import fsdp2.checkpoint
import fsdp2.compat
import fsdp2.experimental
from tests.harness.documents import DOCS, ROOT

PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
REFERENCE = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
MADE = [DOCS / "quickstart.md"]  # while the site is built
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def without_code(text: str) -> str:
    """A page's prose."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(path: Path) -> set[str]:
    """Those of a page's headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each.lower()).strip()) for each in headings}


def test_links_lead_to_files_and_headings_that_there_are() -> None:
    dead = []
    for page in PAGES:
        for link in ("".join(groups) for groups in LINK.findall(without_code(page.read_text()))):
            if link.startswith(("http://", "https://")):
                continue
            target, _, anchor = link.partition("#")
            path = (page.parent / target).resolve() if target else page
            there = path.exists() or path in MADE
            if not there or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead


def test_every_link_to_another_host_is_of_a_known_one() -> None:
    pages = [page for page in PAGES if page.name not in ("errors.md", "beyond.md")]  # they quote
    hosts = {host for page in pages for host in re.findall(r"https?://([\w.-]+)", without_code(page.read_text()))}
    assert hosts <= {"semver.org", "arxiv.org", "github.com", "docs.nvidia.com"}


# ---- reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [fsdp2, fsdp2.checkpoint, fsdp2.compat, fsdp2.experimental], ids=lambda module: module.__name__
)
def test_every_public_name_has_a_page_of_the_reference(module: ModuleType) -> None:
    """`docs/hooks.py` puts the names of `fsdp2` that no page has on a page of their own while the site is built."""
    found = re.findall(rf"^::: {re.escape(module.__name__)}\.([\w.]+)$", REFERENCE, re.MULTILINE)
    others = ("checkpoint.", "compat.", "experimental.")
    shown = [name for name in found if module is not fsdp2 or not name.startswith(others)]
    assert sorted(shown) == sorted(set(shown)), "a name stands twice"
    assert [name for name in shown if not _exists(module, name)] == []
    if module is not fsdp2:
        assert set(module.__all__) <= set(shown)
    names = set(module.__all__) - {"optim"}
    assert [name for name in names if not (getattr(module, name).__doc__ or "").strip()] == []


def _exists(module: ModuleType, name: str) -> bool:
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None and name.startswith("fsdp1."):
        return hasattr(importlib.import_module("fsdp2.compat.fsdp1"), name.removeprefix("fsdp1."))
    return value is not None


def test_every_method_of_sharded_modules_has_a_docstring() -> None:
    methods = {name: value for name, value in vars(fsdp2.FSDPModule).items() if not name.startswith("_")}
    assert [name for name, value in methods.items() if callable(value) and not value.__doc__] == []


def read_variables() -> set[str]:
    """Of the environment: what the package reads, and what is called FSDP2_ anywhere."""
    found: set[str] = set()
    for path in sorted((ROOT / "fsdp2").rglob("*.py")):
        text = path.read_text()
        if "environ" in text and path.name != "doctor.py":  # which looks at what others read
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found |= {each for each in strings if isinstance(each, str) and re.fullmatch(r"[A-Z]+(_[A-Z0-9]+)+", each)}
    for path in (
        each for folder in ("tests", "fsdp2", "benchmarks", "extras") for each in (ROOT / folder).rglob("*.py")
    ):
        if path.name not in ("test_environment.py", "test_doctor.py", "test_compat.py"):  # which misspell some
            found |= set(re.findall(r"\"(FSDP2_[A-Z_]+)\"", path.read_text()))
    return found


def test_every_variable_of_the_environment_is_on_its_page() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    read = read_variables()
    assert {"FSDP2_COMM", "FSDP2_COMPAT", "LOCAL_WORLD_SIZE", "MASTER_PORT"} <= read
    assert sorted(each for each in read if f"`{each}`" not in page) == []


def test_every_command_of_checkpoints_is_on_the_page_of_commands() -> None:
    from fsdp2.checkpoint.commands import add_commands

    page = (DOCS / "reference" / "command-line.md").read_text()
    every = add_commands(argparse.ArgumentParser())._actions
    commands = next(each for each in every if each.metavar == "COMMAND").choices
    assert commands
    for name, parser in dict(commands).items():  # type: ignore[call-overload]
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name} "))
        own = [each for each in parser._actions if each.dest not in ("help", "json")]
        options = [each.option_strings[-1] for each in own if each.option_strings]
        assert [option for option in options if option not in row] == []


# ---- pictures ------------------------------------------------------------------------------------


def load_script(path: Path) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_the_engine_does() -> None:
    folder = DOCS / "drawings"
    written = {path.name: path.read_text() for path in folder.glob("*.svg")}
    assert load_script(folder / "draw.py").pictures() == written, "run `make drawings`"


def test_both_forms_of_every_picture_are_shown_and_say_what_they_show() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for path in (DOCS / "drawings").glob("*-light.svg"):
        name = path.stem.removesuffix("-light")
        assert text.count(f"drawings/{name}-light.svg") >= 1
        assert text.count(f"drawings/{name}-dark.svg") == text.count(f"drawings/{name}-light.svg")
    assert not re.search(r"!\[\]|alt=\"\"", text)
