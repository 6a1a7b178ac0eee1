"""What Python imports as it starts, where this folder is on its ``PYTHONPATH``: see `fsdp2.compat.switch`."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PUBLIC = "torch.distributed.fsdp"


def _load(spec: ModuleSpec | None) -> Any:
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _watch(torch: ModuleType) -> None:
    """torch was imported: install the swap as soon as what it replaces is, if ``FSDP2_COMPAT`` asks for it."""
    if not switch.switched_on():
        return
    if _PUBLIC in sys.modules:
        _install(sys.modules[_PUBLIC])
    else:
        switch.AfterImport([_PUBLIC], _install).start()


def _install(module: ModuleType) -> None:
    from fsdp2.compat.swap import put_in_place

    put_in_place(fsdp1=os.environ[switch.VARIABLE] != switch.KEEP_FSDP1)


if __name__ == "sitecustomize":
    # By its path, for `fsdp2` would import torch.
    switch = _load(spec_from_file_location("fsdp2.compat.switch", os.path.join(os.path.dirname(_HERE), "switch.py")))
    switch.AfterImport(["torch"], _watch).start()
    # The environment's own, which this one hides.
    _load(PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each) != _HERE]))
