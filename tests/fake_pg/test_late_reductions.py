"""Reductions that stay in flight from one backward to the next forward: nothing takes the memory they end in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.harness import fake_world
from tests.harness.internals import gradient_buffers, groups_of


def layers(**options: Any) -> nn.Sequential:
    """Three groups, of which two may be reduced at a time."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.set_reduce_scatter_max_input_buffers(2)
    return model


@pytest.mark.parametrize("half", [False, True], ids=["full", "half"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_gradient_buffers_keep_their_memory_while_they_are_reduced_to(half: bool, replicas: int) -> None:
    """The next forward frees the buffers of gradients that were cleared, not of those that were not delivered yet."""
    with fake_world(4, 1):
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (4,)) if replicas == 1 else init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = layers(mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16 if half else None))
        for _ in range(2):
            model.set_is_last_backward(True)
            model(torch.ones(2, 8)).sum().backward()
            model.zero_grad()
            model.set_is_last_backward(False)
            model(torch.ones(2, 8)).sum().backward()
            waiting = [group for group in groups_of(model) if group.params[0].sharded.grad is None]
            model(torch.ones(2, 8))
            assert waiting
            if not half:  # else they go to their buffer when they are delivered only
                assert all(buffer.untyped_storage().nbytes() for group in waiting for buffer in gradient_buffers(group))
            model.set_is_last_backward(True)
            model(torch.ones(2, 8)).sum().backward()
            assert all(parameter.grad.to_local().untyped_storage().nbytes() for parameter in model.parameters())
            model.zero_grad()
