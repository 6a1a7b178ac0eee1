"""Options that ``explain`` and ``estimate`` share: what to shard, and how."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.api.module import FSDPModule
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.state import Strategy
from fsdp2.errors import FSDPValueError
from fsdp2.grouping.config import ShardingConfig
from fsdp2.grouping.group_choice import common_name
from fsdp2.grouping.sharding import auto_shard, choose_groups
from fsdp2.tools.commands.models import TARGET, TARGET_HELP, mesh_shape_of
from fsdp2.tools.quantities import shown_bytes

_NO_LIMIT = 2**62
_DTYPES = ("bfloat16", "float16", "float32")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the model."""
    parser.add_argument("model", metavar=TARGET, help=TARGET_HELP)


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of ranks."""
    said = "how many ranks, 8, or replicas and shards, 4x8; both names mean the same"
    parser.add_argument("--mesh", "--ranks", metavar="RANKS", type=_mesh, help=said)


def _mesh(text: str) -> str:
    """A type for argparse: a wrong mesh is then an error of the command line.

    Raises:
        argparse.ArgumentTypeError: ``text`` is no mesh.
    """
    try:
        mesh_shape_of(text)
    except FSDPValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_sharding(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to shard."""
    parser.add_argument("--config", metavar="FILE", help="a ShardingConfig (.yaml or .json); the rest changes it")
    parser.add_argument("--strategy", choices=get_args(Strategy), help="a ZeRO stage; as the config says, or zero3")
    parser.add_argument("--blocks", metavar="CLASSES", help="names of the classes that are groups, with commas")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="cut blocks above it into layers (default: 2**30)")
    parser.add_argument("--dtype", choices=_DTYPES, help="compute and gather in it; gradients are reduced in float32")


def config_of(options: argparse.Namespace) -> ShardingConfig:
    """The config that the options describe.

    Raises:
        FSDPValueError: the file is no config, or the options do not go with it.
    """
    config = ShardingConfig() if options.config is None else ShardingConfig.from_file(options.config)
    changes: dict[str, Any] = {}
    if options.strategy is not None:
        changes["strategy"] = options.strategy
    if options.blocks is not None:
        changes["blocks"] = tuple(name.strip() for name in options.blocks.split(",") if name.strip())
    if options.max_bytes is not None:
        changes["max_bytes"] = options.max_bytes
    if options.dtype is not None:
        changes["mp_policy"] = MixedPrecisionPolicy(getattr(torch, options.dtype), torch.float32)
    return dataclasses.replace(config, **changes) if changes else config


def mesh_of(options: argparse.Namespace, config: ShardingConfig, default: str) -> tuple[int, ...]:
    """The sizes of the mesh."""
    if options.mesh is not None:
        return mesh_shape_of(options.mesh)
    if config.mesh_shape is None:
        return mesh_shape_of(default)
    if -1 in config.mesh_shape:
        raise FSDPValueError(
            f"mesh_shape={config.mesh_shape} of the config depends on the number of ranks: say it, --mesh 4x8."
        )
    return config.mesh_shape


def without_mesh(config: ShardingConfig) -> ShardingConfig:
    """The config without its mesh, for use on another mesh that exists."""
    return dataclasses.replace(config, mesh_shape=None, device_type=None)


def blocks_that_are_cut(model: nn.Module, config: ShardingConfig) -> str:
    """A sentence on blocks of ``model``, not yet sharded, that `shard` will cut into layers; "" if there are none."""
    if any(isinstance(each, FSDPModule) for each in model.modules()):
        return ""
    policy: dict[str, Any] = {} if config.mp_policy is None else {"mp_policy": config.mp_policy}
    sizes = {"min_bytes": config.min_bytes, "blocks": config.blocks, **policy}
    names = [group.name for group in choose_groups(model, max_bytes=config.max_bytes, **sizes).groups]
    whole = [group for group in choose_groups(model, max_bytes=_NO_LIMIT, **sizes).groups if group.name]
    cut = [
        each
        for each in whole
        if each.nbytes > config.max_bytes and any(name.startswith(f"{each.name}.") for name in names)
    ]
    if not cut:
        return ""
    largest = max(each.nbytes for each in cut)
    plural = len(cut) > 1
    as_is = config.mp_policy is None or config.mp_policy.param_dtype is None
    halves = " (they count in the dtype that is gathered: --dtype bfloat16 halves those of float32)" if as_is else ""
    return (
        f"{len(cut)} block{'s' if plural else ''} ({common_name([each.name for each in cut])}, {cut[0].class_name}) "
        f"of up to {shown_bytes(largest)} {'are' if plural else 'is'} above max_bytes={config.max_bytes} "
        f"({shown_bytes(config.max_bytes)}), so {'each was' if plural else 'it was'} cut into smaller groups: a whole "
        f"block would be unsharded twice, for computing and for the next one that is gathered ahead. To keep blocks "
        f"whole, say --max-bytes {largest}, or max_bytes in the config{halves}."
    )


def shard(model: nn.Module, mesh: DeviceMesh | None, config: ShardingConfig) -> nn.Module:
    """Shard the model, unless the function that made it has done so."""
    if not any(isinstance(each, FSDPModule) for each in model.modules()):
        auto_shard(model, mesh, config=config if mesh is None else without_mesh(config))
    return model
