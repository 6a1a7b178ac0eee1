"""The kernels of a step of a Llama-like block: how many, on which streams, launched for what."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from extras.gpu_check.trace import kernels_in, ranges_in, traced
from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.harness.internals import groups_of
from tests.harness.models import Block

BLOCKS = 3
COMMUNICATION = ("all_gather", "all_gather_copy_out", "post_backward_reduce")
CHUNK_CAT = "chunk_cat"


def complaints(found: Found, *, is_alone: bool) -> list[str]:
    """What is wrong: communication among compute, more copies than gathers, more launches than collectives."""
    streams, said = found["communication_streams"], []
    if shared := set(streams) & set(found["gemm_streams"]):
        said.append(f"communication and products of matrices share streams {sorted(shared)}")
    if len(streams) < 2:
        said.append(f"gathers and reductions run on streams {streams}, not on two")
    if not found["gemm_streams"]:
        said.append("no product of matrices was seen")
    gathers, reductions = found["gathers"], found["reductions"]
    copies = found["kernels"].get("all_gather_copy_out", 0)
    if found["packed"] and copies > gathers:
        said.append(f"{copies} kernels copy out of {gathers} gathers")
    packs = sum(count for name, count in found["names"].items() if CHUNK_CAT in name)
    if packs != reductions:
        said.append(f"{packs} kernels of {CHUNK_CAT} pack the gradients of {reductions} groups")
    for name, wanted in () if is_alone else (("all_gather", gathers), ("post_backward_reduce", reductions)):
        launched = found["nccl_kernels"].get(name, 0)  # (a rank alone has a copy for each parameter)
        if launched != wanted:
            said.append(f"{launched} kernels of NCCL for {wanted} times {name}")
    return said


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
    return found if setting.is_rehearsal else {**found, COMPLAINTS: complaints(found, is_alone=setting.ranks == 1)}


def _is_gemm(name: str) -> bool:
    return any(word in name.lower() for word in ("gemm", "cutlass", "nvjet", "sm90_xmma"))
