"""The table of all commands, and `main`, which finds the one that is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import fsdp2
from fsdp2.arguments import nearest
from fsdp2.errors import FSDPError
from fsdp2.tools.commands.parsing import WRONG_USE, Parser

PROGRAM = "fsdp2"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: a module ``fsdp2.tools.commands.NAME`` with ``parser`` and ``main``.

    Attributes:
        name: its name on the command line.
        does: what it does, in a few words.
    """

    name: str
    does: str

    def parser(self) -> Parser:
        """The parser of the command."""
        return cast(Callable[[], Parser], self._function("parser"))()

    def main(self, arguments: Sequence[str]) -> int:
        """Run the command. Returns the exit status."""
        return cast(Callable[[Sequence[str]], int], self._function("main"))(arguments)

    def _function(self, name: str) -> object:
        return getattr(importlib.import_module(f"fsdp2.tools.commands.{self.name}"), name)


COMMANDS: tuple[Command, ...] = (
    Command("run", "run a program on fsdp2 that was written for torch's FSDP"),
    Command("explain", "say how a model is sharded, and what is slow about it"),
    Command("estimate", "foretell memory and traffic of a training run, without its devices"),
    Command("doctor", "look at versions, devices, variables, and one exchange between ranks"),
    Command("checkpoint", "look at checkpoints, and take care of them"),
)

USAGE = f"usage: {PROGRAM} COMMAND ..."


def help_text() -> str:
    """The text that ``fsdp2 --help`` prints."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.does}" for command in COMMANDS]
    return "\n".join(
        [
            USAGE,
            "",
            "Shard models of PyTorch over many devices: look at them, plan for them, run programs.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help  print this; after a command: what it takes",
            "  --version   print the version",
            "",
            f"example:\n  {PROGRAM} doctor",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fsdp2`` with these arguments, by default those of the process.

    Returns:
        The exit status: 0; 1 if something is wrong; 2 if the command line is.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(help_text())
        return 0 if given else WRONG_USE
    if given[0] == "--version":
        print(f"{PROGRAM} {fsdp2.__version__}")
        return 0
    command = next((each for each in COMMANDS if each.name == given[0]), None)
    if command is None:
        return _refuse(given[0])
    if command.name == "run":  # exceptions of the program are its own
        return command.main(given[1:])
    try:
        return command.main(given[1:])
    except FSDPError as error:
        print(f"{PROGRAM} {command.name}: {error}", file=sys.stderr)
        return 1
    except SystemExit as left:  # argparse raises it after --help, or for an error
        return left.code if isinstance(left.code, int) else 0 if left.code is None else _said(left.code)
    except BrokenPipeError:  # `fsdp2 ... | head`: the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _said(code: object) -> int:
    print(code, file=sys.stderr)
    return 1


def _refuse(word: str) -> int:
    names = [command.name for command in COMMANDS]
    what = "option" if word.startswith("-") else "command"
    meant = nearest(word, ["--help", "--version"] if what == "option" else names)
    print(f"{PROGRAM}: there is no {what} '{word}'.{meant}\n{USAGE}", file=sys.stderr)
    print(f"{PROGRAM} --help lists the commands: {', '.join(names)}.", file=sys.stderr)
    return WRONG_USE
