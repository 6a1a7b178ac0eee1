"""``fsdp2 estimate``: `fsdp2.estimate`, or `fsdp2.suggest`, for a model that a function makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import nn

from fsdp2.arguments import nearest
from fsdp2.errors import FSDPValueError
from fsdp2.grouping.config import ShardingConfig
from fsdp2.model.accumulation import Kept
from fsdp2.tools.commands.models import BATCH_HELP, look_up, make_batch
from fsdp2.tools.commands.parsing import Parser, add_json
from fsdp2.tools.commands.sharding import add_mesh, add_sharding, add_target, config_of, mesh_of, shard
from fsdp2.tools.estimating.estimate import DEFAULT_HARDWARE, estimate
from fsdp2.tools.estimating.hardware import KNOWN, hardware_of
from fsdp2.tools.estimating.request import CHECKPOINTING
from fsdp2.tools.estimating.suggest import suggest
from fsdp2.tools.progress import working

DESCRIPTION = """\
Foretell what one rank of a training run needs: memory by phase and bytes per link; and whether it fits. Two steps of
one rank are run on tensors without memory; no device is needed.

With --suggest it estimates strategies, checkpointing and offloading, and says which of them fit."""

EXAMPLE = "fsdp2 estimate my_package.models:llama --mesh 128 --batch 256x8192:int64 --hardware h100-8x --dtype bfloat16"

_BY_ITSELF = ("strategy", "blocks", "mp_policy", "offload_policy", "mesh_shape", "device_type")
"""Settings for which `estimate` has arguments, so that it can try others."""


def parser() -> Parser:
    """The parser of the command."""
    made = Parser("fsdp2 estimate", DESCRIPTION, EXAMPLE)
    add_target(made)
    add_mesh(made)
    made.add_argument("--batch", required=True, metavar="BATCH", help=BATCH_HELP)
    made.add_argument(
        "--optimizer", default="AdamW", metavar="NAME", help="a class of torch.optim, MODULE:CLASS, or none (AdamW)"
    )
    made.add_argument("--hardware", default=DEFAULT_HARDWARE, metavar="NAME", help=HARDWARE_HELP)
    made.add_argument("--loss", metavar="LOSS", help=LOSS_HELP)
    add_sharding(made)
    made.add_argument("--checkpointing", choices=CHECKPOINTING, default="none", help="of activations (default: none)")
    made.add_argument("--accumulation", type=int, default=1, metavar="N", help="microbatches of a step (default: 1)")
    made.add_argument(
        "--kept",
        choices=get_args(Kept),
        default="unsharded",
        help="gradients, between microbatches (unsharded)",
    )
    made.add_argument("--suggest", action="store_true", help="try strategies, checkpointing and offloading")
    add_json(made)
    return made


HARDWARE_HELP = (
    f"{', '.join(KNOWN)}: nodes of 8, as many as the ranks need; h100-4x: nodes of 4; h100-8x16: 16 nodes of 8, and no "
    f"more (default: {DEFAULT_HARDWARE})"
)
LOSS_HELP = (
    "what is differentiated: sum, cross-entropy (in float32, of logits and the first tensor of the batch), or "
    "MODULE:FUNCTION, called with the output and the batch (default: output.loss, or the sum of the output)"
)


def loss_named(name: str | None) -> Callable[..., torch.Tensor] | None:
    """The loss with this name; None: the default.

    Raises:
        FSDPValueError: there is no loss of this name.
    """
    if name is None:
        return None
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise FSDPValueError(
            f"there is no loss '{name}': write {', '.join(LOSSES)}, or package.module:function.{nearest(name, LOSSES)}"
        )
    return look_up(name)


def _sum(output: Any, *batch: Any, **more: Any) -> torch.Tensor:
    """The sum of the first tensor of the output."""
    first = output[0] if isinstance(output, (tuple, list)) else getattr(output, "logits", output)
    return first.float().sum()  # type: ignore[no-any-return]


def _cross_entropy(output: Any, *batch: Any, **more: Any) -> torch.Tensor:
    """The cross entropy in float32 of logits (..., classes). The targets are ``labels``, or the first argument."""
    logits = output[0] if isinstance(output, (tuple, list)) else getattr(output, "logits", output)
    targets = more.get("labels", next(iter((*batch, *more.values()))))
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


LOSSES: dict[str, Callable[..., torch.Tensor]] = {"sum": _sum, "cross-entropy": _cross_entropy}
for _name, _function in LOSSES.items():
    _function.__qualname__ = _name  # an estimate shows this name


def optimizer_named(name: str) -> Callable[..., torch.optim.Optimizer] | None:
    """The class of the optimizer with this name; None for "none".

    Raises:
        FSDPValueError: there is no optimizer of this name.
    """
    if name == "none":
        return None
    if ":" in name:
        return look_up(name)
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [each for each, value in vars(torch.optim).items() if isinstance(value, type)]
        raise FSDPValueError(f"torch.optim has no optimizer '{name}'.{nearest(name, known)}")
    return found  # type: ignore[no-any-return]


def sharding_arguments(config: ShardingConfig) -> dict[str, Any]:
    """The arguments of `estimate` for ``config``: plain ones if they can say all of it, else a function that shards."""
    made: dict[str, Any] = {"mp_policy": config.mp_policy, "offload_policy": config.offload_policy}
    names = config.to_dict()
    if all(name in _BY_ITSELF for name in names):
        return {**made, "strategy": config.strategy, "blocks": config.blocks}
    return {**made, "blocks": config.blocks, "shard": lambda model, mesh: shard(model, mesh, config)}


def _tell(what: str) -> None:
    print(f"estimating {what}", flush=True, file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Print the estimate. Returns the exit status: 1 if it does not fit, or with --suggest if nothing fits."""
    understood = parser()
    options = understood.parse_all(arguments)
    with understood.understanding():
        workload: dict[str, Any] = {
            "batch": make_batch(options.batch, "meta"),
            "optimizer": optimizer_named(options.optimizer),
            "hardware": hardware_of(options.hardware),
            "loss": loss_named(options.loss),
            "accumulation": options.accumulation,
            "kept": options.kept,
        }
    config = config_of(options)
    shape = mesh_of(options, config, "8")
    make_model, told = look_up(options.model), sharding_arguments(config)  # called inside of the simulation
    if options.suggest:
        chosen = {name: told[name] for name in ("mp_policy", "blocks")}
        with understood.understanding():
            tried = suggest(make_model, shape, progress=_tell, **workload, **chosen)
        print(tried.to_json() if options.json else tried)
        return 0 if tried.best else 1
    with working("estimating"), understood.understanding():
        found = estimate(make_model, shape, checkpointing=options.checkpointing, **workload, **told)
    print(found.to_json() if options.json else found)
    return 0 if found.fits else 1
