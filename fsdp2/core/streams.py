"""`FSDPCommContext`: streams, events, and what is in flight. A root and all its groups have one; roots may share one.

It reaches the device through the `Device` protocol only, so that a recording fake can run whole training steps on CPU
and check the order of everything.

[Note: streams and lifetimes]
Compute runs on the caller's current stream, all-gathers on one stream of their own, reduce-scatters on another,
all-reduces over replicas on a third. Memory belongs to the stream that was current when it was allocated: freeing it
lets that stream (only) reuse it at once. Hence every wait in `Wait`, each of which closes exactly one race. There is no
``record_stream``. The host waits only for what it reads or lets others write: offloaded gradients; offloaded shards,
before the user's code may write them; and, where parameters had no gradient on this rank in a backward, the reduced
grad mask, which says whether another rank had one.

* The unsharded and staging buffers belong to the all-gather stream, which also copies out of the staging buffer.
  Compute waits for GATHERED before it reads; the all-gather stream waits for READ before the memory is freed. The
  next-but-one gather follows that wait on its stream, so that at most ``prefetch depth + 1`` groups are unsharded at a
  time on the device, however far the host runs ahead.
* What a reduction sends and receives belongs to compute, as gradients do, so that one pool serves all of it. It is
  allocated before GRADIENTS_READY is recorded. The reduce-scatter stream waits for that, packs and reduces. Compute
  waits for PACKED before the next backward takes the memory of gradients that were packed, and for REDUCED before it
  reads what arrived, or reuses the rest. With replicas the all-reduce stream takes over: it waits for REDUCE_SCATTERED.
  Compute waits for the all-reduce one reduction later, so that both streams are at work.

On CPU there are no streams: collectives are asynchronous works, and waiting blocks the host.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.buffers import ALLOCATOR, Arena
from fsdp2.core.places import PLACE, UNNAMED, Label, raise_if_stopped
from fsdp2.core.ports import Port, missing
from fsdp2.errors import FSDPRuntimeError


class Wait(enum.Enum):
    """Why one stream waits for another. Removing any of these is a race, as a test shows for each."""

    PARAMETERS_WRITTEN = "the all-gather stream reads shards after compute (the optimizer) has written them"
    GATHERED = "compute reads unsharded parameters after the all-gather stream has written them"
    READ = "the all-gather stream reuses an unsharded buffer after compute has read it"
    GRADIENTS_READY = (
        "the reduce-scatter stream reads gradients, and reuses reduced ones, after compute is done with them"
    )
    REDUCE_SCATTERED = "the all-reduce stream reads gradients after the reduce-scatter stream has written them"
    PACKED = "compute reuses the memory of unsharded gradients after the reduce-scatter stream has packed them"
    REDUCED = "compute reads reduced gradients, and frees what was sent, after the streams of reductions are done"
    STATE_USED = "copies of optimizer state follow steps that have used it, or the memory that it comes to"
    STATE_COPIED = "compute reads optimizer state that was brought, and frees what was taken back, after the copies"


class Device(Protocol):
    """What the engine asks of a device. Streams and events are opaque to the engine."""

    has_streams: bool
    """False: collectives are issued as asynchronous works, and the stream methods do nothing."""

    def new_stream(self) -> Any:
        """A stream of high priority: communication is short to launch and long to wait for."""

    def current_stream(self) -> Any:
        """The caller's current stream: where compute runs."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current: kernels, collectives and allocations inside belong to it."""

    def record(self, stream: Any) -> Any:
        """An event at the present end of ``stream``."""

    def wait(self, stream: Any, event: Any, why: Wait) -> None:
        """Let whatever is issued to ``stream`` from now on run after ``event``."""

    def block_host(self, event: Any) -> None:
        """Block the host until ``event``: what was copied to host memory is read by the host."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph, which every stream that joined it must leave again."""


_NOTHING = nullcontext()


class HostDevice:
    """The CPU: it has no streams, so collectives are asynchronous works, which the host waits for."""

    has_streams = False

    def new_stream(self) -> None:
        """Return None: a CPU has no streams."""

    def current_stream(self) -> None:
        """Return None: a CPU has no streams."""

    def use(self, stream: None) -> AbstractContextManager[None]:
        """Do nothing: there is no stream to switch to."""
        return _NOTHING

    def record(self, stream: None) -> None:
        """Return None: what was issued before has run, or is a work."""

    def wait(self, stream: None, event: None, why: Wait) -> None:
        """Do nothing: works are waited for on the host."""

    def block_host(self, event: None) -> None:
        """Do nothing: works are waited for where they are kept."""

    def is_capturing(self) -> bool:
        """Return False: a CPU records no graphs."""
        return False


