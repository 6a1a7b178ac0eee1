"""``fsdp2 run``: runs a program that was written for torch's FSDP on fsdp2, as `fsdp2.compat` does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fsdp2.arguments import nearest
from fsdp2.tools.commands.parsing import WRONG_USE, Parser

DESCRIPTION = """\
Run a Python program with fsdp2 in the place of torch.distributed.fsdp: fully_shard, FullyShardedDataParallel and what
belongs to them. Options of fsdp2 come before the program, those of the program after it.

Under a launcher, the launcher comes first: torchrun --nproc-per-node 8 -m fsdp2 run train.py"""

EXAMPLE = "torchrun --nproc-per-node 8 -m fsdp2 run train.py --epochs 3"


def parser() -> Parser:
    """The parser, which is used for help only: arguments behind the program are the program's."""
    made = Parser("fsdp2 run", DESCRIPTION, EXAMPLE, usage="fsdp2 run [options] script.py | -m MODULE [arguments]")
    made.add_argument("-m", metavar="MODULE", help="run a module, instead of a file")
    made.add_argument("--keep-fsdp1", action="store_true", help="leave FullyShardedDataParallel to torch")
    made.add_argument("-v", "--verbose", action="store_true", help="print what was replaced (on rank 0)")
    made.add_argument("program", nargs=argparse.REMAINDER, help="script.py and its arguments")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the program. Its exceptions and its exit status become those of the process."""
    from fsdp2.compat.__main__ import UsageError, parse, run

    try:
        program = parse(list(arguments))
    except UsageError as error:
        word = next((each for each in arguments if each.startswith("-")), "")
        meant = nearest(word, parser().options()) if "unknown option" in str(error) else ""
        message = f"{str(error).replace('-m fsdp2.compat', '-m fsdp2 run')}.{meant}"
        print(f"fsdp2 run: {message}\n{parser().format_usage().strip()}", file=sys.stderr)
        print("fsdp2 run --help says more.", file=sys.stderr)
        return WRONG_USE
    if program is None:
        parser().print_help()
        return 0
    if program.is_module and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # like `python -m`; a console script has its own folder there
    run(program)
    return 0
