"""The reduction of one group's gradients in one dtype: packing, the sharded-gradient buffer, delivery.

Owns the sharded-gradient buffer and the DTensors over it; issues no collective of the reduction.

[Note: reusing the sharded-gradient buffer]
The reduce-scatter writes into one flat buffer under gradient DTensors that are built once: building them anew costs
more than the rest of the reduction. The buffer is used again only when no ``.grad`` is set and nobody else holds what
lies on it: the Python references of every gradient and of its local tensor, and the users of the buffer's storage, are
at the counts they had when they were built. Otherwise a new buffer is built, so a gradient (or a view of one) that the
user keeps never changes. From ``zero_grad`` on (or the first forward after gradients were cleared otherwise) until they
are reduced again the buffer has no memory, as if it did not exist.

Where gradients are delivered in another dtype or place than they are reduced in, the reduction arrives in a temporary,
and one copy of it goes to the buffer.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.buffers import (
    ALLOCATOR,
    Allocate,
    Arena,
    Offloading,
    Resizable,
    host_copy,
    storage_alias,
)
from fsdp2.core.gather import Transfer
from fsdp2.core.layout import GradientLayout, GradientSlot
from fsdp2.core.param import FSDPParam
from fsdp2.core.plan import ReducePlan
from fsdp2.core.ports import Port, missing
from fsdp2.core.sharding import dtensor_at_offset, in_rows, scatter_rows
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError

# `GradientBuffer`: what sharded gradients of one group and dtype lie on, from step to step.
#
# Knows who holds them; when it may be used again, see the note above.


class GradientBuffer:
    """A flat sharded-gradient buffer and the gradients on it.

    Attributes:
        locals: the local tensors of the gradients.
        wrapped: what the DTensors show as their memory: others where the user has set ``.data``.
        resizable: the buffer, to be given memory on the stream that writes it first.
        stays: a graph writes there, so that its memory is never freed.
    """

    stays = False

    def __init__(self, flat: torch.Tensor, gradients: list[DTensor]) -> None:
        self.flat = flat
        self.gradients = gradients
        self.locals = tuple(map(_torch.local_of, gradients))
        self.wrapped = list(map(_torch.untyped_storage, gradients))
        self.resizable = Resizable(flat)
        self._storage = self.resizable.storage
        self._baseline = self._counts()
        self._views: dict[tuple[int, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def _counts(self) -> list[int]:
        """Holders of the storage, then of each gradient and of its local tensor."""
        count = sys.getrefcount
        own = (count(self._storage), _torch.storage_use_count(self._storage))
        return [*own, *map(count, self.gradients), *map(count, self.locals)]

    def view(self, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """``shape`` from ``start`` on; always the same tensor. Nobody keeps it: `is_free` does not see who holds it."""
        known = self._views.get((start, shape, stride))
        if known is None:
            known = self.flat.as_strided(shape, stride, self.flat.storage_offset() + start)
            self._views[start, shape, stride] = known
            self._baseline[1] += 1  # the storage has one user more, which is this object
        return known

    def is_free(self) -> bool:
        """Whether only this object holds the gradients, provided that none of them is any parameter's ``.grad``."""
        return self._counts() == self._baseline

    def release(self) -> None:
        """Free the memory, if the buffer is free. The caller has seen that no ``.grad`` is set."""
        if self._counts() == self._baseline and not self.stays:
            self.resizable.free()


Pack = Callable[[Sequence[torch.Tensor], int, torch.Tensor], None]
"""Fills (world_size, n) with tensors of one dtype, in their order: dim 0 of each is cut into a chunk for each rank."""


def _as_chunks(layout: GradientLayout, world_size: int, device: torch.device, dtype: torch.dtype, casts: bool) -> Pack:
    return _torch.chunk_cat


PACKING: Port[Callable[[GradientLayout, int, torch.device, torch.dtype, bool], Pack]] = Port(_as_chunks)
"""The fastest way of packing what a layout packs on a device, in a dtype, and whether it is cast; all give the same."""


_SHARDED: Callable[[FSDPParam], Any] = operator.attrgetter("sharded")
_DTYPE: Callable[[Any], torch.dtype] = operator.attrgetter("dtype")


