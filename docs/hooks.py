"""What happens while MkDocs builds the site: pages that are made, navigation that fits what is there, links to sources.

Made while building: the README's quick start, the changelog, CONTRIBUTING.md and the engine's README as pages, one page
for each program of examples/, and a reference page with the public names that no other reference page has. Nothing here
imports fsdp2.
"""

from __future__ import annotations

import ast
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COPIED = {
    "changelog.md": ROOT / "CHANGELOG.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "engine.md": ROOT / "fsdp2" / "core" / "README.md",
}
"""Pages whose text lies elsewhere in the repository."""

TOOLS = "reference/tools.md"
DEFAULTS = {"_MIXED_PRECISION": "MixedPrecisionPolicy()", "_OFFLOAD": "OffloadPolicy()"}
"""Constants that stand in signatures."""
BOOSTS = {"reference/compat": 0.7, "reference/": 3, "how-to/": 2, "tutorials/": 1.5, "notebook": 0.3, "programs/": 0.5}
"""How much a page counts in the search, by how its path begins; others count 1."""

_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_LONG_CODE = re.compile(r"(?<=<code>)[^<]{25,}(?=</code>)")
_BREAK = re.compile(r"((?:::|[/_.,(])(?=\w))")
_AFTER = """## What next

[The first model](tutorials/first-model.md) goes through such a program step by step.
[Save and resume](tutorials/checkpoints.md) and [mixed precision](tutorials/mixed-precision.md) add to it.
If you come from another system, there is [a page for it](index.md#where-to-begin).
"""
_COMMENT = re.compile(r"^<!-- (?:code: .*?|setup\n.*?^|raises: \w+ )-->\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    made = {name: path.read_text(encoding="utf-8") for name, path in COPIED.items()}
    made["quickstart.md"] = quick_start()
    made |= {f"programs/{path.stem}.md": _program(path) for path in sorted((ROOT / "examples").glob("*.py"))}
    others = names_without_page()
    if others:
        made[TOOLS] = "# Tools and others\n\n" + "\n\n".join(f"::: fsdp2.{name}" for name in others) + "\n"
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    config.nav = _filled(config.nav, files)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Drop what is for tests, and lead links to files of the repository to the pages that show them."""
    place = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for start, boost in BOOSTS.items() if place.startswith(start)), 1)}
    markdown = _COMMENT.sub("", markdown)
    return _LINK.sub(lambda found: _linked(found, place, files), markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Say defaults as users would write them, and let long code in tables break where words do."""
    for name, shown in DEFAULTS.items():
        html = html.replace(name, shown)
    return _CELL.sub(lambda cell: _LONG_CODE.sub(_breakable, cell.group(0)), html)


def _breakable(code: re.Match[str]) -> str:
    return _BREAK.sub(r"\1<wbr>", code.group(0))


def names_without_page() -> list[str]:
    """Public names of `fsdp2` that no page of docs/reference shows, by the alphabet."""
    tree = ast.parse((ROOT / "fsdp2" / "__init__.py").read_text(encoding="utf-8"))
    lists = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__all__"]
    ]
    names: set[str] = set(ast.literal_eval(lists[0])) - {"optim"}
    shown = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
    return sorted(names - set(re.findall(r"^::: fsdp2\.(\w+)$", shown, re.MULTILINE)), key=str.lower)


def quick_start() -> str:
    """The section of README.md as a page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    return f"# Quick start\n\n## Install\n{sections['Install']}\n## Run\n{sections['Quick start']}\n{_AFTER}"


def _program(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or path.name).splitlines()[0]
    return f"# `examples/{path.name}`\n\n{first}\n\n````python\n{text}````\n"


def _linked(found: re.Match[str], source: str, files: Files) -> str:
    """A link, as it is to be on the page ``source``: a file outside of docs/ by the page that shows it."""
    text, target, anchor = found.group(1), found.group(2), found.group(3) or ""
    origin = COPIED.get(source, DOCS / source)
    path = (origin.parent / target).resolve()
    if origin.parent == (DOCS / source).parent and DOCS in path.parents:
        return found.group(0)
    page = _page_of(path)
    if page is None or files.get_file_from_path(page) is None:
        return text if text.startswith("`") else f"`{text}`"
    return f"[{text}]({os.path.relpath(page, os.path.dirname(source) or '.')}{anchor})"


def _page_of(path: Path) -> str | None:
    """The page that shows a file of the repository."""
    if DOCS in path.parents:
        return path.relative_to(DOCS).as_posix()
    if path.parent == ROOT / "examples":
        return f"programs/{path.stem}.md"
    return next((name for name, copied in COPIED.items() if copied == path), None)


def _filled(nav: list[Any], files: Files) -> list[Any]:
    """The navigation without pages that are not there, and with those that it does not name."""
    there = {file.src_uri for file in files.documentation_pages()}
    kept = _existing(nav, there)
    named = set(re.findall(r"[\w/.-]+\.md", str(kept)))
    programs = sorted(name for name in there - named if name.startswith("programs/"))
    others = sorted(there - named - set(programs))
    for section in kept:
        if "Tutorials" in section and programs:
            section["Tutorials"].append({"Programs": programs})
        if "How-to" in section and others:
            section["How-to"].append({"More": others})
    return kept


def _existing(items: list[Any], there: set[str]) -> list[Any]:
    kept: list[Any] = []
    for item in items:
        if isinstance(item, str):
            kept += [item] if item in there else []
            continue
        ((title, inside),) = item.items()
        if isinstance(inside, str):
            kept += [item] if inside in there else []
        else:
            below = _existing(inside, there)
            kept += [{title: below}] if below else []
    return kept
