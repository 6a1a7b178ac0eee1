"""README.md fits a page, and its quick start runs as it is pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()


def test_figures_are_those_of_the_page_about_performance() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    (table,) = re.findall(r"^\| \| torch \| fsdp2 \| printed by \|\n\|[-|]*\n((?:\|.*\n)*)", README, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert len(rows) == 5
    for _, torch_figure, our_figure, command in rows[:4]:
        assert torch_figure in page and our_figure in page and command.strip("`") in page


def test_the_quick_start_runs_on_two_ranks(tmp_path: Path) -> None:
    """About 9 s, most of it torch's import on three processes."""
    (tmp_path / "quickstart.py").write_text(quick_start())
    assert "torchrun --nproc-per-node 2 quickstart.py" in README
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quickstart.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on cpu" in done.stdout or "2 ranks on cuda" in done.stdout
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < 0.6 * losses[0]
