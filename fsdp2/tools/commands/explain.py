"""``fsdp2 explain``: `fsdp2.explain` for a model that a function makes, on the meta device and any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.errors import FSDPValueError
from fsdp2.tools.commands.models import make_model, ranks_of
from fsdp2.tools.commands.parsing import Parser, add_json
from fsdp2.tools.commands.sharding import (
    add_mesh,
    add_sharding,
    add_target,
    blocks_that_are_cut,
    config_of,
    mesh_of,
    shard,
)
from fsdp2.tools.estimating.simulation import laid_out_for, simulated_world
from fsdp2.tools.explaining import explain
from fsdp2.tools.explaining.text import wrapped
from fsdp2.tools.progress import working

DESCRIPTION = """\
Say how a model is sharded, what a step exchanges, and what is slow about it. The model is made on the meta device, and
the ranks are simulated in this process: no device, no memory and no launcher are needed. They compute on GPUs, unless
a config says device_type: cpu, where other bytes are sent.

A function that calls fully_shard itself is taken at its word; other models are sharded by fsdp2.auto_shard."""


def parser() -> Parser:
    """The parser of the command."""
    made = Parser("fsdp2 explain", DESCRIPTION, "fsdp2 explain my_package.models:build --mesh 64 --strategy zero2")
    add_target(made)
    add_mesh(made)
    add_sharding(made)
    made.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="(default: %(default)s)")
    made.add_argument("--group", metavar="NAME", help="all that is known of one group, by its name or a parameter's")
    add_json(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Print the explanation. Returns the exit status, 0."""
    options = parser().parse_all(arguments)
    config = config_of(options)
    shape = mesh_of(options, config, "8")
    if len(shape) > 2:
        raise FSDPValueError(
            f"--mesh {'x'.join(map(str, shape))} has {len(shape)} dims, and explain shards over one or two, replicas "
            "and shards: say their product."
        )
    with simulated_world(ranks_of(shape), "fsdp2 explain"), laid_out_for(config.device_type or "cuda"):
        with working("making and sharding the model"):
            with torch.device("meta"):
                model = make_model(options.model)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            note = blocks_that_are_cut(model, config)
            explanation = explain(shard(model, mesh, config), ranks_per_node=options.ranks_per_node)
        if options.json:
            found = {**json.loads(explanation.to_json()), "notes": [note] if note else []}
            print(json.dumps(found, indent=2))
        elif options.group is not None:
            print(explanation.details(options.group))
        else:
            if note:  # first, as the tables show the groups that it is about
                print("\n".join(wrapped(f"Note: {note}")) + "\n", flush=True)
            explanation.show()
    return 0
