"""The flat parameters that torch's FSDP1 would have of a model that is wrapped, or sharded, here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.compat.fsdp1.layout import FlatLayout, FlatUnit, lay_out, units_of
from fsdp2.compat.fsdp1.names import WRAPPED, clean


def unit_of(wrapper: Any, *, use_orig_params: bool | None = None, world_size: int | None = None) -> FlatUnit | None:
    """The flat parameter of the wrapper's unit, by names below what is wrapped; None if it has no parameters.

    ``use_orig_params``, ``world_size``: others than the wrapper's.

    Raises:
        FSDPNotImplementedError: parameters are tensor parallel too.
        FSDPValueError: torch's FSDP1 has no flat parameter of such parameters.
    """
    module, below = wrapper._fsdp_wrapped_module, wrapper._wrappers_below()
    use_orig_params = wrapper._use_orig_params if use_orig_params is None else use_orig_params
    own = wrapper._fsdp1_own_parameters()
    # Ties: the first has them.
    taken = {parameter for each in below for parameter in each._fsdp1_own_parameters().values()}
    for name, parameter in own.items():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > wrapper._device_mesh.ndim:
            raise fsdp2.FSDPNotImplementedError(
                f"'{name}' is tensor parallel, and has no flat form (LOCAL_STATE_DICT): use SHARDED_STATE_DICT, whose "
                "tensors say how they are cut."
            )
    units = units_of(
        module,
        [module, *below],
        use_orig_params=use_orig_params,
        ignored={*module.parameters()} - {*own.values()} | taken,
        compute_dtype=wrapper.mixed_precision.param_dtype,
    )
    unit = next(each for each in units if not each.name)
    if not unit.parameters:
        return None
    ranks = world_size or wrapper.world_size
    ranks = ranks if wrapper._fsdp1_is_sharded else 1
    (found,) = lay_out([unit], use_orig_params=use_orig_params, world_size=ranks).units
    return found


def flat_layout(model: nn.Module, use_orig_params: bool | None = None, world_size: int | None = None) -> FlatLayout:
    """What lies where in the flat parameters that torch's FSDP1 has of ``model``. No communication.

    Args:
        model: in which wrappers are; or modules that `fully_shard` was called on, each of which is a unit then.
        use_orig_params: as torch's FSDP1 is given it; by default as the wrappers were.
        world_size: ranks that units are sharded over; by default as they are.

    Raises:
        FSDPValueError: nothing is sharded; or torch's FSDP1 has no flat parameter of such parameters.
        FSDPNotImplementedError: parameters are tensor parallel too.
    """
    units = list(wrappers_of(model))
    if not units:
        return _of_sharded_modules(model, bool(use_orig_params), world_size)
    orig = units[0][1]._use_orig_params if use_orig_params is None else use_orig_params
    found = []
    for name, wrapper in units:
        unit = unit_of(wrapper, use_orig_params=orig, world_size=world_size)
        if unit is not None:
            found.append(replace(unit, name=name))
    ranks = world_size or max(wrapper.world_size for _, wrapper in units)
    return FlatLayout(tuple(found), bool(orig), ranks)


def _of_sharded_modules(model: nn.Module, use_orig_params: bool, world_size: int | None) -> FlatLayout:
    units = [each for each in model.modules() if isinstance(each, fsdp2.FSDPModule)]
    sharded = [each for each in model.parameters() if isinstance(each, DTensor)]
    if not units or not sharded:
        raise fsdp2.FSDPValueError(
            f"nothing in this {type(model).__name__} is sharded, so it has no units: wrap it first; or, of a plain "
            "model, fsdp2.compat.fsdp1.layout.units_of() takes the modules that are to be units."
        )
    if any(each.device_mesh.ndim > 2 or (each.device_mesh.ndim == 2 and not _is_hybrid(each)) for each in sharded):
        raise fsdp2.FSDPNotImplementedError("parameters that are tensor parallel have no flat form.")
    ranks = world_size or max(each.device_mesh.size(-1) for each in sharded)
    ignored = {*model.parameters()} - {*sharded}
    entries = units_of(model, units, use_orig_params=use_orig_params, ignored=ignored)
    return lay_out(entries, use_orig_params=use_orig_params, world_size=ranks)


def _is_hybrid(parameter: DTensor) -> bool:
    return bool(parameter.placements[0].is_replicate())


def wrappers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The wrappers in ``model``, by their clean names."""
    for name, each in model.named_modules():
        if WRAPPED in each._modules and hasattr(type(each), "_fsdp1_own_parameters"):
            yield clean(f"{name}.").removesuffix("."), each
