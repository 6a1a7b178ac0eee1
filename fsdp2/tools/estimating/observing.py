"""`Observer`: the dispatch mode that writes down what one simulated rank allocates and computes.

Which part of a program allocates is read off the Python stack, innermost frame first: the engine's files, or the
model's (torch's own modules, and the autograd engine, count as the model's).
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
from fsdp2.tools.estimating.clocks import Clocks
from fsdp2.tools.estimating.costs import Cost, Fusion, bytes_read, cost_of, seconds_of, written_by
from fsdp2.tools.estimating.hardware import Hardware
from fsdp2.tools.estimating.links import Kind
from fsdp2.tools.estimating.memory import MemoryLog, Phase, Use
from fsdp2.tools.estimating.workspaces import workspace_bytes

_ENGINE = str(Path(fsdp2.__file__).parent)
_TOOLS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_OF_MODELS = tuple(str(Path(_TORCH) / part) for part in ("nn", "autograd", "optim", "utils/checkpoint.py"))

_COLLECTIVES = {
    "_c10d_functional::all_gather_into_tensor": Kind.ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "_c10d_functional::all_reduce": Kind.ALL_REDUCE,
}

Exchanged = Callable[[Kind, int, Any], None]
"""Hears of a collective of tensor parallelism: which, bytes of the whole tensor, the name of its process group."""


class Observer(_torch.TorchDispatchMode):
    """Watches the operators of one thread while it is active (autograd's backward on the CPU included).

    Args:
        mode: of the tensors that are watched.
        log: hears of allocations.
        clocks: where operators take their time; None: time is not counted.
        hardware: how long they take.
        dtype: in which matrices are multiplied, if not in that of the tensors.
        fuses: whether a compiler makes one kernel of what is between two matrix products.

    Attributes:
        flops: of the operators so far, as they are computed.
        model_flops: the same, as they count for the utilization. Not what is computed once more in backward.
        recomputes: what is computed now is computed once more.
        exchanged: see `Exchanged`.
    """

    def __init__(
        self,
        mode: Any,
        log: MemoryLog,
        *,
        clocks: Clocks | None = None,
        hardware: Hardware | None = None,
        dtype: torch.dtype | None = None,
        fuses: bool = False,
    ) -> None:
        super().__init__()
        self._mode, self.log = mode, log
        self.flops = self.model_flops = 0.0
        self._flops_by_dtype: dict[torch.dtype, float] = {}
        self.recomputes = False
        self.exchanged: Exchanged = lambda kind, nbytes, group: None
        self._clocks, self._hardware, self._dtype = clocks, hardware, dtype
        self._fusion = Fusion() if fuses else None
        self._phase: Phase | None = None
        self._on_host = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be asked of every operator: nothing is compiled in a simulation."""
        return False

    @property
    def matmul_dtype(self) -> torch.dtype:
        """The dtype of most operations."""
        return max(self._flops_by_dtype, key=self._flops_by_dtype.__getitem__, default=torch.float32)

    @contextmanager
    def during(self, phase: Phase, *, on_host: bool = False) -> Iterator[None]:
        """``phase`` runs inside. ``on_host``: in host memory, at its speed (an optimizer of offloaded parameters)."""
        self._phase, self._on_host = phase, on_host
        self.log.begin(phase)
        yield
        self._end_chain()
        self.log.begin(None)
        self._phase, self._on_host = None, False

    def recomputing(self, compute: Callable[[], Any]) -> Any:
        """What a checkpointed block computes: in backward for the second time, which does not count as the model's."""
        before, self.recomputes = self.recomputes, self._phase is Phase.BACKWARD
        try:
            return compute()
        finally:
            self.recomputes = before

    def reset(self) -> None:
        """Count operations from now on."""
        self.flops = self.model_flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and write down what it allocates and how long it takes."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return _torch.property_without_memory(func, args)
        if not _torch.only_plain_or_fake(types):
            return NotImplemented  # a DTensor, or what wraps tensors: it runs operators on tensors inside
        result = func(*args, **kwargs)
        new = []
        for tensor in self._watched(result):
            storage = tensor.untyped_storage()
            if not self.log.is_known(storage):
                self.log.add(storage, self._use(), on_host=self._on_host)
                new.append(tensor)
        kind = None if self._phase is None else _COLLECTIVES.get(func._schema.name)
        if kind is not None:
            self._exchange(kind, args, new)
        elif self._phase is not None and self._clocks is None:
            nbytes = workspace_bytes(func, args, kwargs.get("out"))
            self.log.take(nbytes, self._use(), on_host=self._on_host)
        elif self._phase is not None:
            self._run(func, args, kwargs, result, new)
        return result

    def _watched(self, values: Any) -> list[torch.Tensor]:
        return [tensor for tensor in _tensors(values) if _torch.is_made_in(tensor, self._mode)]

    # -- what memory is for

    def _use(self) -> Use:
        if self._phase is None:
            return Use.INPUTS
        if _is_the_engines(sys._getframe(2)):
            return Use.COMMUNICATION
        return Use.OPTIMIZER if self._phase is Phase.OPTIMIZER else Use.ACTIVATIONS

    # -- how long it takes

    def _run(self, func: Any, args: Any, kwargs: Any, result: Any, new: list[torch.Tensor]) -> None:
        if func.namespace != "aten":
            return
        inputs = self._watched((*args, *kwargs.values()))
        written = written_by(func, args, kwargs, new)
        cost = cost_of(func, args, kwargs, result, inputs, written)
        if not cost.nbytes or not (inputs or new):
            return
        self.flops += cost.flops
        if cost.dtype is not None:
            self._flops_by_dtype[cost.dtype] = self._flops_by_dtype.get(cost.dtype, 0.0) + cost.flops
        if not self.recomputes:
            self.model_flops += cost.model_flops
        assert self._clocks is not None, "time is counted"
        if self._fusion is not None and self._clocks.current == 0 and not self._on_host:
            if cost.dtype is None:
                self._fusion.add(bytes_read(func, inputs, written), written, new)
                return
            self._end_chain()
        self._take_time(cost)

    def _take_time(self, cost: Cost) -> None:
        assert self._hardware is not None and self._clocks is not None
        if self._on_host:
            self._clocks.run(cost.nbytes / self._hardware.host_memory_bandwidth)
        else:
            self._clocks.run(seconds_of(cost, self._hardware, self._dtype, fuses=self._fusion is not None))

    def _end_chain(self) -> None:
        if self._fusion is not None and self._clocks is not None and self._hardware is not None:
            nbytes = self._fusion.end()
            self._clocks.run(seconds_of(Cost(0.0, 0.0, nbytes), self._hardware, None))

    def _exchange(self, kind: Kind, args: Any, new: list[torch.Tensor]) -> None:
        self._end_chain()
        whole = args[0] if kind is not Kind.ALL_GATHER else new[0] if new else None
        if whole is not None:
            self.exchanged(kind, whole.numel() * whole.element_size(), args[-1])


def _is_the_engines(frame: Any) -> bool:
    """Whether the innermost frame that is of the engine or of a model is the engine's."""
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
