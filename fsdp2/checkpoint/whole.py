"""Whole weights into a sharded model, in bounded memory: `load_full`.

Everything is compared, on all ranks, before anything is written. Knows nothing of files: `load_from` takes any
`Source`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.arguments import Rule, checked
from fsdp2.checkpoint.blocked import block, unblock
from fsdp2.checkpoint.boxes import at_box, boxes_here, entries, pieces_of, sizes_of
from fsdp2.checkpoint.comparing import Difference, table
from fsdp2.checkpoint.errors import CheckpointMismatch
from fsdp2.checkpoint.held import (
    Held,
    company_of,
    held_by,
    materialize,
    note_written,
    refuse_unreadable,
    settle,
    shape_text,
)
from fsdp2.checkpoint.ranks import Ranks, agree
from fsdp2.checkpoint.report import LoadReport
from fsdp2.checkpoint.rules import BYTES_RULE, RENAME_RULE, is_int
from fsdp2.checkpoint.source import Rename, renamed
from fsdp2.core.param import is_subclass
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.model.broadcast_parameters import device_that_travels
from fsdp2.plugs.states.whole_states import refuse_of_another_rank
from fsdp2.ragged.placement import Box

_EVERY_RANK = "every rank"
_SOURCE = Rule(
    f"{_EVERY_RANK!r}, or a rank >= 0",
    lambda value: value == _EVERY_RANK if isinstance(value, str) else is_int(value) and value >= 0,
    lambda value: isinstance(value, str) or is_int(value),
)
_STATE = Rule("a mapping from names to tensors, or None", lambda value: value is None or isinstance(value, Mapping))


class Offered(NamedTuple):
    """What there is to be loaded under a name: the whole's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A tensor of the model that is to be written.

    Attributes:
        held: the tensor.
        key: the name that the source has it under.
        boxes: which entries this rank has, as they follow each other in its local tensor.
    """

    held: Held
    key: str
    boxes: tuple[Box, ...]


class Source(ABC):
    """Where whole tensors come from.

    Attributes:
        path: for the report.
        what: for messages: "the state dict".
        group: of the ranks that load together; None: there is one.
        ranks: the same.
    """

    path: str = ""
    what: str
    group: dist.ProcessGroup | None = None
    ranks: Ranks

    @abstractmethod
    def offered(self) -> dict[str, Offered]:
        """What there is, by name. All ranks call it, and none has refused anything before."""

    @abstractmethod
    def write(self, wanted: Sequence[Wanted]) -> int:
        """Write this rank's part of all of them; returns the bytes that were read of files. All ranks call it."""

    def lines(self, wanted: Sequence[Wanted]) -> list[str]:
        """What else the ranks must agree on."""
        return []


def load_from(model: nn.Module, source: Source, caller: str, *, arguments: str, strict: bool, cast: bool) -> LoadReport:
    """Write what ``source`` has to ``model``, after all ranks have agreed that it fits. Collective.

    Raises:
        CheckpointMismatch: it does not, with a table of all differences; nothing was written, on any rank.
        CheckpointDamaged: something could not be read, after parts of the model were written.
        FSDPRuntimeError: inside of a forward or backward, or of `full_parameters`; the ranks differ.
    """
    error: Exception | None = settle(model, caller, frees=True)
    held = held_by(model)
    source.group, source.ranks = company_of(held)
    ranks = source.ranks
    if error is None:
        error = _caught(lambda: refuse_unreadable(held, caller, meta=False))
    lines = [f"{caller} with {arguments}, strict={strict}, cast={cast}"]
    lines += [f"{name} {each.described}" for each in held for name in each.names]
    agree(ranks, error, lines, caller)
    fit = _Fit()
    error = _caught(lambda: _compare(held, source, fit, strict=strict, cast=cast, caller=caller))
    lines = [] if error is not None else [f"{each.held.name} from {each.key}" for each in fit.wanted]
    lines += [] if error is not None else source.lines(fit.wanted)
    agree(ranks, error, lines, caller)
    nbytes = 0

    def write() -> None:
        nonlocal nbytes
        now = {name: each for each in held_by(model) for name in each.names}
        wanted = [Wanted(now[each.held.name], each.key, each.boxes) for each in fit.wanted]
        try:
            nbytes = source.write(wanted)
        finally:
            note_written(each.held for each in wanted)

    def make_room() -> None:
        materialize(model, [each.held for each in fit.wanted])

    try:
        for action in (make_room, write):  # ranks write together, so that all must have room before
            with torch.inference_mode(False), torch.no_grad():
                error = _caught(action)
            agree(ranks, error, [], caller)
    except BaseException as raised:  # of the keyboard, too
        block(model, raised)
        raise
    unblock(model)
    nbytes = sum(ranks.all_gather(nbytes, f"how much {caller} has read"))
    return LoadReport(
        path=source.path,
        loaded=tuple(each.held.name for each in fit.wanted),
        missing=tuple(each.name for each in fit.missing),
        unexpected=tuple(fit.unexpected),
        cast=dict(fit.cast),
        unwritten=tuple(each.name for each in fit.unwritten),
        unverified=tuple(each.held.name for each in fit.wanted) if source.path else (),  # such files have no checksums
        bytes_read=nbytes,
    )