class StreamDevice:
    """CUDA and devices like it (``torch.<type>.Stream``, ``Event``, ``stream``, ``current_stream``)."""

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def new_stream(self) -> Any:
        """A high-priority stream of the device, which need not be the current one."""
        return self._module.Stream(device=self._device, priority=-1)

    def current_stream(self) -> Any:
        """The current stream of the device."""
        return self._module.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Switch to ``stream``."""
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def record(self, stream: Any) -> Any:
        """A fresh event on ``stream``."""
        return stream.record_event()

    def wait(self, stream: Any, event: Any, why: Wait) -> None:
        """Wait on the device, not on the host."""
        stream.wait_event(event)

    def block_host(self, event: Any) -> None:
        """Wait on the host."""
        event.synchronize()

    def is_capturing(self) -> bool:
        """Whether this device's current stream records a graph. Another device may be torch's current one."""
        asks = getattr(self._module, "is_current_stream_capturing", None)
        if asks is None:
            return False
        # torch answers for its current device. Switching to ours costs calls, so it is done only where they differ.
        if self._device.index in (None, self._module.current_device()):
            return bool(asks())
        with self._module.device(self._device):
            return bool(asks())


def device_for(device: torch.device) -> Device:
    """The `Device` through which the engine uses ``device``."""
    return HostDevice() if device.type == "cpu" else StreamDevice(device)


@dataclass(slots=True)
class CommHandle:
    """Communication under way: asynchronous works (CPU), or an event on the stream that it was issued to.

    Attributes:
        works: asynchronous collectives. With streams there are some only if the user gathers on the current stream.
        event: recorded behind the communication; None where there are works instead.
        label: what is exchanged, for messages and for the watchdog.
        is_lost: a collective of torch's own has failed, so that no work of its process group will end.
    """

    works: list[dist.Work]
    event: Any = None
    label: Label = UNNAMED
    is_lost: bool = False

    def wait_for_works(self) -> None:
        """Wait for the works, if there are any: this blocks the host on CPU, else the current stream."""
        if self.works:
            PLACE.waiting = self
            try:
                for work in self.works:
                    work.wait()
            except Exception:
                # Works of our own transports say which of them failed. Where none does, a collective of torch's own
                # failed: it cannot be told which, and its process group cannot be used any more.
                self.is_lost = not any([getattr(work, "has_failed", False) for work in self.works])
                raise_if_stopped()
                raise
            finally:
                PLACE.waiting = None

    def leave_failed_works(self) -> bool:
        """Forget works that have failed, so that nobody waits for them again. Returns whether there were any.

        Their data is lost, and peers may still write into their buffers later.
        """
        if self.is_lost:  # see `wait_for_works`
            self.works = []
            return True
        if not any([getattr(work, "has_failed", False) for work in self.works]):
            return False
        self.works = [work for work in self.works if not getattr(work, "has_failed", False)]
        return True


class Stage(enum.Enum):
    """How far a reduction has come, which decides what must be waited for before it goes on."""

    LAUNCHED = "collectives were launched, and others follow"
    LAST_LAUNCHED = "the last collectives were launched"
    DONE = "everything was issued; gradients are to be set"


class Held(Protocol):
    """Memory that was handed to a collective."""

    def leave(self) -> None:
        """Neither free nor reuse the memory: a collective may still write there, and nothing can wait for it."""

    def release_gradients(self) -> None:
        """Drop the references to unsharded gradients that have been packed."""

    def release_inputs(self) -> None:
        """Drop the references to the inputs of the reduce-scatter, which is done."""


class Lasting(Protocol):
    """A buffer that a captured graph writes in every replay."""

    def is_free(self) -> bool:
        """Whether the program holds no view of it."""


class PendingReduce(CommHandle):
    """A gradient reduction in flight, and everything that must live until compute has waited for it.

    It is put into the queue before its first collective is launched: whatever exception comes between a launch and the
    next statement, the memory that was handed over is still held.

    Attributes:
        held: what was handed to collectives.
        steps: the reduction itself, a generator that stops after each `Stage`. Streams keep the order of what is
            issued, so that there it runs up to `Stage.DONE` at once; without streams the host waits after each stage.
        stage: the last one that it has come to.
        needs_host: tells, for gradients that are copied to host memory, whether the host needs their values to deliver
            them (to add them up, or for hooks). If not, the host waits once, after the last reduction. None: gradients
            stay on the device.
        is_launching: collectives are being launched; after an exception there, one may run that nothing can wait for.
        compute_stream: the stream that the backward ran on, to which all held memory belongs.
        packed: an event behind the packing; None once the packed gradients were released. Gradients that are sent
            without packing are held on.
        scattered: an event behind the reduce-scatter, if another stream goes on with the reduction. The inputs of the
            reduce-scatter can be released behind it.
        owner: the reducer whose gradients these are; `drop_reduces` selects by it.
    """

    __slots__ = (
        "_has_streams", "compute_stream", "held", "is_launching", "needs_host", "owner", "packed", "scattered",
        "stage", "steps",
    )  # fmt: skip
    steps: Iterator[Stage]
    stage: Stage

    def __init__(self, device: Device, owner: object = None) -> None:
        self.owner = owner
        self.works, self.event = [], None  # before anything is launched, too: an exception may come at once
        self.packed: Any = None
        self.scattered: Any = None
        self.label, self.is_lost = UNNAMED, False
        self.held: Sequence[Held] = ()
        self.needs_host: Callable[[], bool] | None = None
        self.is_launching = True
        self.compute_stream = device.current_stream() if device.has_streams else None
        self._has_streams = device.has_streams

    def launch(self) -> None:
        """Go on to the next stage that must be waited for."""
        self.works, self.event = [], None
        with _torch.without_grad():
            self.stage = next(self.steps)
            while self._has_streams and self.stage is not Stage.DONE:
                self.stage = next(self.steps)

    def deliver(self) -> None:
        """Run to the end, which sets the gradients. All communication has been waited for."""
        with _torch.without_grad():
            for _ in self.steps:
                pass

    def abandon(self) -> None:
        """End the reduction here. What was handed to collectives is still held."""
        self.steps = iter(())  # the frame of the other steps refers to this, so they would live on


POOL: Port[Callable[[], Arena]] = Port(missing("memory.memory_pool"))
"""Makes an `Arena` that keeps memory from use to use, instead of returning it to torch's allocator."""


