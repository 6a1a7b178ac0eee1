"""Every block of Python code in docs/ runs: see `tests.harness.documents` for what a page says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import multi_rank
from tests.harness.documents import ROOT, Page, pages, read_page, run_page
from tests.harness.fake import fake_world
from tests.harness.state import forget_meshes

# Code that a test of its own runs on values that it checks; it is not run twice.
ELSEWHERE = {
    "docs/fsdp1.md": "tests/fsdp1/test_docs.py",
    **dict.fromkeys(
        (
            "docs/migrate/accelerate.md",
            "docs/migrate/lightning.md",
            "docs/migrate/torchtitan.md",
            "docs/recipes/ray.md",
            "docs/recipes/trainer.md",
        ),
        "tests/clients/test_recipes.py",
    ),
}
INSTALLED = tuple(map(int, torch.__version__.split(".")[:2]))
PAGES = [page for page in pages() if page.name not in ELSEWHERE]


def params(found: list[Page]) -> list[object]:
    """As parameters of a test; slow ones are left to the full suite."""

    def marks(page: Page) -> list[pytest.MarkDecorator]:
        reason = f"the page says that it needs torch {'.'.join(map(str, page.torch))}"
        return [pytest.mark.skipif(page.torch > INSTALLED, reason=reason), *[pytest.mark.full] * page.is_full]

    return [pytest.param(page.name, marks=marks(page)) for page in found]


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What code writes lands in a folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", params([page for page in PAGES if not page.ranks]))
def test_code_runs_in_one_process(name: str, in_a_folder: None) -> None:
    page = read_page(ROOT / name)
    if page.fake:
        with fake_world(page.fake):
            run_page(page)
    else:
        try:
            run_page(page)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            forget_meshes()


def run_on_ranks(name: str, folder: Path) -> None:
    """On this rank, in ``folder``, which all share."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        run_page(read_page(ROOT / name))
    finally:
        os.chdir(before)


@multi_rank(2, timeout=300)  # graphs are compiled on some: 10 s each, and many times that on a busy machine
@pytest.mark.parametrize("name", params([page for page in PAGES if page.ranks == 2]))
def test_code_runs_on_two_ranks(name: str, tmp_path: Path, world_size: int) -> None:
    run_on_ranks(name, tmp_path)


@multi_rank(4)
@pytest.mark.parametrize("name", params([page for page in PAGES if page.ranks == 4]))
def test_code_runs_on_four_ranks(name: str, tmp_path: Path, world_size: int) -> None:
    run_on_ranks(name, tmp_path)


def test_no_page_is_left_out() -> None:
    assert {page.ranks for page in PAGES} <= {0, 2, 4}
    for name, test in ELSEWHERE.items():
        assert Path(name).name in (ROOT / test).read_text()
