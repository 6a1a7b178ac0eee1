"""The same training by torch's `fully_shard` and by this one: the losses are the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from extras.gpu_check.programs.stacks import batch, differing, sharded, stack
from extras.gpu_check.runs import COMPLAINTS, Found
from extras.gpu_check.setting import Setting

WIDTH = 512
STEPS = 50
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
MICROBATCHES = 2
HALF = "half"
IMPLEMENTATIONS: dict[str, Any] = {"torch": theirs, "fsdp2": fsdp2}


def _losses(setting: Setting, name: str) -> list[float]:
    options, library = setting.options, IMPLEMENTATIONS[name]
    width, dtype = setting.pick(WIDTH, 32), options.get("dtype", "fp32")
    arguments: dict[str, Any] = {}
    if "replicas" in options:
        replicas = setting.ranks // 2 if options["replicas"] == HALF else int(options["replicas"])
        shape = (replicas, setting.ranks // replicas)
        arguments["mesh"] = init_device_mesh(setting.device_type, shape, mesh_dim_names=("replicate", "shard"))
    if dtype != "fp32":
        half = torch.bfloat16 if dtype == "bf16" else torch.float16
        arguments["mp_policy"] = library.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    model = sharded(stack(setting, width), library.fully_shard, **arguments)
    if "factor" in options:
        for each in (*model, model):
            each.set_gradient_divide_factor(float(options["factor"]))
    accumulates = options.get("accumulates")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(setting.device_type, enabled=dtype == "fp16", init_scale=1024.0)
    losses = []
    for step in range(setting.pick(STEPS, 5)):
        for micro in range(MICROBATCHES if accumulates else 1):
            if accumulates == "without sync":
                model.set_requires_gradient_sync(micro == MICROBATCHES - 1)
            loss = model(batch(setting, width, MICROBATCHES * step + micro)).float().square().mean()
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    setting.synchronize()
    return [float(loss) for loss in losses]


def run(setting: Setting) -> Found:
    """Options: ``dtype`` (fp32, bf16, fp16 with a GradScaler), ``replicas`` (a number, or half of the ranks),
    ``factor``, ``accumulates``.
    """
    with setting.group():
        losses: dict[str, list[float]] = {name: _losses(setting, name) for name in IMPLEMENTATIONS}
    tolerance = TOLERANCES[setting.options.get("dtype", "fp32")]
    said = differing(losses["fsdp2"], losses["torch"], tolerance)
    ends = {name: [found[0], found[-1]] for name, found in losses.items()}
    return {"first_and_last": ends, COMPLAINTS: [f"beside torch's, {said}"] if said else []}
