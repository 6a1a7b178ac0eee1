"""Models and batches on a command line: ``package.module:function``, ``path.py:function``, ``8x2048:int64``."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fsdp2.arguments import nearest
from fsdp2.errors import FSDPTypeError, FSDPValueError

TARGET = "MODULE:FUNCTION"
TARGET_HELP = "makes the model: package.module:function, or path/to/file.py:function, called without arguments"
BATCH_HELP = (
    "what all ranks together train on in a step: shapes and dtypes of the arguments of the model, 64x2048:int64 "
    "(several with commas; float32 where no dtype is said), or MODULE:FUNCTION, which makes it"
)


def look_up(name: str) -> Callable[..., Any]:
    """The function with this ``name``.

    Raises:
        FSDPValueError: ``name`` has another form, or there is no such function; the message says the nearest name.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise FSDPValueError(f"'{name}' names no function: write package.module:function, or path/to/file.py:function.")
    module = _file(where) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FSDPValueError(f"there is no '{part}' in {where}.{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise FSDPTypeError(f"'{name}' is a {type(found).__name__}, and a function is needed.")
    return found  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # like `python -m`: a console script does not look in the current folder
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        hint = " For a file write its path, with .py." if error.name == package else ""
        raise FSDPValueError(f"the module '{name}' cannot be imported: {error}.{hint}") from error


def _file(path: str) -> ModuleType:
    source = Path(path)
    if not source.is_file():
        raise FSDPValueError(f"there is no file {path}.")
    name = f"_fsdp2_target_{source.stem}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickles and `typing` look up its classes there
    folder = str(source.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # like Python for a program: it may import files beside it
    spec.loader.exec_module(module)
    return module


def make_model(name: str) -> nn.Module:
    """The model that the function with this ``name`` makes.

    Raises:
        FSDPValueError: there is no such function.
        FSDPTypeError: it returns no module.
    """
    model = look_up(name)()
    if not isinstance(model, nn.Module):
        raise FSDPTypeError(f"{name} returned a {type(model).__name__}, and a module is needed.")
    return model


_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


def make_batch(text: str, device: str) -> Any:
    """A batch: tensors of zeros with these shapes and dtypes, or what a function returns.

    Raises:
        FSDPValueError: ``text`` is neither.
    """
    parts = [_SHAPE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(parts):
        if ":" not in text:
            raise FSDPValueError(f"'{text}' is no batch: write a shape and a dtype, 64x2048:int64, or a function.")
        with torch.device(device):
            return look_up(text)()
    return tuple(_tensor(each[1], each[2] or "float32", device) for each in parts if each)


def _tensor(shape: str, dtype: str, device: str) -> torch.Tensor:
    if dtype not in _DTYPES:  # (torch has names of more dtypes, of which it makes no tensors)
        raise FSDPValueError(
            f"a batch has no dtype '{dtype}'; there are {', '.join(_DTYPES)}.{nearest(dtype, _DTYPES)} For another, "
            "let a function make the batch."
        )
    return torch.zeros([int(size) for size in shape.split("x")], dtype=getattr(torch, dtype), device=device)


def mesh_shape_of(text: str) -> tuple[int, ...]:
    """The sizes of mesh dims: ``8`` or ``4x8``.

    Raises:
        FSDPValueError: ``text`` has another form.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise FSDPValueError(f"a mesh is a number of ranks, 8, or sizes of its dims, 4x8, got '{text}'.")
    return tuple(int(size) for size in text.split("x"))


def ranks_of(shape: tuple[int, ...]) -> int:
    """How many ranks a mesh has."""
    ranks = 1
    for size in shape:
        ranks *= size
    return ranks
