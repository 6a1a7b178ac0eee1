"""`load`: what a checkpoint has, into a model, its optimizers and a program's values; everything is compared before.

open                   each rank reads what the checkpoint holds, and small values
compare                names, shapes, dtypes, groups, sizes of files; all ranks tell each other all differences
read                   each rank what its rows lie in, checksums first; nothing was written before
hand over              optimizers and values
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp2.arguments import checked
from fsdp2.checkpoint.blocked import block, unblock
from fsdp2.checkpoint.comparing import RENAME, Difference, hint_of_names, of_all_ranks, table
from fsdp2.checkpoint.contents import (
    MODEL,
    PER_RANK,
    SHARED,
    STEP,
    STRUCTURE,
    Contents,
    Stateful,
    Values,
    filled,
    places_of,
    with_live_tensors,
)
from fsdp2.checkpoint.errors import CheckpointError, CheckpointMismatch
from fsdp2.checkpoint.held import held_by, materialize, note_written
from fsdp2.checkpoint.optimizers import CLASS, NAMES, Optimizers, groups_that_match, nested, shortened
from fsdp2.checkpoint.ranks import Ranks, agree, ranks_of
from fsdp2.checkpoint.reading import Reader
from fsdp2.checkpoint.report import LoadReport
from fsdp2.checkpoint.rules import ONLY_RULE, OPTIMIZER_RULE, PATH_RULE, RENAME_RULE, VALUES_RULE
from fsdp2.checkpoint.source import Rename, Source, is_tensor, open_source, saved_groups, split_state
from fsdp2.core.plan import fingerprint
from fsdp2.model.broadcast_parameters import GROUP

Only = str | Sequence[str] | Callable[[str], bool] | None
Verify = Literal["reading", "first", "no"]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of one load."""

    strict: bool = True
    only: Only = None
    rename: Rename = None
    cast: bool = False
    verify: Verify = "reading"
    per_rank_missing: Literal["raise", "keep"] = "raise"

    def takes(self, name: str) -> bool:
        """Whether ``only`` takes the parameter or buffer ``name``."""
        only = self.only
        if only is None:
            return True
        if callable(only):
            return bool(only(name))
        patterns = [only] if isinstance(only, str) else only
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@checked(
    path=PATH_RULE,
    optimizer=OPTIMIZER_RULE,
    shared=VALUES_RULE,
    per_rank=VALUES_RULE,
    process_group=GROUP,
    only=ONLY_RULE,
    rename=RENAME_RULE,
)
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    shared: Values | None = None,
    per_rank: Values | None = None,
    strict: bool = True,
    only: Only = None,
    rename: Rename = None,
    cast: bool = False,
    verify: Verify = "reading",
    per_rank_missing: Literal["raise", "keep"] = "raise",
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load the checkpoint in the folder ``path``: one of `save`, or of `torch.distributed.checkpoint`.

    Everything is compared before anything is read: if the checkpoint does not fit, the model is as it was. Each rank
    reads the saved parts that its rows lie in, whatever ranks, meshes and placements have saved them.

    Collective: all ranks of ``process_group`` must call it, outside of forward and backward. Takes memory for the
    largest of these parts, and for what optimizers are given that they did not have.

    Args:
        path: of the folder.
        model: sharded, plain, or one that contains sharded ones. Parameters and buffers on meta get memory, those that
            the checkpoint has.
        optimizer: one, several, or none. Needs no step before; gradients stay as they are.
        shared: by their names, what is to be given its state: by ``load_state_dict``; plain values are replaced in the
            mapping.
        per_rank: the same, of what this rank had saved.
        strict: False: what is missing or unexpected is left out, and stands in the report.
        only: names to load, as ``"blocks.*"``, or several, or a function of a name; everything else stays as it is,
            hyperparameters too.
        rename: a function from a name in the checkpoint to the model's.
        cast: whether values of another dtype are converted to the model's.
        verify: ``"reading"``: checksums are compared of what is read; ``"first"``: of everything, before anything is
            written; ``"no"``.
        per_rank_missing: ``"keep"``: on another number of ranks than saved it, ``per_rank`` stays as it is.
        process_group: by default that of all ranks.

    Raises:
        FSDPTypeError, FSDPValueError: an argument of another kind.
        CheckpointIncomplete: there is no complete checkpoint.
        CheckpointMismatch: it does not fit: all differences, and nothing was loaded.
        CheckpointDamaged: files are not what was written. If that shows only while they are read, forwards of the
            model and of its parts raise until a load has succeeded.
        CheckpointError: a value could not be handed over, by its ``load_state_dict``.
    """
    ranks = ranks_of(process_group)
    options = Options(strict, only, rename, cast, verify, per_rank_missing)
    return Load(Path(path).absolute(), ranks, options).run(lambda: Contents(model, optimizer, shared, per_rank), model)


class _Wanted(NamedTuple):
    """What is to be read.

    Attributes:
        tensors: of the model: for names in the checkpoint, theirs in the model.
        state: of optimizers: by parameter, by state, names in the checkpoint. Empty where it has none of a parameter,
            which then has none afterwards.
        groups: for each parameter group, hyperparameters, or None.
        values: of the program, read already: ``shared`` and ``per_rank`` by name.
        extra: of the model, what is no tensor.
    """

    tensors: dict[str, str]
    state: dict[str, dict[str, str]]
    groups: list[Mapping[str, Any] | None]
    values: list[tuple[Values, str, Any]]
    extra: dict[str, Any]


class Load:
    """One load under way.

    Args:
        path: of the folder.
        ranks: that load together.
        options: see `load`.
    """

    def __init__(self, path: Path, ranks: Ranks, options: Options) -> None:
        self._path, self._ranks, self._options = path, ranks, options
        self._differences: list[Difference] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._cast: dict[str, str] = {}
        self._bytes_read = 0
        self._contents: Contents
        self._source: Source
        self._wanted: _Wanted
        self._taken: frozenset[str]
        self._copies: set[str] = set()
        self._unverified: set[str] = set()
        self._without_sums: set[str] = set()
        self._step: int | None = None

    def run(self, collect: Callable[[], Contents], model: nn.Module) -> LoadReport:
        """All of it."""
        with torch.inference_mode(False):
            return self._run(collect, model)

    def _run(self, collect: Callable[[], Contents], model: nn.Module) -> LoadReport:
        error = self._attempt(lambda: self._compare(collect))
        found = self._together(error, [] if error is not None else self._asked(), self._differences)
        differences = of_all_ranks(found)
        if differences:
            raise CheckpointMismatch(table(f"the checkpoint {self._path}", differences))
        if self._options.verify == "first":
            self._together(self._attempt(self._verify_files))
        try:
            reader = Reader(self._source, sums=self._options.verify == "reading")
            self._finish_reading(reader, self._attempt(lambda: self._read(reader)))
            self._together(self._attempt(self._hand_over))
        except BaseException as error:  # of the keyboard, too
            block(model, error)
            raise
        unblock(model)
        return self._report()

    # -- what ranks tell each other

    def _attempt(self, action: Callable[[], Any]) -> CheckpointError | None:
        try:
            action()
        except CheckpointError as error:
            return error
        except Exception as error:  # every rank is told, and raises it
            return CheckpointError(f"the checkpoint {self._path} was not loaded: {type(error).__name__}: {error}")
        return None

    def _together(self, error: Exception | None, lines: Sequence[str] = (), own: Any = None) -> list[Any]:
        """`agree`; whatever speaks against that is an error of this package."""
        try:
            return agree(self._ranks, error, lines, f"the load of {self._path.name}", own)
        except CheckpointError:
            raise
        except RuntimeError as failure:
            raise CheckpointError(f"the checkpoint {self._path} was not loaded: {failure}") from failure

    def _asked(self) -> list[str]:
        """What must be the same on all ranks."""
        options, wanted, contents = self._options, self._wanted, self._contents
        functions = {name for name in ("only", "rename") if callable(getattr(options, name))}
        lines = [f"the checkpoint with {self._source.told_by}"]  # folders of nodes may be of different ones
        lines += [
            f"{name}={'a function' if name in functions else getattr(options, name)}" for name in options.__slots__
        ]
        lines += [f"shared: {sorted(contents.shared)}", f"per_rank: {sorted(contents.per_rank)}"]
        lines += [f"optimizer: {sorted(contents.optimizers.parameters)}"]
        return [*lines, f"tensors: {fingerprint(str(sorted(wanted.tensors.items())))}"]

    # -- compare

    def _compare(self, collect: Callable[[], Contents]) -> None:
        contents = self._contents = collect()
        names = frozenset(contents.state) | frozenset(contents.names.buffers)
        source = self._source = open_source(self._path, names, self._options.rename)
        source.refuse_wrong_sizes(sorted(source.files())[self._ranks.rank :: self._ranks.size])
        first = contents.names.first
        every = dict.fromkeys([*contents.state, *contents.names.parameters])
        # What is tied a pattern takes by any of its names; a function, which may exclude one, must take all.
        self._taken = frozenset(first.get(name, name) for name in every if self._options.takes(name))
        if callable(self._options.only):
            self._taken -= {first.get(name, name) for name in every if not self._options.takes(name)}
        tensors, extra = self._compare_model()
        reader = Reader(source, sums=self._options.verify != "no")
        self._step = step_of(reader)
        groups, state = self._compare_optimizers(reader)
        values = self._values(reader)
        loaded = {name: reader.value(key) for name, key in extra.items()}
        self._unverified = {name for name, key in extra.items() if key in reader.without_sums}
        self._bytes_read += reader.bytes_read
        self._wanted = _Wanted(tensors, state, groups, values, loaded)

    def _differ(self, kind: str, name: str, text: str = "") -> None:
        self._differences.append(Difference(kind, name, text))

    def _refuse_nothing(self, takes: bool) -> None:
        """Refuse patterns that fit no name, and a load of nothing.

        Raises:
            CheckpointError: naming them.
        """
        only, names, strict = self._options.only, list(self._contents.state), self._options.strict
        if only is not None and not callable(only):
            for pattern in [only] if isinstance(only, str) else only:
                if names and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                    near = difflib.get_close_matches(pattern.rstrip("*."), names, 1, 0.0)
                    raise CheckpointError(f"only={pattern!r} takes nothing of the model: its names are as '{near[0]}'.")
        if takes or not names:
            return
        is_for_values = strict and (self._contents.shared or self._contents.per_rank)
        if only is not None and not self._missing and not is_for_values:
            raise CheckpointError(f"only={only!r} takes nothing of the model: its names are as '{names[0]}'.")
        if self._unexpected and not strict:
            hint = hint_of_names(names, self._unexpected)
            raise CheckpointError(
                f"the checkpoint has nothing of the model: its names are as '{self._unexpected[0]}', and those of the "
                f"model as '{names[0]}'. {RENAME}{': ' if hint else ''}{hint}."
            )

    def _compare_model(self) -> tuple[dict[str, str], dict[str, str]]:
        """Of the model, what is read: tensors, and others, for each name in the checkpoint that in the model."""
        contents, source, options = self._contents, self._source, self._options
        there = {f"{MODEL}.{rest}" for rest in source.below(MODEL)}
        tensors: dict[str, str] = {}
        extra: dict[str, str] = {}
        of_first: dict[str, list[str]] = {}
        for name in contents.state:
            of_first.setdefault(contents.names.first.get(name, name), []).append(name)
        found: str | None
        for first, tied in of_first.items():
            if first not in self._taken:
                continue
            found = next((each for each in tied if f"{MODEL}.{each}" in there), None)
            wanted = contents.state[first]
            if found is None:
                self._miss(first, wanted)
            elif not isinstance(wanted, torch.Tensor):
                extra[first] = f"{MODEL}.{found}"
            elif not is_tensor(source, f"{MODEL}.{found}"):
                self._differ("shape", first, f"a value in the checkpoint, {_described(wanted)} in the model")
            else:
                tensors[f"{MODEL}.{found}"] = first
                self._compare_tensor(first, wanted, f"{MODEL}.{found}")
        known = {f"{MODEL}.{name}" for name in contents.state}
        for key in sorted(there - known):
            name = key[len(MODEL) + 1 :]
            if options.takes(name):
                self._unexpected.append(name)
                if options.strict:
                    self._differ("unexpected", name, _described(source.metadata.state_dict_metadata[key]))
        self._refuse_nothing(bool(tensors or extra))
        for name in sorted(contents.names.transient):
            if contents.names.buffers[name].is_meta and options.strict and options.only is None:
                text = f"a buffer that is not persistent, {_described(contents.names.buffers[name])}"
                self._differ("unwritten", name, text)
        return tensors, extra

    def _miss(self, name: str, wanted: Any) -> None:
        self._missing.append(name)
        if self._options.strict:
            self._differ("missing", name, _described(wanted))

    def _compare_tensor(self, name: str, wanted: torch.Tensor, key: str) -> None:
        found = cast(TensorStorageMetadata, self._source.metadata.state_dict_metadata[key])
        if tuple(found.size) != tuple(wanted.shape):
            self._differ("shape", name, f"{tuple(found.size)} in the checkpoint, {tuple(wanted.shape)} in the model")
        elif found.properties.dtype != wanted.dtype:
            text = f"{found.properties.dtype} in the checkpoint, {wanted.dtype} in the model"
            if self._options.cast:
                self._cast[name] = f"{found.properties.dtype} -> {wanted.dtype}"
            else:
                self._differ("dtype", name, text)

    def _compare_optimizers(self, reader: Reader) -> tuple[list[Mapping[str, Any] | None], dict[str, dict[str, str]]]:
        """Hyperparameters for each group, and which states there are to be read."""
        contents, source, options = self._contents, self._source, self._options
        wanted = contents.optimizers.groups
        if not wanted:
            return [], {}
        names = self._taken.intersection(contents.optimizers.parameters)
        saved = _groups(reader, saved_groups(source), options.rename, wanted)
        first = contents.names.first
        state = split_state(source, names, options.rename, first)
        in_saved = {name for group in saved for name in group[NAMES]}
        in_saved = {first.get(name, name) for name in in_saved}
        if not saved:
            self._differ("group", "optimizer", "the checkpoint has no optimizer")
            return [], {}
        for name in sorted(names - in_saved):
            self._missing.append(f"optimizer: {name}")
            if options.strict:
                self._differ("group", name, "in no parameter group of the checkpoint")
        if options.only is None:
            for name in sorted(in_saved - set(contents.optimizers.parameters)):
                self._unexpected.append(f"optimizer: {name}")
                if options.strict:
                    self._differ("group", name, "in no parameter group of the optimizer")
        saved = [{**group, NAMES: [first.get(name, name) for name in group[NAMES]]} for group in saved]
        matched, lines = groups_that_match(wanted, saved, in_saved & names)
        for line in lines:
            self._differ("group", line)
        self._compare_classes()
        state = {name: state.get(name, {}) for name in sorted(names & (in_saved | set(state)))}
        return matched if options.only is None else [None] * len(wanted), state

    def _compare_classes(self) -> None:
        """Whether the optimizers are of the classes that were saved, by the names of their parameters."""
        manifest = self._source.manifest
        first, rename = self._contents.names.first, self._options.rename
        saved: dict[str, str] = {}
        for group in () if manifest is None else manifest.groups:
            for name in group[NAMES]:
                ours = name if rename is None else rename(name)
                saved[first.get(ours, ours)] = str(group.get(CLASS, ""))
        differ: dict[tuple[str, str], list[str]] = {}
        for name, kind in self._contents.optimizers.classes.items():
            if saved.get(name) and saved[name] != kind:
                differ.setdefault((saved[name], kind), []).append(name)
        for (theirs, ours), found in differ.items():
            self._differ("group", shortened(found), f"of {theirs} in the checkpoint, of {ours} now")

    def _values(self, reader: Reader) -> list[tuple[Values, str, Any]]:
        """The program's values, as they were packed. DTensors among them are read later."""
        contents, source, options = self._contents, self._source, self._options
        wanted = [(contents.shared, name, SHARED) for name in contents.shared]
        saved_by = {int(rest.partition(".")[0]) for rest in source.below(PER_RANK)}
        if contents.per_rank:
            if saved_by and saved_by != set(range(self._ranks.size)):
                if options.per_rank_missing == "raise":
                    text = f"{len(saved_by)} in the checkpoint, {self._ranks.size} now"
                    self._differ("ranks", PER_RANK, text)
            else:
                front = f"{PER_RANK}.{self._ranks.rank}"
                wanted += [(contents.per_rank, name, front) for name in contents.per_rank]
        found = []
        for values, name, front in wanted:
            key, structure = f"{front}.{name}", f"{STRUCTURE}.{front}.{name}"
            if key in source.names and not is_tensor(source, key):
                found.append((values, name, reader.value(key)))
            elif structure in source.names:
                (inside,) = reader.value(structure)
                found.append((values, name, self._nested(inside, values[name], f"{front}[{name!r}]")))
            elif options.strict:
                self._differ("value", f"{front.partition('.')[0]}[{name!r}]")
            else:
                self._missing.append(key)
        return found

    def _nested(self, inside: Any, value: Any, where: str) -> _Nested:
        """Where the sharded tensors of a value are to be read to: to those that it has now."""
        live = value.state_dict() if isinstance(value, Stateful) else value
        places = places_of(inside, live)
        for key, place in places.items():
            meta: Any = self._source.metadata.state_dict_metadata.get(key)
            has_both = isinstance(meta, TensorStorageMetadata) and isinstance(place, DTensor)
            if not (has_both and place.shape == meta.size and place.dtype == meta.properties.dtype):
                self._differ("value", where, f"no sharded tensor like '{key}' is in it now, to be read to")
        return _Nested(inside, places)

    # -- read

    def _verify_files(self) -> None:
        """Compare all checksums of a share of the items."""
        reader = Reader(self._source)
        for index in self._source.items()[self._ranks.rank :: self._ranks.size]:
            reader.verify(index)
        self._bytes_read += reader.bytes_read
        self._without_sums = reader.without_sums

    def _read(self, reader: Reader) -> None:
        contents, wanted = self._contents, self._wanted
        names = set(wanted.tensors.values())
        if any(contents.names.tensors()[name].is_meta for name in names if name in contents.names.first):
            materialize(contents.model, [each for each in held_by(contents.model) if each.name in names])
            contents.refresh()
        into: dict[str, torch.Tensor] = {key: contents.state[name] for key, name in wanted.tensors.items()}
        self._state: dict[str, dict[str, Any]] = {}
        known = contents.optimizers.state() if wanted.state else {}
        for name, keys in wanted.state.items():
            of_one = self._state[name] = {}
            for state, key in keys.items():
                if not is_tensor(self._source, key):
                    of_one[state] = reader.value(key)
                    continue
                found = cast(TensorStorageMetadata, self._source.metadata.state_dict_metadata[key])
                like = torch.empty(found.size, dtype=found.properties.dtype, device="meta")
                here = known.get(name, {}).get(state)
                made = contents.optimizers.destination(name, state, here, like)
                of_one[state] = into[key] = made
        for _, _, value in wanted.values:
            if isinstance(value, _Nested):
                into |= value.places
        reader.read(into)

    def _finish_reading(self, reader: Reader, error: Exception | None) -> None:
        """Tell each other what was read.

        Raises:
            CheckpointDamaged: a rank has found damage; on every rank.
        """
        copies = set() if error is not None else self._contents.copies.intersection(self._wanted.tensors.values())
        without_sums = self._without_sums | reader.without_sums
        found = self._together(error, [], (reader.bytes_read + self._bytes_read, copies, without_sums))
        self._copies = set().union(*(of_rank for _, of_rank, _ in found))
        without_sums = without_sums.union(*(of_rank for *_, of_rank in found))
        self._unverified |= {name for key, name in self._wanted.tensors.items() if key in without_sums}
        self._bytes_read = sum(nbytes for nbytes, *_ in found)

    # -- hand over

    def _hand_over(self) -> None:
        contents, wanted = self._contents, self._wanted
        names = set(wanted.tensors.values())
        note_written(each for each in held_by(contents.model) if each.name in names)
        indirect = {**{name: contents.state[name] for name in self._copies}, **wanted.extra}
        if indirect:
            set_model_state_dict(contents.model, indirect, options=StateDictOptions(strict=False))
        if wanted.groups:
            state = {
                name: nested(of_one, {key: self._source.tail_of(saved) for key, saved in wanted.state[name].items()})
                for name, of_one in self._state.items()
            }
            if self._options.only is not None or not self._options.strict:  # what was not taken stays
                state = {**contents.optimizers.state(), **state}
            state = {name: of_one for name, of_one in state.items() if of_one}
            contents.optimizers.load(state, wanted.groups, casts=self._options.cast)
        for values, name, value in wanted.values:
            state = filled(value.inside, value.places) if isinstance(value, _Nested) else value[0]
            here = values[name]
            if isinstance(here, Stateful):
                here.load_state_dict(state)
            elif _takes(here, state):
                with torch.no_grad():  # it may be a buffer of a module
                    here.copy_(state)
            else:
                values[name] = with_live_tensors(state, here)

    def _report(self) -> LoadReport:
        wanted, contents = self._wanted, self._contents
        loaded = [*wanted.tensors.values(), *wanted.extra]
        here = contents.names.tensors()
        return LoadReport(
            path=str(self._path),
            step=self._step,
            loaded=tuple(loaded),
            missing=tuple(self._missing),
            unexpected=tuple(self._unexpected),
            cast=dict(self._cast),
            unwritten=tuple(name for name, tensor in here.items() if tensor.is_meta),
            unverified=tuple(n for n in loaded if self._options.verify == "no" or n in self._unverified),
            optimizer=tuple(name for name, keys in wanted.state.items() if keys),
            values=tuple(name for _, name, _ in wanted.values),
            bytes_read=self._bytes_read,
        )