class Accumulation:
    """What some backwards have reduced, and the last of them is to deliver: here nothing ever waits.

    Attributes:
        dtype: in which it adds up; None: in none.
        waits: there is something in it.
        missing: indices of parameters that had no gradient on this rank in any of these backwards.
    """

    dtype: torch.dtype | None = None
    waits: bool = False
    missing: frozenset[int] = frozenset()

    @property
    def waiting(self) -> torch.Tensor | None:
        """The sum itself; None if nothing waits."""
        return None

    def added_to(self, reduced: torch.Tensor) -> torch.Tensor:
        """``reduced`` plus what waits; in place if dtypes allow."""
        return reduced

    def keep(self, total: torch.Tensor, missing: Sequence[int]) -> None:
        """Let ``total`` wait: a sum that `added_to` returned."""
        raise NotImplementedError

    def still_missing(self, missing: Sequence[int]) -> frozenset[int]:
        """Those of ``missing`` that had no gradient before either."""
        return frozenset(missing)

    def drop(self) -> None:
        """Nothing waits any more."""


ACCUMULATION: Port[Callable[[Offloading, torch.dtype], Accumulation]] = Port(missing("memory.host_accumulation"))
"""Makes one that waits in host memory."""


@dataclass(slots=True)
class PackedGradients:
    """One reduction under way: what it sends, where it arrives, and what must stay alive until it has.

    Attributes:
        output: flat, where it arrives, in the reduce dtype.
        is_borrowed: ``output`` is a custom collective's, which may use it again, or a graph's.
        delivered: flat, what the gradients lie on; None until `GradientBucket.finish`.
        missing: indices of parameters without a gradient on this rank.
        members: of the reduce-scatter.
        inputs: the gradients themselves, until they were packed; those that travel alone are among the members.
        added: what earlier backwards have reduced over shards, and this one adds.
        may_keep: the memory of ``output``, all the same, if nobody else holds it.
        taken: buffers, of those sent and arrived in, that go back to their arena once the gradients are delivered.
        presence: (params,) on the host, on its way there: which of them has a gradient on some rank. None: not asked.
    """

    output: torch.Tensor
    is_borrowed: bool
    delivered: torch.Tensor | None = None
    missing: list[int] = field(default_factory=list)
    members: list[Transfer] = field(default_factory=list)
    inputs: list[torch.Tensor | None] = field(default_factory=list)
    added: torch.Tensor | None = None
    taken: list[Resizable] = field(default_factory=list)
    presence: torch.Tensor | None = None
    may_keep: bool = False

    def give_back(self) -> None:
        """Everything was sent, has arrived and been delivered."""
        for buffer in self.taken:
            buffer.free()

    def release_inputs(self) -> None:
        """Let go of what was sent, once it has been."""
        self.members, self.inputs, self.added = [], [], None
        arrived = _torch.storage_of(self.output)
        for buffer in self.taken:
            if _torch.storage_of(buffer.flat) != arrived:
                buffer.free()


def _is_changed(slot: GradientSlot) -> bool:
    """Whether a gradient is more than packed as it comes."""
    return slot.direct or slot.is_dealt_out or bool(slot.partition.order) or slot.partition.leading > 1


