"""Sharded modules that are pickled in one job and unpickled in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import FSDPRuntimeError, fully_shard
from tests.harness.models import TRANSFORMER
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import goes_on_like

MESHES: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "hsdp": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_pickle_trains_on_in_another_job(mesh: str, tmp_path: Path, pools: Any) -> None:
    """Saved by one job of four ranks after training, and trained on by another that has made no mesh."""
    pool = pools[4]
    pool.run_job(_save, (mesh, tmp_path), {})
    pool.run_job(_go_on, (tmp_path,), {})


def _save(mesh: str, folder: Path) -> None:
    model = TRANSFORMER.build()
    for unit in TRANSFORMER.units(model):
        fully_shard(unit, mesh=MESHES[mesh]())
    optimizer = adamw(list(model.parameters()))
    reference = Reference(TRANSFORMER, world_size=4)
    goes_on_like(reference, model, optimizer, steps=2, world_size=4)
    torch.save((model, optimizer), folder / f"{dist.get_rank()}.pt")


def _go_on(folder: Path) -> None:
    with pytest.raises(FSDPRuntimeError, match="every rank has shards of its own"):
        torch.load(folder / f"{(dist.get_rank() + 1) % 4}.pt", weights_only=False)
    model, optimizer = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
    reference = Reference(TRANSFORMER, world_size=4)
    reference.run(2)
    goes_on_like(reference, model, optimizer, steps=2, world_size=4)


def test_without_process_groups(tmp_path: Path, pools: Any) -> None:
    pools[2].run_job(_save_small, (tmp_path,), {})
    with pytest.raises(FSDPRuntimeError, match="init_process_group"):
        torch.load(tmp_path / "0.pt", weights_only=False)


def _save_small(folder: Path) -> None:
    torch.save(fully_shard(nn.Linear(3, 4)), folder / f"{dist.get_rank()}.pt")
