"""The reduce-scatter of one group's gradients in one dtype: packing, the sharded-gradient buffer, delivery.

Owns the sharded-gradient buffer and the DTensors over it; issues no collective.

[Note: reusing the sharded-gradient buffer]
The reduce-scatter writes into one flat buffer under gradient DTensors that are built once: building them anew costs
more than the rest of the reduction. The buffer is used again only when no ``.grad`` is set and nobody else holds what
lies on it: the Python references of every gradient and of its local tensor, and the users of the buffer's storage, are
at the counts they had when they were built. Otherwise a new buffer is built, so a gradient (or a view of one) that the
user keeps never changes. From the first forward after gradients were cleared until they are reduced again the buffer
has no memory, as if it did not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.buffers import Member, storage_alias
from fsdp2.common import FSDPNotImplementedError, FSDPRuntimeError
from fsdp2.layout import GradientLayout, row_range
from fsdp2.param import FSDPParam


class _GradientBuffer:
    """A flat sharded-gradient buffer and the gradients on it."""

    def __init__(self, flat: torch.Tensor, gradients: list[DTensor]) -> None:
        self.flat = flat
        self.gradients = gradients
        self._storage = flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._has_memory = True
        self._baseline = self._counts()

    def _counts(self) -> list[int]:
        """Holders of the storage, then of each gradient and of its local tensor."""
        count, local_of = sys.getrefcount, _torch.local_of
        counts = [count(self._storage), _torch.storage_use_count(self._storage)]
        for gradient in self.gradients:
            counts.append(count(gradient))
            counts.append(count(local_of(gradient)))
        return counts

    def is_free(self) -> bool:
        """Whether only this object holds the gradients, provided that none of them is any parameter's ``.grad``."""
        return not self._has_memory or self._counts() == self._baseline

    def allocate(self) -> None:
        """Give the buffer memory. On the stream that writes it first."""
        if not self._has_memory:
            self._storage.resize_(self._nbytes)
            self._has_memory = True

    def release(self) -> None:
        """Free the memory, if the buffer is free. The caller has seen that no ``.grad`` is set."""
        if self._has_memory and self._counts() == self._baseline:
            self._storage.resize_(0)
            self._has_memory = False


@dataclass(slots=True)
class PackedGradients:
    """One reduction under way: what it sends, where it arrives, and what must stay alive until it has."""

    members: list[Member]
    output: torch.Tensor
    missing: list[int]
    inputs: list[torch.Tensor | None]