def _caught(action: Callable[[], None]) -> Exception | None:
    """What it raises, of what the other ranks are to raise as well."""
    try:
        action()
    except Exception as error:  # of a function for names, too: the other ranks wait
        return error
    return None


@dataclass(slots=True, eq=False)
class _Fit:
    """How what is offered and what the model holds go together."""

    wanted: list[Wanted] = field(default_factory=list)
    missing: list[Held] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unwritten: list[Held] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)


def _compare(held: Sequence[Held], source: Source, fit: _Fit, *, strict: bool, cast: bool, caller: str) -> None:
    """Fill ``fit``.

    Raises:
        CheckpointMismatch: something does not fit, with all that does not.
    """
    offered = source.offered()
    left = dict.fromkeys(offered)
    found: list[Difference] = []
    for each in held:
        keys = [name for name in each.names if name in offered]
        for key in keys:
            left.pop(key, None)
        if not keys and not each.transient:
            fit.missing.append(each)
        elif keys:
            _compare_one(each, keys[0], offered[keys[0]], source, fit, found, cast=cast)
    fit.unexpected = list(left)
    written = {each.held for each in fit.wanted}
    fit.unwritten = [each for each in held if each.local.is_meta and each not in written]
    if strict:
        missing = set(fit.missing)
        found += [Difference("missing", each.name, each.described) for each in fit.missing]
        found += [
            Difference("unexpected", name, f"{shape_text(offered[name].shape)} {offered[name].dtype}") for name in left
        ]
        found += [
            Difference("unwritten", each.name, f"{each.described}{_TRANSIENT if each.transient else ''}")
            for each in fit.unwritten
            if each not in missing and not any(name in offered for name in each.names)
        ]
    if found:
        raise CheckpointMismatch(table(f"{caller}: {source.what}", found))


_TRANSIENT = ", a buffer that is not persistent"


def _compare_one(
    held: Held, key: str, offered: Offered, source: Source, fit: _Fit, found: list[Difference], *, cast: bool
) -> None:
    boxes = boxes_here(held.tensor)
    if boxes is None:
        raise FSDPNotImplementedError(
            f"'{held.name}' has the placements {list(_torch.spec_of(held.tensor).placements)}, of which it is not "
            "known which entries this rank has; copy to its to_local() instead."
        )
    shape, dtype = tuple(held.tensor.shape), held.tensor.dtype
    if offered.shape != shape:
        text = f"{shape_text(offered.shape)} in {source.what}, {shape_text(shape)} in the model"
        found.append(Difference("shape", key, text))
    if offered.dtype != dtype:
        if cast and offered.dtype.is_floating_point and dtype.is_floating_point:
            fit.cast[held.name] = f"{offered.dtype} -> {dtype}"
        else:
            text = f"{offered.dtype} in {source.what}, {dtype} in the model"
            found.append(Difference("dtype", key, text))
    fit.wanted.append(Wanted(held, key, boxes))


