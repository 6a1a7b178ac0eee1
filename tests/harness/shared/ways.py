"""Ways of sharding a module, as arguments of `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy


def hybrid() -> dict[str, Any]:
    shape = (2, dist.get_world_size() // 2)
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))}


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "keep": lambda: {"reshard_after_forward": False},
    "hybrid": hybrid,
    "offloaded": lambda: {"offload_policy": CPUOffloadPolicy()},
}
