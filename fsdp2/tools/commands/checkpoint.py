"""``fsdp2 checkpoint``: the commands of `fsdp2.checkpoint.commands`."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.checkpoint import commands
from fsdp2.tools.commands.parsing import Parser


def parser() -> Parser:
    """The parser of the command."""
    made = Parser("fsdp2 checkpoint", commands.DESCRIPTION, "fsdp2 checkpoint verify runs/llama/step-00001000")
    commands.add_commands(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands. Returns the exit status: 0, or 1 if something is wrong with a checkpoint."""
    return commands.run(parser().parse_all(arguments))
