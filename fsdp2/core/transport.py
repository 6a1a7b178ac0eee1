"""How the ranks of one process group exchange the members of a plan: one `Transport`, bound when a group is prepared.

A backend that has a form of its own is one class in one file, which names itself in `OF_BACKENDS`, as
`plugs/transports/gloo_p2p.py` does. A process group that is written in Python has no name there. ``FSDP2_COMM=native``
in the environment of every rank selects torch.distributed's own collectives everywhere, in a world of one rank too.

All methods must be called by all ranks of the process group, in the same order, with members of the same sizes. Works
are added to ``works`` as they are issued; where it is None, everything runs on the current stream.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.buffers import ALLOCATOR, Arena
from fsdp2.core.gather import Transfer
from fsdp2.core.options import AllGather, Comm, ReduceScatter
from fsdp2.core.places import UNNAMED, Label, order_over
from fsdp2.errors import FSDPValueError

Works = list[Any] | None
Allocate = Callable[..., torch.Tensor]

VARIABLE = "FSDP2_COMM"
NATIVE = "native"


class Transport(ABC):
    """Exchanges over one process group.

    Attributes:
        allocate: where the buffers of what travels come from, if that is not for the engine to say. Everything then
            travels packed.
        is_ordered: whether all ranks must issue what they communicate in the same order, a program's own included.
        is_alone: there is nobody to communicate with: what is sent may lie where it arrives.
        widens: whether it sums in the dtype of the output what came in a narrower one, as if it had been cast before.
        way: what plans say of it; "" of torch.distributed's own.
        among_replicas: what sums over replicas, if there are any.
        label: what is exchanged; ranks on which it differs do not exchange it.
    """

    allocate: Allocate | None = None
    is_ordered: bool = False
    is_alone: bool = False
    widens: bool = False
    way: str = ""
    label: Label = UNNAMED
    among_replicas: Native | None = None

    @abstractmethod
    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """Gather the input (n,) of every member into its output (world_size * n,).

        ``user_waits``: the user asked for a work to wait for, which a collective of his own may then return.
        """

    @abstractmethod
    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """Reduce the input (world_size * n,) of every member over the ranks; its output (n,) is this rank's part.

        Both have one dtype, unless it `widens`.

        ``arena``: of what is received for that.
        """

    def all_reduce(self, output: torch.Tensor, op: Any, works: Works) -> None:
        """Reduce ``output``, of a reduce-scatter, over the replicas, in place."""
        if self.among_replicas is not None:
            self.among_replicas.sum(output, op, works)


class Alone(Transport):
    """There is nobody to communicate with: values are copied."""

    is_alone = True
    widens = True

    def __init__(self, allocate: Allocate | None = None) -> None:
        self.allocate = allocate

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """Copy, unless a member is gathered where it lies."""
        for output, input in members:
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """Copy, unless a member was packed where it arrives."""
        for output, input in members:
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)


class Native(Transport):
    """torch.distributed's own collectives; the order of summation is the backend's.

    With works there is one per member, all in flight together: on gloo that beats its coalesced form, which flattens
    inside. Else several members are coalesced into one launch, unless the backend cannot.
    """

    is_ordered = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._order = order_over(group)
        self._coalesces = _torch.coalesces(group)

    def compare(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        """Gather ``mine`` (n,) into ``everyone`` (world_size * n,), before this returns.

        The engine's own business: neither patched functions nor dispatch modes see it.
        """
        _torch.gather_unobserved(everyone, mine, self.group)

    def sum(self, tensor: torch.Tensor, op: Any, works: Works) -> None:
        """Reduce ``tensor`` over the ranks, in place."""
        self._order.begin(self.label)
        all_reduce(tensor, self.group, op, works)

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """One launch, or one work for each member."""
        self._order.begin(self.label)
        if works is None and len(members) > 1 and self._coalesces:
            with _torch.coalescing(self.group):
                for output, input in members:
                    _torch.all_gather_batched(output, input, self.group)
            return
        for output, input in members:
            work = _torch.all_gather_single(output, input, self.group, works is not None)
            if works is not None and work is not None:  # a function that a program has put there may return none
                works.append(work)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """One launch, or one work for each member."""
        self._order.begin(self.label)
        if works is None and len(members) > 1 and self._coalesces:
            with _torch.coalescing(self.group):
                for output, input in members:
                    _torch.reduce_scatter_batched(output, input, op, self.group)
            return
        for output, input in members:
            work = _torch.reduce_scatter_single(output, input, op, self.group, works is not None)
            if works is not None and work is not None:  # a function that a program has put there may return none
                works.append(work)


class Custom(Transport):
    """The user's own all-gather or reduce-scatter, which also decides where its buffers lie."""

    is_ordered = True

    def __init__(self, comm: Comm, group: dist.ProcessGroup) -> None:
        self._comm: Any = comm
        self._group = group
        self.allocate = comm.allocate

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """Asynchronous only where ``user_waits``."""
        for output, input in members:
            _add(works, self._comm(output_tensor=output, input_tensor=input, group=self._group, async_op=user_waits))

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """As the user has it."""
        for output, input in members:
            _add(works, self._comm(output_tensor=output, input_tensor=input, group=self._group, op=op))


OF_BACKENDS: dict[tuple[str, str], Callable[[dist.ProcessGroup], Native]] = {}
"""What takes the place of `Native`, by the type of the device that the group computes on, and its backend there."""


def is_native_chosen() -> bool:
    """Whether the environment asks for torch.distributed's own collectives.

    Raises:
        FSDPValueError: it asks for something else.
    """
    text = os.environ.get(VARIABLE, "")
    if text not in ("", NATIVE):
        raise FSDPValueError(f"{VARIABLE} must be '{NATIVE}' or unset, got '{text}'.")
    return bool(text)


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether nobody else is in ``group``. (``FSDP2_COMM=native`` runs the collectives of one rank all the same.)

    Raises:
        FSDPValueError: the environment asks for a transport that there is not.
    """
    return group is None or (group.size() == 1 and not is_native_chosen())


def transport_of(
    group: dist.ProcessGroup | None,
    device: torch.device,
    custom: AllGather | ReduceScatter | None = None,
    *,
    label: Label = UNNAMED,
) -> Transport:
    """What communicates over ``group`` between ranks that compute on ``device``; ``custom`` in its place.

    Raises:
        FSDPValueError: the environment asks for a transport that there is not.
    """
    found: Transport
    if group is None or is_alone(group):
        found = Alone(None if custom is None else custom.allocate)
    else:
        found = among(group, device) if custom is None else Custom(custom, group)
    found.label = label
    return found


def among(group: dist.ProcessGroup, device: torch.device) -> Native:
    """What communicates over ``group``, of several ranks, where no user has said how.

    Raises:
        FSDPValueError: the environment asks for a transport that there is not.
    """
    return Native(group) if is_native_chosen() else of_backend(group, device)


def of_backend(group: dist.ProcessGroup, device: torch.device) -> Native:
    """What communicates over ``group`` whatever a rank's user or environment has chosen."""
    return OF_BACKENDS.get((device.type, _torch.backend_name(group, device)), Native)(group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, works: Works) -> None:
    """Reduce ``tensor`` over the ranks of ``group``, in place."""
    _add(works, dist.all_reduce(tensor, op=op, group=group, async_op=works is not None))


def _add(works: Works, work: dist.Work | None) -> None:
    if work is None:
        return
    if works is None:
        work.wait()  # a custom collective was asynchronous all the same: the current stream follows it
    else:
        works.append(work)
