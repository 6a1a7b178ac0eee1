"""`Observer`: the dispatch mode that records what one simulated rank allocates.

The Python stack tells which part of a program allocates: the first frame, from the innermost on, that is the engine's
or the model's. (torch's own modules, and the autograd engine, count as the model's.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fsdp2
from fsdp2 import _torch
from fsdp2.tools.estimating.memory import MemoryLog, Phase, Use
from fsdp2.tools.estimating.workspaces import workspace_bytes
from fsdp2.tools.facts.data import Kind

_ENGINE = str(Path(fsdp2.__file__).parent)
_TOOLS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_OF_MODELS = tuple(str(Path(_TORCH) / part) for part in ("nn", "autograd", "optim", "utils/checkpoint.py"))

_COLLECTIVES: dict[str, Kind] = {
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional::all_reduce": "all-reduce",
}

Exchanged = Callable[[Kind, int, Any], None]
"""A callback for collectives of tensor parallelism: kind, bytes of the full tensor, name of the process group."""


class Observer(_torch.TorchDispatchMode):
    """Sees the operators of one thread while it is active (autograd's backward on the CPU included).

    Args:
        mode: the fake tensor mode whose tensors are observed.
        log: where allocations are noted.
        exchanged: see `Exchanged`.
        counts_workspaces: whether operators need workspaces, as on a CPU.
    """

    def __init__(self, mode: Any, log: MemoryLog, exchanged: Exchanged, *, counts_workspaces: bool) -> None:
        super().__init__()
        self._mode, self.log, self._exchanged = mode, log, exchanged
        self._counts_workspaces = counts_workspaces
        self._phase: Phase | None = None
        self._on_host = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, as nothing is compiled in a simulation. torch would look for this at every operator."""
        return False

    @contextmanager
    def during(self, phase: Phase, *, on_host: bool = False) -> Iterator[None]:
        """Inside, ``phase`` runs. ``on_host``: in host memory (an optimizer of offloaded parameters)."""
        self._phase, self._on_host = phase, on_host
        self.log.begin(phase)
        yield
        self.log.begin(None)
        self._phase, self._on_host = None, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and note what it allocates."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return _torch.property_without_memory(func, args)
        if not _torch.only_plain_or_fake(types):
            return NotImplemented  # a DTensor or another wrapper, which runs operators on the tensors inside
        result = func(*args, **kwargs)
        new = []
        for tensor in _tensors(result):
            storage = tensor.untyped_storage() if _torch.is_made_in(tensor, self._mode) else None
            if storage is not None and not self.log.is_known(storage):
                self.log.add(storage, self._use(), on_host=self._on_host)
                new.append(tensor)
        if self._phase is None:
            return result
        kind = _COLLECTIVES.get(func._schema.name)
        if kind is not None:
            whole = args[0] if kind != "all-gather" else new[0] if new else None
            if whole is not None:
                self._exchanged(kind, whole.numel() * whole.element_size(), args[-1])
        elif self._counts_workspaces:
            nbytes = workspace_bytes(func, args, kwargs.get("out"))
            self.log.take(nbytes, self._use(), on_host=self._on_host)
        return result

    def _use(self) -> Use:
        if self._phase is None:
            return Use.INPUTS
        if _is_the_engines(sys._getframe(2)):
            return Use.COMMUNICATION
        return Use.OPTIMIZER if self._phase is Phase.OPTIMIZER else Use.ACTIVATIONS


def _is_the_engines(frame: Any) -> bool:
    """Whether the innermost frame that belongs to the engine or to a model is the engine's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TORCH):
            if name.startswith(_OF_MODELS):
                return False
        elif name != __file__:
            return name.startswith(_ENGINE) and not name.startswith(_TOOLS)
        frame = frame.f_back
    return False


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
