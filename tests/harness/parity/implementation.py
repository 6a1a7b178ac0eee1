"""The implementation that the tests of `tests/parity` run against: fsdp2, or torch's own `fully_shard` as their check.

``FSDP2_PARITY=torch python -m pytest tests/parity`` runs the same programs on torch: a test that fails there is wrong
about what torch documents, or says so with one of the marks below. (``FSDP2_PARITY_UNSKIP=1`` runs those too, to see
what torch does.) The ranks are forked by pytest and inherit the variables.

Names are looked up when they are used, so that a missing one fails its own tests only.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

_TORCH_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api",
    "torch.distributed.fsdp._fully_shard._fsdp_common",
)
_MODULES = {"fsdp2": ("fsdp2",), "torch": _TORCH_MODULES}
Mark = Callable[[Any], Any]


class Implementation:
    """The public names of one implementation, as attributes: ``API.fully_shard``."""

    def __init__(self, name: str) -> None:
        if name not in _MODULES:
            raise ValueError(f"FSDP2_PARITY must be one of {', '.join(_MODULES)}, got {name!r}")
        self.name = name

    def __getattr__(self, name: str) -> Any:
        for module_name in _MODULES[self.name]:
            module = importlib.import_module(module_name)
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"{self.name} has no {name}")


API = Implementation(os.environ.get("FSDP2_PARITY", "fsdp2"))
IS_TORCH = API.name == "torch"
_SKIPS = IS_TORCH and "FSDP2_PARITY_UNSKIP" not in os.environ
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def beyond_torch(reason: str) -> Mark:
    """What we promise and torch does not do, on any version so far: skipped on torch."""
    return pytest.mark.skipif(_SKIPS, reason=f"beyond torch: {reason}")


def torch_from(version: tuple[int, int], reason: str) -> Mark:
    """What torch does from ``version`` on, and we do on every version: skipped on an older torch."""
    return pytest.mark.skipif(_SKIPS and version > TORCH_VERSION, reason=f"torch {version[0]}.{version[1]}: {reason}")


def installed_from(version: tuple[int, int], reason: str) -> Mark:
    """What needs something of torch beside `fully_shard`, from ``version`` on: skipped for both on an older one."""
    return pytest.mark.skipif(version > TORCH_VERSION, reason=f"needs torch {version[0]}.{version[1]}: {reason}")
