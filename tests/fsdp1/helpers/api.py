"""What the installed torch offers as FSDP1, by introspection: names, arguments, fields, members.

``test_parity_page`` compares it with docs/parity-fsdp1.md. Torch's modules are imported when a function is called.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

_FSDP = "torch.distributed.fsdp"
_HOOKS = "torch.distributed.algorithms._comm_hooks"
OF_ENVIRONMENT = "FSDP_"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def public_names() -> dict[str, Any]:
    """What a program can import, by name: of the package what is FSDP1's, and of the modules beside it."""
    newer = set(_module(f"{_FSDP}._fully_shard").__all__)
    package = _module(_FSDP)
    found = {name: getattr(package, name) for name in package.__all__ if name not in newer}
    for module in (f"{_FSDP}.wrap", f"{_FSDP}._flat_param"):
        found |= {name: getattr(_module(module), name) for name in _module(module).__all__}
    found["ShardedGradScaler"] = _module(f"{_FSDP}.sharded_grad_scaler").ShardedGradScaler
    hooks = _module(f"{_HOOKS}.default_hooks")
    of_hooks = {
        name: value for name, value in vars(hooks).items() if getattr(value, "__module__", "") == hooks.__name__
    }
    found |= {name: value for name, value in of_hooks.items() if name[0] != "_"}
    found["LOW_PRECISION_HOOKS"] = _module(_HOOKS).LOW_PRECISION_HOOKS
    return found


def variables() -> list[str]:
    """Of the environment, which torch's reads."""
    values = vars(_module(f"{_FSDP}._flat_param")).values()
    return [value for value in values if isinstance(value, str) and value.startswith(OF_ENVIRONMENT)]


def attributes(instance: Any) -> list[str]:
    """Public ones of a wrapper, beside a module's."""
    return [name for name in vars(instance) if name[0] != "_" and name not in vars(type(instance).__mro__[1]())]


def arguments(function: Callable[..., Any]) -> list[str]:
    """Without ``self``, ``*args`` and ``**kwargs``."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind not in variadic]


OPERATORS = ("__getattr__", "__getitem__")


def _of_class(name: str, cls: Any) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield from (f"{name}.{member}" for member in cls.__members__)
        return
    if dataclasses.is_dataclass(cls):
        yield from (f"{name}({field.name})" for field in dataclasses.fields(cls))
        return
    if not issubclass(cls, tuple) and name not in ("FlatParameter", "FlatParamHandle"):  # which torch alone makes
        yield from (f"{name}({argument})" for argument in arguments(cls))
    if name in ("FlatParameter", "FlatParamHandle"):  # private, but for what its documents name
        return
    for method, value in vars(cls).items():
        if isinstance(value, property) and method[0] != "_":
            yield f"{name}.{method}"
        if method in OPERATORS or (method[0] != "_" and callable(getattr(cls, method))):
            yield f"{name}.{method}"
            if method not in OPERATORS:
                function = value.__func__ if isinstance(value, staticmethod) else value
                yield from (f"{name}.{method}({argument})" for argument in arguments(function))


def items() -> list[str]:
    """Everything there is to say something about: ``FullyShardedDataParallel(device_id)`` and so on."""
    found = []
    for name, value in public_names().items():
        found.append(name)
        if inspect.isclass(value):
            found += _of_class(name, value)
        elif callable(value):
            found += [f"{name}({argument})" for argument in arguments(value)]
    return [*found, *variables()]