_LOADS = "load_full()"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@checked(state_dict=_STATE, source=_SOURCE, budget_bytes=BYTES_RULE, rename=RENAME_RULE)
def load_full(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    source: Any = _EVERY_RANK,
    strict: bool = True,
    rename: Rename = None,
    cast: bool = False,
    budget_bytes: int = 64 << 20,
) -> LoadReport:
    """Write a state dict of whole tensors, or of DTensors that lie anyhow, to the sharded ``model``, in place.

    All is compared first: names, shapes, dtypes. What does not fit is one error on all ranks, and nothing is written
    then. Of tied parameters one name is enough; names may have what torch.compile or activation checkpointing add.
    Parameters and buffers on meta are given memory if they are written, and only then.

    Collective: all ranks must call it with the same arguments (but the values), outside of forward and backward.

    Args:
        model: sharded, or with sharded modules below, or neither.
        state_dict: by name. Buffers that are not persistent may be in it.
        source: ``"every rank"``: each has all of them, and copies its own rows; nothing is sent but pieces of DTensors
            that lie otherwise than the model's. A rank of all: only its ``state_dict`` counts, and pieces of it are
            broadcast; the others may pass None.
        strict: False: names that only one of both has are in the report. Shapes and dtypes must fit all the same.
        rename: a function from a name in the state dict to the model's.
        cast: floating-point tensors may be of another dtype.
        budget_bytes: of what is sent at a time: the memory that is taken beside the shards, at most.

    Returns:
        What was loaded, and what was not: the same on all ranks.

    Raises:
        FSDPTypeError: not a module or a mapping; a value that is no tensor.
        FSDPValueError: a ``source`` that does not hold ``model``; two names are one after ``rename``.
        CheckpointMismatch: a table of all that does not fit; with ``strict``, also parameters and buffers on meta that
            nothing would write.
        FSDPRuntimeError: inside of a forward or backward, or of `full_parameters`; the ranks differ. On all ranks.
        FSDPNotImplementedError: placements that are no boxes of the whole, as `Partial`; tensor subclasses.

    Stream: the current one.
    """
    everyone = source == _EVERY_RANK
    states = _States(state_dict, budget_bytes, rename)
    found: Source = states if everyone else _FromRank(states, budget_bytes, source)
    arguments = f"source={source!r}, budget_bytes={budget_bytes}, rename={'None' if rename is None else 'given'}"
    return load_from(model, found, _LOADS, arguments=arguments, strict=strict, cast=cast)


class _States(Source):
    """A state dict that every rank has."""

    what = "the state dict"

    def __init__(self, state: Mapping[str, Any] | None, budget: int, rename: Rename) -> None:
        self._budget, self._rename = budget, rename
        self._state: Mapping[str, Any] = {} if state is None else state
        self._is_none = state is None
        self.values: dict[str, Any] = {}

    def _name(self) -> None:
        """Call everything as the model does."""
        names: dict[str, str] = {}
        for key, value in self._state.items():
            name = key if self._rename is None else renamed(self._rename, key)
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            if self._rename is not None and name in names:
                raise FSDPValueError(f"{_LOADS}: rename calls both '{names[name]}' and '{key}' '{name}'.")
            names[name], self.values[name] = key, value

    def offered(self) -> dict[str, Offered]:
        """Of this rank's state dict.

        Raises:
            FSDPTypeError: a value is no tensor.
            FSDPValueError: there is none; two names are one after the function for names; a DTensor lies on other ranks
                as well.
        """
        if self._is_none:
            raise FSDPValueError(
                f"{_LOADS} was given None for a state dict. Where one rank alone has it, all ranks say which: source=0."
            )
        self._name()
        for name, value in self.values.items():
            _refuse_value(name, value)
            refuse_of_another_rank(value, name)
            if isinstance(value, DTensor):
                outside = set(value.device_mesh.mesh.flatten().tolist()).difference(self.ranks.numbers)
                if outside:
                    raise FSDPValueError(
                        f"'{name}' of the state dict lies on the ranks {sorted(outside)} as well, which do not hold "
                        f"the model, and take no part in {_LOADS}: pass its full_tensor()."
                    )
        return {name: Offered(tuple(value.shape), value.dtype) for name, value in self.values.items()}

    def lines(self, wanted: Sequence[Wanted]) -> list[str]:
        """How DTensors lie. (Not on which ranks: beside tensor parallelism there are several meshes of one kind.)"""
        lines: list[str] = []
        for each in wanted:
            value = self.values[each.key]
            if isinstance(value, DTensor):
                stays = _lies(value) == _lies(each.held.tensor)
                how = "as here" if stays else f"{tuple(value.device_mesh.shape)} {list(value.placements)}"
                lines.append(f"{each.key} lies {how}")
        return lines

    def write(self, wanted: Sequence[Wanted]) -> int:
        """Copy rows of whole tensors; send what lies otherwise: each part once, from the first rank that has it."""
        moved: dict[str, tuple[Box, ...]] = {}
        for each in wanted:
            value = self.values[each.key].detach()
            if not isinstance(value, DTensor):
                _take(each, value, tuple((0, size) for size in value.shape))
            elif _lies(value) == _lies(each.held.tensor):
                each.held.local.copy_(_torch.local_of(value))
            else:
                moved[each.key] = boxes_here(value) or ()
        of_ranks = self.ranks.all_gather(moved, f"where the tensors are that {_LOADS} reads")
        for each in wanted:
            seen: set[Box] = set()
            for rank, boxes in zip(self.ranks.numbers, (found.get(each.key, ()) for found in of_ranks), strict=True):
                for box in [box for box in boxes if box not in seen]:
                    seen.add(box)
                    _send(each, self.values[each.key], box, rank, self.group, self._budget)
        return 0


