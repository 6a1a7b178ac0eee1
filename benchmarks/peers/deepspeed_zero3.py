"""DeepSpeed's ZeRO stage 3 on the CPU, with an optimizer of torch's.

DeepSpeed replaces `torch.nn.functional.linear`, for everyone in the process. Here its own is in place during its own
steps only, so that others beside it run torch's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from benchmarks.implementations import ShardingOptions
from benchmarks.models import StackedBlocks
from benchmarks.training import MakeOptimizer, StepOfBatch

os.environ["DS_ACCELERATOR"] = "cpu"  # read by the import
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def program(
    name: str, model: StackedBlocks, *, mesh: DeviceMesh, options: ShardingOptions, make_optimizer: MakeOptimizer
) -> StepOfBatch:
    """Defaults, but for two.

    Gradients are not clipped: unless it is told otherwise, DeepSpeed clips to a norm of 1. And buckets have room for a
    block: the default takes 2 GB for them.
    """
    engine, linear = _engine(model, make_optimizer)

    def step(batch: torch.Tensor) -> torch.Tensor:
        with _in_place(linear):
            loss: torch.Tensor = engine(batch)
            engine.backward(loss)
            engine.step()  # and gradients are gone
        return loss.detach()

    return step


def _engine(model: StackedBlocks, make_optimizer: MakeOptimizer) -> tuple[Any, Callable[..., torch.Tensor]]:
    """The model under DeepSpeed, and the function that is to be `linear` while it runs."""
    # It reads them, although the process group is there.
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    bucket = max(sum(each.numel() for each in block.parameters()) for block in model.blocks)
    with contextlib.redirect_stdout(sys.stderr), _in_place(F.linear):
        deepspeed.init_distributed(dist_backend="gloo")
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            optimizer=make_optimizer(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,  # rows are not looked at
                "zero_optimization": {"stage": 3, "reduce_bucket_size": bucket},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.0,
            },
        )
        return engine, F.linear


@contextlib.contextmanager
def _in_place(linear: Callable[..., torch.Tensor]) -> Iterator[None]:
    before = F.linear
    F.linear = linear
    try:
        yield
    finally:
        F.linear = before
