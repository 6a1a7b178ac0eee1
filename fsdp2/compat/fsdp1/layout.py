"""What lies where in the flat parameters that torch's FSDP1 makes of a model: names, shapes, offsets, padding, ranks.

FSDP1 concatenates the parameters of a unit into one 1-D tensor and gives each rank one piece of it, wherever that cuts
the parameters. It saves that tensor (``LOCAL_STATE_DICT``, raw optimizer states), but never the layout, which follows
from the order of the modules, the wrapping, ``use_orig_params`` and the number of ranks. Here it is computed from
these, so that such files can be read and written (`fsdp2.compat.fsdp1.flat_checkpoints`).

A unit of two ranks, with a 3-element ``a``, a 2 x 2 ``b`` and a 1-element ``c``, all fp32::

    use_orig_params=False         a a a b|b b b c        no gap; the last rank's part ends where the elements do,
                                  rank 0 |rank 1         and in memory zeros fill it up (none here: 8 = 2 * 4)

    use_orig_params=True          a a a - b|b b b c -    each parameter begins at a multiple of 16 bytes (4 elements),
                                  rank 0   |rank 1       and the end is padded to a multiple of the ranks; - is 42

The 16 bytes are counted in the dtype in which the unit computes (`UnitEntries.compute_dtype`, FSDP1's
``MixedPrecision.param_dtype``), in whatever dtype it is stored: with bf16 there, ``b`` begins at element 8.
A parameter that is dense but not contiguous (``channels_last``, transposed) lies in the order of its memory.

This file knows neither process groups nor the engine. Everything was learnt by watching torch 2.13, and is compared
with it in tests/fsdp1/test_flat_layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.compat.fsdp1.names import clean

FLAT_PARAM = "_flat_param"
"""The name of a flat parameter in the module of its unit, and so the last part of its key in a LOCAL state dict."""

ALIGNMENT_BYTES = 16
"""Where parameters may begin in a flat parameter with ``use_orig_params=True``."""

PADDING_VALUE = 42
"""What torch fills the gaps with, in the parameters of ``use_orig_params=True``; files are the same to the bit."""


class ParamInfo(NamedTuple):
    """Where a parameter of a unit is registered. Torch's record of this name; a layout holds no modules: None."""

    param_name: str
    module: nn.Module | None
    module_name: str


class SharedParamInfo(NamedTuple):
    """A further name of a parameter in its unit, and the first one (``prim``). Torch's record; see `ParamInfo`."""

    param_name: str
    module: nn.Module | None
    module_name: str
    prim_param_name: str
    prim_module: nn.Module | None
    prim_module_name: str


class ShardParamInfo(NamedTuple):
    """Which elements of a parameter a rank holds, and where in its shard; both ends of the range are included.

    Torch's record of almost this name. A parameter of no elements may be in a shard: its range is ``(0, -1)``.
    """

    in_shard: bool
    offset_in_shard: int | None = None
    numel_in_shard: int | None = None
    intra_param_start_idx: int | None = None
    intra_param_end_idx: int | None = None


