"""What the installed torch offers around its own `fully_shard`, by introspection: names, methods, arguments.

`test_signatures` compares it with ours, `test_parity_table` with docs/parity.md. torch's modules are imported when a
function is called: fsdp2 itself never does.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_MESH_CLASSES = ("DataParallelMeshInfo", "FSDPMeshInfo", "DDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult")
USED_PRIVATE_METHODS = ("_apply", "_get_fsdp_state", "_set_unshard_async_op")
"""Of `FSDPModule`: private in torch, and called by its own pipelining, by nn.Module and by other people's programs."""


def public_names() -> dict[str, Any]:
    """What a program can import: ``__all__`` of torch's modules, the policies and collectives, the mesh classes.

    What a version does not have yet (2.11 knows no `DataParallelMeshDims`) is left out.
    """
    found: dict[str, Any] = {}
    for name in ("", "._fully_shard"):
        module = importlib.import_module(_PACKAGE + name)
        found |= {each: getattr(module, each) for each in module.__all__}
    api = importlib.import_module(f"{_PACKAGE}._fsdp_api")
    found |= {
        name: value
        for name, value in vars(api).items()
        if inspect.isclass(value) and value.__module__.startswith("torch.distributed.fsdp") and name[0] != "_"
    }
    common = importlib.import_module(f"{_PACKAGE}._fsdp_common")
    return found | {name: getattr(common, name) for name in _MESH_CLASSES if hasattr(common, name)}


def classes() -> dict[str, type]:
    """The classes among the public names."""
    return {name: value for name, value in public_names().items() if inspect.isclass(value)}


def functions() -> dict[str, Callable[..., Any]]:
    """The functions among the public names."""
    return {name: value for name, value in public_names().items() if not inspect.isclass(value)}


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The methods that ``cls`` itself defines and a program may call, by name."""
    return {
        name: value
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and (name[0] != "_" or name in (*USED_PRIVATE_METHODS, "__call__"))
    }


def properties(cls: type) -> list[str]:
    """The public properties that ``cls`` itself defines."""
    return [name for name, value in vars(cls).items() if isinstance(value, property) and name[0] != "_"]


def fields(cls: type) -> list[str]:
    """The arguments of the constructor that ``cls`` itself declares, as a dataclass does."""
    declared = inspect.get_annotations(cls)
    return [name for name in inspect.signature(cls).parameters if name in declared]


def arguments(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments, without ``self``, ``*args`` and ``**kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind not in variadic]


def items() -> list[str]:
    """Everything there is to say something about: ``fully_shard(mesh)``, ``FSDPModule.unshard``, and so on."""
    found = [f"{name}({argument})" for name, value in functions().items() for argument in arguments(value)]
    found += functions()
    for name, cls in classes().items():
        found += [name, *(f"{name}({field})" for field in fields(cls)), *(f"{name}.{each}" for each in properties(cls))]
        for method, function in methods(cls).items():
            found += [f"{name}.{method}", *(f"{name}.{method}({each})" for each in arguments(function))]
    return found


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def same_default(theirs: Any, ours: Any) -> bool:
    """Equal; of policies, field by field, as their classes differ."""
    if dataclasses.is_dataclass(theirs) and not isinstance(theirs, type):
        fields = [field.name for field in dataclasses.fields(theirs)]
        same_class = type(theirs).__name__ == type(ours).__name__
        return same_class and all(getattr(theirs, name) == getattr(ours, name) for name in fields)
    return theirs is ours or (type(theirs) is type(ours) and theirs == ours)


def assert_takes_the_same(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Whatever can be passed to ``theirs`` can be passed to ``ours``, and means the same argument."""
    expected = [each for each in inspect.signature(theirs).parameters.values() if each.kind not in VARIADIC]
    found = inspect.signature(ours).parameters
    for parameter in expected:
        assert parameter.name in found, f"no argument {parameter.name}"
        mine = found[parameter.name]
        assert mine.kind == parameter.kind, f"{parameter.name}: {mine.kind} instead of {parameter.kind}"
        assert same_default(parameter.default, mine.default), f"{parameter.name}: default {mine.default!r}"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = [each.name for each in expected if each.kind in positional]
    assert [each.name for each in found.values() if each.kind in positional][: len(order)] == order
    names = {each.name for each in expected}
    more = [each for each in found.values() if each.name not in names and each.kind not in VARIADIC]
    if len(expected) == len(inspect.signature(theirs).parameters):  # theirs names all that it takes
        assert [each.name for each in more if each.default is inspect.Parameter.empty] == []
