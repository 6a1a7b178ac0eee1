"""``fsdp2 doctor``: all parts of `fsdp2.tools.doctor`, one after the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from fsdp2.tools.commands.parsing import Parser, add_json
from fsdp2.tools.commands.sharding import add_ranks
from fsdp2.tools.environment import VARIABLES
from fsdp2.tools.progress import working

DESCRIPTION = """\
Look at versions, devices and the variables of process groups, and let ranks that it starts gather something. Under
torchrun the ranks are those of the launcher, on all nodes."""


def parser() -> Parser:
    """What it understands."""
    made = Parser("fsdp2 doctor", DESCRIPTION, "fsdp2 doctor --ranks 8")
    made.add_argument("--no-exchange", action="store_true", help="start no ranks")
    add_ranks(made, None, "how many to start (default: one for each GPU, or 2)")
    made.add_argument("--variables", action="store_true", help="list the variables that fsdp2 reads, and do no more")
    add_json(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Print what was found; the exit status: 1 if there is a problem."""
    options = parser().parse_all(arguments)
    if options.variables:
        print(variables(as_json=options.json))
        return 0
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


def variables(*, as_json: bool) -> str:
    """All variables that fsdp2 reads, with what each means and is now."""
    if as_json:
        rows = [
            {name: value for name, value in asdict(each).items() if name != "accepts"}
            | {"value": os.environ.get(each.name)}
            for each in VARIABLES
        ]
        return json.dumps(rows, indent=2)
    lines = []
    for each in VARIABLES:
        value = os.environ.get(each.name)
        now = "not set" if value is None else f"set to {value}"
        lines += [f"{each.name} ({now})", f"  takes: {each.takes}; default: {each.default}", f"  {each.means}", ""]
    return "\n".join(lines).rstrip()
