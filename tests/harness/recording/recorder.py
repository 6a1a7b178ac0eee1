"""A device with streams that only records: whole training steps on CPU leave a trace for `happens_before`.

`RecordingDevice` stands in for the device that fsdp2 would use, `Recorder` (a dispatch mode) attributes every operation
and every collective to the stream that is current, with the memory it reads and writes. Everything is executed at once,
in the order of issue, on CPU; the trace says what the waits would guarantee on a device. Collectives are executed as if
all ranks held the same values, so that none of them is garbage. An asynchronous one runs on a stream of the process
groups, which its work waits for, as with NCCL.

All memory counts as the device's, but for what is allocated in `Recorder.on_host`, and what is computed from that alone
(an offloaded optimizer's state): the host computes there itself. A copy between both is the current stream's.

    with fake_world(4), recording() as recorder:
        model = ...
        train(model)
    assert not list(find_violations(recorder.trace))
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2._torch
import fsdp2.core.gather
import fsdp2.core.gradients
import fsdp2.core.state
import fsdp2.core.streams
import fsdp2.optim.offload
from fsdp2.core.gradients import PACKING
from fsdp2.plugs.memory.packing import chunks_on_device
from tests.harness.happens_before import (
    HOST,
    Access,
    Allocation,
    EventRecord,
    Mark,
    Operation,
    Release,
    StreamWait,
    TraceEvent,
)
from tests.harness.recording.memory import Block, MemoryMap

COMPUTE = 0
"""The stream that is current to begin with."""

_PACKAGE = str(Path(fsdp2.__file__).parent)
_SEAM = fsdp2.core.streams.__file__

# Positional arguments that these write are not read (those of ``out=`` never are).
_OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_"}
_OUTPUT_THEN_INPUT = {
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
}
_ALLOCATES_ONLY = ("empty", "new_empty")
_SYNCHRONIZING = {"_local_scalar_dense", "nonzero", "index", "index_put_", "masked_select", "equal"}
"""What makes the host wait for a device, or may: an index that is a list of Python's is copied there meanwhile."""
_COPIES = {"copy_", "_foreach_copy_", "_to_copy"}
_PLAIN = (Tensor, nn.Parameter)

LAUNCHED, WORKED, COPIED, BLOCKED = "launched", "work.wait", "copied while the host waits", "block_host"
"""Reasons of waits that are none of the engine's `Wait`: of the works' stream for the stream that launches a work; of
the current stream for a work; of the host in a copy that is not asynchronous; of the host where the engine says so."""


class RecordingDevice:
    """fsdp2's `Device` protocol; streams are numbers, and so are events."""

    has_streams = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def new_stream(self) -> int:
        """The next number."""
        return next(self._recorder.new_streams)

    def current_stream(self) -> int:
        """The stream that operations and allocations are attributed to."""
        return self._recorder.stream

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Attribute to ``stream`` what happens inside."""
        before, self._recorder.stream = self._recorder.stream, stream
        try:
            yield
        finally:
            self._recorder.stream = before

    def record(self, stream: int) -> int:
        """Record a fresh event."""
        event = next(self._recorder.new_events)
        self._recorder.trace.append(EventRecord(stream, event))
        return event

    def wait(self, stream: int, event: int, why: object) -> None:
        """Record a wait, and which functions of fsdp2 outside of `core.streams` led to it."""
        self._recorder.trace.append(StreamWait(stream, event, why, tuple(_sites())))

    def is_capturing(self) -> bool:
        """Whatever a test says."""
        return self._recorder.captures

    def block_host(self, event: int) -> None:
        """Record a wait of the host."""
        self._recorder.trace.append(StreamWait(HOST, event, BLOCKED, tuple(_sites())))


class RecordedWork:
    """What an asynchronous collective returns: to wait is the current stream's."""

    def __init__(self, recorder: Recorder, event: int) -> None:
        self._recorder = recorder
        self.event = event

    def wait(self) -> bool:
        """Record a wait."""
        self._recorder.trace.append(StreamWait(self._recorder.stream, self.event, WORKED, tuple(_sites())))
        return True


