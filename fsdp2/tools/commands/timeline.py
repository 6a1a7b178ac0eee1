"""``fsdp2 timeline``: `fsdp2.timeline` of some steps of a model that a function makes, on ranks that it starts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.core.trees import map_tensors, tensors_in
from fsdp2.errors import FSDPValueError
from fsdp2.tools.commands.estimate import LOSS_HELP, loss_named, optimizer_named
from fsdp2.tools.commands.models import BATCH_HELP, make_batch, make_model
from fsdp2.tools.commands.parsing import Parser, add_json
from fsdp2.tools.commands.sharding import add_ranks, add_sharding, add_target, config_of, shard
from fsdp2.tools.estimating.rank import default_loss
from fsdp2.tools.timeline.timeline import Timeline, refuse_path, timeline

DESCRIPTION = """\
Train some steps of a model on zeros, and show what each rank computes, gathers, reduces and waits for. It starts the
ranks itself, one for each GPU, or two on a CPU; under torchrun it is one of its ranks.

In a program of your own: with fsdp2.timeline(model) as timeline: ..."""


def parser() -> Parser:
    """What it understands."""
    made = Parser("fsdp2 timeline", DESCRIPTION, "fsdp2 timeline models.py:build --batch 8x512:int64 --out steps.json")
    add_target(made)
    made.add_argument("--batch", required=True, metavar="BATCH", help=BATCH_HELP)
    add_ranks(made, None, "how many to start on this machine (default: GPUs, or 2)")
    add_sharding(made)
    made.add_argument("--optimizer", default="AdamW", metavar="NAME", help="as in fsdp2 estimate (default: AdamW)")
    made.add_argument("--loss", metavar="LOSS", help=LOSS_HELP)
    made.add_argument("--steps", type=int, default=3, metavar="N", help="that are shown (default: 3)")
    made.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before them (default: 2)")
    made.add_argument("--out", action="append", default=[], metavar="FILE", help="a trace, .json, or a picture, .png")
    add_json(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or be one; the exit status is theirs."""
    understood = parser()
    options = understood.parse_all(arguments)
    with understood.understanding():  # here, and not by each of the ranks
        for path in options.out:
            refuse_path(Path(path))
        optimizer_named(options.optimizer)
        loss_named(options.loss)
    if "RANK" not in os.environ:
        return _launch(options, arguments)
    with_gpu = torch.accelerator.is_available()
    if with_gpu:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group()
    try:
        found = _run(options, "cpu" if not with_gpu else str(torch.accelerator.current_accelerator()))
    finally:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(found.to_json() if options.json else found)
    return 0


def _launch(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    ranks = options.ranks or torch.accelerator.device_count() or 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # which torchrun would warn of
    return subprocess.run([*command, "-m", "fsdp2", "timeline", *arguments], env={**os.environ, **threads}).returncode


def _run(options: argparse.Namespace, device: str) -> Timeline:
    model = make_model(options.model).to(device)
    model = shard(model, None, config_of(options))
    make_optimizer = optimizer_named(options.optimizer)
    optimizer = None if make_optimizer is None else make_optimizer(list(model.parameters()))
    batch = part_of(make_batch(options.batch, device), dist.get_rank(), dist.get_world_size())
    loss = loss_named(options.loss)
    for _ in range(options.warmup):
        step(model, optimizer, batch, loss)
    with timeline(model) as found:
        for _ in range(options.steps):
            step(model, optimizer, batch, loss)
    for path in options.out:
        found.save(path)
    return found


def part_of(batch: Any, rank: int, ranks: int) -> Any:
    """A rank's part of each tensor that has as many rows as the first: these are samples, as for an estimate.

    Raises:
        FSDPValueError: ``ranks`` do not divide the samples, or there are none.
    """
    samples = next((each.shape[0] for each in tensors_in(batch) if each.dim()), None)
    if samples is None or samples % ranks:
        raise FSDPValueError(
            f"the batch has {'no' if samples is None else samples} samples in dim 0, which {ranks} ranks do not divide."
        )
    return map_tensors(lambda each: each.chunk(ranks)[rank] if each.dim() and each.shape[0] == samples else each, batch)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    loss_of: Callable[..., torch.Tensor] | None = None,
) -> None:
    """One step: of ``loss_of(output, *batch)``, else of the loss that the output has, or the sum of the output."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    args = args if isinstance(args, (tuple, list)) else (args,)
    output = model(*args, **kwargs)
    loss = default_loss(output)[0] if loss_of is None else loss_of(output, *args, **kwargs)
    loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
