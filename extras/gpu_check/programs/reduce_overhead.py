"""A compiled model in CUDA graphs (``mode="reduce-overhead"``): how much more memory it takes than without."""

from __future__ import annotations

from typing import Any

import torch

from extras.gpu_check.programs.stacks import batch, sharded, stack
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting


def complaints(found: Found) -> list[str]:
    """What is wrong: CUDA graphs take half of the shards' memory more, so they have a copy of them."""
    more = found["reserved"]["reduce-overhead"] - found["reserved"]["default"]
    return [f"{more} bytes more in CUDA graphs, where all shards are {found['shards']}"] * (more > found["shards"] / 2)


def run(setting: Setting) -> Found:
    """Bytes that are reserved after some steps, in the default mode and in that one, and of the shards."""
    width = setting.pick(4096, 32)
    reserved: dict[str, int] = {}
    shards = 0
    with setting.group():
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            model: Any = sharded(stack(setting, width))
            backend: dict[str, Any] = setting.pick({"mode": mode}, {"backend": "eager"})
            compiled = torch.compile(model, fullgraph=True, **backend)
            for step in range(6):
                compiled(batch(setting, width, step)).square().mean().backward()
                model.zero_grad()
            setting.synchronize()
            shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
            if not setting.is_rehearsal:
                torch.cuda.empty_cache()
                reserved[mode] = torch.cuda.memory_reserved()
            del model, compiled
    found = {"reserved": reserved, "shards": shards}
    return found if setting.is_rehearsal else {**found, COMPLAINTS: complaints(found)}
