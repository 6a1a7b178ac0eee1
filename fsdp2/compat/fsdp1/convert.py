"""``python -m fsdp2.compat.fsdp1.convert IN OUT --to full|dcp|local``: flat checkpoints of FSDP1, from and to files.

FSDP1's LOCAL state dicts, and ``optimizer.state_dict()`` of its flat parameters, fit the wrapping, the form and the
number of ranks that wrote them, and say none of the three. Told these, this command puts the files of all ranks
together, or cuts a whole checkpoint into such files, in one process without a process group.

Where a file nests them (``{"model": ..., "optim": ..., "step": 3}``), so does the result. No more than one unit is in
memory: what is read stays in the files, what is made lies in a folder of scratch files beside OUT until OUT is written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.compat.fsdp1.flat_checkpoints import (
    Keep,
    NamedState,
    OptimizerOrder,
    is_optimizer_state,
    named_state,
    read_model,
    read_optimizer,
    write_model,
    write_optimizer,
)
from fsdp2.compat.fsdp1.layout import FLAT_PARAM, FlatLayout, lay_out, units_of
from fsdp2.compat.fsdp1.names import clean
from fsdp2.compat.fsdp1.sharded_files import load

DESCRIPTION = """\
Convert checkpoints of torch's FSDP1 that consist of flat parameters: LOCAL state dicts, and optimizer.state_dict() of
flat parameters (use_orig_params=False) or of pieces of parameters (True). IN is the files of all ranks: a folder, or
the files themselves; the last number in a file's name is its rank. With --from full it is one file of whole tensors.

  --to full    one file (torch.save) of whole tensors by name; of optimizers, FSDP1's optim_state_dict
  --to dcp     the same as a folder of torch.distributed.checkpoint, for any number of ranks
  --to local   a folder of flat files for --world-size ranks

FSDP1 does not save the layout, so it is given: by --model, a function that returns the plain model (it is called
under the meta device), by --units, and by --use-orig-params or --no-use-orig-params."""

EXAMPLE = """\
example: python -m fsdp2.compat.fsdp1.convert checkpoints/step100 model.pt --to full \\
             --model my_package.models:build --units Block --use-orig-params"""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The model, and how FSDP1 wraps it: what a layout follows from.

    Attributes:
        model: Plain, best on the meta device; the names, shapes and dtypes count.
        units: The modules that are wrapped, the model among them if it is.
        ignored: Parameters that FSDP1 ignores.
        compute_dtype: ``MixedPrecision.param_dtype``.
        optimizer_names: The optimizer's parameters in its order, group after group, if it is not the model's.
    """

    model: nn.Module
    units: Sequence[nn.Module]
    ignored: Sequence[nn.Parameter] = ()
    compute_dtype: torch.dtype | None = None
    optimizer_names: tuple[str, ...] | None = None

    def layout(self, use_orig_params: bool, world_size: int) -> FlatLayout:
        """The layout for a form and a number of ranks."""
        entries = units_of(
            self.model,
            self.units,
            use_orig_params=use_orig_params,
            ignored=self.ignored,
            compute_dtype=self.compute_dtype,
        )
        return lay_out(entries, use_orig_params=use_orig_params, world_size=world_size)

    def order(self, layout: FlatLayout, *, as_given: bool) -> OptimizerOrder:
        """Of the optimizer's parameters: the user's, if there is one and it is ``as_given`` for this layout's form."""
        if self.optimizer_names is not None and as_given:
            return OptimizerOrder.given(self.optimizer_names)
        return OptimizerOrder.of_model(self.model, layout)

    def plain_order(self) -> OptimizerOrder:
        """Of a plain model's optimizer."""
        return self.order(FlatLayout((), use_orig_params=True, world_size=1), as_given=True)

    def names(self) -> set[str]:
        """All names of parameters."""
        return {clean(name) for name, _ in self.model.named_parameters(remove_duplicate=False)}


# ---- files ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Scratch:
    """A folder in which made tensors lie until the result is written."""

    folder: Path
    count: int = 0

    def keep(self, made: Tensor) -> Tensor:
        """The same values in a file, mapped into memory, which the system writes out when it needs the room."""
        if made.numel() == 0 or made.ndim == 0:
            return made.clone()
        self.count += 1
        path = str(self.folder / str(self.count))
        kept = torch.from_file(path, shared=True, size=made.numel(), dtype=made.dtype).view(made.shape)
        return kept.copy_(made)


