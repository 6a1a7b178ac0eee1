"""The gradients of some parameters, with those on one buffer as one tensor: for operations on every element alike.

[Note: what is one tensor]
The sharded gradients of a group lie on one buffer. If the ``.grad`` of parameters that follow each other there are the
delivered ones, the slice from the first to the last is one tensor, and whatever else is in it is zeros: the padding
between packed gradients, and the rows that this rank is short of. (A user's function that fills or reduces the buffer
may leave anything there, so gradients of such a group are taken one by one.) A slice ends before a parameter that is
not among them (another optimizer may hold it), before a gap between gradients that travelled alone, to which nothing
was ever written, and before the grad mask, which says which parameters had a gradient.

[Note: norms of rows]
On a CPU the norms of many small tensors cost a call each, while those of the rows of a matrix cost one call. Gradients
of one size that lie side by side are such rows. A row is summed as a tensor of its size is, to the same bits, as long
as torch uses one thread for it: for less than 32768 elements. Kernels of accelerators sum in another order.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fsdp2 import _torch
from fsdp2.core.gradients import GradientBucket, GradientBuffer
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import FSDPParam, Link, fsdp_param_of

_gradient_of = operator.attrgetter("grad")

_MOST_IN_A_ROW = 1 << 15
"""The number of elements at which torch may begin to split a sum over threads."""

_View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where something starts in a buffer, its shape, and its strides."""


class _Together(NamedTuple):
    """Parameters whose gradients are delivered on one buffer.

    Attributes:
        params: the sharded parameters, in the order in which their gradients lie.
        bucket: the bucket that delivers them.
        pick: takes what belongs to these parameters out of a sequence for all parameters of the bucket.
        pieces: slices (numel,) of the buffer, each of which is one tensor.
        rows: views (k, n) of the buffer: the gradients of k > 1 parameters that follow each other, a row for each.
        apart: positions of the parameters that are in no row.
        order: the parameters in the order of their norms: those in `rows`, then those `apart`.
    """

    params: tuple[torch.Tensor, ...]
    bucket: weakref.ref[GradientBucket]
    pick: Callable[[Sequence[Any]], Iterable[Any]]
    pieces: tuple[_View, ...]
    rows: tuple[_View, ...]
    apart: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, held: set[FSDPParam], bucket: GradientBucket) -> _Together:
        """The parameters of ``bucket`` that are ``held``; see [Note: what is one tensor]."""
        slots = bucket.layout.slots
        positions: list[int] = []
        pieces: list[tuple[int, int]] = []
        # In buffer order. Zeros that pad a packed gradient lie before it, and become a part of the piece.
        for position in sorted(range(len(slots)), key=lambda index: slots[index].offset):
            param, slot = bucket.params[position], slots[position]
            if param not in held:
                continue
            positions.append(position)
            # On a rank that does not own the parameter, its place has another one, which that rank owns.
            is_owned = slot.partition.owner is not None
            numel = param.local.numel() if is_owned else slot.shard_numel
            pad_numel = 0 if slot.direct or is_owned else slot.pad_numel
            start, length = pieces[-1] if pieces else (-1, 0)
            if numel and start + length == slot.offset - pad_numel:
                pieces[-1] = (start, slot.offset + numel - start)
            elif numel:
                pieces.append((slot.offset, numel))
        ordered = tuple(positions)
        rows, in_rows = _rows(bucket, ordered)
        among = {position: index for index, position in enumerate(ordered)}
        apart = tuple(among.keys() - set(in_rows))
        return cls(
            tuple(bucket.params[each].sharded for each in ordered),
            weakref.ref(bucket),
            _picking(ordered),
            tuple((start, (numel,), (1,)) for start, numel in pieces),
            rows,
            apart,
            tuple(among[each] for each in (*in_rows, *apart)),
        )

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients: slices of the buffer; or each by itself, if one is not the delivered one."""
        slices = self.slices()
        return _each(self.params) if slices is None else iter(slices)

    def slices(self) -> list[torch.Tensor] | None:
        """The slices of the buffer; None if a gradient is not the delivered one."""
        bucket = self.bucket()
        delivered = None if bucket is None else bucket.delivered
        # Compared by identity: a gradient that was replaced or cleared lies elsewhere.
        found = map(_gradient_of, self.params)
        if delivered is None or not all(map(operator.is_, found, self.pick(delivered.gradients))):
            return None
        return list(itertools.starmap(delivered.view, self.pieces))

    def norms(self, order: float) -> Iterator[torch.Tensor]:
        """The norms of the gradients in `order`, as several (k,) of one dtype. Call it after `slices`."""
        delivered = _delivered(self)
        for rows in itertools.starmap(delivered.view, self.rows):
            yield torch.linalg.vector_norm(rows, order, dim=1)
        if self.apart:
            yield torch.stack(_torch.foreach_norm([delivered.locals[each] for each in self.apart], order, None))


def _picking(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """A function that takes the items at ``positions`` out of a sequence, in one call."""
    # `itemgetter` of one position would return the item itself, not a sequence of one.
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return operator.itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0))


def _delivered(together: _Together) -> GradientBuffer:
    bucket = together.bucket()
    delivered = None if bucket is None else bucket.delivered
    assert delivered is not None, "slices were found"
    return delivered


def _rows(bucket: GradientBucket, positions: Sequence[int]) -> tuple[tuple[_View, ...], tuple[int, ...]]:
    """The gradients at ``positions`` that form rows of matrices, in buffer order; and the positions in these rows."""
    rows: list[_View] = []
    members: list[int] = []
    run: list[int] = []
    starts = [slot.offset for slot in bucket.layout.slots]
    sizes = list(map(math.prod, bucket.local_shapes))

    def end_run() -> None:
        if len(run) > 1:
            rows.append((starts[run[0]], (len(run), sizes[run[0]]), (starts[run[1]] - starts[run[0]], 1)))
            members.extend(run)
        run.clear()

    for position in positions:
        # The rows of a matrix have one size, and one distance from each to the next.
        is_equal = run and sizes[position] == sizes[run[-1]]
        if not is_equal or (len(run) > 1 and starts[position] - starts[run[-1]] != starts[run[1]] - starts[run[0]]):
            end_run()
        # Larger gradients, and permuted ones, would not be summed to the same bits.
        if sizes[position] < _MOST_IN_A_ROW and not bucket.layout.slots[position].partition.order:
            run.append(position)
    end_run()
    return tuple(rows), tuple(members)


def _each(params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The local gradient of each of ``params`` that has one, with elements on this rank."""
    for param in params:
        gradient = param.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            # The sum of several entries for one place may be infinite, though none of them is.
            param.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        local = _torch.wait_for_tensor(_torch.plain_of(gradient))
        if local.numel():
            yield local