class GradientBucket:
    """Packs the unsharded gradients of a group's trainable parameters that are reduced in one dtype, and delivers them.

    Attributes:
        params: the parameters, in the order of the group.
        plan: what they have in common, and how they travel.
        dtype: of the plan, in which gradients are reduced.
        layout: of the plan.
        local_shapes: of the parts of each parameter that this rank receives.
        reduce_scattered: reduced over shards, and waiting for the all-reduce over replicas; in ``layout``.
        sum: reduced, and waiting on the host for the last backward, if anything ever does.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        plan: ReducePlan,
        *,
        world_size: int,
        rank: int,
        device: torch.device,
        offloading: Offloading,
    ) -> None:
        self.params = tuple(params)
        self.plan = plan
        self.layout, self.dtype = layout, dtype = plan.layout, plan.dtype
        self.reduce_scattered: torch.Tensor | None = None
        self._reduce_scattered_missing: set[int] = set()  # without a gradient on this rank in any of its backwards
        self._world_size = world_size
        self._device = device
        self._home = offloading
        self.local_shapes = [slot.local_shape(rank) for slot in layout.slots]
        dtypes = {param.delivery_dtype(dtype) for param in self.params}
        self._delivery_dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        self._arrives_in_place = self._delivery_dtype is dtype and offloading.device == device
        self.sum = Accumulation()
        if offloading.sums_on_host:
            self.sum = ACCUMULATION.filling(
                offloading, self._delivery_dtype or functools.reduce(torch.promote_types, dtypes, dtype)
            )
        self._buffer: GradientBuffer | None = None
        self._is_due = False  # something is on its way to the buffer, or lies there and is no parameter's ``.grad`` yet
        self._carried = layout.carried
        self._presences = slice(layout.presence_offset, layout.presence_offset + len(self.params))
        self._positions = self._find_positions()
        placed = [
            (index, position, slot)
            for index, (position, slot) in enumerate(zip(self._positions, self._carried, strict=True))
            if position is not None
        ]
        self._rearranged = [each for each in placed if _is_changed(each[2])]
        self._as_they_come = [(index, position) for index, position, slot in placed if not _is_changed(slot)]
        casts = any(param.param_dtype != dtype for param in self.params)
        self._pack = PACKING.filling(layout, world_size, device, dtype, casts)
        self._templates: dict[torch.dtype, list[torch.Tensor]] = {}
        self._are_plain = all(param.sharding.unsharded_spec is None for param in self.params)

    def _template_of(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """``packing`` without gradients, in their ``dtype``: zeros for alignment, and last the presence of all."""
        if dtype not in self._templates:
            placed = zip(self._carried, self._positions, strict=True)
            packed = [slot for slot, position in placed if position not in (None, -1)]
            sizes = {0, *(slot.pad_numel for slot in packed)}
            zeros = {n: torch.zeros(self._world_size, n, dtype=dtype, device=self._device) for n in sizes}
            template: list[torch.Tensor] = []
            for slot in sorted(packed, key=lambda slot: slot.offset):
                if slot.pad_numel:
                    template.append(zeros[slot.pad_numel])
                template.append(zeros[0])
            numel = self.layout.packed_numel - self.layout.presence_offset
            presence = torch.zeros(self._world_size, numel, dtype=dtype, device=self._device)
            presence[:, : len(self.params)] = self.plan.presence
            template.append(presence)
            self._templates[dtype] = template
        return self._templates[dtype]

    def _find_positions(self) -> list[int | None]:
        """Where in ``packing`` each gradient goes: -1 if it travels alone, None if it has no elements."""
        positions: list[int | None] = [-1 if slot.shard_numel else None for slot in self._carried]
        position = 0
        for index, slot in sorted(enumerate(self._carried), key=lambda pair: pair[1].offset):
            if slot.shard_numel and not slot.direct:
                position += 1 if slot.pad_numel else 0
                positions[index] = position
                position += 1
        return positions

    def pop_grads(self) -> list[torch.Tensor | None]:
        """Take autograd's gradients off the unsharded parameters."""
        if not self._are_plain:
            return [param.pop_grad() for param in self.params]
        gradients: list[torch.Tensor | None] = [None] * len(self.params)
        for index, param in enumerate(self.params):
            unsharded = param.unsharded
            if unsharded is not None:
                gradients[index] = unsharded.grad
                unsharded.grad = None
        return gradients

    def begin(
        self,
        in_place: bool,
        allocate: Allocate | None = None,
        arena: Arena = ALLOCATOR,
        onto_output: bool = False,
    ) -> PackedGradients:
        """Take the memory of a reduction: where gradients are packed, and where their sum arrives.

        On the stream of compute, see [Note: streams and lifetimes]. ``in_place``: what arrives is what is delivered, if
        dtype and place allow; else it is a temporary. ``arena``: of what is needed until delivery. ``onto_output``:
        what is packed is sent to nobody, and lies where it arrives.
        """
        layout = self.layout
        taken: list[Resizable] = []
        if allocate is not None:
            output = allocate((layout.numel,), dtype=self.dtype, device=self._device)
        elif in_place and self._arrives_in_place:
            output = self._delivery_flat(arena)
        else:
            passes_on = in_place and self._is_copied_to_delivery
            output = (arena if passes_on else ALLOCATOR).empty(
                layout.numel, dtype=self.dtype, device=self._device, taken=taken
            )
        size = self._world_size * layout.packed_numel
        if allocate is not None:
            input = allocate((size,), dtype=self.dtype, device=self._device)
        elif onto_output:
            input = output[:size]
        else:
            input = arena.empty(size, dtype=self.dtype, device=self._device, taken=taken)
        row = output if layout.numel == layout.packed_numel else output[: layout.packed_numel]
        # Gradients may be delivered where they arrived if that is their buffer.
        delivered = output if self._buffer is not None and output is self._buffer.flat else None
        return PackedGradients(output, allocate is not None, delivered, [], [(row, input)], [], taken=taken)

    def pack(
        self,
        packed: PackedGradients,
        gradients: list[torch.Tensor | None],
        *,
        arena: Arena = ALLOCATOR,
        lets_go: bool = False,
        casts: bool = False,
    ) -> None:
        """Fill what `begin` has taken with ``gradients`` (one per parameter, unsharded shapes; None for zeros).

        What is packed is a list of tensors, whose chunks along dim 0 go to the ranks in one kernel::

            packing = [pad, g0, g1, pad, g2, presence]      two parameters without alignment between them, and a third
            input   = | pad g0 g1 pad g2 presence | pad g0 g1 pad g2 presence | ...     rank 0's chunks, rank 1's, ...

        ``_positions`` says where in the list each gradient goes; the rest comes from ``_template_of``. Most go there
        ``_as_they_come``. The others are ``_rearranged``: permuted, cut along another dim, or sent alone, without a
        copy. A gradient of another dtype than most is packed in theirs, and then once more over that place.

        On the stream of the reduce-scatter. Gradients are read, never written. ``lets_go``: a gradient that is copied
        for itself leaves ``gradients`` before the next copy is made, as no stream may still read it. ``casts``: what
        travels alone is cast to the dtype in which it is reduced.
        """
        layout, world_size, output, taken = self.layout, self._world_size, packed.output, packed.taken
        sent = self.dtype if casts else self.plan.sent
        missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        carried = gradients if layout.region is None else self._with_region(gradients, sent)
        dtype = self._packed_dtype(carried, missing)
        packing = self._template_of(dtype).copy()
        direct: list[Transfer] = []
        others = self._place(carried, packing, dtype)
        for index, position, slot in self._rearranged:
            gradient = self._dense(index, carried[index], sent if slot.direct else dtype)
            if slot.partition.order:
                gradient = gradient.permute(slot.partition.order)
            if not slot.direct:
                if gradient.dtype is not dtype:
                    others.append((slot, gradient))
                    gradient = gradient.to(dtype)
                if slot.is_dealt_out:
                    gradient = scatter_rows(gradient, slot.partition, slot.rows, world_size)
                else:
                    gradient = in_rows(gradient, slot.partition)
                packing[position] = gradient
                continue
            if gradient.dtype is not sent:
                flat = arena.empty(gradient.numel(), dtype=sent, device=self._device, taken=taken)
                gradient = flat.view(gradient.shape).copy_(gradient)
                if lets_go:
                    carried[index] = None
            direct.append((output.narrow(0, slot.offset, slot.shard_numel), gradient.contiguous().view(-1)))
        if missing:
            packing[-1] = self._without(packing[-1], missing)
        (_, input), *_ = packed.members
        rows = input.view(world_size, -1)
        self._pack(packing, world_size, rows)
        for slot, gradient in others:
            pieces = scatter_rows(gradient, slot.partition, slot.rows, world_size)
            rows[:, slot.offset : slot.offset + slot.shard_numel].view(pieces.shape).copy_(pieces)
        packed.members += direct
        packed.missing, packed.inputs = missing, gradients

    def _place(
        self, carried: list[torch.Tensor | None], packing: list[torch.Tensor], dtype: torch.dtype
    ) -> list[tuple[GradientSlot, torch.Tensor]]:
        """Put gradients that are packed as they come to their positions in ``packing``.

        Returns:
            Those that are not of ``dtype``, to be packed over what was put in their place, which may have lost bits:
            casting all to a dtype that has room for each would take a copy of every other.
        """
        others: list[tuple[GradientSlot, torch.Tensor]] = []
        for index, position in self._as_they_come:
            gradient = carried[index]
            if gradient is None or gradient.is_sparse or gradient.dtype is not dtype:
                gradient = self._dense(index, gradient, dtype)
                if gradient.dtype is not dtype:
                    others.append((self._carried[index], gradient))
                    gradient = gradient.to(dtype)
            packing[position] = gradient
        return others

    def _with_region(self, gradients: list[torch.Tensor | None], sent: torch.dtype) -> list[torch.Tensor | None]:
        """What is carried: ``gradients``, but in the place of those that are owned one flat gradient made of them."""
        layout = self.layout
        assert layout.region is not None, "some are owned"
        dtypes = {each.dtype for each in gradients if each is not None}
        dtype = sent if layout.region.direct else next(iter(dtypes)) if len(dtypes) == 1 else self.dtype
        flat = torch.empty(layout.region.partition.numel, dtype=dtype, device=self._device)
        pieces = flat.split_with_sizes([numel for _, numel in layout.filling])
        gaps, filled, sources, start = [], [], [], 0
        for (index, numel), piece in zip(layout.filling, pieces, strict=True):
            offset, start = start, start + numel
            gradient = None if index is None else gradients[index]
            if index is None or gradient is None:
                gaps.append(piece)
                continue
            if gradient.is_sparse:
                self._refuse_sparse(self.params[index])
            partition = layout.slots[index].partition
            filled.append(storage_alias(flat, offset, partition.shape, partition.stride(partition.shape)))
            sources.append(gradient)
        if gaps:
            _torch.foreach_zero(gaps)  # padding, and what has no gradient on this rank
        if filled:
            _torch.foreach_copy(filled, sources)
        return [
            *(each for each, slot in zip(gradients, layout.slots, strict=True) if slot.partition.owner is None),
            flat,
        ]

    def _dense(self, index: int, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """What is carried at ``index``: zeros of ``dtype`` in the place of a gradient that this rank does not have."""
        if gradient is None:
            return torch.zeros(self._carried[index].partition.shape, dtype=dtype, device=self._device)
        if gradient.is_sparse:
            in_turn = zip(self.params, self.layout.slots, strict=True)
            self._refuse_sparse([param for param, slot in in_turn if slot.partition.owner is None][index])
        return gradient

    @staticmethod
    def _refuse_sparse(param: FSDPParam) -> NoReturn:
        raise FSDPNotImplementedError(
            f"parameter '{param.path}' has a sparse gradient, which cannot be sharded; use sparse=False."
        )

    def _packed_dtype(self, carried: Sequence[torch.Tensor | None], missing: Sequence[int]) -> torch.dtype:
        """The dtype in which gradients are packed, which then casts as it copies: that of all, or of most elements."""
        present = [each for each in carried if each is not None] if missing else carried
        dtypes = set(map(_DTYPE, present))
        if len(dtypes) == 1:
            (dtype,) = dtypes
            return dtype
        numels: dict[torch.dtype, int] = {self.dtype: 0}
        for gradient, position in zip(carried, self._positions, strict=True):
            if gradient is not None and position not in (None, -1):
                numels[gradient.dtype] = numels.get(gradient.dtype, 0) + gradient.numel()
        return max(numels, key=numels.__getitem__)

    @property
    def _is_copied_to_delivery(self) -> bool:
        """Whether nothing of a temporary that gradients arrive in is needed after their delivery."""
        return self._delivery_dtype is not None and not self._arrives_in_place and self.sum.dtype is None

    @staticmethod
    def _without(presence: torch.Tensor, missing: list[int]) -> torch.Tensor:
        presence = presence.clone()
        starts = [index for index in missing if index - 1 not in missing]
        ends = [index + 1 for index in missing if index + 1 not in missing]
        # (Not by a list of indices, which would be copied to the device while the host waits.)
        _torch.foreach_zero([presence[:, start:end] for start, end in zip(starts, ends, strict=True)])
        return presence

    def keep_reduce_scattered(self, packed: PackedGradients) -> None:
        """Keep what was reduced over shards until it is all-reduced over replicas. On the reduce-scatter stream."""
        if self.reduce_scattered is None:
            self.reduce_scattered = packed.output.clone() if packed.is_borrowed else packed.output
            self._reduce_scattered_missing = set(packed.missing)
        else:
            self.reduce_scattered.add_(packed.output)
            self._reduce_scattered_missing.intersection_update(packed.missing)

    def add_reduce_scattered(self, packed: PackedGradients) -> None:
        """Add what `keep_reduce_scattered` kept. On the reduce-scatter stream."""
        if self.reduce_scattered is not None:
            packed.output.add_(self.reduce_scattered)
            packed.added = self.reduce_scattered
            packed.missing = [index for index in packed.missing if index in self._reduce_scattered_missing]
            self.reduce_scattered = None

    def continues(self, earlier: GradientBucket) -> bool:
        """Whether what waits in ``earlier`` can wait here."""
        dtypes = [each.sum.dtype for each in (self, earlier)]
        knows_presence = bool(earlier.plan.presence) or not self.plan.presence
        return self.layout == earlier.layout and dtypes[0] == dtypes[1] and knows_presence

    def take_reduce_scattered(self, earlier: GradientBucket) -> None:
        """Go on with what ``earlier``, which this continues, has kept."""
        self.reduce_scattered, earlier.reduce_scattered = earlier.reduce_scattered, None
        self._reduce_scattered_missing = earlier._reduce_scattered_missing
        self.sum = earlier.sum

    def waits(self) -> bool:
        """Whether a later backward is to go on with what earlier ones have reduced."""
        return self.reduce_scattered is not None or self.sum.waits

    def clear(self, indices: Sequence[int], set_to_none: bool) -> None:
        """Make zeros of what waits of these parameters; ``set_to_none``: as if they had no gradient on this rank."""
        waiting = [] if self.reduce_scattered is None else [self.reduce_scattered]
        if self.sum.waiting is not None:
            waiting.append(self.sum.waiting)
        for flat in waiting:
            for index in indices:
                slot, shape = self.layout.slots[index], self.local_shapes[index]
                storage_alias(flat, slot.offset, shape, slot.partition.stride(shape)).zero_()
                if set_to_none:
                    flat[self.layout.presence_offset + index].zero_()
        if set_to_none:
            self._reduce_scattered_missing.update(indices)
            self.sum.missing |= frozenset(indices)

    def drop(self) -> None:
        """Forget what waits."""
        self._is_due = False
        self.reduce_scattered = None
        self.sum.drop()

    def finish(
        self,
        packed: PackedGradients,
        divisor: float | torch.Tensor | None,
        keeps: bool,
        arena: Arena = ALLOCATOR,
        of_compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Divide by ``divisor``, and bring the result to the dtype and place of the gradients.

        =================================================  ==========================================================
        the sum has arrived in                             the gradients lie on
        =================================================  ==========================================================
        the gradient buffer                                that
        a temporary of their dtype and place               that, as some ``.grad`` is set already and is added to
        the memory of a graph, which nobody else holds     the buffer, which takes the memory over
        memory of a custom collective, or of a graph       the buffer, or a temporary if a ``.grad`` is set: a copy
        a temporary of another dtype or place              the same: a cast, or a move to the host
        any, and the gradients have several dtypes         copies that `set_grads` makes, each in its own
        =================================================  ==========================================================

        ``keeps``: to the host instead, where it waits for the last backward. ``arena``: as in `begin`.

        On the stream that reduced last, the current stream where there are none. Memory is taken ``of_compute``.
        """
        if divisor is not None:
            packed.output.div_(divisor)
        if keeps or self.sum.waits:
            packed.output = self.sum.added_to(packed.output)
            if keeps:
                self.sum.keep(packed.output, packed.missing)
                return
            packed.missing = sorted(self.sum.still_missing(packed.missing))
            self.sum.drop()
        if self._delivery_dtype is None and packed.is_borrowed:
            arrived = packed.output
            with of_compute():
                packed.output = torch.empty_like(arrived)
            packed.output.copy_(arrived)
        if packed.delivered is None and self._delivery_dtype is not None:
            if self._arrives_in_place and not packed.is_borrowed:
                packed.delivered = packed.output
            elif packed.may_keep and self._can_keep(packed.output):
                packed.output = packed.delivered = self._kept(packed.output)
            else:
                with of_compute():
                    packed.delivered = self._delivery_flat(arena)
                packed.delivered.copy_(packed.output, non_blocking=True)

    def _delivery_flat(self, arena: Arena) -> torch.Tensor:
        """Where gradients are delivered: their own buffer (in a pool), or a temporary if some ``.grad`` is set."""
        assert self._delivery_dtype is not None, "gradients of one dtype lie on one buffer"
        if not self._are_cleared():
            return self._home.empty(self.layout.numel, self._delivery_dtype)
        buffer = self._unused_buffer(self._delivery_dtype)
        buffer.resizable.allocate(ALLOCATOR if self._home.is_host else arena)
        self._is_due = True
        return buffer.flat

    def _unused_buffer(self, dtype: torch.dtype) -> GradientBuffer:
        buffer = self._buffer
        # (Lists are compared by identity first, and without a call.)
        if buffer is not None and [*map(_torch.untyped_storage, buffer.gradients)] != buffer.wrapped:
            self._refuse_set_data(buffer)
        if self._buffer is None or (self._buffer.resizable.has_memory and not self._buffer.is_free()):
            flat = self._home.empty(self.layout.numel, dtype)
            self._buffer = GradientBuffer(flat, self._gradients_on(flat))
        return self._buffer

    def _refuse_set_data(self, buffer: GradientBuffer) -> NoReturn:
        self._buffer = None
        now = list(map(_torch.untyped_storage, buffer.gradients))
        changed = next(index for index, storage in enumerate(now) if storage is not buffer.wrapped[index])
        raise FSDPRuntimeError(
            f".data was set on the gradient of parameter '{self.params[changed].path}'. A DTensor ignores that: the "
            "gradient had its former values, also in a step that followed. Write into it instead, under "
            "torch.no_grad(): parameter.grad.mul_(0.5), parameter.grad.copy_(value)."
        )

    def _can_keep(self, flat: torch.Tensor) -> bool:
        """Whether ``flat`` is all of its memory, in the place and dtype of the gradients, and no other tensor's."""
        if not (self._arrives_in_place and _torch.can_swap_memory):
            return False
        storage = flat.untyped_storage()
        is_alone = _torch.storage_use_count(storage) == 2  # the tensor, and the object just made
        return is_alone and storage.nbytes() == self.layout.numel * self.dtype.itemsize

    def _kept(self, flat: torch.Tensor) -> torch.Tensor:
        """The buffer, with the memory of ``flat``; or where some ``.grad`` is set, ``flat`` as a temporary."""
        if not self._are_cleared():
            return flat
        buffer = self._unused_buffer(self.dtype)
        buffer.resizable.take_over(flat.untyped_storage())
        self._is_due = True
        return buffer.flat

    @property
    def delivered(self) -> GradientBuffer | None:
        """The buffer that gradients were last delivered on, if they were: whether a parameter has its own is open."""
        return self._buffer

    def cleared_buffer(self) -> GradientBuffer | None:
        """The gradient buffer, if it has memory, of gradients that were delivered and cleared since."""
        buffer = self._buffer
        if buffer is None or not buffer.resizable.has_memory or self._is_due or not self._are_cleared():
            return None
        return buffer

    def leave_buffer(self) -> None:
        """Neither free nor use the gradient buffer again. Gradients that lie on it keep it."""
        self._buffer = None

    def needs_values(self, packed: PackedGradients) -> bool:
        """Whether `set_grads` does more than to set ``.grad``."""
        if packed.delivered is None or not self._are_cleared() or self._have_tensor_hooks():
            return True
        return any(_torch.post_accumulate_grad_hooks(param.sharded) for param in self.params)

    def _are_cleared(self) -> bool:
        """Whether no parameter has a gradient. (Loops here, for a generator is one more call per parameter.)

        From the last on: where each is cleared by a hook of its own, that one still has its.
        """
        with _torch.plain_attributes():
            for param in reversed(self.params):  # noqa: SIM110
                if param.sharded.grad is not None:
                    return False
            return True

    def _have_tensor_hooks(self) -> bool:
        with _torch.plain_attributes():
            return any(map(_torch.tensor_hooks, map(_SHARDED, self.params)))

    def _gradients_on(self, flat: torch.Tensor) -> list[DTensor]:
        return [self._gradient_on(flat, index, flat.dtype) for index in range(len(self.params))]

    def _gradient_on(self, flat: torch.Tensor, index: int, dtype: torch.dtype) -> DTensor:
        """The gradient that lies on ``flat``, or a copy where it must be of another ``dtype`` or in another place."""
        slot, shape = self.layout.slots[index], self.local_shapes[index]
        local = storage_alias(flat, slot.offset, shape, slot.partition.stride(shape))
        local = local.to(device=self._home.device, dtype=dtype)
        spec = _torch.spec_with_dtype(_torch.spec_of(self.params[index].sharded), dtype)
        return dtensor_at_offset(local, spec)

    def set_grads(self, packed: PackedGradients, *, zeros_for_unused: bool) -> None:
        """Set or add to ``.grad`` of the sharded parameters, once the reduction has arrived.

        A parameter that had no gradient on any rank is left as it is, unless ``zeros_for_unused``. The users' hooks on
        parameters are called here, with the reduced gradient: autograd never sees the sharded parameters.
        """
        if zeros_for_unused or not packed.missing:
            self._set(packed, set())
        elif packed.presence is not None:
            self._set(packed, set(packed.missing))  # the others when the host knows: see `set_late_grads`
        else:
            self._set(packed, self._absent(packed, packed.output[self._presences]))

    def copy_presence(self, packed: PackedGradients) -> None:
        """Let the host know later which parameters have a gradient on some rank, if that is open.

        On the stream that reduced last, where there are streams. `set_late_grads` follows, once this has arrived.
        """
        if packed.missing:
            packed.presence = host_copy(packed.output[self._presences])

    def set_late_grads(self, packed: PackedGradients) -> None:
        """As `set_grads`, of the parameters that had no gradient on this rank. `copy_presence` has arrived."""
        assert packed.presence is not None, "asked for"
        late = set(packed.missing) - self._absent(packed, packed.presence)
        if late:
            self._set(packed, set(range(len(self.params))) - late)

    def _set(self, packed: PackedGradients, absent: set[int]) -> None:
        """Set or add to the gradients of all parameters but ``absent``."""
        buffer, delivered = self._buffer, packed.delivered
        if delivered is None or self._have_tensor_hooks():
            self._accumulate_each(packed.output if delivered is None else delivered, absent)
        elif buffer is not None and delivered is buffer.flat:
            met: list[tuple[FSDPParam, DTensor]] = []  # autograd has set a gradient since these were sent
            pairs: Iterable[tuple[FSDPParam, DTensor]] = zip(self.params, buffer.gradients, strict=True)
            if absent:
                pairs = [pair for index, pair in enumerate(pairs) if index not in absent]
            with _torch.plain_attributes():
                for param, gradient in pairs:
                    sharded = param.sharded
                    if sharded.grad is None:
                        sharded.grad = gradient
                    else:
                        met.append((param, gradient))
            for param, gradient in met:
                self._add(param, gradient)
        elif buffer is not None and not absent and self._accumulates_in(buffer):
            buffer.flat.add_(delivered)
        else:
            self._accumulate_each(delivered, absent)
        self._is_due = False
        self._call_hooks(absent)

    @staticmethod
    def _absent(packed: PackedGradients, presence: torch.Tensor) -> set[int]:
        """Parameters without a gradient on any rank; where ``presence`` is the device's, the host waits for it."""
        is_absent = (presence == 0).tolist()
        return {index for index in packed.missing if is_absent[index]}

    def _accumulates_in(self, buffer: GradientBuffer) -> bool:
        return all(
            param.sharded.grad is gradient for param, gradient in zip(self.params, buffer.gradients, strict=True)
        )

    def _accumulate_each(self, flat: torch.Tensor, absent: set[int]) -> None:
        for index, param in enumerate(self.params):
            if index in absent:
                continue
            gradient: torch.Tensor = self._gradient_on(flat, index, param.delivery_dtype(self.dtype))
            for hook in (_torch.tensor_hooks(param.sharded) or {}).values():
                if _torch.is_of_several(hook):
                    self._refuse_hook_of_several(param)
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            self._add(param, gradient)

    @staticmethod
    def _add(param: FSDPParam, gradient: torch.Tensor) -> None:
        """Set ``.grad`` of the sharded parameter, or add to what is there.

        DTensor's own operators may have left a gradient with other placements, as of parameters that are cut unevenly.
        """
        existing, spec = param.sharded.grad, _torch.spec_of(param.sharded)
        if existing is None:
            param.sharded.grad = gradient
            return
        if not isinstance(existing, DTensor) or existing.device_mesh != spec.mesh:
            raise FSDPRuntimeError(
                f"the gradient of '{param.path}' was set to a {type(existing).__name__} that is not on the mesh of its "
                "parameter, so the next one cannot be added to it; set .grad to None or to a DTensor with the "
                "parameter's placements."
            )
        if tuple(existing.placements) == tuple(spec.placements):
            existing.add_(gradient)
        else:
            param.sharded.grad = existing.redistribute(placements=spec.placements).add_(gradient)

    @staticmethod
    def _refuse_hook_of_several(param: FSDPParam) -> NoReturn:
        raise FSDPNotImplementedError(
            f"torch.autograd.graph.register_multi_grad_hook was given the sharded parameter '{param.path}', which is "
            "in no autograd graph: the hook would never be called, or without this gradient. Use "
            "register_post_accumulate_grad_hook on each parameter, a module's register_full_backward_hook, or what "
            "follows backward()."
        )

    def _call_hooks(self, absent: set[int]) -> None:
        """Call the users' post-accumulate-grad hooks."""
        with _torch.plain_attributes():
            hooks_of = list(map(_torch.post_accumulate_grad_hooks, map(_SHARDED, self.params)))
        if not any(hooks_of):
            return
        for index, hooks in enumerate(hooks_of):
            if hooks and index not in absent:
                for hook in tuple(hooks.values()):
                    hook(self.params[index].sharded)