def _refuse_value(name: str, value: Any) -> None:
    """Refuse what cannot be written piece by piece.

    Raises:
        FSDPTypeError: it is no tensor.
        FSDPRuntimeError: it has no values.
        FSDPNotImplementedError: its parts are no boxes of the whole, or not dense.
    """
    if not isinstance(value, torch.Tensor):
        raise FSDPTypeError(
            f"{_LOADS} takes tensors, and '{name}' is a {type(value).__name__}: leave it out of the state dict (what "
            "get_extra_state() has returned goes to set_extra_state() of its module)."
        )
    plain = _torch.plain_of(value)
    if plain.is_meta:
        raise FSDPRuntimeError(f"{_LOADS} finds no values in '{name}' of the state dict, which is on the meta device.")
    if is_subclass(plain) or plain.layout is not torch.strided:
        raise FSDPNotImplementedError(f"'{name}' of the state dict is a {type(plain).__name__} of {plain.layout}.")
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None and boxes_here(value) is None:
        raise FSDPNotImplementedError(
            f"'{name}' of the state dict is a DTensor with placements {list(value.placements)}, whose parts are no "
            "rows or columns of the whole: pass its full_tensor()."
        )


def _lies(tensor: torch.Tensor) -> str:
    """Where the parts of ``tensor`` are: equal for tensors whose local tensors are alike on all ranks."""
    if not isinstance(tensor, DTensor):
        return "no mesh"
    spec = _torch.spec_of(tensor)
    return f"{spec.mesh.mesh.tolist()} {list(spec.placements)}"


class _FromRank(Source):
    """The state dict of one rank."""

    what = "the state dict"

    def __init__(self, states: _States, budget: int, rank: int) -> None:
        self._budget = budget
        self._rank = rank
        self._is_mine = not dist.is_initialized() or dist.get_rank() == rank
        self._states = states
        self._known: dict[str, Offered] = {}

    def offered(self) -> dict[str, Offered]:
        """What the rank has told all others.

        Raises:
            Exception: of what it cannot send or read, on all ranks.
        """
        ranks = self.ranks
        if self._rank not in ranks.numbers:
            raise FSDPValueError(f"{_LOADS} got source={self._rank}, and the model is on the ranks {ranks.numbers}.")
        mine: list[dict[str, Offered]] = []

        def look() -> None:
            self._states.ranks = ranks
            mine.append(self._states.offered())
            self._refuse_parts()

        error = _caught(look) if self._is_mine else None
        (offered,) = agree(ranks, error, [], _LOADS, mine)[ranks.numbers.index(self._rank)]
        self._known = offered
        return dict(offered)

    def _refuse_parts(self) -> None:
        for name, value in self._states.values.items():
            if boxes_here(value) != (tuple((0, size) for size in value.shape),):
                raise FSDPValueError(
                    f"{_LOADS} with source={self._rank}: '{name}' of its state dict is a DTensor with placements "
                    f"{list(value.placements)}, of which this rank has a part. Pass whole tensors, or the DTensors on "
                    f"all ranks with source={_EVERY_RANK!r}."
                )

    def write(self, wanted: Sequence[Wanted]) -> int:
        """Broadcast pieces of all that is wanted."""
        for each in wanted:
            shape, dtype = self._known[each.key]
            value = self._states.values[each.key] if self._is_mine else torch.empty(shape, dtype=dtype, device="meta")
            _send(each, value, tuple((0, size) for size in shape), self._rank, self.group, self._budget)
        return 0


def _send(
    wanted: Wanted, value: torch.Tensor, box: Box, source: int, group: dist.ProcessGroup | None, budget: int
) -> None:
    """Broadcast a box of ``value`` from the rank ``source`` of all, a piece at a time; each rank keeps its own part.

    Collective over ``group``.
    """
    device = torch.device("cpu") if group is None else device_that_travels(torch.device("cpu"), group)
    for piece in pieces_of(box, value.element_size(), budget):
        if group is None or dist.get_rank() == source:
            ((_, part),) = entries(_torch.plain_of(value.detach()), boxes_here(value) or (), piece)
            part = part.to(device).contiguous()
        else:
            part = torch.empty(sizes_of(piece), dtype=value.dtype, device=device)
        if group is not None:
            dist.broadcast(part.view(-1).view(torch.uint8), src=source, group=group)
        _take(wanted, part, piece)
        del part  # before the next is received


def _take(wanted: Wanted, part: torch.Tensor, box: Box) -> None:
    """Write what this rank has of ``box`` of the whole, whose values are ``part``."""
    for each, view in entries(wanted.held.local, wanted.boxes, box):
        view.copy_(at_box(part, each, box))