def _takes(here: Any, state: Any) -> bool:
    """Whether ``state`` can be written to the tensor ``here`` as what it is: no floats to integers."""
    both = isinstance(here, torch.Tensor) and isinstance(state, torch.Tensor)
    return both and here.shape == state.shape and torch.can_cast(state.dtype, here.dtype)


class _Nested(NamedTuple):
    """A value that has sharded tensors.

    Attributes:
        inside: the value, with marks for them.
        places: what they are to be read to, by name.
    """

    inside: Any
    places: dict[str, Any]


def _groups(
    reader: Reader, found: Mapping[str, Mapping[str, str]], rename: Rename, wanted: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The parameter groups of a checkpoint: names and hyperparameters."""
    groups = []
    for index, keys in found.items():
        group = {key: _hyperparameter(reader, name) for key, name in keys.items()}
        group.setdefault(NAMES, [index])  # torch's flattened form: each parameter has its own
        names = group[NAMES]
        group[NAMES] = list(names) if rename is None else [rename(name) for name in names]
        groups.append(group)
    if groups and all(NAMES not in keys for keys in found.values()):
        of = {group[NAMES][0]: group for group in groups}
        merged = [[name for name in each[NAMES] if name in of] for each in wanted]
        rest = set(of).difference(*merged)
        groups = [{**of[names[0]], NAMES: names} for names in merged if names]
        groups += [of[name] for name in sorted(rest)]
    return groups


def _hyperparameter(reader: Reader, name: str) -> Any:
    source = reader.source
    if not is_tensor(source, name):
        return reader.value(name)
    meta = cast(TensorStorageMetadata, source.metadata.state_dict_metadata[name])
    value = torch.empty(meta.size, dtype=meta.properties.dtype, device="cpu")
    reader.read({name: value})
    return value


def step_of(reader: Reader) -> int | None:
    """The training step that a checkpoint is of, if it says one."""
    if STEP not in reader.source.names:
        return None
    value = _hyperparameter(reader, STEP)
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    return value if type(value) is int else None


def _described(tensor: Any) -> str:
    if isinstance(tensor, TensorStorageMetadata):
        return f"{tensor.properties.dtype} {tuple(tensor.size)}"
    if isinstance(tensor, torch.Tensor):
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    return "a value"


__all__ = ["Load", "Options", "load"]