@contextmanager
def scratch_beside(out: Path) -> Iterator[Scratch]:
    """A folder on the disk of ``out``, gone at the end."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.scratch-", dir=out.absolute().parent))
    try:
        yield Scratch(folder)
    finally:
        shutil.rmtree(folder)


def rank_files(paths: Sequence[Path]) -> list[Path]:
    """The files of all ranks, in order: those of a folder, or those given.

    Raises:
        FSDPValueError: They are not the files of ranks 0 to n - 1 of one kind; the message says which there are.
    """
    files = sorted(
        each for path in paths for each in (path.iterdir() if path.is_dir() else [path]) if not each.is_dir()
    )
    for file in files:
        if not file.exists():
            raise fsdp2.FSDPValueError(f"there is no file {file}")
    kinds: dict[tuple[Path, str, str], dict[int, Path]] = {}
    for file in files:
        found = re.fullmatch(r"(.*?)(\d+)(\D*)", file.name)
        if found is None:
            raise fsdp2.FSDPValueError(
                f"{file} has no number in its name that says which rank wrote it; give the files of ranks alone"
            )
        kinds.setdefault((file.parent, found[1], found[3]), {})[int(found[2])] = file
    if len(kinds) != 1:
        shown = sorted(f"{before}*{after}" for _, before, after in kinds)
        raise fsdp2.FSDPValueError(
            f"{', '.join(map(str, paths))}: {f'files of several kinds, {shown}' if kinds else 'no files'}; convert one "
            "kind after the other, giving its files"
        )
    ((_, by_rank),) = kinds.items()
    if sorted(by_rank) != list(range(len(by_rank))):
        raise fsdp2.FSDPValueError(f"files of the ranks {sorted(by_rank)}; give those of all ranks from 0 on")
    return [by_rank[rank] for rank in range(len(by_rank))]


# ---- what is in them --------------------------------------------------------------------------------


@dataclass(slots=True)
class Whole:
    """A checkpoint of whole tensors, by its nested keys.

    Attributes:
        models: State dicts, by the keys under which they lie; the empty tuple if the file is one.
        optimizers: States by name.
        others: Everything else, which is passed on as it is.
    """

    models: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[tuple[str, ...], NamedState] = field(default_factory=dict)
    others: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def tree(
        self, model: Callable[[dict[str, Any]], Any], optimizer: Callable[[NamedState], Any]
    ) -> dict[str, Any] | Any:
        """The parts in their places, each written by its function."""
        parts = {
            **self.others,
            **{place: model(each) for place, each in self.models.items()},
            **{place: optimizer(each) for place, each in self.optimizers.items()},
        }
        root: dict[str, Any] = {}
        for place, value in parts.items():
            if not place:
                return value
            inner = root
            for key in place[:-1]:
                inner = inner.setdefault(key, {})
            inner[place[-1]] = value
        return root


def find_parts(
    values: Sequence[Any], names: set[str], place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, Sequence[Any]]]:
    """State dicts of models and optimizers, and other values, in what the files of all ranks hold.

    Yields:
        The keys that lead to it; ``model``, ``optimizer`` or ``other``; and each rank's.

    Raises:
        FSDPValueError: The files have other keys.
    """
    first = values[0]
    if is_optimizer_state(first):
        yield place, "optimizer", values
    elif not isinstance(first, Mapping) or not all(isinstance(key, str) for key in first):
        yield place, "other", values
    elif any(clean(key) in names or key.rpartition(".")[2] == FLAT_PARAM for key in first):
        yield place, "model", values
    else:
        for rank, value in enumerate(values):
            if not isinstance(value, Mapping) or value.keys() != first.keys():
                raise fsdp2.FSDPValueError(
                    f"the files of rank 0 and rank {rank} differ at '{'.'.join(place)}': {list(first)} and "
                    f"{list(value) if isinstance(value, Mapping) else type(value).__name__}"
                )
        for key in first:
            yield from find_parts([value[key] for value in values], names, (*place, key))


def read(
    values: Sequence[Any], wrapping: Wrapping, layout: FlatLayout | None, keep: Keep, skip: Iterable[str] = ()
) -> Whole:
    """Put together what the files of all ranks hold.

    Args:
        values: What each file holds, in the order of the ranks; one, if it is whole already.
        wrapping: The model.
        layout: Of the files; None if they are whole.
        keep: Where whole tensors go.
        skip: Keys that are left out, with what is below.

    Raises:
        FSDPValueError: The files do not fit the layout, have no state of this model, or differ in what is passed on.
    """
    found, left_out = Whole(), set(skip)
    for place, kind, each in find_parts(values, wrapping.names()):
        if left_out & {".".join(place[:depth]) for depth in range(1, len(place) + 1)}:
            continue
        if kind == "model":
            found.models[place] = _whole_model(each, layout, keep)
        elif kind == "optimizer" and layout is None:
            found.optimizers[place] = named_state(each[0], wrapping.plain_order())
        elif kind == "optimizer" and layout is not None:
            named = read_optimizer(layout, each, wrapping.order(layout, as_given=True))
            found.optimizers[place] = _kept(named, keep)
        else:
            found.others[place] = _same_on_all(place, each)
    if not found.models and not found.optimizers:
        keys = [str(key) for key in values[0]] if isinstance(values[0], Mapping) else type(values[0]).__name__
        raise fsdp2.FSDPValueError(
            f"the files hold neither a state dict of {type(wrapping.model).__name__} nor one of an optimizer; their "
            f"keys are {keys}"
        )
    return found


def _whole_model(states: Sequence[Any], layout: FlatLayout | None, keep: Keep) -> dict[str, Any]:
    if layout is None:
        return {clean(name): value for name, value in states[0].items()}
    whole = {}
    for names, value in read_model(layout, states):
        whole.update(dict.fromkeys(names, keep(value) if isinstance(value, Tensor) else value))
    return whole


def _kept(named: NamedState, keep: Keep) -> NamedState:
    states = {
        name: {key: keep(value) if isinstance(value, Tensor) else value for key, value in named.of(name).items()}
        for name in named.names
    }
    return NamedState(named.names, lambda name: dict(states[name]), named.param_groups)


def _same_on_all(place: tuple[str, ...], values: Sequence[Any]) -> Any:
    for rank, value in enumerate(values):
        if not _equal(values[0], value):
            key = ".".join(place)
            raise fsdp2.FSDPValueError(
                f"'{key}' differs between rank 0 and rank {rank}, and belongs to no model or optimizer, so the result "
                f"has no place for both; leave it out (--skip {key})"
            )
    return values[0]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


# ---- what is made of them ---------------------------------------------------------------------------


def write_full(whole: Whole, out: Path) -> None:
    """One file of whole tensors by name."""
    _save(whole.tree(lambda model: model, _by_name), out)


def write_dcp(whole: Whole, out: Path) -> None:
    """A folder of `torch.distributed.checkpoint`, of the same."""
    # Imports torch's FSDP1 (2.11 to 2.15), which the other formats do without.
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    with warnings.catch_warnings():
        # DCP says that it takes this for one process, also if it is told so.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save_dcp(whole.tree(lambda model: model, _by_name), checkpoint_id=out, no_dist=True)


def _save(tree: Any, out: Path) -> None:
    """As `torch.save`; to a file of Python, which says what the system says: of a full disk, for example."""
    with out.open("wb") as file:
        torch.save(tree, file)


def _by_name(state: NamedState) -> dict[str, Any]:
    return {"state": {name: state.of(name) for name in state.names}, "param_groups": state.param_groups}


def write_local(whole: Whole, out: Path, layout: FlatLayout, order: OptimizerOrder, scratch: Scratch) -> None:
    """A folder of one flat file for each rank, ``rank_0.pt`` and so on."""
    out.mkdir(parents=True, exist_ok=True)
    for rank in range(layout.world_size):

        def model(state: dict[str, Any], rank: int = rank) -> dict[str, Any]:
            return write_model(layout, state, rank, scratch.keep)

        def optimizer(state: NamedState, rank: int = rank) -> dict[str, Any]:
            return write_optimizer(layout, state, rank, order, scratch.keep)

        _save(whole.tree(model, optimizer), out / f"rank_{rank}.pt")


def commit(made: Path, out: Path) -> None:
    """Give what was made its name once all of it is on disk, so that no crash leaves a part of it there."""
    for each in [made, *(made.rglob("*") if made.is_dir() else ())]:
        _flush(each)
    made.rename(out)
    _flush(out.absolute().parent)


def _flush(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def convert(
    sources: Sequence[Path],
    out: Path,
    to: str,
    wrapping: Wrapping,
    *,
    use_orig_params: bool | None,
    is_whole: bool = False,
    target_use_orig_params: bool | None = None,
    world_size: int | None = None,
    skip: Iterable[str] = (),
    trust: bool = False,
) -> None:
    """The command: read ``sources`` (files, or a folder), write ``out``.

    Args:
        sources: Files of all ranks, or the one that is whole.
        out: A file or a folder, as ``to`` says; it must not exist.
        to: ``full``, ``dcp`` or ``local``.
        wrapping: The model and its units.
        use_orig_params: Of what is read; None if it is whole.
        is_whole: Whether that is one file of whole tensors.
        target_use_orig_params: Of what is written, if it is flat and another form.
        world_size: Number of ranks of what is written, if it is flat; that of what is read if left out.
        skip: Keys to leave out.
        trust: Let the files execute code.

    Raises:
        FSDPValueError: The files do not fit, or arguments do not; nothing is left at ``out`` then.
    """
    if out.exists():
        raise fsdp2.FSDPValueError(f"{out} exists already; give another path, or remove it")
    if is_whole and to == "full":
        raise fsdp2.FSDPValueError("the file is whole already; --from full is for --to local and --to dcp")
    files = [*sources] if is_whole else rank_files(sources)
    if is_whole and len(files) != 1:
        raise fsdp2.FSDPValueError(f"with --from full there is one file to read, not {len(files)}")
    if not is_whole and use_orig_params is None:
        raise fsdp2.FSDPValueError(
            "give --use-orig-params or --no-use-orig-params, as FSDP1 had it when it wrote the files"
        )
    layout = None if use_orig_params is None or is_whole else wrapping.layout(use_orig_params, len(files))
    form = use_orig_params if target_use_orig_params is None else target_use_orig_params
    if to == "local" and (form is None or (is_whole and world_size is None)):
        raise fsdp2.FSDPValueError("--to local needs --world-size, and --use-orig-params or --no-use-orig-params")
    target = wrapping.layout(bool(form), world_size or len(files)) if to == "local" else None
    values = [load(file, trust=trust) for file in files]
    with scratch_beside(out) as scratch:
        whole = read(values, wrapping, layout, scratch.keep, skip)
        made = scratch.folder / "made"
        if target is not None:
            order = wrapping.order(target, as_given=layout is None or form == layout.use_orig_params)
            write_local(whole, made, target, order, scratch)
        else:
            (write_full if to == "full" else write_dcp)(whole, made)
        commit(made, out)


# ---- the command line -------------------------------------------------------------------------------


def look_up(name: str) -> Any:
    """What ``package.module:attribute`` names.

    Raises:
        FSDPValueError: There is no such thing.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise fsdp2.FSDPValueError(f"'{name}' is not of the form package.module:function")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise fsdp2.FSDPValueError(f"'{name}' is not there: {error}") from error


