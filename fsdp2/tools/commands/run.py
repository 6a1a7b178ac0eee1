"""``fsdp2 run``: a program of torch's FSDP on fsdp2, as `fsdp2.compat` runs it; or one of DDP, sharded by a config."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Sequence

from fsdp2.arguments import nearest
from fsdp2.errors import FSDPError
from fsdp2.grouping.config import ShardingConfig
from fsdp2.tools.commands.parsing import WRONG_USE, Parser
from fsdp2_switch import AUTO_SHARD

DESCRIPTION = """\
Run a Python program with fsdp2 in the place of torch.distributed.fsdp: fully_shard, FullyShardedDataParallel and what
belongs to them. Options of fsdp2 come before the program, those of the program after it.

With --auto-shard, or --config, a program that shards nothing is sharded: its DistributedDataParallel(model) calls
fsdp2.auto_shard(model, config). The program goes on to train as under DDP; what it cannot do any more, saving the model
on one rank for instance, is refused with what to write instead. 'The command line' in the documentation
has the list.

Under a launcher, the launcher comes first: torchrun --nproc-per-node 8 -m fsdp2 run train.py"""

EXAMPLE = "torchrun --nproc-per-node 8 -m fsdp2 run --config sharding.yaml train.py --epochs 3"


def parser() -> Parser:
    """What it understands, for its help. (What follows the program is the program's.)"""
    made = Parser("fsdp2 run", DESCRIPTION, EXAMPLE, usage="fsdp2 run [options] script.py | -m MODULE [arguments]")
    made.add_argument("-m", metavar="MODULE", help="run a module, instead of a file")
    made.add_argument("--auto-shard", action="store_true", help="shard the model of a DDP program")
    made.add_argument("--config", metavar="FILE", help="the same, as a ShardingConfig says (.yaml or .json)")
    made.add_argument("--keep-fsdp1", action="store_true", help="leave FullyShardedDataParallel to torch")
    made.add_argument("-v", "--verbose", action="store_true", help="print what was replaced (on rank 0)")
    made.add_argument("program", nargs=argparse.REMAINDER, help="script.py and its arguments")
    return made


def split(arguments: Sequence[str]) -> tuple[bool, str | None, list[str]]:
    """Whether to shard, the path of a config, and what is left, which `fsdp2.compat` understands."""
    rest, left = list(arguments), []
    auto, config = False, None
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        option = rest.pop(0)
        if option == "--auto-shard":
            auto = True
        elif option == "--config":
            config = rest.pop(0) if rest else ""
        elif option.startswith("--config="):
            config = option.partition("=")[2]
        else:
            left.append(option)
    return auto or config is not None, config, [*left, *rest]


def main(arguments: Sequence[str]) -> int:
    """Run the program. What it raises, and its exit status, are those of the process."""
    from fsdp2.compat.__main__ import UsageError, parse, run

    auto, config, rest = split(arguments)
    if config == "":
        return _wrong("--config takes the path of a file.")
    try:
        program = parse(rest)
    except UsageError as error:
        word = next((each for each in rest if each.startswith("-")), "")
        meant = nearest(word, parser().options()) if "unknown option" in str(error) else ""
        return _wrong(f"{str(error).replace('-m fsdp2.compat', '-m fsdp2 run')}.{meant}")
    if program is None:
        parser().print_help()
        return 0
    try:
        if auto:
            _auto_shard(config)
    except FSDPError as error:
        print(f"fsdp2 run: {error}", file=sys.stderr)
        return 1
    if program.is_module and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script has its own folder there
    run(program)
    return 0


def _wrong(message: str) -> int:
    print(f"fsdp2 run: {message}\n{parser().format_usage().strip()}", file=sys.stderr)
    print("fsdp2 run --help says more.", file=sys.stderr)
    return WRONG_USE


def _auto_shard(path: str | None) -> None:
    from fsdp2.compat import auto_sharding

    config = None if path is None else ShardingConfig.from_file(path)
    # Processes that the program starts may run in another folder.
    os.environ[AUTO_SHARD] = "1" if path is None else os.path.abspath(path)
    sharding = auto_sharding.install(config)
    atexit.register(_say_if_unused, sharding)


def _say_if_unused(sharding: object) -> None:
    if not getattr(sharding, "was_used", True) and os.environ.get("RANK", "0") == "0":
        print(
            "fsdp2 run --auto-shard: this process made no torch.nn.parallel.DistributedDataParallel, so nothing was "
            "sharded by it. What a program shards itself, by fully_shard or FullyShardedDataParallel, goes by its own "
            "arguments; and what its child processes did is not known here.",
            file=sys.stderr,
        )
