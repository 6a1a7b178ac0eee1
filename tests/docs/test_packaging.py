"""What `make dist` builds: metadata, contents, and a bare environment in which the quick start runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import fsdp2
from fsdp2 import _torch_names, _versions
from tests.harness.documents import ROOT
from tests.harness.hiding import without

README = (ROOT / "README.md").read_text()


# ---- versions of torch ---------------------------------------------------------------------------


def test_the_range_of_torch_is_that_of_the_metadata() -> None:
    (first, last) = re.findall(r"torch>=(\d+\.\d+),<(\d+\.\d+)\"", (ROOT / "pyproject.toml").read_text())[0]
    assert _versions.version_of(first) == _versions.FIRST
    major, minor = _versions.LAST
    assert _versions.version_of(last) == (major, minor + 1)


def test_the_versions_that_were_tested_are_those_that_are_said() -> None:
    (listed,) = re.findall(r"^tested-torch = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    tested = [_versions.version_of(each) for each in re.findall(r'"(.+?)"', listed)]
    assert tested == sorted(tested) and tested[0] == _versions.FIRST and tested[-1] == _versions.LAST


def test_a_tested_torch_is_taken_without_a_word() -> None:
    for version in ("2.11.0", "2.13.1+cpu", "2.15.0a0+git12"):
        _versions.check(version)


def test_a_newer_torch_that_has_all_names_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"tested with torch 2\.11 to 2\.15, and torch 2\.16\.0 is installed.*nothing was"
    ):
        _versions.check("2.16.0")


def test_a_newer_torch_that_lacks_a_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_names, "_look_up", without("torch.distributed.tensor.placement_types:_StridedShard"))
    with pytest.raises(
        ImportError, match=r"torch 3\.0\.0, which is installed, lacks a .*\n.*_StridedShard.*\n.*torch>=2\.11,<2\.16"
    ):
        _versions.check("3.0.0")


def test_an_older_torch_is_refused() -> None:
    with pytest.raises(ImportError, match=r"needs torch 2\.11 to 2\.15, and torch 2\.10\.1 is installed"):
        _versions.check("2.10.1")


# ---- the wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, as `make dist` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Deprecat" not in done.stdout + done.stderr
    return folder


def metadata(wheel: Path) -> Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (each for each in file.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.mark.full
def test_the_wheel_holds_the_package_and_says_what_it_is(dist: Path) -> None:
    """About 8 s: `dist` is built from a source distribution."""
    (wheel,) = dist.glob("*.whl")
    found = metadata(wheel)
    assert (found["Name"], found["Version"], found["License-Expression"]) == (
        "fsdp2",
        fsdp2.__version__,
        "BSD-3-Clause",
    )
    assert found["License-File"] == "LICENSE" and found["License"] is None
    assert "torch<2.16,>=2.11" in found.get_all("Requires-Dist", [])
    assert not [each for each in found.get_all("Classifier", []) if each.startswith("License")]
    assert found.get_payload() == README
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        entry_points = file.read(f"fsdp2-{fsdp2.__version__}.dist-info/entry_points.txt").decode()
    assert {"fsdp2/py.typed", "fsdp2/core/README.md", "fsdp2/api/fully_shard.py"} <= names
    assert {name.split("/")[0] for name in names} == {"fsdp2", f"fsdp2-{fsdp2.__version__}.dist-info"}
    assert entry_points == "[console_scripts]\nfsdp2 = fsdp2.__main__:run\n"  # no program but this is changed
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp2").rglob("*.py")}
    assert own == {name for name in names if name.startswith("fsdp2/") and name.endswith(".py")}


@pytest.mark.full
def test_the_source_distribution_holds_what_tests_and_docs_need(dist: Path) -> None:
    """It is built with the wheel."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {
        "Makefile",
        "mkdocs.yml",
        "CHANGELOG.md",
        "docs/index.md",
        "docs/drawings/step-dark.svg",
        "tests/conftest.py",
    }
    assert needed <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.full
def test_the_quick_start_runs_where_only_the_wheel_is_installed(dist: Path, tmp_path: Path) -> None:
    """About 20 s: a new environment, and three processes that import torch, which is borrowed from this environment."""
    (wheel,) = dist.glob("*.whl")
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = bare / "bin" / "python"
    (site,) = bare.glob("lib/python*/site-packages")
    own = {"fsdp2", "__editable__", "_editable"}
    for each in Path(torch.__file__).parents[1].iterdir():  # not by a .pth file, which would bring this checkout along
        if not any(word in each.name for word in own):
            (site / each.name).symlink_to(each)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    program = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "quickstart.py").write_text(program + "\nimport fsdp2\nprint('from', fsdp2.__file__)\n")
    run = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quickstart.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"from {site}" in done.stdout and "step 60: loss" in done.stdout
    alone = "import sys, torch.distributed.fsdp as f; print(f.fully_shard.__module__, 'fsdp2' in sys.modules)"
    done = subprocess.run([str(python), "-c", alone], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.distributed.fsdp False\n"