def wrapping_from(arguments: argparse.Namespace) -> Wrapping:
    """Build the model and find its units.

    Raises:
        FSDPValueError: Names that are given are not there.
    """
    with torch.device("meta"):
        model = look_up(arguments.model)()
    if not isinstance(model, nn.Module):
        raise fsdp2.FSDPValueError(f"{arguments.model} returned a {type(model).__name__}, not a module")
    if arguments.dtype is not None:
        model.to(dtype_named(arguments.dtype))
    order = look_up(arguments.optimizer_order)(model) if arguments.optimizer_order else None
    return Wrapping(
        model,
        units_named(model, arguments.units),
        ignored_by(model, arguments.ignored),
        dtype_named(arguments.param_dtype) if arguments.param_dtype else None,
        None if order is None else tuple(order),
    )


def units_named(model: nn.Module, units: str) -> list[nn.Module]:
    """The model and its modules of the classes named (``Block,Head``), or those that a function returns for it.

    Raises:
        FSDPValueError: There is no module of a class that is named.
    """
    if ":" in units:
        return list(look_up(units)(model))
    names = [name.strip() for name in units.split(",") if name.strip()]
    classes = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in classes:
            raise fsdp2.FSDPValueError(f"no module is a {name}; there are {sorted(classes)}")
    return [module for module in model.modules() if module is model or type(module).__name__ in names]


