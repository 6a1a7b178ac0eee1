"""A function of the user's in the place of the copy out of an all-gather: `FSDPModule.set_all_gather_layout`.

torch adds this after 2.15, as ``torch.distributed.fsdp.experimental``; the names are those of it. The engine itself
gathers large parameters where they belong. A group with a function gathers everything into one buffer of
(world_size * n,) in the order of ranks, with nothing between the parameters, and the function moves it from there.

Owns the class of layouts, and the gather of such groups. What tensors with extensions of their own send is moved by the
engine all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp2 import _torch
from fsdp2.arguments import shown
from fsdp2.core.buffers import ALLOCATOR, Allocate, Arena, Resizable, on_the_wire
from fsdp2.core.gather import GATHER_BY_FUNCTION, Gather, Source
from fsdp2.core.layout import Slot
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.module import OUTPUT_FUNCTION
from fsdp2.core.options import OutputFunction
from fsdp2.core.sharding import rows_in_place
from fsdp2.errors import FSDPNotImplementedError, FSDPTypeError, named

_NATIVE = "all_gather_output_fn_with_native_copy"
_NOTHING_TO_DO = (_NATIVE, "_default_all_gather_output_fn")
"""Names of functions of torch's, and of the one here, that do what the engine does anyhow."""


def all_gather_output_fn_with_native_copy(
    gathered: torch.Tensor,
    outputs: list[torch.Tensor],
    split_sizes: list[int],
    outer_sizes: list[int],
    world_size: int,
) -> None:
    """Copy what was gathered into ``outputs``, each by one copy: torch's opt-in for fewer copies.

    fsdp2 needs no such function, for it gathers large parameters without any copy: ``set_all_gather_layout`` takes a
    layout of it, and goes on as without one. It can be called all the same, as by a function of the user's.

    Args:
        gathered: (world_size * n,) in the order of ranks; bytes (uint8) if there are several dtypes.
        outputs: flat; each is filled from its beginning.
        split_sizes: elements of ``gathered`` that each rank has sent of each of ``outputs``; n together.
        outer_sizes: in how many pieces ranks alternate in each of ``outputs``: 1 where dim 0 was cut.
        world_size: of the ranks that have sent.
    """
    rows = gathered.view(world_size, -1)
    for output, outer, piece in zip(outputs, outer_sizes, rows.split(split_sizes, dim=1), strict=True):
        whole = output if output.dtype == gathered.dtype else output.view(gathered.dtype)
        whole = whole[: piece.numel()].view(outer, world_size, -1)
        whole.copy_(piece.reshape(world_size, outer, -1).transpose(0, 1))


@dataclass(frozen=True, slots=True)
class DefaultAllGatherLayout:
    """What was gathered lies in the order of ranks, and ``output_fn`` moves it into the parameters.

    ``output_fn(gathered, outputs, split_sizes, outer_sizes, world_size)`` is called under ``torch.no_grad()`` after
    every all-gather, on the stream that has gathered, with the arguments of `all_gather_output_fn_with_native_copy`. It
    may write ``outputs`` alone, all of which it must fill, and keep none of its arguments. Of several dtypes everything
    comes as bytes: ``gathered`` and ``outputs`` are uint8, and ``split_sizes`` count bytes. It is not called where
    nothing is gathered, nor by a group of one rank.

    Attributes:
        output_fn: the function; by default the engine's own way, which needs none.

    Raises:
        FSDPTypeError: it cannot be called.
    """

    output_fn: OutputFunction = all_gather_output_fn_with_native_copy

    def __post_init__(self) -> None:
        if not callable(self.output_fn):
            raise FSDPTypeError(
                "DefaultAllGatherLayout takes a function (gathered, outputs, split_sizes, outer_sizes, world_size), "
                f"got {shown(self.output_fn)}."
            )


def output_function(layout: Any) -> OutputFunction | None:
    """The function of ``layout``, ours or torch's own; None of one that asks for what the engine does anyhow.

    Raises:
        FSDPTypeError: it is no layout.
        FSDPNotImplementedError: one of a backend's, with methods that torch keeps private.
    """
    if layout is None:
        return None
    if any(each.__name__ == DefaultAllGatherLayout.__name__ for each in type(layout).__mro__):
        function: OutputFunction | None = getattr(layout, "output_fn", None)
        is_known = getattr(function, "__name__", "") in _NOTHING_TO_DO
        is_ours_or_torchs = str(getattr(function, "__module__", "")).startswith(("fsdp2.", "torch."))
        return None if is_known and is_ours_or_torchs else function
    if hasattr(layout, "finalize_outputs") or hasattr(layout, "prepare_output"):
        raise FSDPNotImplementedError(
            f"set_all_gather_layout takes DefaultAllGatherLayout(output_fn=...), got {shown(layout)}: layouts that "
            "prepare and finalize for themselves are a private interface of torch's for authors of backends. Pass the "
            "collective to set_custom_all_gather(), which says where it allocates, and a function that moves what has "
            "arrived as output_fn."
        )
    raise FSDPTypeError(
        f"set_all_gather_layout takes DefaultAllGatherLayout(output_fn=...) or None, got {shown(layout)}."
    )


class _Output(NamedTuple):
    """One of ``outputs``.

    Attributes:
        source: what it is part of.
        slot: its place there.
        flat: what the function fills.
        outer: in how many pieces ranks alternate there.
        moves: copies that bring it to the parameter; none if it is that.
    """

    source: Source
    slot: Slot
    flat: torch.Tensor
    outer: int
    moves: list[tuple[torch.Tensor, torch.Tensor]]


