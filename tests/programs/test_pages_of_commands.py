"""The pages of the command line and of configs: what they show can be run, and lists are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import fsdp2
from fsdp2 import ShardingConfig
from fsdp2.tools.commands.entry import COMMANDS
from fsdp2.tools.environment import VARIABLES

DOCS = Path(fsdp2.__file__).parents[1] / "docs"
PAGES = ("reference/command-line.md", "config.md", "reference/environment.md")
COMMAND_LINE, CONFIG, ENVIRONMENT = ((DOCS / name).read_text(encoding="utf-8") for name in PAGES)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S)


def test_the_program_of_configs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(CONFIG, "python")
    exec(compile(program, "config.md", "exec"), {})
    text = capsys.readouterr().out
    assert "The settings of its ShardingConfig:\n  strategy: zero2" in text and "2 x " in text


def test_the_file_of_configs_is_one(tmp_path: Path) -> None:
    (text,) = blocks(CONFIG, "yaml")
    path = tmp_path / "sharding.yaml"
    path.write_text(text, encoding="utf-8")
    config = ShardingConfig.from_file(path)
    assert config.max_bytes == 512 * 2**20 and config.blocks == ("Block",)
    path.write_text(text.replace("strategy:", "stratgy:"), encoding="utf-8")
    with pytest.raises(fsdp2.FSDPValueError, match=r"sharding\.yaml: a ShardingConfig has no setting 'stratgy'\. Did"):
        ShardingConfig.from_file(path)


def test_commands_and_variables_are_complete() -> None:
    commands = set(re.findall(r"^\| `fsdp2 (\w+)", COMMAND_LINE, re.M))
    assert commands == {command.name for command in COMMANDS}
    own = ENVIRONMENT.split("## ")[1]
    assert set(re.findall(r"^\| `(FSDP2_\w+)` \|", own, re.M)) == {variable.name for variable in VARIABLES}


def test_the_lines_of_the_page_are_understood() -> None:
    (lines,) = blocks(COMMAND_LINE, "sh")
    for line in lines.splitlines():
        said = re.search(r"\bfsdp2 ([^)]*)", line)
        assert said is not None
        name, *arguments = shlex.split(said[1])
        (command,) = [each for each in COMMANDS if each.name == name]
        command.parser().parse_all(arguments)
