"""The gradients of some parameters, those that lie on one buffer as one tensor: for what treats all elements alike.

[Note: what is one tensor]
The sharded gradients of a group lie on one buffer. Where the ``.grad`` of parameters that follow each other there are
the ones that were delivered, the slice from the first to the last is one tensor, and what is not theirs in it is zeros:
the alignment of packed gradients, and the rows that this rank is short of. (A user's function that fills or reduces
the buffer may leave anything there: gradients of such a group are taken one by one.) A slice ends before anything else:
a parameter that is not among them (another optimizer may hold it), a gap between gradients that travelled alone, which
nothing was ever written to, and the numbers that say which parameters had a gradient.

[Note: norms of rows]
On a CPU the norm of each of many small tensors costs a call each, while those of the rows of a matrix are one. Equal
gradients lie side by side, in rows. A row is summed as a tensor of its size is, to the same bits, as long as torch
leaves that to one thread: for less than 32768 elements. The kernels of accelerators are others.
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
"""Elements from which on torch may share a sum out among threads."""

_View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where something starts in a buffer, its shape, its strides."""


class _Together(NamedTuple):
    """Parameters whose gradients are delivered on one buffer.

    Attributes:
        params: the sharded parameters, in the order in which their gradients lie.
        bucket: that delivers them.
        pick: what belongs to each, of a sequence of what belongs to all parameters of the bucket.
        pieces: of the buffer, each of which is one tensor, (numel,).
        rows: (k, n) of the buffer, dense in each row: k > 1 of the parameters that follow each other.
        apart: positions of those in no row.
        order: of the parameters, as their norms come: those of `rows`, those `apart`.
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
        """Those of ``bucket`` that are ``held``; see [Note: what is one tensor]."""
        slots = bucket.layout.slots
        positions: list[int] = []
        pieces: list[tuple[int, int]] = []
        for position in sorted(range(len(slots)), key=lambda index: slots[index].offset):
            param, slot = bucket.params[position], slots[position]
            if param not in held:
                continue
            positions.append(position)
            is_owned = slot.partition.owner is not None
            numel = (
                param.local.numel() if is_owned else slot.shard_numel
            )  # at another owner's place lies something else
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
        """The gradients: slices of the buffer, or each by itself if one is not as it was delivered."""
        slices = self.slices()
        return _each(self.params) if slices is None else iter(slices)

    def slices(self) -> list[torch.Tensor] | None:
        """The slices of the buffer; None if a gradient is not as it was delivered."""
        bucket = self.bucket()
        delivered = None if bucket is None else bucket.delivered
        found = map(_gradient_of, self.params)
        if delivered is None or not all(map(operator.is_, found, self.pick(delivered.gradients))):
            return None
        return list(itertools.starmap(delivered.view, self.pieces))

    def norms(self, order: float) -> Iterator[torch.Tensor]:
        """(k,) each, all of one dtype: the norms of the gradients, in `order`. After `slices`."""
        delivered = _delivered(self)
        for rows in itertools.starmap(delivered.view, self.rows):
            yield torch.linalg.vector_norm(rows, order, dim=1)
        if self.apart:
            yield torch.stack(_torch.foreach_norm([delivered.locals[each] for each in self.apart], order, None))


def _picking(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """What takes those at ``positions`` out of a sequence, in one call."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return operator.itemgetter(slice(positions[0], positions[0] + 1) if positions else slice(0))


def _delivered(together: _Together) -> GradientBuffer:
    bucket = together.bucket()
    delivered = None if bucket is None else bucket.delivered
    assert delivered is not None, "slices were found"
    return delivered


def _rows(bucket: GradientBucket, positions: Sequence[int]) -> tuple[tuple[_View, ...], tuple[int, ...]]:
    """What is rows of a matrix, of the gradients at ``positions`` in the order of the buffer; and whose, in turn."""
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
        is_equal = run and sizes[position] == sizes[run[-1]]
        if not is_equal or (len(run) > 1 and starts[position] - starts[run[-1]] != starts[run[1]] - starts[run[0]]):
            end_run()
        if sizes[position] < _MOST_IN_A_ROW and not bucket.layout.slots[position].partition.order:
            run.append(position)
    end_run()
    return tuple(rows), tuple(members)


def _each(params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The local gradient of each of ``params`` that has one, and elements of it on this rank."""
    for param in params:
        gradient = param.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            # What several entries of one place add up to may be infinite, though none of them is.
            param.grad = gradient = gradient.coalesce()
            gradient = gradient.values()
        local = _torch.wait_for_tensor(_torch.plain_of(gradient))
        if local.numel():
            yield local


class Delivered:
    """Parameters, and where their gradients are delivered; good as long as they are the same, laid out as they were.

    Attributes:
        known: what its users have found out about parameters that does not change before that does, by its class.
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
        """Whether it was made of ``params``, whose gradients are laid out as they were."""
        known = self._params
        if params is not known and (len(params) != len(known) or not all(map(operator.is_, params, known))):
            return False
        groups = [group for reference in self._groups if (group := reference()) is not None]
        now = _buckets_of(groups)
        return len(now) == len(self._buckets) and all(
            bucket is reference() for bucket, reference in zip(now, self._buckets, strict=True)
        )

    def gradients(self) -> Iterator[torch.Tensor]:
        """Local tensors, none empty, that are all gradients of the parameters, and zeros."""
        for together in self._together:
            yield from together.gradients()
        yield from _each(self._others)

    def slices(self) -> list[torch.Tensor] | None:
        """The same, if each lies on a buffer as it was delivered, and no parameter comes twice; else None."""
        if sum(len(together.params) for together in self._together) != len(self._params):
            return None
        with _torch.plain_attributes():
            found = [together.slices() for together in self._together]
        return None if any(each is None for each in found) else [part for each in found if each for part in each]

    def locals(self) -> tuple[torch.Tensor, ...]:
        """The local tensors of all gradients, in the order of the parameters. After `slices`.

        Not to be kept: a buffer whose gradients somebody holds is not used again.
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
        """(n,): of each gradient, as the parameters were given; see [Note: norms of rows]. After `slices`.

        All of them must be of one floating-point dtype and on the CPU.
        """
        if self._order is None:
            found = [id(together.params[index]) for together in self._together for index in together.order]
            at = {each: index for index, each in enumerate(found)}
            self._order = torch.tensor([at[id(param)] for param in self._params], device="cpu")
        norms = torch.cat([part for together in self._together for part in together.norms(order)])
        return norms.index_select(0, self._order)


def _buckets_of(groups: Iterable[FSDPParamGroup]) -> list[GradientBucket]:
    """Those of ``groups`` in which all that is not a gradient is zeros."""
    return [bucket for group in groups if not group.settings.has_user_reduction for bucket in group.reducer.buckets]


def delivered_of(params: Sequence[torch.Tensor]) -> Delivered | None:
    """Where the gradients of ``params`` are delivered, remembered by the first of them; None if that is not sharded."""
    if not params or fsdp_param_of(params[0]) is None:
        return None
    link: Link[Delivered] | None = getattr(params[0], "_fsdp_delivered", None)
    known = None if link is None else link.target
    if known is None or not known.is_of(params):
        known = Delivered(params)
        params[0]._fsdp_delivered = Link(known)  # type: ignore[attr-defined]
    return known
