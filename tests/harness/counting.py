"""What a piece of code costs, in numbers that do not depend on load: collectives, calls of Python."""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts what goes to a process group, by the name of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func._schema.name.partition("::")[2].strip("_").removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


_NAMES = {"allgather_base": "all-gather", "reduce_scatter_base": "reduce-scatter", "allreduce": "all-reduce"}


class Traffic(TorchDispatchMode):
    """Counts what goes to process groups by kind, number of ranks (0 of an all-reduce), and bytes of one rank.

    Attributes:
        counts: by these three.
        sent_bytes: in messages to single ranks, which exchanges on gloo are made of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[tuple[str, int, int]] = collections.Counter()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].strip("_") if func.namespace == "c10d" else ""
        if name == "send":
            self.sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in args[0])
        elif name and name != "recv":
            kind = _NAMES[name]
            tensors = args[0] if kind == "all-reduce" else args[:2]
            sizes = sorted(tensor.numel() * tensor.element_size() for tensor in tensors)
            group = 0 if kind == "all-reduce" else sizes[1] // sizes[0]
            self.counts[kind, group, sizes[0]] += 1
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Counts operators that read or write memory, by name: not those that make views, nor those that allocate only."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._opname.startswith(("empty", "new_empty")):
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def python_calls(function: Callable[[], object]) -> int:
    """Calls of Python and C functions while ``function`` runs."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    function()
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


_COPIES = ("_chunk_cat", "_foreach_copy_", "_to_copy", "cat", "clone", "copy", "copy_", "split_with_sizes_copy")


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copies, concatenations and casts have written.

    Attributes:
        nbytes: of all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _COPIES:
            into = (kwargs or {}).get("out", args[0] if name.endswith("copy_") else result)
            self.nbytes += sum(each.nbytes for each in (into if isinstance(into, (list, tuple)) else [into]))
        return result
