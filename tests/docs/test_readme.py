"""README.md fits a page, and its quick start runs as it is pasted."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness import multi_rank
from tests.harness.documents import ROOT

README = (ROOT / "README.md").read_text()


def quick_start() -> str:
    """The one Python file of the README."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return program


def test_it_fits_a_page() -> None:
    assert len(README.splitlines()) <= 150


def test_it_names_the_commands_of_contributors_and_what_ci_runs() -> None:
    assert "`make train`" in README and "`make test`" in README
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_figures_are_those_of_the_page_about_performance() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    (table,) = re.findall(r"^\| \| torch \| fsdp2 \| printed by \|\n\|[-|]*\n((?:\|.*\n)*)", README, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert len(rows) == 9
    for _, torch_figure, our_figure, command in rows[:8]:
        assert torch_figure in page and our_figure in page and command.strip("`") in page


@multi_rank(2)
@pytest.mark.full
def test_the_quick_start_trains(world_size: int) -> None:
    """In processes that are there already, and fewer steps than it has."""
    program = quick_start().replace("range(61)", "range(21)")
    assert program != quick_start()
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setenv("LOCAL_RANK", str(dist.get_rank()))
        exec(compile(program, "quickstart.py", "exec"), {"__name__": "__main__"})
    if dist.get_rank() == 0:
        check(printed.getvalue(), losses=2)


def check(printed: str, losses: int) -> None:
    """What rank 0 prints: where it is, and losses that fall."""
    assert re.search(r"^2 ranks on (cpu|cuda:0); \(256, 64\) is \(128, 64\) here$", printed, re.MULTILINE)
    found = [float(each) for each in re.findall(r"loss ([\d.]+)", printed)]
    assert len(found) == losses and found[-1] < 0.6 * found[0]


@pytest.mark.full
def test_the_quick_start_runs_as_it_is_pasted(tmp_path: Path) -> None:
    """About 12 s, most of it torch's import in three processes."""
    (tmp_path / "quickstart.py").write_text(quick_start())
    assert "torchrun --nproc-per-node 2 quickstart.py" in README
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quickstart.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, losses=4)
