"""Which of torch's objects fsdp2 has a counterpart for, and which loaded modules may hold them.

Knows the layout of ``torch.distributed.fsdp`` (2.11 to 2.15); changes nothing.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import fsdp2
from fsdp2.compat import bridges

PUBLIC = "torch.distributed.fsdp"
IMPLEMENTATION = f"{PUBLIC}._fully_shard"
HOME = f"{IMPLEMENTATION}._fully_shard"
STATES = f"{IMPLEMENTATION}._fsdp_state"
"""Of its implementation, where programs look up the state of a module."""
# Where torch defines what its packages re-export. Torch's own objects are found here at any time.
_DEFINED_IN = (f"{IMPLEMENTATION}._fsdp_api", f"{IMPLEMENTATION}._fsdp_common", HOME)
# It derives from torch's `FSDPModule` and `FSDPState`, and must go on doing so.
_REPLICATE = "torch.distributed._composable.replicate_with_fsdp"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """An object of torch, and what stands in its place."""

    name: str
    torchs: object
    ours: object


def counterparts() -> tuple[Counterpart, ...]:
    """Everything public in fsdp2 that torch's implementation has under the same name, as of now."""
    pairs = (Counterpart(name, torchs_own(name), getattr(fsdp2, name)) for name in fsdp2.__all__)
    return tuple(pair for pair in pairs if pair.torchs is not None and pair.torchs is not pair.ours)


CLIPPING = ("torch.nn.utils.clip_grad", "torch.nn.utils")
"""Where gradients are clipped. Who holds torch's functions already calls, by them, what is replaced there."""


def counterparts_of_clipping() -> tuple[Counterpart, ...]:
    """Torch's functions that clip gradients, and ours with the same bits."""
    pairs = fsdp2.optim.torch_clipping.substitutes().items()
    return tuple(Counterpart(torchs.__name__, torchs, ours) for torchs, ours in pairs)


# Torch's FSDP1, where each name is defined; a torch that has dropped it has none of these modules.
WRAPPER = f"{PUBLIC}.fully_sharded_data_parallel"
FLAT_PARAM = f"{PUBLIC}._flat_param"
_FSDP1 = {
    "FullyShardedDataParallel": WRAPPER,
    "ShardedGradScaler": f"{PUBLIC}.sharded_grad_scaler",
    "FlatParameter": FLAT_PARAM,
    "FlatParamHandle": FLAT_PARAM,
    "FlatParamShardMetadata": FLAT_PARAM,
    "ParamInfo": FLAT_PARAM,
    "SharedParamInfo": FLAT_PARAM,
    "_get_module_fsdp_state_if_fully_sharded_module": f"{PUBLIC}._common_utils",
    "_lazy_init": f"{PUBLIC}._runtime_utils",
}


def counterparts_of_fsdp1() -> tuple[Counterpart, ...]:
    """What stands for torch's FSDP1, as of now. (Enums and configurations are torch's own objects here too.)"""
    ours = importlib.import_module("fsdp2.compat.fsdp1")
    wrapper: type = ours.FullyShardedDataParallel
    bridged: dict[str, Callable[[Any, Any], object]] = {
        "_get_module_fsdp_state_if_fully_sharded_module": bridges.state_of_wrapper,
        "_lazy_init": bridges.initialized_lazily,
    }
    pairs = []
    for name, module in _FSDP1.items():
        found = vars(importlib.import_module(module)).get(name) if importlib.util.find_spec(module) else None
        is_torchs = getattr(found, "__module__", "").startswith(PUBLIC) and not hasattr(found, "__wrapped__")
        if found is not None and is_torchs:
            own = bridged[name](found, wrapper) if name in bridged else getattr(ours, name)
            pairs.append(Counterpart(name, found, own))
    return tuple(pairs)


def wrapped_by_torchs_fsdp1() -> list[str]:
    """The names of classes of which torch's own FSDP1 has wrapped modules that are alive."""
    found = vars(importlib.import_module(WRAPPER)) if importlib.util.find_spec(WRAPPER) else {}
    wrapper = found.get("FullyShardedDataParallel")
    if wrapper is None or not wrapper.__module__.startswith(PUBLIC):
        return []
    if _instances(wrapper):
        gc.collect()  # those that nothing holds but cycles of their own, as a module's hooks make them
    return sorted({type(each.module).__name__ for each in _instances(wrapper)})


def _instances(cls: type) -> list[Any]:
    classes = [cls]
    for each in classes:  # those that are added too
        classes += each.__subclasses__()
    return [each for each in gc.get_referrers(*classes) if type(each) in classes]


def torchs_own(name: str) -> object | None:
    """What torch's implementation of ``fully_shard`` defines as ``name``, whether or not it is replaced elsewhere."""
    for module in _DEFINED_IN:
        found: object = vars(importlib.import_module(module)).get(name)
        if found is not None and getattr(found, "__module__", "").startswith(PUBLIC):
            return found
    return None


def without_counterpart() -> tuple[str, ...]:
    """Torch's public names that fsdp2 lacks."""
    public: list[str] = importlib.import_module(IMPLEMENTATION).__all__
    return tuple(name for name in public if name not in fsdp2.__all__)


def modules_of_torch() -> Iterator[ModuleType]:
    """The loaded modules of torch in which names may be replaced: all but those that make up its implementation."""
    for name, module in _loaded():
        implements = name.startswith(f"{IMPLEMENTATION}._") or name == _REPLICATE
        if name.partition(".")[0] == "torch" and (not implements or name in (HOME, STATES)):
            yield module


def modules_with_bridges() -> Iterator[ModuleType]:
    """The loaded modules of others in which `bridges` replaces a name of their own."""
    return (module for name, module in _loaded() if name in (*bridges.LIGHTNING, *bridges.TRANSFORMERS))


def modules_of_others() -> Iterator[ModuleType]:
    """The loaded modules of everyone but torch and fsdp2."""
    for name, module in _loaded():
        if name.partition(".")[0] not in ("torch", "fsdp2"):
            yield module


def _loaded() -> list[tuple[str, ModuleType]]:
    return [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
