"""What the engine takes the process group for, and makes of that: fusing, and factors that NCCL multiplies by."""

from __future__ import annotations

import os
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist

from extras.gpu_check.programs.stacks import batch, sharded, stack
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from fsdp2 import _torch
from tests.harness.internals import groups_of

WIDTH = 64
FACTOR = 3.0


def unknown(name: str, fuses: bool) -> list[str]:
    """What is wrong: NCCL is taken for something else. From torch 2.15 on it is ``nccl2``, which does not fuse."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    is_new = release >= (2, 15) and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
    expected = ("nccl2", False) if is_new else ("nccl", True)
    launches = "several at once" if fuses else "each by itself"
    said = f"the backend is called {name!r} and taken to launch {launches}; expected {expected[0]!r}"
    return [said] * ((name, fuses) != expected)


def run(setting: Setting) -> Found:
    """In a rehearsal gloo's group is given the name, and nothing is reduced."""
    complaints = []
    named = mock.patch.object(_torch, "backend_name", lambda group, device: "nccl2")
    with setting.group(), named if setting.is_rehearsal else nullcontext():
        name = _torch.backend_name(dist.group.WORLD, setting.device)
        model = sharded(stack(setting, WIDTH))
        groups = groups_of(model)
        for layer in (*model, model):
            layer.set_gradient_divide_factor(FACTOR)
        scaling = groups[0].reducer._scaling(torch.float32)
        if setting.ranks > 1 and scaling.scatter_op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            complaints.append(f"backend {name!r} is not known as NCCL: a divide factor takes kernels of its own")
        if not setting.is_rehearsal:
            complaints += unknown(name, groups[0].mesh.fuses)
            model(batch(setting, WIDTH, 0)).square().mean().backward()
            whole = [(param.path, param.unsharded) for group in groups for param in group.params]
            outlive = [path for path, unsharded in whole if unsharded is not None and unsharded.grad is not None]
            complaints += [f"{path}: the gradient of the whole parameter outlives the backward" for path in outlive]
    return {"backend": name, "fuses": groups[0].mesh.fuses, "torch": torch.__version__, COMPLAINTS: complaints}
