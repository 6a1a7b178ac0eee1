"""The world of the tests on one GPU: without communication, and with NCCL's, which one rank can have with itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp2.core.transport import NATIVE, VARIABLE


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    """Products are compared with those of other kernels: to fp32's precision, not to TF32's ten bits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        yield
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=["alone", NATIVE])
def world_of_one(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank, which copies; or which has collectives of NCCL with itself."""
    if request.param == NATIVE:
        monkeypatch.setenv(VARIABLE, NATIVE)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
