"""The memory of a group, drawn to scale: bars of rectangles, as SVG that is as wide as the page.

All bars of one drawing have one scale, in bytes, but for one that says how much it is magnified. Positions are in
percent, so that bars fit any width; what is written stands beside them, in HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fsdp2.tools.facts.data import GroupFacts, ParamFacts
from fsdp2.tools.quantities import shown_bytes

HEIGHT = 26
COLOURS = 8
"""How many classes of colours the page has: ``p0`` to ``p7``."""

MOST_BOUNDARIES = 128
"""Of more ranks than this, the ends of shards are not drawn: they would be one grey area."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bar: from where, how long (bytes), its classes in the style sheet, and what a pointer shows."""

    start: float
    nbytes: float
    classes: str
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a drawing.

    Attributes:
        label: what it is.
        note: how much it is.
        nbytes: its length.
        pieces: what it is made of; the rest is padding.
    """

    label: str
    note: str
    nbytes: float
    pieces: tuple[Piece, ...]


def memory_of(group: GroupFacts, rank: int) -> str:
    """The shards of all ranks, those of ``rank`` magnified, the unsharded buffers, staging, and gradients."""
    bars = [
        bar for bar in (_all_shards(group, rank), *_unsharded(group), _staging(group), _gradients(group)) if bar.nbytes
    ]
    scale = max((bar.nbytes for bar in bars), default=0)
    own = _own_shards(group)
    drawn = [_drawn(bar, scale) for bar in bars]
    if own.nbytes and group.shard_size > 1:
        factor = scale / own.nbytes
        note = f"{own.note}, magnified {factor:,.0f} times" if factor >= 1.5 else own.note
        drawn.insert(1, _drawn(Bar(own.label, note, own.nbytes, own.pieces), own.nbytes))
    return f'<div class="bars">{"".join(drawn)}</div>{_legend(group)}'


def bar_of(label: str, note: str, pieces: Sequence[Piece], scale: float) -> str:
    """One bar of ``pieces``, whose full width would be ``scale`` bytes."""
    nbytes = max((piece.start + piece.nbytes for piece in pieces), default=0)
    return _drawn(Bar(label, note, nbytes, tuple(pieces)), scale)


def _drawn(bar: Bar, scale: float) -> str:
    def percent(nbytes: float) -> str:
        return f"{100 * nbytes / scale:.4f}%"

    rectangles = [f'<rect class="pad" x="0" y="0" width="{percent(bar.nbytes)}" height="{HEIGHT}"/>']
    for piece in bar.pieces:
        place = f'x="{percent(piece.start)}" width="{percent(piece.nbytes)}" y="0" height="{HEIGHT}"'
        title = f"<title>{escape(piece.title)}</title>"
        hatch = f'<rect class="hatch" {place}/>' if "packed" in piece.classes.split() else ""
        rectangles.append(f'<g><rect class="{piece.classes}" {place}>{title}</rect>{hatch}</g>')
    svg = f'<svg width="100%" height="{HEIGHT}" role="img" aria-label="{escape(bar.label)}">{"".join(rectangles)}</svg>'
    return f'<div class="bar"><p><b>{escape(bar.label)}</b> <span>{escape(bar.note)}</span></p>{svg}</div>'


def _colour(index: int) -> str:
    return f"p{index % COLOURS}"


def _all_shards(group: GroupFacts, own: int) -> Bar:
    """End to end, the one of this rank marked."""
    each, world_size = group.shard_bytes, group.shard_size
    if world_size == 1:
        return Bar("parameters", f"{shown_bytes(each)}, whole on every rank", each, tuple(_slots(group, "shard")))
    pieces = []
    if world_size <= MOST_BOUNDARIES:
        for index, rank in enumerate(group.shard_ranks):
            kind = "rank own" if rank == own else "rank"
            pieces.append(Piece(index * each, each, kind, f"rank {rank}: {shown_bytes(each)}"))
    else:
        pieces.append(Piece(0, world_size * each, "rank", f"{world_size} ranks, {shown_bytes(each)} each"))
    note = f"{world_size} x {shown_bytes(each)}" + (" in host memory" if "parameters" in group.offloads else "")
    return Bar("shards of all ranks", note, world_size * each, tuple(pieces))


def _own_shards(group: GroupFacts) -> Bar:
    return Bar("shards of one rank", shown_bytes(group.shard_bytes), group.shard_bytes, tuple(_slots(group, "shard")))


def _slots(group: GroupFacts, kind: str) -> list[Piece]:
    """Every parameter in the shard buffers, which follow each other here."""
    starts, end = [], 0
    for buffer in group.buffers:
        starts.append(end)
        end += buffer.shard_bytes
    pieces = []
    for index, param in enumerate(group.params):
        if param.buffer is None:
            pieces.append(_piece(index, param, end, param.local_bytes))
            end += param.local_bytes
        elif param.owner is None or param.local_bytes:
            pieces.append(_piece(index, param, starts[param.buffer] + param.shard_offset_bytes, _own_part(param)))
    return pieces


def _own_part(param: ParamFacts) -> int:
    """What every rank keeps room for; of an owned parameter the whole, on its owner."""
    return param.local_bytes if param.owner is not None else param.shard_room_bytes


def _piece(index: int, param: ParamFacts, start: float, nbytes: float) -> Piece:
    way = "packed" if param.gather == "packed" else "direct"
    return Piece(start, nbytes, f"slot {_colour(index)} {way}", f"{param.name}: {shown_bytes(nbytes)}, {param.gather}")


def _unsharded(group: GroupFacts) -> list[Bar]:
    bars = []
    if group.shard_size == 1:
        return []
    for number, buffer in enumerate(group.buffers):
        pieces = tuple(
            _piece(index, param, param.unsharded_offset_bytes, param.unsharded_bytes)
            for index, param in enumerate(group.params)
            if param.buffer == number
        )
        bars.append(Bar("unsharded buffer", shown_bytes(buffer.unsharded_bytes), buffer.unsharded_bytes, pieces))
    alone = [(index, param) for index, param in enumerate(group.params) if param.buffer is None]
    if alone:
        following, end = [], 0
        for index, param in alone:
            following.append(_piece(index, param, end, param.unsharded_bytes))
            end += param.unsharded_bytes
        bars.append(Bar("gathered by itself", shown_bytes(end), end, tuple(following)))
    return bars


def _staging(group: GroupFacts) -> Bar:
    nbytes = group.staging_bytes if group.shard_size > 1 else 0
    piece = Piece(0, nbytes, "temporary", f"staging buffer: {shown_bytes(nbytes)}, while a gather is under way")
    return Bar(
        "staging buffer", f"{shown_bytes(nbytes)}, for what is packed, while a gather is under way", nbytes, (piece,)
    )


def _gradients(group: GroupFacts) -> Bar:
    nbytes = group.gradient_bytes
    piece = Piece(0, nbytes, "gradient", f"gradients of this rank: {shown_bytes(nbytes)}")
    return Bar("gradients of one rank", f"{shown_bytes(nbytes)}, from backward to zero_grad()", nbytes, (piece,))


def _legend(group: GroupFacts) -> str:
    stripes = [" packed" if param.gather == "packed" else "" for param in group.params]
    items = [
        f'<li><i class="key {_colour(index)}{stripe}"></i>{escape(param.name)}</li>'
        for index, (param, stripe) in enumerate(zip(group.params, stripes, strict=True))
    ]
    more = f"<li>and {len(items) - 24} more</li>" if len(items) > 24 else ""
    keys = '<li><i class="key pad"></i>padding</li>'
    if any(param.gather == "packed" for param in group.params):
        keys += '<li><i class="key rank packed"></i>striped: travels packed</li>'
    return f'<ul class="legend">{"".join(items[:24])}{more}{keys}</ul>'