class GatherByFunction(Gather):
    """Everything in one packed member without padding, copied in parameter by parameter, and out by the function."""

    def __init__(
        self,
        sources: Sequence[Source],
        mesh: DataParallelMesh,
        device: torch.device,
        allocate: Allocate | None,
        function: OutputFunction,
        around: str,
    ) -> None:
        super().__init__((), mesh.shard_size, mesh.shard_rank, device, allocate)
        world_size = mesh.shard_size
        # The widest elements first, so that each lies on a multiple of its size.
        self._sources = tuple(sorted(sources, key=lambda source: -source.unsharded.element_size()))
        self._function = function
        self._around = around
        dtypes = {source.unsharded.dtype for source in self._sources}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        carried = [(source, slot) for source in self._sources for slot in _in_order(source)]
        self._rearranged: list[Resizable] = []
        self._outputs = [self._output(source, slot) for source, slot in carried]
        self._splits = [
            each.slot.shard_numel * each.source.unsharded.element_size() // self._dtype.itemsize
            for each in self._outputs
        ]
        self._numel = sum(self._splits)
        own = 0 if allocate is not None else self._numel
        self._sent = Resizable(torch.empty(own, dtype=self._dtype, device=device))
        self._arrived = Resizable(torch.empty(world_size * own, dtype=self._dtype, device=device))
        self._gathered: torch.Tensor | None = None
        self._temporary = [each for each in (self._sent, self._arrived, *self._rearranged) if each.nbytes]
        if allocate is None:
            self._bind_to(self._arrived.flat, self._sent.flat)

    def _output(self, source: Source, slot: Slot) -> _Output:
        """What the function fills of ``slot``: the parameter's place, or where its order is another, a temporary."""
        partition, numel = slot.partition, self._world_size * slot.shard_numel
        whole = source.unsharded[slot.unsharded_offset :]
        if partition.arrives_in_order:
            return _Output(source, slot, whole[:numel], 1, [])
        if partition.dim is not None and slot.rows * self._world_size == partition.size:
            return _Output(source, slot, whole[:numel], partition.outer, [])
        rearranged = Resizable(torch.empty(numel, dtype=source.unsharded.dtype, device=self._device))
        self._rearranged.append(rearranged)
        moves = rows_in_place(rearranged.flat.view(self._world_size, -1), whole, partition, slot.rows)
        return _Output(source, slot, rearranged.flat, 1, moves)

    def _bind_to(self, gathered: torch.Tensor, sent: torch.Tensor) -> None:
        self._let_go()
        self._gathered = gathered
        sent_bytes, start = sent.view(torch.uint8), 0
        for source, slot, *_ in self._outputs:
            nbytes = slot.shard_numel * source.unsharded.element_size()
            part = sent_bytes[start : start + nbytes].view(source.unsharded.dtype)
            self._add_copy_in(source.shard.narrow(0, slot.shard_offset, slot.shard_numel), part)
            start += nbytes
        self.members = ((on_the_wire(gathered), on_the_wire(sent)),) if self._numel else ()

    def _let_go(self) -> None:
        super()._let_go()
        self._gathered = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the buffers have at the moment."""
        return sum(each.storage.nbytes() for each in self._temporary)

    def allocate(self, arena: Arena = ALLOCATOR) -> None:
        """Give memory to what is sent, gathered into and filled. On the stream that writes it first."""
        self._has_memory = True
        self._arena = arena
        for buffer in self._temporary:
            buffer.allocate(arena)
        self._allocate_unsharded()
        if self._allocate is not None and self._numel:
            gathered = self._allocate((self._world_size * self._numel,), dtype=self._dtype, device=self._device)
            row_bytes, widest = self._numel * self._dtype.itemsize, self._sources[0].unsharded.element_size()
            sent = gathered[self._rank * self._numel : (self._rank + 1) * self._numel]
            if row_bytes % widest:  # a part of it would not lie on a multiple of its elements' size
                sent = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            self._bind_to(gathered, sent)

    def copy_in(self, version: object = None) -> None:
        """Copy all that is sent, cast where it must be: nothing is kept from gather to gather."""
        for copies in self._copies_in.values():
            _torch.foreach_copy(copies.destinations, copies.sources, non_blocking=True)

    def copy_out(self) -> None:
        """Let the function fill its outputs, rearrange those that need it, and free what the gather needed."""
        if self._numel:
            assert self._gathered is not None, "it has arrived"
            outputs = [each.flat for each in self._outputs]
            if self._dtype is torch.uint8:
                outputs = [each.view(torch.uint8) for each in outputs]
            with torch.no_grad(), named(f"the output_fn of set_all_gather_layout(), around '{self._around}'"):
                self._function(
                    self._gathered,
                    outputs,
                    list(self._splits),
                    [each.outer for each in self._outputs],
                    self._world_size,
                )
                for each in self._outputs:
                    for arrived, place in each.moves:
                        place.copy_(arrived)
        self.free()

    def free(self) -> None:
        """Free all but the unsharded buffers."""
        if not self._has_memory:
            return
        self._has_memory = False
        for buffer in self._temporary:
            buffer.free()
        if self._allocate is not None:
            self._let_go()


def _in_order(source: Source) -> list[Slot]:
    """What is carried of ``source``, as the parameters are in their module."""
    return [slot for slot in source.layout.carried if slot.shard_numel]


OUTPUT_FUNCTION.fill(output_function)
GATHER_BY_FUNCTION.fill(GatherByFunction)
