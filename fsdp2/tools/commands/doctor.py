"""``fsdp2 doctor``: all parts of `fsdp2.tools.doctor`, one after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fsdp2.tools.commands.parsing import Parser, add_json
from fsdp2.tools.progress import working

DESCRIPTION = """\
Look at versions, devices and the variables of process groups, and let ranks that it starts gather something. Under
torchrun the ranks are those of the launcher, on all nodes."""


def parser() -> Parser:
    """The parser of the command."""
    made = Parser("fsdp2 doctor", DESCRIPTION, "fsdp2 doctor --ranks 8")
    made.add_argument("--no-exchange", action="store_true", help="start no ranks")
    made.add_argument("--ranks", type=int, metavar="N", help="how many to start (default: one for each GPU, or 2)")
    add_json(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Print what was found. Returns the exit status: 1 if there is a problem, else 0."""
    options = parser().parse_all(arguments)
    from fsdp2.tools import doctor

    with working("looking"):
        found = [*doctor.versions(), *doctor.devices(), *doctor.variables()]
        if not options.no_exchange:
            found += doctor.exchange(options.ranks)
    diagnosis = doctor.Diagnosis(found)
    if os.environ.get("RANK", "0") == "0":
        print(diagnosis.to_json() if options.json else diagnosis)
        sys.stdout.flush()
    return 0 if diagnosis.is_well else 1
