"""What one contender does in a step, in processes of its own: its losses, its memory, and what no load changes.

* Losses of the first steps are averaged over the ranks, and held against one process that trains on all batches.
* Peaks are those of the allocator (`benchmarks.peers.allocator`) in warm steps, beyond what was there before the model
  was built: all that the contender holds, buffers of compiled code and of gloo included.
* Bytes sent are those that the kernel counted on this process's TCP connections, whoever wrote them.
* Copies and operations are those of `benchmarks.counts`, which nothing compiled runs under; calls are Python functions
  and built-in ones. The copy of a rank's own part to its place in what an all-gather delivers is no copy outside of
  collectives: gloo's all-gather makes it inside of itself, that of fsdp2, which is made of messages, where it is seen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.copies import tensors_in
from benchmarks.counts import OperationCounter, OperationCounts, PythonCallCounter
from benchmarks.host_time import garbage_collector_off
from benchmarks.implementations import AGAIN, DDP, UNSHARDED, NameParts, ShardingOptions, base_of
from benchmarks.models import ModelSpec, build_model
from benchmarks.peers.allocator import PeakOfAllocator, bytes_in_use, count_large_blocks
from benchmarks.ranks import on_ranks
from benchmarks.training import Step, adamw, batch_of, training_step

CHECKED_STEPS = 3
TOLERANCE = 1e-5
"""Relative, of a loss in fp32: sums of 65,536 values in another order."""
MEMORY_STEPS = 3
SENDING_STEPS = 3
ACKNOWLEDGED = 120
"""Where the kernel's `struct tcp_info` has `tcpi_bytes_acked`, 8 bytes: sent, and arrived."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Of the rank that has most of it.

    Attributes:
        losses: of the first steps, the average of all ranks; they are the same on each.
        peak_bytes: that the contender holds at most during a step.
        computing_peak_bytes: the same until the optimizer steps.
        copied_bytes: copied outside of collectives in a step, by operations that torch dispatches; None: not seen.
        sent_bytes: sent in a step.
        calls: of Python functions and built-in ones in a step.
        operations: dispatched in a step; None: not seen.
    """

    losses: tuple[float, ...]
    peak_bytes: int
    computing_peak_bytes: int
    copied_bytes: int | None
    sent_bytes: int
    calls: int
    operations: int | None


def measure_facts(name: str, spec: ModelSpec, options: ShardingOptions, timeout: float) -> Facts:
    """Runs ``options.world_size`` processes. Raises what a rank raised, and TimeoutError after ``timeout`` seconds."""
    by_rank = on_ranks(options.world_size, _facts_on_rank, name, spec, options, timeout=timeout)
    largest = {each.name: _largest([of_rank[each.name] for of_rank in by_rank]) for each in fields(Facts)}
    return Facts(**largest | {"losses": tuple(largest["losses"])})


def _largest(values: Sequence[Any]) -> Any:
    return None if None in values else max(values)


def own_bytes(name: str, spec: ModelSpec, world_size: int) -> int:
    """Parameters, gradients and AdamW's two states of one rank, fp32: in parts, or whole where nothing is sharded."""
    ranks = 1 if base_of(name) in (UNSHARDED, DDP) else world_size
    return 4 * 4 * sum(parameter.numel() for parameter in build_model(spec).parameters()) // ranks


def reference_losses(spec: ModelSpec, world_size: int) -> tuple[float, ...]:
    """Losses of the first steps of one process that trains on the batches of all ranks."""
    model = build_model(spec)
    optimizer = adamw(model.parameters())
    losses = []
    for _ in range(CHECKED_STEPS):
        loss = torch.stack([model(batch_of(spec, rank)) for rank in range(world_size)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative one."""
    return max(abs(mine - other) / abs(other) for mine, other in zip(losses, expected, strict=True))


def _facts_on_rank(name: str, spec: ModelSpec, options: ShardingOptions) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    count_large_blocks()
    mesh = init_device_mesh("cpu", (options.world_size,))
    _warm_up(name, spec, mesh, options)
    before = bytes_in_use()
    step = training_step(name, spec, mesh=mesh, options=options)
    losses = [_averaged(step()) for _ in range(CHECKED_STEPS)]
    computing_peak, peak = _peaks(step)
    calls = PythonCallCounter()
    with garbage_collector_off(), calls:
        step()
    counts = None if NameParts.of(name).compiled else _operations(step)
    return asdict(
        Facts(
            losses=tuple(losses),
            peak_bytes=peak - before,
            computing_peak_bytes=computing_peak - before,
            copied_bytes=None if counts is None else counts.copied_bytes.total(),
            sent_bytes=_sent_in_a_step(step),
            calls=calls.calls - 1,  # `step` itself
            operations=None if counts is None else counts.operations,
        )
    )


def _warm_up(name: str, spec: ModelSpec, mesh: DeviceMesh, options: ShardingOptions) -> None:
    """A step of a small model, so that what a process takes once, for modules and caches of its own, is not counted."""
    eager = name.removesuffix(AGAIN).removesuffix(NameParts.of(name).compiled)
    small = replace(spec, blocks=1, dim=16, hidden_dim=32, batch_rows=1)
    training_step(eager, small, mesh=mesh, options=options)()
    gc.collect()


def _peaks(step: Step) -> tuple[int, int]:
    """Of forward and backward, and of all, in several steps."""
    computing, whole = [], []
    with PeakOfAllocator() as allocator:
        hook = register_optimizer_step_pre_hook(lambda *_: computing.append(allocator.take()))
        for _ in range(MEMORY_STEPS):
            with garbage_collector_off():
                allocator.take()
                first = len(computing)
                step()
                computing[first + 1 :] = []  # where an optimizer steps on one part of the parameters after the other
                whole.append(max(allocator.take(), computing[first]))
        hook.remove()
    return max(computing), max(whole)


class _OutsideOfCollectives(OperationCounter):
    """Without the copy of what was just sent to the others as well: a rank's own part of a gather made of messages."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: set[tuple[int, int]] = set()  # address and bytes, since something was last received

    def observe(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        name = op._schema.name
        if name == "c10d::recv_":
            self._sent.clear()
        elif name == "c10d::send":
            self._sent.update((each.data_ptr(), each.nbytes) for each in tensors_in(args[0]))
        elif name == "aten::copy_" and (args[1].data_ptr(), args[1].nbytes) in self._sent:
            self.counts.operations += 1
            return
        super().observe(op, args, kwargs, result)


def _operations(step: Step) -> OperationCounts:
    counter = _OutsideOfCollectives()
    with garbage_collector_off(), counter:
        step()
    return counter.counts


def _averaged(loss: torch.Tensor) -> float:
    total = loss.to(torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _sent_in_a_step(step: Step) -> int:
    """The average of several, without the barrier."""
    start, before = _settled_bytes(), _settled_bytes()
    for _ in range(SENDING_STEPS):
        step()
    return max(0, _settled_bytes() - before - (before - start)) // SENDING_STEPS


def _settled_bytes() -> int:
    dist.barrier()
    time.sleep(0.1)  # the last ones are acknowledged
    return acknowledged_bytes()


def acknowledged_bytes() -> int:
    """That this process has sent over its TCP connections which are open now, and that have arrived. Linux only."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                total += _acknowledged_of(int(descriptor))
    return total


def _acknowledged_of(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("=Q", information, ACKNOWLEDGED)[0])
