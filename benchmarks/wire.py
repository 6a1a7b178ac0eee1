"""A wire in one process: copies in the place of collectives, and a stream that is busy for as long as the bytes take.

A process is rank 0 of a fake group. In the place of torch.distributed's collectives, for torch and for fsdp2, this
rank's part is copied. Import fsdp2 before they are replaced: it remembers torch's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class Wire:
    """Keeps the current stream (on CPU: the host) busy for as long as bytes are under way; 0: they take no time."""

    def __init__(self, device: torch.device, bytes_per_second: float) -> None:
        self._is_host = device.type == "cpu"
        self._seconds_per_byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._cycles_per_second = 0.0 if self._is_host else _cycles_per_second()

    def send(self, nbytes: int) -> None:
        """Be busy for ``nbytes``."""
        seconds = nbytes * self._seconds_per_byte
        if not seconds:
            return
        if self._is_host:
            time.sleep(seconds)
        else:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))


def _cycles_per_second() -> float:
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return 1e3 * cycles / start.elapsed_time(end)


@contextmanager
def delayed_collectives(wire: Wire) -> Iterator[None]:
    """In the place of torch.distributed's, which torch and fsdp2 look up at each call: so both take their usual ways.

    Every rank has what this one has: of a gather that many copies, of a reduction this rank's part.
    """

    def gather(*tensors: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False, **named: torch.Tensor) -> None:
        output, input, *_ = [*tensors, *named.values()]
        world_size = group.size()
        output.view(world_size, -1).copy_(input.view(1, -1).expand(world_size, -1))
        wire.send(output.nbytes * (world_size - 1) // world_size)

    def reduce(
        *tensors: torch.Tensor, group: dist.ProcessGroup, op: Any = None, async_op: bool = False, **named: torch.Tensor
    ) -> None:
        output, input, *_ = [*tensors, *named.values()]
        output.copy_(input.view(-1)[: output.numel()])
        wire.send(input.nbytes * (group.size() - 1) // group.size())

    names = {"all_gather_single": gather, "all_gather_into_tensor": gather}
    names |= {"reduce_scatter_single": reduce, "reduce_scatter_tensor": reduce}
    with ExitStack() as stack:
        for name, function in names.items():
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, function))
        yield
