"""``fsdp2 convert``: flat checkpoints of torch's FSDP1 to whole ones and back, by `fsdp2.compat.fsdp1.convert`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fsdp2.tools.commands.parsing import Parser, add_json
from fsdp2.tools.progress import working

EXAMPLE = """\
fsdp2 convert checkpoints/step100 model.pt --to full \\
      --model my_package.models:build --units Block --use-orig-params"""


def parser() -> Parser:
    """What it understands."""
    from fsdp2.compat.fsdp1 import convert

    made = Parser("fsdp2 convert", convert.DESCRIPTION, EXAMPLE)
    convert.add_options(made)
    add_json(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Convert; the exit status: 0, or 1 where files or names do not fit, and nothing was written."""
    from fsdp2.compat.fsdp1 import convert

    given = parser().parse_all(arguments)
    with working(f"converting to {given.out}"):
        convert.run(given)
    data = {"out": str(given.out), "to": given.to}
    print(json.dumps(data) if given.json else f"wrote {given.out}")
    return 0
