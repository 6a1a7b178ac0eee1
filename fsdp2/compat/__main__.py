"""``python -m fsdp2.compat script.py ...``: run a program with fsdp2 in the place of torch's ``fully_shard``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from dataclasses import dataclass

from fsdp2.compat.swap import install
from fsdp2.compat.switch import reach_children

USAGE = """\
usage: python -m fsdp2.compat [--keep-fsdp1] [--verbose] script.py [arguments]
       python -m fsdp2.compat [--keep-fsdp1] [--verbose] -m module [arguments]

Run a Python program with fsdp2 in the place of torch.distributed.fsdp: fully_shard, FullyShardedDataParallel and what
belongs to them.
Under a launcher, the swap runs in the processes that it starts:
       torchrun --nproc-per-node 8 -m fsdp2.compat script.py [arguments]
       accelerate launch -m fsdp2.compat script.py [arguments]

  --keep-fsdp1    leave FullyShardedDataParallel to torch
  -v, --verbose   print what was replaced (on rank 0)
  -h, --help      print this

Processes that the program itself starts, by spawn, by a command or through Ray, have the swap too, by what they inherit
of its environment: FSDP2_COMPAT=1 (or keep-fsdp1), and a folder in front of PYTHONPATH."""

# They start other processes, and shard nothing themselves.
LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "accelerate.commands.launch",
)


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a path or the name of a module, and its arguments."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    verbose: bool
    fsdp1: bool = True


class UsageError(Exception):
    """A command line that cannot be run; the message says why."""


def parse(arguments: list[str]) -> Program | None:
    """Understand the command line; None if it asks for help.

    Raises:
        UsageError: there is nothing to run, or it cannot be run this way.
    """
    rest = list(arguments)
    verbose, fsdp1 = False, True
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option = rest.pop(0)
        if option in ("-h", "--help"):
            return None
        if option not in ("-v", "--verbose", "--keep-fsdp1"):
            raise UsageError(f"unknown option {option}; options of the program come after its name")
        verbose, fsdp1 = verbose or option != "--keep-fsdp1", fsdp1 and option != "--keep-fsdp1"
    is_module = bool(rest) and rest[0] == "-m"
    if is_module:
        rest.pop(0)
    if not rest:
        raise UsageError("no module named after -m" if is_module else "no program named")
    _refuse_launchers(rest[0])
    (_check_module if is_module else _check_script)(rest[0])
    return Program(rest[0], is_module, tuple(rest[1:]), verbose, fsdp1)


def _refuse_launchers(target: str) -> None:
    if target in LAUNCHERS or os.path.basename(target) in LAUNCHERS:
        raise UsageError(
            f"{target} starts other processes, and shards nothing itself; turn it round: "
            "torchrun [options] -m fsdp2.compat script.py"
        )


def _check_script(path: str) -> None:
    if os.path.exists(path):
        return
    hint = f"; for a module, write -m {path}" if "/" not in path and not path.endswith(".py") else ""
    raise UsageError(f"no such file: {path}{hint}")


def _check_module(name: str) -> None:
    package = name.partition(".")[0]  # what lies deeper is found by importing the package, which must wait
    if not package or importlib.util.find_spec(package) is None:
        hint = f"; for a file, leave out -m: python -m fsdp2.compat {name}" if os.path.exists(name) else ""
        raise UsageError(f"no module named {name}{hint}")


def run(program: Program) -> None:
    """Install the swap for the rest of this process, and run ``program`` as ``__main__``, as Python would."""
    swap = install(fsdp1=program.fsdp1)
    reach_children(fsdp1=program.fsdp1)
    if program.verbose and os.environ.get("RANK", "0") == "0":
        print(swap, file=sys.stderr)
    sys.argv = [program.target, *program.arguments]
    if program.is_module:
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later, with -P
            sys.path[0] = os.path.dirname(os.path.abspath(program.target))
        runpy.run_path(program.target, run_name="__main__")


def main() -> None:
    """The command."""
    try:
        program = parse(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"fsdp2.compat: {error}\n\n{USAGE}")
    if program is None:
        print(USAGE)
    else:
        run(program)


if __name__ == "__main__":
    main()