class Delivered:
    """Parameters, and where their gradients are delivered; valid while both stay the same, see `is_of`.

    Attributes:
        known: what users of this class have found out about the parameters, by a class of theirs; as long valid.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.known: dict[type[Any], Any] = {}
        self._params = tuple(params)
        owners = [owner for param in params if (owner := fsdp_param_of(param)) is not None]
        groups = dict.fromkeys(owner.group for owner in owners if owner.group is not None)
        self._groups: tuple[weakref.ref[FSDPParamGroup], ...] = tuple(map(weakref.ref, groups))
        buckets = _buckets_of(groups)
        self._buckets = tuple(map(weakref.ref, buckets))
        held = set(owners)
        self._together = [_Together.of(held, bucket) for bucket in buckets]
        delivered = {id(param) for together in self._together for param in together.params}
        self._others = [param for param in params if id(param) not in delivered]
        self._order: torch.Tensor | None = None
        self._in_turn: Callable[[Sequence[Any]], Iterable[Any]] | None = None

    def is_of(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether it was made of ``params``, and their gradients are laid out as they were then."""
        known = self._params
        if params is not known and (len(params) != len(known) or not all(map(operator.is_, params, known))):
            return False
        groups = [group for reference in self._groups if (group := reference()) is not None]
        # A group that is laid out again makes new buckets, so it is enough to compare identities.
        now = _buckets_of(groups)
        return len(now) == len(self._buckets) and all(
            bucket is reference() for bucket, reference in zip(now, self._buckets, strict=True)
        )

    def gradients(self) -> Iterator[torch.Tensor]:
        """Local tensors, none empty, that hold all gradients of the parameters, and zeros."""
        for together in self._together:
            yield from together.gradients()
        yield from _each(self._others)

    def slices(self) -> list[torch.Tensor] | None:
        """`gradients`, if all of them are delivered ones, and no parameter comes twice; else None."""
        if sum(len(together.params) for together in self._together) != len(self._params):
            return None
        with _torch.plain_attributes():
            found = [together.slices() for together in self._together]
        return None if any(each is None for each in found) else [part for each in found if each for part in each]

    def locals(self) -> tuple[torch.Tensor, ...]:
        """The local tensors of all gradients, in the order of the parameters. Call it after `slices`.

        Do not keep them: a buffer whose gradients somebody holds is not used again.
        """
        found: list[torch.Tensor] = []
        for together in self._together:
            found += together.pick(_delivered(together).locals)
        if self._in_turn is None:
            places = [id(param) for together in self._together for param in together.params]
            at = {each: index for index, each in enumerate(places)}
            self._in_turn = _picking(tuple(at[id(param)] for param in self._params))
        return tuple(self._in_turn(found))

    def norms(self, order: float) -> torch.Tensor:
        """The norm of each gradient, (n,), in the order of the parameters. Call it after `slices`.

        All of them must have one floating-point dtype and be on the CPU. See [Note: norms of rows].
        """
        if self._order is None:
            found = [id(together.params[index]) for together in self._together for index in together.order]
            at = {each: index for index, each in enumerate(found)}
            self._order = torch.tensor([at[id(param)] for param in self._params], device="cpu")
        norms = torch.cat([part for together in self._together for part in together.norms(order)])
        return norms.index_select(0, self._order)


def _buckets_of(groups: Iterable[FSDPParamGroup]) -> list[GradientBucket]:
    """The buckets of ``groups`` in whose buffers everything but the gradients is zeros."""
    return [bucket for group in groups if not group.settings.has_user_reduction for bucket in group.reducer.buckets]


def delivered_of(params: Sequence[torch.Tensor]) -> Delivered | None:
    """Where the gradients of ``params`` are delivered, remembered on the first of them; None if that is not sharded."""
    if not params or fsdp_param_of(params[0]) is None:
        return None
    link: Link[Delivered] | None = getattr(params[0], "_fsdp_delivered", None)
    known = None if link is None else link.target
    if known is None or not known.is_of(params):
        known = Delivered(params)
        params[0]._fsdp_delivered = Link(known)  # type: ignore[attr-defined]
    return known