class DtypeGradients:
    """Packs the unsharded gradients of a group's trainable parameters of one dtype, and delivers the reduced ones."""

    def __init__(self, params: Sequence[FSDPParam], layout: GradientLayout, *, world_size: int, rank: int) -> None:
        self.params = tuple(params)
        self.layout = layout
        self._world_size = world_size
        self._local_shapes = [self._local_shape(index, rank) for index in range(len(self.params))]
        self._buffer: _GradientBuffer | None = None
        first = params[0].local
        self._dtype, self._device = first.dtype, first.device
        self._presence = torch.ones(world_size, len(self.params), dtype=self._dtype, device=self._device)
        self._pads = {
            slot.pad_numel: torch.zeros(world_size, slot.pad_numel, dtype=self._dtype, device=self._device)
            for slot in layout.slots
            if slot.pad_numel
        }

    def _local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        slot = self.layout.slots[index]
        start, stop = row_range(slot.shape[0], slot.rows, rank)
        return (stop - start, *slot.shape[1:])

    def take(self) -> list[torch.Tensor | None]:
        """Take autograd's gradients off the unsharded parameters."""
        gradients: list[torch.Tensor | None] = []
        for param in self.params:
            unsharded = param.unsharded
            assert unsharded is not None, "gradients are taken after lazy initialization"
            gradients.append(unsharded.grad)
            unsharded.grad = None
        return gradients

    def pack(self, gradients: list[torch.Tensor | None]) -> PackedGradients:
        """Prepare the reduction of ``gradients`` (one per parameter, unsharded shapes; None contributes zeros).

        On the stream of the reduce-scatter, which allocates and fills every buffer made here. Gradients are read, never
        written: the mean over ranks is the collective's.
        """
        layout, world_size = self.layout, self._world_size
        output = self._output()
        missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        packing: list[torch.Tensor] = []
        direct: list[Member] = []
        for param, slot, gradient in zip(self.params, layout.slots, gradients, strict=True):
            if slot.shard_numel == 0:
                continue
            if gradient is None:
                gradient = torch.zeros(slot.shape, dtype=self._dtype, device=self._device)
            if gradient.is_sparse:
                raise FSDPNotImplementedError(
                    f"parameter '{param.path}' has a sparse gradient, which cannot be sharded; use sparse=False."
                )
            if slot.direct:
                destination = output.narrow(0, slot.offset, slot.shard_numel)
                direct.append((destination, gradient.contiguous().view(-1)))
                continue
            packing.append(gradient)
            if slot.pad_numel:
                packing.append(self._pads[slot.pad_numel])
        packing.append(self._presence_of(missing))
        packed = torch.empty(world_size, layout.packed_numel, dtype=self._dtype, device=self._device)
        _torch.chunk_cat(packing, world_size, packed)
        members = [(output[: layout.packed_numel], packed.view(-1)), *direct]
        return PackedGradients(members, output, missing, gradients)

    def _presence_of(self, missing: list[int]) -> torch.Tensor:
        if not missing:
            return self._presence
        presence = self._presence.clone()
        presence[:, missing] = 0
        return presence

    def _output(self) -> torch.Tensor:
        """Where the reduction arrives: the gradients' own buffer, or a temporary if some ``.grad`` is set."""
        if any(param.sharded.grad is not None for param in self.params):
            return torch.empty(self.layout.numel, dtype=self._dtype, device=self._device)
        if self._buffer is None or not self._buffer.is_free():
            flat = torch.empty(self.layout.numel, dtype=self._dtype, device=self._device)
            self._buffer = _GradientBuffer(flat, self._gradients_on(flat))
        self._buffer.allocate()
        return self._buffer.flat

    def release(self) -> None:
        """Free the gradient buffer's memory if the gradients have been cleared and nobody else holds one."""
        if self._buffer is not None and all(param.sharded.grad is None for param in self.params):
            self._buffer.release()

    def _gradients_on(self, flat: torch.Tensor) -> list[DTensor]:
        # A wrapper's own storage is null. Made from a local tensor with an offset, it could not be saved.
        placeholder = flat.new_empty(0)
        gradients = []
        for param, slot, shape in zip(self.params, self.layout.slots, self._local_shapes, strict=True):
            gradient = _torch.make_dtensor(placeholder, _torch.spec_of(param.sharded))
            _torch.set_local(gradient, storage_alias(flat, slot.offset, shape))
            gradients.append(gradient)
        return gradients

    def deliver(self, packed: PackedGradients) -> None:
        """Set or add to ``.grad`` of the sharded parameters, once the reduction has arrived.

        A parameter that had no gradient on any rank is left as it is. The users' hooks on parameters are called here,
        with the reduced gradient: autograd never sees the sharded parameters.
        """
        absent = self._absent(packed)
        buffer = self._buffer
        if any(_torch.tensor_hooks(param.sharded) for param in self.params):
            self._accumulate_each(packed.output, absent)
        elif buffer is not None and packed.output is buffer.flat:
            for index, (param, gradient) in enumerate(zip(self.params, buffer.gradients, strict=True)):
                if index not in absent:
                    param.sharded.grad = gradient
        elif buffer is not None and not absent and self._accumulates_in(buffer):
            buffer.flat.add_(packed.output)
        else:
            self._accumulate_each(packed.output, absent)
        self._call_hooks(absent)

    def _absent(self, packed: PackedGradients) -> set[int]:
        """Parameters without a gradient on any rank. Reads the device only if one is missing on this rank."""
        if not packed.missing:
            return set()
        start = self.layout.presence_offset
        presence = packed.output[start : start + len(self.params)].tolist()
        return {index for index in packed.missing if presence[index] == 0}

    def _accumulates_in(self, buffer: _GradientBuffer) -> bool:
        return all(
            param.sharded.grad is gradient for param, gradient in zip(self.params, buffer.gradients, strict=True)
        )

    def _accumulate_each(self, output: torch.Tensor, absent: set[int]) -> None:
        for index, (param, reduced) in enumerate(zip(self.params, self._gradients_on(output), strict=True)):
            if index in absent:
                continue
            gradient: torch.Tensor = reduced
            for hook in (_torch.tensor_hooks(param.sharded) or {}).values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            existing = param.sharded.grad
            if existing is None:
                param.sharded.grad = gradient
            elif isinstance(existing, DTensor) and existing.placements == param.sharded.placements:  # type: ignore[attr-defined]
                existing.add_(gradient)
            else:
                raise FSDPRuntimeError(
                    f"the gradient of '{param.path}' was set to a {type(existing).__name__} that is not sharded like "
                    "its parameter, so the next one cannot be added to it; set .grad to None or to a DTensor with "
                    "the parameter's placements."
                )

    def _call_hooks(self, absent: set[int]) -> None:
        """Call the users' post-accumulate-grad hooks."""
        for index, param in enumerate(self.params):
            hooks = _torch.post_accumulate_grad_hooks(param.sharded)
            if hooks and index not in absent:
                for hook in tuple(hooks.values()):
                    hook(param.sharded)
