"""``fsdp2 suggest``: `fsdp2.suggest` of a model that a function makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.tools.commands.estimate import add_workload, target, workload_of
from fsdp2.tools.commands.parsing import Parser, add_json
from fsdp2.tools.commands.sharding import add_ranks, add_target
from fsdp2.tools.estimating.suggest import suggest
from fsdp2.tools.progress import Telling

DESCRIPTION = """\
Search for settings to train a model with: strategies, meshes, checkpointing, microbatches, offloading. Each is
estimated, as by fsdp2 estimate; a dozen or two are. It says on stderr which one is being estimated."""


def parser() -> Parser:
    """What it understands."""
    made = Parser(
        "fsdp2 suggest", DESCRIPTION, "fsdp2 suggest my_package.models:llama --ranks 64 --batch 128x8192:int64"
    )
    add_target(made)
    add_ranks(made, 8, "how many, of all (default: 8)")
    add_workload(made)
    made.add_argument("--blocks", metavar="CLASSES", help="names of the classes that are groups, with commas")
    made.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="compute and gather in it")
    made.add_argument("--best", type=int, default=3, metavar="N", help="how many are shown in full (default: 3)")
    add_json(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Print them; the exit status: 1 if nothing fits."""
    understood = parser()
    options = understood.parse_all(arguments)
    with understood.understanding():
        workload = workload_of(options)
    policy = MixedPrecisionPolicy()
    if options.dtype is not None:
        policy = MixedPrecisionPolicy(getattr(torch, options.dtype), torch.float32)
    with understood.understanding():
        found = suggest(
            target(options.model),
            options.ranks,
            mp_policy=policy,
            blocks=None if options.blocks is None else [name.strip() for name in options.blocks.split(",")],
            best=options.best,
            progress=Telling("estimating"),
            **workload,
        )
    print(found.to_json() if options.json else found)
    return 0 if found.best else 1
