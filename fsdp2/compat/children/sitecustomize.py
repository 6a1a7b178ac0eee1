"""What Python imports as it starts, where this folder is on its ``PYTHONPATH``: see `fsdp2.compat.switch`."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load(spec: ModuleSpec) -> ModuleType:
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    assert spec.loader is not None, "of a file"
    spec.loader.exec_module(module)
    return module


if __name__ == "sitecustomize":
    switch = spec_from_file_location("fsdp2.compat.switch", os.path.join(os.path.dirname(_HERE), "switch.py"))
    assert switch is not None, "of a file"
    _load(switch).watch_torch()
    # The environment's own, which this one hides.
    hidden = PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each) != _HERE])
    if hidden is not None:
        _load(hidden)
