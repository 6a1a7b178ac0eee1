"""Steps whose communication takes any time, and whose freed memory holds garbage: losses are the same, bit by bit.

On CUDA, streams of communication sleep at random; on CPU, messages between ranks arrive late and in any order.
"""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from extras.gpu_check.programs.stacks import differing, plainly_trained, sharded, stack, train
from extras.gpu_check.runs import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from tests.harness.jitter import jittering, late_messages

STEPS = 6


def _late(setting: Setting, seed: int) -> AbstractContextManager[None]:
    return late_messages(seed) if setting.is_rehearsal else jittering(seed * setting.ranks + setting.rank)


def _slow_one_rank(setting: Setting, model: nn.Module, seed: int) -> None:
    """Let it sleep before one forward in six, and before one backward in six."""
    if setting.rank != seed % setting.ranks:
        return
    generator = random.Random(seed)

    def sleep(module: nn.Module, *given: object) -> None:
        if generator.random() < 1 / 6:
            time.sleep(setting.pick(0.2, 0.01))

    first, *others = model.children()
    first.register_forward_pre_hook(sleep)
    for layer in others:
        layer.register_forward_pre_hook(sleep)
        layer.register_full_backward_pre_hook(sleep)


def run(setting: Setting) -> Found:
    """Options: ``seeds``, of which each is a training; ``replicas``, of HSDP; ``slow``: one rank sleeps now and then;
    ``apart``: reduce-scatters have a process group of their own.
    """
    seeds = int(setting.options.get("seeds", "100"))
    replicas = int(setting.options.get("replicas", "0"))
    complaints = []
    with setting.group():
        mesh = None
        if replicas:
            shape = (replicas, setting.ranks // replicas)
            mesh = init_device_mesh(setting.device_type, shape, mesh_dim_names=("replicate", "shard"))
        for width in setting.pick((64, 1024), (16, 512)):
            plain = plainly_trained(setting, width, STEPS)
            expected = train(setting, sharded(stack(setting, width), mesh=mesh), width, STEPS)
            if said := differing(expected, plain, tolerance=1e-4):
                complaints.append(f"width {width}, without delays: {said}")
            for seed in range(setting.pick(seeds, 2)):
                with _late(setting, seed):
                    model = sharded(stack(setting, width), mesh=mesh)
                    if "apart" in setting.options:
                        model.set_separate_reduce_scatter_group(True)
                    if "slow" in setting.options:
                        _slow_one_rank(setting, model, seed)
                    found = train(setting, model, width, STEPS)
                if said := differing(found, expected):
                    complaints.append(f"width {width}, seed {seed}: {said}")
                    break
    return {"seeds": seeds, "torch": torch.__version__, COMPLAINTS: complaints}