class FSDPCommContext:
    """The streams of one root and the reductions in flight on them. Several roots may share one.

    Attributes:
        post_optim_event: an event behind the optimizer's step, which the user has set and nothing has waited for yet.
        max_pending_reduces: how many reductions may be in flight while the next backward computes; each holds the
            unsharded gradients of its group.
        gather_arena: gives memory to all-gathers.
        reduce_arena: gives memory to reductions. Without streams it is the same arena.
        was_interrupted: an exception came while a reduction was being launched.
        was_captured: a forward was captured in a graph.
        held_for_graphs: buffers that a captured graph writes, kept alive whoever else drops them.
        has_failed: a reduction has failed while it was waited for.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._compute_stream = device.current_stream()  # the current stream of the last forward
        self.all_gather_stream = device.new_stream()
        self.reduce_scatter_stream = device.new_stream()
        self.all_reduce_stream = device.new_stream()
        self.post_optim_event: Any = None
        self.max_pending_reduces = 1
        self.gather_arena = self.reduce_arena = ALLOCATOR
        self.held_for_graphs: list[Lasting] = []
        # A reduction waits in the first queue, and goes on to the second when its reduce-scatter is done and an
        # all-reduce follows. All that is in the second is older than all that is in the first.
        self._pending: deque[PendingReduce] = deque()
        self._all_reducing: deque[PendingReduce] = deque()
        self.was_interrupted = self.was_captured = self.has_failed = self._holds_pools = False
        self._interrupted: list[PendingReduce] = []  # kept for ever: collectives may still use what they hold
        self._to_host: list[Any] = []  # events behind copies of gradients to the host
        self._host_reads: list[Any] = []  # events behind copies from offloaded shards
        self._late: deque[tuple[Any, object, Callable[[], None]]] = deque()  # see `call_when_on_host`
        self._unfinished: object = None  # see `begin_handle`

    def pool_memory(self, enable: bool) -> None:
        """Set whether memory for communication is kept from use to use. Buffers that are in use stay as they are."""
        if enable is (self.gather_arena is not ALLOCATOR):
            return
        self.refuse_to_drop_pools()
        for arena in self._arenas():
            arena.close()
        self.gather_arena = POOL.filling() if enable else ALLOCATOR
        self.reduce_arena = POOL.filling() if enable and self.device.has_streams else self.gather_arena

    def refuse_to_drop_pools(self) -> None:
        """Refuse to give back memory whose addresses a captured graph has recorded.

        Raises:
            FSDPRuntimeError: one was captured while memory was kept.
        """
        if self._holds_pools:
            raise FSDPRuntimeError(
                "set_communication_memory_pool(False): a graph was captured that reads and writes memory of the pool, "
                "which would be given to others. Leave the pool on for as long as that graph is replayed; the model "
                "takes it along when it is deleted."
            )

    def begin_forward(self) -> None:
        """A forward begins. If it is captured, a graph holds the addresses of pooled memory from then on."""
        self._compute_stream = self.device.current_stream()
        if self.device.is_capturing():
            self.was_captured = True
            self._holds_pools = self._holds_pools or self.gather_arena is not ALLOCATOR
            for arena in self._arenas():
                arena.hold()

    def end_step(self) -> None:
        """A step that reduced gradients is over: trim the pools to what such a step needs.

        During a capture the pools keep everything. Instead, compute waits for the all-gather stream: a capture must end
        with all of its streams joined, and this is the only one that nothing else waits for at the end of a backward.
        """
        if self.device.is_capturing():
            self.compute_follows_gathers()
            return
        if self.gather_arena is ALLOCATOR:
            return
        for arena in self._arenas():
            arena.trim()

    def pooled_storages(self) -> list[torch.UntypedStorage]:
        """The storages of the pools that no buffer uses at the moment."""
        return [storage for arena in self._arenas() for storage in arena.idle_storages()]

    def is_held_elsewhere(self) -> bool:
        """Whether the program holds a tensor on memory that a captured graph may write."""
        return any(not each.is_free() for each in self.held_for_graphs) or any(
            arena.is_held_elsewhere() for arena in self._arenas()
        )

    def _arenas(self) -> set[Arena]:
        return {self.gather_arena, self.reduce_arena}

    def begin_handle(self, owner: object) -> None:
        """``owner`` has returned a handle for its reductions, to be waited for before another pass begins here."""
        self._unfinished = owner

    def end_handle(self) -> None:
        """The handle was waited for."""
        self._unfinished = None

    def is_unfinished(self, owner: object) -> bool:
        """Whether the handle of ``owner`` is still to be waited for."""
        return self._unfinished is owner

    def refuse_unfinished_handle(self, what: str) -> None:
        """Refuse to begin ``what`` while a handle is outstanding.

        Raises:
            FSDPRuntimeError: naming the remedy.
        """
        if self._unfinished is not None:
            raise FSDPRuntimeError(
                f"{what} was begun before the previous gradient reduction was waited for: call wait() on the handle "
                "that finalize_backward(async_op=True) returned first."
            )

    def invalidate_handle(self, owner: object) -> None:
        """``owner`` starts clean: forget its handle.

        Raises:
            FSDPRuntimeError: the handle outstanding is another root's.
        """
        if self._unfinished is not None and self._unfinished is not owner:
            raise FSDPRuntimeError(
                "reset_iter_state() was called while another root that shares the communication context has a gradient "
                "reduction outstanding; wait for its handle, or reset that root."
            )
        self._unfinished = None

    def may_be_read_elsewhere(self) -> bool:
        """Whether the program may be reading gradients on another stream than compute, which owns their memory."""
        return self.post_optim_event is not None or self.device.current_stream() != self._compute_stream

    def gathers_follow(self, event: Any) -> None:
        """Let all-gathers from now on run after ``event``, which the user recorded after the optimizer's step."""
        self.device.wait(self.all_gather_stream, event, Wait.PARAMETERS_WRITTEN)

    def compute_follows(self, event: Any) -> None:
        """Let compute run after ``event`` too: it reads shards in place, and reuses the memory of gradients."""
        self.device.wait(self.device.current_stream(), event, Wait.PARAMETERS_WRITTEN)

    def gathers_follow_compute(self) -> None:
        """Let all-gathers from now on see what compute has written so far: parameters after an optimizer step."""
        event = self.device.record(self.device.current_stream())
        self.device.wait(self.all_gather_stream, event, Wait.PARAMETERS_WRITTEN)

    def compute_follows_gather(self, handle: CommHandle) -> None:
        """Let compute see the gathered parameters. Blocks the host on CPU."""
        self._wait_for(handle, Wait.GATHERED)

    def compute_follows_gathers(self) -> None:
        """Let compute free what an interrupted all-gather may still be reading or writing."""
        if self.device.is_capturing():
            self.gathers_follow_readers()  # waiting for a stream outside of the capture is an error: bring it in
        event = self.device.record(self.all_gather_stream)
        self.device.wait(self.device.current_stream(), event, Wait.GATHERED)

    def gathers_follow_readers(self) -> None:
        """Let the all-gather stream reuse unsharded memory that compute has read. Called before that is freed."""
        event = self.device.record(self.device.current_stream())
        self.device.wait(self.all_gather_stream, event, Wait.READ)

    def reduces_follow_compute(self) -> None:
        """Let the reduce-scatter stream see the gradients that compute has written so far."""
        event = self.device.record(self.device.current_stream())
        self.device.wait(self.reduce_scatter_stream, event, Wait.GRADIENTS_READY)

    def compute_follows_reduces(self, hook_stream: Any = None) -> None:
        """Let compute free what the streams of reductions may still be reading, outside of any pending reduction."""
        streams = [self.reduce_scatter_stream, self.all_reduce_stream]
        if hook_stream is not None:
            streams.append(hook_stream)
        if self.device.is_capturing():
            event = self.device.record(self.device.current_stream())
            for stream in streams:
                self.device.wait(stream, event, Wait.GRADIENTS_READY)  # as in `compute_follows_gathers`
        for stream in streams:
            self.device.wait(self.device.current_stream(), self.device.record(stream), Wait.REDUCED)

    def all_reduces_follow(self, stream: Any) -> Any:
        """Let ``stream`` see what the reduce-scatter stream has written so far. Returns the event that it waits for."""
        event = self.device.record(self.reduce_scatter_stream)
        self.device.wait(stream, event, Wait.REDUCE_SCATTERED)
        return event

    def __del__(self) -> None:
        """Let compute wait for all communication: the groups go too, and their memory must not be reused before."""
        if self.device.has_streams and not sys.is_finalizing():
            # The garbage collector runs this on any thread, each of which has a current stream of its own.
            with self.device.use(self._compute_stream):
                self.compute_follows_reduces()
                self.compute_follows_gathers()
                for pending in (*self._all_reducing, *self._pending):  # a hook may have moved them to its own stream
                    self._wait_for_reduce(pending)

    def give_up(self, pending: PendingReduce, hook_stream: Any) -> None:
        """An exception came while ``pending`` was being launched: make it safe to free what it holds.

        Without streams there is nothing to wait for: what it holds is kept, also after `drop_reduces`.
        """
        if self.device.has_streams:
            # Events on all streams of reductions cover whatever was issued, though it is not known how far that came.
            self._pending.remove(pending)
            self.compute_follows_reduces(hook_stream)
        else:
            self.was_interrupted = True

    def add_pending(self, pending: PendingReduce) -> None:
        """Queue a reduction whose collectives are about to be launched."""
        self._pending.append(pending)

    def make_room(self) -> None:
        """Let compute wait until one more reduction may hold unsharded gradients. With streams only.

        A reduction whose reduce-scatter is done holds none. One such reduction at a time is left in flight, so that its
        all-reduce runs beside the next reduce-scatter.
        """
        while len(self._pending) >= self.max_pending_reduces:
            self._finish_all_reduces()
            pending = self._pending[0]
            if pending.scattered is None:  # no other stream goes on with it: it is done
                self._wait(pending)
                self._pending.popleft().deliver()
            else:
                self._wait_until_scattered(pending)
                self._all_reducing.append(self._pending.popleft())

    def _wait_until_scattered(self, pending: PendingReduce) -> None:
        # For this wait `event` stands for the reduce-scatter alone; then it is the end of the reduction again.
        last, pending.event = pending.event, pending.scattered
        self._wait_for_reduce(pending)
        pending.event, pending.scattered = last, None
        for each in pending.held:
            each.release_inputs()

    def free_packed(self) -> None:
        """Give compute back the memory of gradients that have been packed, before it makes the next ones."""
        # Behind another reduction, the packing is reached only when that is done: compute would lose the overlap.
        if len(self._pending) == 1 and self._pending[0].packed is not None:
            (pending,) = self._pending
            self.device.wait(self.device.current_stream(), pending.packed, Wait.PACKED)
            pending.packed = None
            for each in pending.held:
                each.release_gradients()

    def retire_reduces(self, keep: int) -> None:
        """Wait for reductions and deliver their gradients, oldest first, until ``keep`` are in flight.

        With replicas, one more may be in its second stage, the all-reduce, unless ``keep`` is 0.
        """
        if self.device.has_streams:
            self._finish_all_reduces()  # all of them are older than what is pending
        while len(self._pending) > keep:
            pending = self._pending[0]
            self._wait(pending)
            if pending.stage is Stage.LAUNCHED:  # without streams only
                self._finish_all_reduces()
                # Both are set before the launch: an exception inside of it must leave them set.
                pending.is_launching = self.was_interrupted = True
                self._all_reducing.append(self._pending.popleft())
                pending.launch()
                pending.is_launching = self.was_interrupted = False
            else:
                self._pending.popleft().deliver()
        if keep == 0:
            self._finish_all_reduces()

    def finish_reduces(self) -> None:
        """Wait for all reductions and deliver their gradients. The host waits only for values that it needs itself."""
        if self.has_failed:
            self.drop_reduces()  # their gradients are lost, as the exception of the wait that failed has said
        self.retire_reduces(0)
        if self._to_host:
            self._wait_on_host(self._to_host)
        while self._late:
            event, _, then = self._late.popleft()
            self.device.block_host(event)
            then()

    def call_when_on_host(self, event: Any, owner: object, then: Callable[[], None]) -> None:
        """Let `finish_reduces` block the host until ``event``, then call ``then``; not if ``owner``'s are dropped."""
        self._late.append((event, owner, then))

    def _wait_on_host(self, events: list[Any]) -> None:
        for event in events:
            self.device.block_host(event)
        events.clear()

    def host_writes_shards_after(self, event: Any) -> None:
        """A copy reads offloaded shards until ``event``: see `let_host_write_shards`."""
        self._host_reads.append(event)

    def let_host_write_shards(self) -> None:
        """Block the host until no copy reads offloaded shards. Called before the user's code may write them."""
        if self._host_reads:
            self._wait_on_host(self._host_reads)

    def _finish_all_reduces(self) -> None:
        while self._all_reducing:
            self._wait(self._all_reducing[0])
            self._all_reducing.popleft().deliver()

    def drop_reduces(self, owners: Collection[object] | None = None) -> None:
        """Wait for reductions in flight and drop their gradients: those of ``owners``, by default all.

        If a reduction was interrupted or has failed, all are dropped too: the data of the others may be lost with it.
        """
        if self.was_interrupted or self.has_failed:
            owners = None
        for queue in (self._all_reducing, self._pending):
            for pending in list(queue):
                if owners is None or pending.owner in owners:
                    pending.is_launching = pending.leave_failed_works() or pending.is_launching
                    self._wait(pending)
                    queue.remove(pending)
                    pending.abandon()
        self._late = deque(each for each in self._late if owners is not None and each[1] not in owners)
        self.was_interrupted = self.has_failed = False

    def forget_events(self) -> None:
        """Forget all events. They were recorded in a graph capture that failed, so waiting for them is an error."""
        for pending in (*self._all_reducing, *self._pending):
            pending.event = pending.scattered = pending.packed = None
        self._to_host.clear()
        self._host_reads.clear()

    def _wait(self, pending: PendingReduce) -> None:
        if pending.is_launching:
            # An exception came between its launches: a collective may run that nothing can wait for. What it holds is
            # leaked on purpose, since freed memory would be written by that collective.
            pending.is_launching, pending.stage = False, Stage.DONE
            pending.abandon()
            for each in pending.held:
                each.leave()
            self._interrupted.append(pending)
        try:
            if self.device.has_streams:
                self._wait_for_reduce(pending)
            else:
                self._wait_for(pending, Wait.REDUCED)
        except Exception:
            self.has_failed = True
            raise
        if pending.needs_host is not None and pending.event is not None:
            if pending.needs_host():
                self.device.block_host(pending.event)
            else:
                self._to_host.append(pending.event)

    def _wait_for_reduce(self, pending: PendingReduce) -> None:
        self._wait_for(pending, Wait.REDUCED)
        # Autograd may have run this module's backward on another stream. Held memory returns to that one when it is
        # freed, so it must wait as well.
        stream = pending.compute_stream
        if pending.event is not None and stream != self.device.current_stream():
            self.device.wait(stream, pending.event, Wait.REDUCED)

    def _wait_for(self, handle: CommHandle, why: Wait) -> None:
        handle.wait_for_works()
        if handle.event is not None:
            self.device.wait(self.device.current_stream(), handle.event, why)
