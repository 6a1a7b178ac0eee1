"""`Parser`: argparse with errors in sentences that name the nearest option, and exit status 2."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from fsdp2.arguments import nearest
from fsdp2.errors import FSDPValueError

WRONG_USE = 2
"""The exit status of a command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of its subcommands.

    Args:
        example: a command line that works, shown at the end of the help.
    """

    def __init__(self, prog: str, description: str, example: str = "", **more: Any) -> None:
        epilog = f"example:\n  {example}" if example else None
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )

    def options(self) -> list[str]:
        """All options in their order: ``--json``, ..."""
        return [option for action in self._actions for option in action.option_strings]

    def subcommands(self) -> dict[str, Parser]:
        """The parsers of the subcommands, by name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse ``arguments``; exit with a sentence if that is not possible."""
        given, rest = self.parse_known_args(list(arguments))
        if rest:
            self._inner(arguments).error(f"unrecognized arguments: {' '.join(rest)}")
        return given

    def _inner(self, arguments: Sequence[str]) -> Parser:
        """The parser of the subcommand that is called, or this one."""
        inner = self.subcommands()
        return next((inner[each] for each in arguments if each in inner), self)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and what may have been meant, and exit with status 2."""
        said = message if message.endswith((".", "?")) else f"{message}."
        meant = "".join(self._meant(message))
        print(f"{self.prog}: {said}{meant}\n{self.format_usage().strip()}", file=sys.stderr)
        print(f"{self.prog} --help says more.", file=sys.stderr)
        sys.exit(WRONG_USE)

    @contextmanager
    def understanding(self) -> Iterator[None]:
        """Treat an FSDPValueError raised inside as an error of the command line: exit as `error` does."""
        try:
            yield
        except FSDPValueError as error:
            self.error(str(error))

    def _meant(self, message: str) -> Iterator[str]:
        found = re.match(r"unrecognized arguments: (\S+)", message)
        if found and found[1].startswith("-"):
            yield nearest(found[1].partition("=")[0], self.options())
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if found and not message.startswith("argument -"):  # an option with few values lists all: none is nearer
            yield nearest(found[1], re.findall(r"[\w./+-]+", found[2]))


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``, which all commands have."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