def _sites() -> Iterator[str]:
    """``file.function:line`` of the callers within fsdp2, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and code.co_filename != _SEAM:
            yield f"{Path(code.co_filename).stem}.{code.co_name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]


class Recorder(TorchDispatchMode):
    """Appends to ``trace`` what is done on this thread while it is active (autograd's CPU backward included).

    Attributes:
        names: what `name` has called storages.
        captures: pretend that a graph is being captured.
        synchronizing: operations of the engine that make the host wait for the device: name, and functions that led
            there, innermost first. (Where the engine says that the host waits, there is a `StreamWait` of `HOST`.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[TraceEvent] = []
        self.names: dict[int, str] = {}
        self.captures = False
        self.synchronizing: list[tuple[str, tuple[str, ...]]] = []
        self.stream = COMPUTE
        self.new_streams = count(COMPUTE + 1)
        self.new_events = count()
        self.works_stream = next(self.new_streams)
        self._memory = MemoryMap(lambda number: self.trace.append(Release(number)))
        self._allocates_on_host = False
        self._streams: dict[int, int] = {}  # on which storages were last allocated
        self._idle: dict[int, int] = {}  # address of memory in a pool: the stream that it belongs to
        self._host_storages: set[int] = set()

    # -- for tests

    def mark(self, name: str) -> None:
        """Leave a mark in the trace."""
        self.trace.append(Mark(name))

    def name(self, tensor: Tensor, name: str) -> None:
        """Give the storage whose memory ``tensor`` lies in a name, for all blocks it ever has: see `blocks_named`."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        block = self._memory.find(local.data_ptr())
        if block is not None:
            self.names[block.reference.cdata] = name

    def blocks_named(self) -> dict[int, str]:
        """The blocks of the storages that have names."""
        found = (event for event in self.trace if isinstance(event, Allocation) and event.storage in self.names)
        return {event.block: self.names[event.storage] for event in found}

    # -- memory

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """What is allocated inside is host memory."""
        before, self._allocates_on_host = self._allocates_on_host, True
        yield
        self._allocates_on_host = before

    def _allocated(self, storage: torch.UntypedStorage, *, written: bool, on_host: bool = False) -> Block:
        block = self._memory.add(storage)
        cdata = block.reference.cdata
        if on_host or self._allocates_on_host:
            self._host_storages.add(cdata)
        stream = HOST if cdata in self._host_storages else self.stream
        self.trace.append(Allocation(block.number, stream, block.nbytes, cdata, written))
        self._streams[cdata] = stream
        self._idle.pop(block.address, None)
        return block

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor``, if it has any, is the host's."""
        block = self._memory.find(tensor.data_ptr())
        return block is not None and block.reference.cdata in self._host_storages

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` was resized: freed, or given fresh memory."""
        self._memory.collect()
        self._memory.remove(storage)
        if storage.nbytes():
            self._allocated(storage, written=False)

    def swapped(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """A pool gave memory to ``one``, as if it were fresh; or took that of ``other``, as if it were freed."""
        self._memory.collect()
        if self._memory.remove(other):
            self._idle[one.data_ptr()] = self._streams[other._cdata]
        else:
            stream = self._idle.get(one.data_ptr(), self.stream)
            assert stream == self.stream, "memory of a pool is used on one stream"
            self._allocated(one, written=False)

    def _is_new(self, tensor: Tensor) -> bool:
        return _has_memory(tensor) and self._memory.find(tensor.data_ptr()) is None

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and record it unless it only makes views or fake tensors."""
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # sharding propagation
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor: it runs operations on its local tensor
        self._memory.collect()
        reads, writes = _operands(func, args, kwargs)
        inputs = [tensor for tensor in reads + writes if _has_memory(tensor)]
        for tensor in inputs:
            if self._is_new(tensor):
                self._allocated(tensor.untyped_storage(), written=True)
        places = list(map(self.is_on_host, inputs))
        on_host = all(places) if places else self._allocates_on_host
        assert len(set(places)) < 2 or func._opname in _COPIES, f"{func} on tensors of the host and of the device"
        if func._opname in _SYNCHRONIZING and not on_host:
            self.synchronizes(func._opname)
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            _exchange(func, args)
        outputs = [tensor for tensor in _tensors(result) if self._is_new(tensor)]
        for tensor in outputs:
            if self._is_new(tensor):  # not twice
                self._allocated(tensor.untyped_storage(), written=False, on_host=on_host)
        if outputs or writes or not list(_tensors(result)):
            self._launched(HOST if on_host else self.stream, func, reads, writes + outputs)
        if len(set(places)) == 2 and not _is_asynchronous(func, args, kwargs):
            self.wait(HOST, self.stream, COPIED)
            self.synchronizes(COPIED)
        return result

    def synchronizes(self, name: str) -> None:
        """The host waits for the device, in an operation ``name``."""
        sites = tuple(_sites())
        if sites:
            self.synchronizing.append((name, sites))

    def wait(self, stream: int, other: int, why: object) -> None:
        """Let ``stream`` wait for the present end of ``other``."""
        event = next(self.new_events)
        self.trace += [EventRecord(other, event), StreamWait(stream, event, why, tuple(_sites()))]

    @contextlib.contextmanager
    def asynchronously(self) -> Iterator[RecordedWork]:
        """What is issued inside runs on the stream of the process groups; gives the work that stands for it."""
        issuing, work = self.stream, RecordedWork(self, next(self.new_events))
        self.wait(self.works_stream, issuing, LAUNCHED)
        self.stream = self.works_stream
        try:
            yield work
        finally:
            self.stream = issuing
            self.trace.append(EventRecord(self.works_stream, work.event))

    def _launched(self, stream: int, func: Any, reads: list[Tensor], writes: list[Tensor]) -> None:
        if torch.Tag.inplace_view in func.tags or func._opname.startswith(_ALLOCATES_ONLY):
            return
        ranges: dict[tuple[int, int, int], list[bool]] = {}
        for role, tensors in enumerate((reads, writes)):
            for tensor in filter(_has_memory, tensors):
                ranges.setdefault(self._memory.range_of(tensor), [False, False])[role] = True
        if ranges:
            accesses = tuple(Access(*where, *roles) for where, roles in ranges.items())
            self.trace.append(Operation(stream, f"{func.namespace}.{func._opname}", accesses))


def _has_memory(tensor: Tensor) -> bool:
    """Whether there is anything to access. Views of freed memory may be made, but not used."""
    plain = type(tensor) in _PLAIN and tensor.device.type == "cpu"
    return plain and tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0


def _is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a copy lets the host go on."""
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking", False))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


@cache
def _roles(func: Any) -> tuple[tuple[int | None, str, bool, bool], ...]:
    """Per argument of ``func`` that may hold tensors: position, name, whether it is read, whether it is written."""
    roles = []
    for index, argument in enumerate(func._schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (writes and (argument.kwarg_only or func._opname in _OVERWRITES))
        if func.namespace == "c10d":
            known = func._opname in _OUTPUT_THEN_INPUT
            reads, writes = (index == 1, index == 0) if known else (True, True)
        roles.append((None if argument.kwarg_only else index, argument.name, reads, writes))
    return tuple(roles)


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that ``func`` reads, and those it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, name, is_read, is_written in _roles(func):
        value = args[index] if index is not None and index < len(args) else kwargs.get(name)
        tensors = list(_tensors(value))
        reads += tensors if is_read else []
        writes += tensors if is_written else []
    return reads, writes


def _exchange(func: Any, args: Any) -> None:
    """Do what a collective of the `fake` process group does not, as if all ranks held what this one does."""
    if func._opname not in _OUTPUT_THEN_INPUT:
        return
    for output, sent in zip(_tensors(args[0]), _tensors(args[1]), strict=True):
        if output.numel() >= sent.numel():
            output.view(-1, sent.numel()).copy_(sent.clone().view(1, -1))  # which may lie in the output
        else:
            output.copy_(sent.view(-1, output.numel())[dist.get_rank()])


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record what this thread does; roots that are initialized inside take a `RecordingDevice` for their device."""
    recorder = Recorder()
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = resize(storage, nbytes)
        recorder.resized(storage)
        return result

    swap = fsdp2._torch.swap_memory

    def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        swap(one, other)
        recorder.swapped(one, other)

    host_copy = fsdp2.core.gradients.host_copy

    def copied_to_host(tensor: Tensor) -> Tensor:
        with recorder.on_host():
            return host_copy(tensor)

    tolist = Tensor.tolist

    def listed(tensor: Tensor) -> Any:
        if _has_memory(tensor) and not recorder.is_on_host(tensor):
            recorder.synchronizes("tolist")  # which no dispatch mode sees
        return tolist(tensor)

    gather, scatter = fsdp2._torch.all_gather_single, fsdp2._torch.reduce_scatter_single
    with (
        mock.patch.object(fsdp2.core.state, "device_for", lambda device: RecordingDevice(recorder)),
        mock.patch.object(fsdp2.optim.offload, "device_for", lambda device: RecordingDevice(recorder)),
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        mock.patch.object(fsdp2.core.gradients, "host_copy", copied_to_host),
        mock.patch.object(Tensor, "tolist", listed),
        mock.patch.object(fsdp2.core.gather, "copies_columns", lambda device: True),
        mock.patch.object(PACKING, "filling", lambda *layout: chunks_on_device),
        mock.patch.object(fsdp2._torch, "swap_memory", swap_memory),
        mock.patch.object(fsdp2._torch, "all_gather_single", with_recorded_works(recorder, gather)),
        mock.patch.object(fsdp2._torch, "reduce_scatter_single", with_recorded_works(recorder, scatter)),
        recorder,
    ):
        yield recorder


def with_recorded_works(recorder: Recorder, issue: Callable[..., Any]) -> Callable[..., Any]:
    """``issue``, a collective whose last argument says whether it is asynchronous."""

    def issued(*args: Any) -> RecordedWork | None:
        *others, is_asynchronous = args
        if not is_asynchronous:
            issue(*others, False)
            return None
        with recorder.asynchronously() as work:
            issue(*others, False)
        return work

    return issued