class FlatParamShardMetadata(NamedTuple):
    """What of a unit one rank holds: torch's record of this name, field by field.

    Attributes:
        param_names: Names within the unit, of the parameters of which the rank has elements.
        param_shapes: Their whole shapes.
        param_strides: Their whole strides.
        param_contiguities: Whether they are contiguous.
        param_numels: Their whole numbers of elements.
        param_offsets: The first and the last of the rank's elements in each, both included.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """A parameter of a unit, as it is before anything is flattened. ``fqn`` is its name within the unit."""

    fqn: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True


@dataclass(frozen=True, slots=True)
class Tie:
    """A second name of a parameter within its unit, and the first one."""

    fqn: str
    first_fqn: str


@dataclass(frozen=True, slots=True)
class UnitEntries:
    """A unit: what a layout is computed from.

    Attributes:
        name: Its name in the model; empty for the model itself.
        parameters: In FSDP1's order: modules as `nn.Module.named_modules` walks them, without nested units.
        ties: Further names of them.
        compute_dtype: ``MixedPrecision.param_dtype``, if there is one: it decides where parameters may begin.
        world_size: Ranks among which this unit is sharded, where it is not the layout's; ``NO_SHARD`` has 1.
    """

    name: str
    parameters: tuple[ParamEntry, ...]
    ties: tuple[Tie, ...] = ()
    compute_dtype: torch.dtype | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """A parameter in a flat parameter: elements ``offset`` to ``offset + numel``."""

    fqn: str
    shape: torch.Size
    stride: tuple[int, ...]
    is_contiguous: bool
    offset: int
    requires_grad: bool

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.shape.numel()

    @property
    def end(self) -> int:
        """The offset after its last element."""
        return self.offset + self.numel

    def is_outermost(self, dim: int) -> bool:
        """Whether the entries of ``dim`` follow each other in memory, whole."""
        return not self.shape or self.numel == 0 or _memory_order(self.stride)[0] == dim

    def with_rows(self, rows: int) -> FlatEntry:
        """The same with so many entries of dim 0, which must be outermost."""
        return replace(self, shape=torch.Size((rows, *self.shape[1:])))

    def flatten(self, whole: Tensor) -> Tensor:
        """The elements of ``whole`` (``shape``) as they lie in the flat parameter: (numel,); a view if it lies so."""
        return whole.permute(_memory_order(self.stride)).reshape(-1)

    def unflatten(self, flat: Tensor) -> Tensor:
        """The inverse: a view of ``flat`` (numel,) in the shape and the strides of the parameter."""
        order = _memory_order(self.stride)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return flat.view([self.shape[dim] for dim in order]).permute(inverse)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive elements of a parameter, on one rank.

    Attributes:
        entry: The parameter.
        start: The first of the elements, counted within the parameter in the order in which it lies.
        numel: How many there are, at least one.
        offset_in_shard: Where the first one lies in the rank's shard.
    """

    entry: FlatEntry
    start: int
    numel: int
    offset_in_shard: int

    @property
    def end(self) -> int:
        """The element after the last, counted as ``start``."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """The flat parameter of one unit.

    Attributes:
        name: The unit's name in the model.
        entries: Its parameters, in order.
        ties: Their further names.
        dtype: Of all of them.
        numel: Elements of the unsharded flat parameter, those of padding included that torch counts and saves: gaps,
            and with ``use_orig_params=True`` the padding at the end.
        world_size: Ranks that it is cut for.
        use_orig_params: Which of the two kinds it is.
    """

    name: str
    entries: tuple[FlatEntry, ...]
    ties: tuple[Tie, ...]
    dtype: torch.dtype
    numel: int
    world_size: int
    use_orig_params: bool

    @property
    def key(self) -> str:
        """The flat parameter's name in the model, without what wrappers put before it: ``blocks.0._flat_param``."""
        return f"{self.name}.{FLAT_PARAM}" if self.name else FLAT_PARAM

    @property
    def requires_grad(self) -> bool:
        """Whether any of the parameters does."""
        return any(entry.requires_grad for entry in self.entries)

    @property
    def keeps_shapes(self) -> bool:
        """Whether what optimizers see of it are whole parameters in their shapes: ``NO_SHARD``, not flat."""
        return self.use_orig_params and self.world_size == 1

    def rank_of(self, rank: int) -> int:
        """Whose shard ``rank`` has; of a unit that is not sharded all have the first."""
        return 0 if self.world_size == 1 else rank

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard in memory, padding included."""
        return -(-self.numel // self.world_size)

    def saved_numel(self, rank: int) -> int:
        """Elements of a rank's shard in a LOCAL state dict: those before ``numel``."""
        return max(0, min(self.shard_numel, self.numel - rank * self.shard_numel))

    def padding_numel(self, rank: int) -> int:
        """Zeros at the end of a rank's shard in memory, which no file has."""
        return self.shard_numel - self.saved_numel(rank)

    @property
    def numels_with_padding(self) -> tuple[int, ...]:
        """The lengths of parameters and gaps, in order, the gap at the end included; they add up to ``numel``."""
        return tuple(length for length, _ in self._runs())

    @property
    def is_padding_mask(self) -> tuple[bool, ...]:
        """Which of ``numels_with_padding`` are gaps."""
        return tuple(is_padding for _, is_padding in self._runs())

    def _runs(self) -> Iterator[tuple[int, bool]]:
        at = 0
        for entry in self.entries:
            if entry.offset > at:
                yield entry.offset - at, True
            yield entry.numel, False
            at = entry.end
        if self.numel > at:
            yield self.numel - at, True

    def full_name(self, fqn: str) -> str:
        """The name in the model of what has the name ``fqn`` in the unit."""
        return f"{self.name}.{fqn}" if self.name else fqn

    def names_of(self, entry: FlatEntry) -> tuple[str, ...]:
        """All names of a parameter in the model, the first one first."""
        others = (tie.fqn for tie in self.ties if tie.first_fqn == entry.fqn)
        return tuple(self.full_name(fqn) for fqn in (entry.fqn, *others))

    def shared_param_infos(self) -> tuple[SharedParamInfo, ...]:
        """The ties as torch records them."""
        infos = []
        for tie in self.ties:
            module_name, _, param_name = tie.fqn.rpartition(".")
            first_module_name, _, first_param_name = tie.first_fqn.rpartition(".")
            infos.append(SharedParamInfo(param_name, None, module_name, first_param_name, None, first_module_name))
        return tuple(infos)

    def shard_param_infos(self, rank: int) -> tuple[ShardParamInfo, ...]:
        """For each parameter, which of its elements ``rank`` holds."""
        return tuple(self._shard_param_info(entry, rank) for entry in self.entries)

    def _shard_param_info(self, entry: FlatEntry, rank: int) -> ShardParamInfo:
        start, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        if entry.offset >= end or entry.end <= start:
            return ShardParamInfo(in_shard=False)
        first = max(start, entry.offset)
        numel = min(end, entry.end) - first
        return ShardParamInfo(True, first - start, numel, first - entry.offset, first - entry.offset + numel - 1)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The elements that ``rank`` holds, parameter by parameter; parameters of which it holds none are left out."""
        return tuple(piece for entry in self.entries if (piece := self.piece(entry, rank)) is not None)

    def piece(self, entry: FlatEntry, rank: int) -> Piece | None:
        """The elements of one parameter that ``rank`` holds; None if there are none."""
        info = self._shard_param_info(entry, rank)
        if not info.numel_in_shard:
            return None
        assert info.offset_in_shard is not None and info.intra_param_start_idx is not None
        return Piece(entry, info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard)

    def shard_metadata(self, rank: int) -> FlatParamShardMetadata:
        """What torch's ``FlatParamHandle.shard_metadata()`` gives on ``rank``."""
        infos = zip(self.entries, self.shard_param_infos(rank), strict=True)
        held = [(entry, info) for entry, info in infos if info.in_shard]
        return FlatParamShardMetadata(
            param_names=tuple(entry.fqn for entry, _ in held),
            param_shapes=tuple(entry.shape for entry, _ in held),
            param_strides=tuple(entry.stride for entry, _ in held),
            param_contiguities=tuple(entry.is_contiguous for entry, _ in held),
            param_numels=tuple(entry.numel for entry, _ in held),
            param_offsets=tuple(
                (info.intra_param_start_idx or 0, -1 if info.intra_param_end_idx is None else info.intra_param_end_idx)
                for _, info in held
            ),
        )


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The flat parameters of a model.

    Attributes:
        units: Those with parameters, in the order of the modules: the model first, then what is nested.
        use_orig_params: Of all of them.
        world_size: Ranks that the model is cut for; a unit may have its own number.
    """

    units: tuple[FlatUnit, ...]
    use_orig_params: bool
    world_size: int

    def shard_metadata(self, rank: int) -> tuple[FlatParamShardMetadata, ...]:
        """The record of each unit for one rank."""
        return tuple(unit.shard_metadata(rank) for unit in self.units)


def lay_out(units: Iterable[UnitEntries], *, use_orig_params: bool, world_size: int) -> FlatLayout:
    """The layout that torch's FSDP1 would make of ``units``. Units without parameters have no flat parameter.

    Args:
        units: As `units_of` gives them.
        use_orig_params: As FSDP1 is given it.
        world_size: Ranks that the model is cut for.

    Raises:
        FSDPValueError: FSDP1 has no flat parameter for such a unit; the message names the parameters.

    Example:
        >>> entry = ParamEntry("weight", torch.Size([3]), (1,), torch.float32)
        >>> layout = lay_out([UnitEntries("", (entry,))], use_orig_params=True, world_size=2)
        >>> layout.units[0].numel, layout.units[0].shard_numel
        (4, 2)
    """
    if world_size < 1:
        raise fsdp2.FSDPValueError(f"world_size is {world_size}; a layout is for one rank or more")
    flat = [_flat_unit(each, use_orig_params, each.world_size or world_size) for each in units if each.parameters]
    return FlatLayout(tuple(flat), use_orig_params, world_size)


def _flat_unit(unit: UnitEntries, use_orig_params: bool, world_size: int) -> FlatUnit:
    _check(unit, use_orig_params)
    dtype = unit.parameters[0].dtype
    aligned = max(1, ALIGNMENT_BYTES // (unit.compute_dtype or dtype).itemsize) if use_orig_params else 1
    entries: list[FlatEntry] = []
    for parameter in unit.parameters:
        offset = _round_up(entries[-1].end if entries else 0, aligned)
        is_contiguous = _is_contiguous(parameter.shape, parameter.stride)
        shape, stride = torch.Size(parameter.shape), tuple(parameter.stride)
        entries.append(FlatEntry(parameter.fqn, shape, stride, is_contiguous, offset, parameter.requires_grad))
    numel = _round_up(entries[-1].end, world_size if use_orig_params else 1)
    return FlatUnit(unit.name, tuple(entries), unit.ties, dtype, numel, world_size, use_orig_params)


def _check(unit: UnitEntries, use_orig_params: bool) -> None:
    """Refuses what torch's FSDP1 refuses to flatten."""
    where, first = f"the unit '{unit.name}'" if unit.name else "the root unit", unit.parameters[0]
    for each in unit.parameters:
        name = f"'{unit.name}.{each.fqn}'" if unit.name else f"'{each.fqn}'"
        if not each.shape:
            raise fsdp2.FSDPValueError(f"{name} is a scalar, which no flat parameter holds; give it the shape (1,)")
        if each.dtype != first.dtype:
            raise fsdp2.FSDPValueError(
                f"{where} has no flat parameter: {name} is {each.dtype} and '{first.fqn}' is {first.dtype}; FSDP1 "
                "wants one dtype per unit. Make one of them a unit of its own, or ignore it"
            )
        if each.requires_grad != first.requires_grad and not use_orig_params:
            raise fsdp2.FSDPValueError(
                f"{where} has no flat parameter with use_orig_params=False: of {name} and '{first.fqn}' one requires "
                "gradients and the other does not. Use use_orig_params=True, or make one of them a unit of its own"
            )
        if not _is_dense(each.shape, each.stride):
            raise fsdp2.FSDPValueError(
                f"{name} of shape {tuple(each.shape)} has strides {tuple(each.stride)}, which leave gaps or overlap, "
                "so its memory cannot lie in a flat parameter; make it contiguous"
            )
    if unit.world_size is not None and unit.world_size < 1:
        raise fsdp2.FSDPValueError(f"{where} has world_size {unit.world_size}; it is one rank or more")
    if sum(each.shape.numel() for each in unit.parameters) == 0:
        raise fsdp2.FSDPValueError(
            f"{where} has only parameters without elements, of which FSDP1 makes no flat parameter"
        )


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _memory_order(stride: tuple[int, ...]) -> list[int]:
    """The dims from the outermost in memory to the innermost."""
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    if math.prod(shape) == 0:
        return True
    dims = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1)
    expected = accumulate((size for _, size in dims), lambda a, b: a * b, initial=1)
    return all(step == each for (step, _), each in zip(dims, expected, strict=False))


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    # FSDP1 counts a last dim of size 1 with another stride as not contiguous, though torch does not look at its stride.
    is_row_major = torch.empty_strided(tuple(shape), tuple(stride), device="meta").is_contiguous()
    return is_row_major and stride[-1] == 1


