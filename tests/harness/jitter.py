"""Communication that takes its time, and memory that holds garbage: a missing wait shows as a wrong number.

`late_messages` is for CPU: every message between ranks is sent by another thread, after a while, in any order; what is
received into holds garbage until it has arrived. `jittering` is for devices with streams: the streams of communication
sleep at random before what is issued to them. Both fill memory with garbage before it is freed, and after it is given.

What the race checker proves of a recorded step (`happens_before`) this shows on the real thing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fsdp2.core.state
from fsdp2 import _torch
from fsdp2.core.buffers import ALLOCATOR, Arena, Resizable
from fsdp2.core.streams import Device, device_for
from fsdp2.plugs.transports import gloo_p2p
from fsdp2.plugs.transports.gloo_p2p import Exchange, _peers

LONGEST_SECONDS = 0.004
"""A message waits for up to this long: longer than a small block computes."""

LONGEST_CYCLES = 2_000_000
"""The same of a device's stream: about a millisecond."""


def fill_with_garbage(tensor: torch.Tensor) -> None:
    """NaN, or bytes that are NaN in every floating-point dtype."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.view(torch.uint8).fill_(0xFF)


@contextmanager
def garbage_in_memory(*, frees: bool = True) -> Iterator[None]:
    """What the engine frees holds garbage from then on, if anybody still looks; so does what it is given.

    Not ``frees``: only what it is given. A stream that frees memory of another has told it before when it has read,
    and would fill it later than that.
    """
    allocate, free = Resizable.allocate, Resizable.free

    def allocated(self: Resizable, arena: Arena = ALLOCATOR) -> None:
        had_memory = self.has_memory
        allocate(self, arena)
        if not had_memory:
            fill_with_garbage(self.flat)

    def freed(self: Resizable) -> None:
        if frees and self.has_memory:
            fill_with_garbage(self.flat)
        free(self)

    with mock.patch.object(Resizable, "allocate", allocated), mock.patch.object(Resizable, "free", freed):
        yield


class _LateWork:
    """A message that another thread sends after a while."""

    def __init__(self, seconds: float, part: torch.Tensor, target: int, group: dist.ProcessGroup, tag: int) -> None:
        self._thread = threading.Thread(target=self._send, args=(seconds, part, target, group, tag))
        self._work: Any = None
        self._failure: BaseException | None = None
        self._thread.start()

    def _send(self, seconds: float, *message: Any) -> None:
        time.sleep(seconds)
        try:
            self._work = _torch.send(*message)
        except BaseException as failure:  # raised by `wait`
            self._failure = failure

    def wait(self) -> bool:
        """Block until it was sent."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._work.wait()
        return True


@contextmanager
def late_messages(seed: int) -> Iterator[None]:
    """On gloo, between few ranks. What happens inside must have ended when it is left."""
    generator = random.Random(seed * 1000 + dist.get_rank())

    def launch(self: Exchange, arriving: Sequence[torch.Tensor], leaving: Sequence[torch.Tensor]) -> None:
        for source in _peers(self.group)[0]:
            fill_with_garbage(arriving[source])
        launched(self, arriving, leaving)

    def send(self: dist.ProcessGroup, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        seconds = generator.choice([0.0, generator.uniform(0, LONGEST_SECONDS)])
        return _LateWork(seconds, tensors[0], target, self, tag)

    launched = Exchange.launch
    with (
        mock.patch.object(Exchange, "launch", launch),
        mock.patch.object(gloo_p2p, "_send", send),
        garbage_in_memory(),
    ):
        yield


class JitteringDevice:
    """A `Device` as the engine knows it: ``device``, whose streams of communication sleep before what they are given.

    Attributes:
        dropped: reasons for which no stream waits: faults that are to be found.
    """

    has_streams = True

    def __init__(self, device: Device, generator: random.Random, dropped: frozenset[object] = frozenset()) -> None:
        self._device = device
        self._generator = generator
        self._side: list[Any] = []
        self.dropped = dropped

    def new_stream(self) -> Any:
        """One that will sleep."""
        self._side.append(self._device.new_stream())
        return self._side[-1]

    def current_stream(self) -> Any:
        """As it is."""
        return self._device.current_stream()

    @contextmanager
    def use(self, stream: Any) -> Iterator[Any]:
        """Switch to ``stream``, and let it sleep if it is one of communication."""
        with self._device.use(stream) as entered:
            if any(stream is each for each in self._side):
                torch.cuda._sleep(self._generator.randrange(LONGEST_CYCLES))
            yield entered

    def record(self, stream: Any) -> Any:
        """As it is."""
        return self._device.record(stream)

    def wait(self, stream: Any, event: Any, why: Any) -> None:
        """As it is, unless that is the fault."""
        if why not in self.dropped:
            self._device.wait(stream, event, why)

    def block_host(self, event: Any) -> None:
        """As it is."""
        self._device.block_host(event)

    def is_capturing(self) -> bool:
        """As it is."""
        return self._device.is_capturing()


@contextmanager
def jittering(seed: int, dropped: frozenset[object] = frozenset()) -> Iterator[None]:
    """Roots that are made inside have a `JitteringDevice`. On CUDA."""
    generator = random.Random(seed)

    def device_of(device: torch.device) -> Device:
        return JitteringDevice(device_for(device), generator, dropped)

    patched: AbstractContextManager[Any] = mock.patch.object(fsdp2.core.state, "device_for", device_of)
    with patched, garbage_in_memory(frees=False):
        yield
