"""Runs the Python code of a page of docs/, as a reader would paste it: block after block, in one namespace.

A page says in a comment on what its code runs, and what it needs beside what it shows::

    <!-- code: ranks=2 -->           on two gloo ranks; also ranks=4
    <!-- code: fake=8 -->            in one process, as rank 0 of 8 simulated ranks; nothing is computed by others
    <!-- code: alone -->             in one process, without a process group
    <!-- code: ranks=2, sharded -->  `model` is sharded by its blocks, as on most pages
    <!-- code: fake=8, full -->      slow: run by `make test-full` only
    <!-- code: ranks=2, torch=2.13 -->  needs that torch, as the page says
    <!-- code: ranks=2, warns -->    torch warns of what the page does (in tests, other warnings are errors)

    <!-- setup
    critic = Model()
    -->                              is run before the next block; the site does not show it

    <!-- raises: FSDPValueError -->  the next block ends with this error

Without a comment a page runs on ``fake=2``, or alone if it makes a process group itself. Every page finds `PRELUDE` in
its namespace. Blocks of another language than ``python`` are not run.
"""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PRELUDE = """
import copy, functools, logging, os, signal
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
import fsdp2
from fsdp2 import *


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=8, layers=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


torch.manual_seed(0)
model = Model()
batches = microbatches = [torch.randn(4, 8) for _ in range(2)]
batch = inputs = x = batches[0]
loss_of = lambda model, batch: model(batch).square().mean()
"""
"""What pages may use without defining it: torch's and fsdp2's names, a small model, some batches."""

_SHARDED = "model = sharded(model)\n"
_OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters())\n"

_DECLARED = re.compile(r"^<!-- code: (.*?) -->$", re.MULTILINE)
_PIECE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$|^<!-- raises: (?P<raises>\w+) -->$|"
    r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a page, or what is to be run before one.

    Attributes:
        text: Python.
        line: of the page that the first line of ``text`` is.
        raises: the class of the error that it ends with, or "".
        is_shown: whether readers see it.
    """

    text: str
    line: int
    raises: str = ""
    is_shown: bool = True


@dataclass(frozen=True, slots=True)
class Page:
    """A page with Python code.

    Attributes:
        path: of the file.
        ranks: gloo ranks to run on, or 0.
        fake: ranks to simulate, or 0. Neither: no process group.
        is_sharded: whether `model` is sharded before the first piece.
        is_full: whether only the full suite runs it.
        warns: whether warnings are no errors.
        torch: the first release, (major, minor), that has what the page shows.
        pieces: in the order of the page.
    """

    path: Path
    ranks: int
    fake: int
    is_sharded: bool
    is_full: bool
    warns: bool
    torch: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """Its path from the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()


def read_page(path: Path) -> Page:
    """The page at ``path``.

    Raises:
        ValueError: the page's comment says something unknown.
    """
    text = path.read_text(encoding="utf-8")
    declared = _DECLARED.search(text)
    default = "alone" if "init_process_group" in text else "fake=2"
    words = [word.strip() for word in (declared.group(1) if declared else default).split(",")]
    facts = dict(word.partition("=")[::2] for word in words)
    unknown = set(facts) - {"ranks", "fake", "alone", "sharded", "full", "torch", "warns"}
    if unknown:
        raise ValueError(f"{path.name}: <!-- code: ... --> says {sorted(unknown)}, which is unknown")
    return Page(
        path,
        int(facts.get("ranks", 0)),
        int(facts.get("fake", 0)),
        "sharded" in facts,
        "full" in facts,
        "warns" in facts,
        tuple(map(int, facts.get("torch", "2.11").split("."))),
        tuple(_pieces(text)),
    )


def pages() -> list[Page]:
    """All pages of docs/ that show Python code."""
    found = [read_page(path) for path in sorted(DOCS.rglob("*.md"))]
    return [page for page in found if any(piece.is_shown for piece in page.pieces)]


def _pieces(text: str) -> Iterator[Piece]:
    raises = ""
    for found in _PIECE.finditer(text):
        if found.group("raises"):
            raises = found.group("raises")
            continue
        group = "setup" if found.group("setup") is not None else "code"
        line = text.count("\n", 0, found.start(group)) + 1
        indent = len(found.group("indent") or "")
        code = "\n".join(each[indent:] for each in found.group(group).splitlines())
        yield Piece(code, line, raises if group == "code" else "", group == "code")
        raises = "" if group == "code" else raises


def run_page(page: Page) -> None:
    """Run all pieces in one namespace, in this process, which has the process group that the page asks for.

    Raises:
        AssertionError: a piece raises what it should not, or does not raise what it should; with the line of the page.
    """
    module = ModuleType("page_of_docs")  # in which pickle finds the classes of the page
    sys.modules[module.__name__] = module
    try:
        with warnings.catch_warnings():
            if page.warns:
                warnings.simplefilter("ignore")
            _run_in(module.__dict__, page)
    finally:
        del sys.modules[module.__name__]


def _run_in(names: dict[str, Any], page: Page) -> None:
    exec(PRELUDE + (_SHARDED if page.is_sharded else "") + _OPTIMIZER, names)
    for piece in page.pieces:
        code = compile("\n" * (piece.line - 1) + piece.text, str(page.path), "exec")
        raised = ""
        try:
            exec(code, names)
        except Exception as error:
            raised = type(error).__name__
            if raised != piece.raises:
                raise AssertionError(
                    f"{page.name}, a block from line {piece.line}:\n{traceback.format_exc()}"
                ) from None
        assert raised == piece.raises, f"{page.name}, line {piece.line}: no {piece.raises} was raised"
