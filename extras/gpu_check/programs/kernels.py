"""The kernels of a step of a Llama-like block: how many, on which streams, launched for what."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from extras.gpu_check.runs import Found
from extras.gpu_check.setting import Setting
from extras.gpu_check.trace import kernels_in, ranges_in, traced
from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.harness.internals import groups_of
from tests.harness.models import Block

BLOCKS = 3
COMMUNICATION = ("all_gather", "all_gather_copy_out", "post_backward_reduce")


def run(setting: Setting) -> Found:
    """Options: ``width`` of the block (1024), whose parameters are packed where they are small.

    Found, of one step: gathers and reductions; by range, and NCCL's apart, how many kernels there are; streams. Of one
    group: how many parameters are gathered each by itself, how many are packed, and whether the backend fuses several.
    """
    width = setting.pick(int(setting.options.get("width", "1024")), 32)
    with setting.group():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(width, heads=4, hidden=4 * width) for _ in range(BLOCKS)))
        model.to(setting.device)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        inputs: Tensor = torch.randn(2, 128, width, device=setting.device)

        def step() -> None:
            model(inputs).float().square().mean().backward()
            model.zero_grad()

        for _ in range(3):
            step()
        events = traced(setting, step)
        kernels, ranges = kernels_in(events), ranges_in(events)
        group = groups_of(model)[0]
        (plan,) = group.plan.gathers
        direct = sum(slot.direct for slot in plan.layout.slots)
        found = {
            "gathers": ranges["all_gather"],
            "reductions": ranges["post_backward_reduce"],
            "direct": direct,
            "packed": len(plan.layout.slots) - direct,
            "fuses": group.mesh.fuses,
            "kernels": dict(Counter(each.range for each in kernels if not each.is_nccl)),
            "nccl_kernels": dict(Counter(each.range for each in kernels if each.is_nccl)),
            "communication_streams": sorted({each.stream for each in kernels if each.range in COMMUNICATION}),
            "gemm_streams": sorted({each.stream for each in kernels if _is_gemm(each.name)}),
            "names": dict(Counter(f"{each.range}: {each.name[:80]}" for each in kernels if each.range)),
        }
    return found


def _is_gemm(name: str) -> bool:
    return any(word in name.lower() for word in ("gemm", "cutlass", "nvjet", "sm90_xmma"))
