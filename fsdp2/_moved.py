"""Names that files of earlier versions have for what is elsewhere now: pickles name modules and classes.

A module of `MOVED` exists, empty, for whoever imports it by its former name; what is looked up in it comes from where
it is now. `torch.load(weights_only=True)` knows tensors by these names too. Programs import public names from `fsdp2`.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

MOVED = {
    "fsdp2.params.param": {"refuse_share_memory": "fsdp2.core.param"},
    "fsdp2.plan.ragged": {"RaggedDTensor": "fsdp2.ragged.dtensor", "RaggedShard": "fsdp2.ragged.placement"},
}
"""By former modules, what state dicts name in them, and where that is now."""


class _Former(types.ModuleType):
    """A module that was."""

    def __getattr__(self, name: str) -> Any:
        now = MOVED.get(self.__name__, {}).get(name)
        if now is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; import public names from fsdp2.")
        return getattr(importlib.import_module(now), name)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules that were."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Of former names only, and of the folders that they were in."""
        is_folder = any(former.startswith(f"{name}.") for former in MOVED)
        return ModuleSpec(name, self, is_package=is_folder) if is_folder or name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Empty."""
        return _Former(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def know_former_names() -> None:
    """Let pickles of earlier versions find what they name. Once, when the package is imported."""
    sys.meta_path.append(_Finder())
    for former, names in MOVED.items():
        for name, now in names.items():
            if importlib.util.find_spec(now) is None:  # a part that is not installed
                continue
            torch.serialization.add_safe_globals([(getattr(importlib.import_module(now), name), f"{former}.{name}")])