def units_of(
    root: nn.Module,
    units: Collection[nn.Module],
    *,
    use_orig_params: bool,
    ignored: Iterable[nn.Parameter] = (),
    compute_dtype: torch.dtype | None = None,
) -> list[UnitEntries]:
    """The units of a plain (or meta) model in FSDP1's order, if the modules ``units`` are wrapped bottom-up.

    A parameter belongs to the innermost unit above the module that registers it. One that is tied within a unit is
    there once, and has further names. One that is tied across units belongs, with ``use_orig_params=True``, to the
    unit that is wrapped first, and with False to each of them, as a copy (which is what FSDP1 makes of it).

    Args:
        root: The model; names count from it. Wrappers for checkpointing inside leave no trace in names.
        units: The modules that FSDP1 wraps, ``root`` among them if it is.
        use_orig_params: As FSDP1 is given it.
        ignored: Parameters that no unit takes (``ignored_states``, or those of ``ignored_modules``).
        compute_dtype: ``MixedPrecision.param_dtype``; for units that differ, use `dataclasses.replace` on the result.

    Returns:
        One for each unit, in the order of ``root.named_modules()``; units without parameters are there too.

    Raises:
        FSDPValueError: One of ``units`` is not in ``root``.
    """
    names = {id(module): clean(f"{name}.").removesuffix(".") for name, module in root.named_modules()}
    wanted = {id(unit) for unit in units}
    for unit in units:
        if id(unit) not in names:
            raise fsdp2.FSDPValueError(
                f"a unit, {type(unit).__name__}, is no module of the given {type(root).__name__}"
            )
    taken: set[object] = {id(parameter) for parameter in ignored}
    found = {}
    for unit in _bottom_up(root, wanted, set()):
        parameters, ties = _take(unit, wanted, taken, by_object=use_orig_params)
        found[id(unit)] = UnitEntries(names[id(unit)], parameters, ties, compute_dtype)
    return [found[id(module)] for module in root.modules() if id(module) in wanted]