def ignored_by(model: nn.Module, pattern: str | None) -> list[nn.Parameter]:
    """Parameters whose names match, or which are in modules whose names do.

    Raises:
        FSDPValueError: None does.
    """
    if pattern is None:
        return []
    modules = [module for name, module in model.named_modules() if re.fullmatch(pattern, clean(name))]
    found = [parameter for name, parameter in model.named_parameters() if re.fullmatch(pattern, clean(name))]
    found += [parameter for module in modules for parameter in module.parameters()]
    if not found:
        raise fsdp2.FSDPValueError(f"--ignored {pattern} is the name of no parameter and of no module with parameters")
    return found


def dtype_named(name: str) -> torch.dtype:
    """``bfloat16``, or ``torch.bfloat16``.

    Raises:
        FSDPValueError: There is none of this name.
    """
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise fsdp2.FSDPValueError(f"torch has no dtype {name}")
    return found


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="python -m fsdp2.compat.fsdp1.convert",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(made)
    return made


def add_options(made: argparse.ArgumentParser) -> None:
    """Let ``made`` understand them."""
    add = made.add_argument
    add("sources", nargs="+", type=Path, metavar="IN", help="the files of all ranks, or their folder")
    add("out", type=Path, metavar="OUT", help="what is written; must not exist")
    add("--to", choices=("full", "dcp", "local"), required=True)
    add("--from", dest="source", choices=("flat", "full"), default="flat", help="what IN is (flat)")
    add("--model", required=True, metavar="MODULE:FUNCTION", help="returns the plain model")
    add(
        "--units",
        default="",
        metavar="CLASSES",
        help="names of the classes that are units beside the model, with commas; or MODULE:FUNCTION, which is given "
        "the model and returns the modules that are units, the model among them if it is",
    )
    on_off = argparse.BooleanOptionalAction
    add("--use-orig-params", action=on_off, default=None, help="as FSDP1 was given it")
    add("--target-use-orig-params", action=on_off, default=None, help="of what is written, if it is another")
    add("--world-size", type=int, help="ranks of what is written by --to local (as many as IN has)")
    add("--ignored", metavar="REGEX", help="whole names of modules or parameters that FSDP1 ignored")
    add("--dtype", help="of the parameters, if --model makes another: bfloat16")
    add("--param-dtype", help="MixedPrecision.param_dtype, if there was one")
    add(
        "--optimizer-order",
        metavar="MODULE:FUNCTION",
        help="is given the model, returns the names of the optimizer's parameters, group after group; needed if there "
        "are several groups, or parameters in another order than the model's (a unit's flat parameter is "
        "UNIT._flat_param)",
    )
    add("--skip", action="append", default=[], metavar="KEY", help="leave this out; may be repeated")
    add("--trust", action="store_true", help="let files execute code: they hold more than tensors")


def run(given: argparse.Namespace) -> None:
    """Convert as the options say.

    Raises:
        FSDPValueError: The files do not fit, or arguments do not; nothing is left at ``out`` then.
    """
    convert(
        given.sources,
        given.out,
        given.to,
        wrapping_from(given),
        use_orig_params=given.use_orig_params,
        is_whole=given.source == "full",
        target_use_orig_params=given.target_use_orig_params,
        world_size=given.world_size,
        skip=given.skip,
        trust=given.trust,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    try:
        run(parser().parse_args(arguments))
    except (fsdp2.FSDPError, OSError) as error:  # of the system: no permission, no space
        sys.exit(f"fsdp2.compat.fsdp1.convert: {error}")


if __name__ == "__main__":
    main()