def _bottom_up(module: nn.Module, wanted: set[int], seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _bottom_up(child, wanted, seen)
    if id(module) in wanted:
        yield module


def _take(
    unit: nn.Module, wanted: set[int], taken: set[object], *, by_object: bool
) -> tuple[tuple[ParamEntry, ...], tuple[Tie, ...]]:
    """What ``unit`` flattens of what is left, marked in ``taken``: parameters, or else places where they stand."""
    first_names: dict[int, str] = {}
    entries, ties, marks = [], [], set[object]()
    for name, module in _own_modules(unit, wanted, ""):
        for param_name, parameter in module._parameters.items():
            place = (id(module), param_name)
            if parameter is None or id(parameter) in taken or place in taken:
                continue
            fqn = clean(f"{name}{param_name}")
            marks.add(id(parameter) if by_object else place)
            if id(parameter) in first_names:
                ties.append(Tie(fqn, first_names[id(parameter)]))
                continue
            first_names[id(parameter)] = fqn
            stride = tuple(parameter.stride())
            entries.append(ParamEntry(fqn, parameter.shape, stride, parameter.dtype, parameter.requires_grad))
    taken |= marks
    return tuple(entries), tuple(ties)


def _own_modules(module: nn.Module, wanted: set[int], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """``module`` and what is below it without other units; a module of two names is there twice."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and id(child) not in wanted:
            yield from _own_modules(child, wanted, f"{prefix}{name}.")
