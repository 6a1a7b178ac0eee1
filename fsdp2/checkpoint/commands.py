"""The commands of ``python -m fsdp2.checkpoint``. One process, no process group, no code of the model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint.contents import STATE
from fsdp2.checkpoint.errors import CheckpointError, CheckpointIncomplete
from fsdp2.checkpoint.folders import leftovers, name_of, old_in, remove, steps_in
from fsdp2.checkpoint.inspection import Opened, Tensor, differences
from fsdp2.checkpoint.ranks import Alone
from fsdp2.checkpoint.safetensors_files import MAX_FILE_BYTES, export
from fsdp2.checkpoint.source import METADATA
from fsdp2.errors import FSDPError

DESCRIPTION = "Look at checkpoints, and take care of them, without a model."
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 where something is wrong with a checkpoint, 2 with the command line."""
    options = add_commands(argparse.ArgumentParser("python -m fsdp2.checkpoint", description=DESCRIPTION)).parse_args(
        arguments
    )
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Run the command that `add_commands` has understood."""
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (FSDPError, OSError) as error:  # of the system: no permission, no such disk
        print(f"{error}", file=sys.stderr)
        return 1


def add_commands(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let ``parser`` understand the commands; returns it."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], says: str, *paths: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=says, description=says)
        for path in paths:
            found.add_argument(path.lower(), metavar=path, type=Path)
        found.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        found.set_defaults(command=command)
        return found

    add("list", list_run, "the checkpoints of a run", "RUN")
    shown = add("show", show, "what is in a checkpoint", "PATH")
    shown.add_argument("--all", action="store_true", help="optimizer states and values, too")
    add("verify", verify, "compare all sizes and checksums; status 1 if anything differs", "PATH")
    compared = add("diff", diff, "how two checkpoints differ; status 1 if they do", "PATH", "OTHER")
    compared.add_argument("--values", action="store_true", help="the largest difference of each tensor, too")
    exported = add("export", export_folder, "write the model as safetensors", "PATH", "FOLDER")
    exported.add_argument("--dtype", choices=_DTYPES, help="cast floating-point tensors")
    exported.add_argument("--max-file-bytes", type=int, default=MAX_FILE_BYTES, help="default: %(default)s")
    pruned = add("prune", prune, "remove old checkpoints of a run; never the newest", "RUN")
    pruned.add_argument("--keep-last", type=int, required=True, metavar="N", help="how many of the newest stay")
    pruned.add_argument("--keep-every", type=int, metavar="N", help="those of steps that are multiples stay, too")
    return parser


def list_run(options: argparse.Namespace) -> int:
    """A line for each checkpoint, the oldest first; status 1 if one cannot be read, which has a line all the same."""
    run: Path = options.run
    steps = steps_in(run)
    if (run / METADATA).exists():
        raise CheckpointIncomplete(f"{run} is a checkpoint itself, no run: show {run}.")
    if not run.is_dir():
        raise CheckpointIncomplete(f"there is no run {run}: no such folder.")
    found: list[dict[str, Any]] = []
    for step in steps:
        try:
            found.append(_listed(step, Opened(run / name_of(step))))
        except (CheckpointError, OSError) as error:
            found.append({**dict.fromkeys(("time", "ranks", "bytes")), "name": name_of(step), "step": step})
            found[-1]["error"] = str(error)
    wrong = [each["error"] for each in found if "error" in each]
    left = [str(each) for each in leftovers(run)]
    lines = [] if steps else [f"no checkpoints in {run}"]
    if steps:
        rows = [[each["name"], each["time"] or "", str(each["ranks"] or ""), _size(each["bytes"])] for each in found]
        lines += [*_table([["checkpoint", "time", "ranks", "size"], *rows]), *wrong]
    says = "left by a process that did not come to its end; the next save or restore removes it"
    _say(options, {"checkpoints": found, "left": left}, [*lines, *(f"{each}: {says}" for each in left)])
    return 1 if wrong else 0


def _listed(step: int, opened: Opened) -> dict[str, Any]:
    manifest = opened.source.manifest
    return {
        "name": name_of(step),
        "step": step,
        "time": None if manifest is None else manifest.time,
        "ranks": None if manifest is None else manifest.ranks,
        "bytes": sum(opened.source.files().values()),
    }


def show(options: argparse.Namespace) -> int:
    """What is in a checkpoint."""
    opened = Opened(options.path)
    manifest, tensors = opened.source.manifest, opened.tensors()
    states = [each for name, each in tensors.items() if name.startswith(f"{STATE}.")]
    shown = {name: each for name, each in tensors.items() if options.all or not name.startswith(f"{STATE}.")}
    values = {name: opened.value(name) for name in opened.values()} if options.all else {}
    lines = [f"{options.path}"] if opened.step is None else [f"{options.path}", f"step {opened.step}"]
    if manifest is not None:
        versions = ", ".join(f"{name} {each}" for name, each in manifest.versions.items())
        lines.append(f"saved {manifest.time} by {manifest.ranks} ranks, mesh {manifest.mesh or 'none'}, {versions}")
    else:
        lines.append("saved by torch.distributed.checkpoint")
    lines += _table([["tensor", "shape", "dtype", "sharded", "size"], *map(_row, shown.values())])
    if states and not options.all:
        lines.append(f"and {len(states)} tensors of optimizer state, {_size(sum(each.nbytes for each in states))}")
    hyperparameters = opened.hyperparameters()
    lines += [f"{name} = {_shortened(value)}" for name, value in {**hyperparameters, **values}.items()]
    data = {
        "path": str(options.path),
        "step": opened.step,
        "time": None if manifest is None else manifest.time,
        "ranks": None if manifest is None else manifest.ranks,
        "mesh": None if manifest is None else manifest.mesh,
        "versions": {} if manifest is None else dict(manifest.versions),
        "tensors": [_tensor(each) for each in shown.values()],
        "optimizer_state": {"tensors": len(states), "bytes": sum(each.nbytes for each in states)},
        "hyperparameters": hyperparameters,
        "values": values,
    }
    _say(options, data, lines)
    return 0


def _row(each: Tensor) -> list[str]:
    dtype = str(each.dtype).removeprefix("torch.")
    place = f"tied to {each.same_as}" if each.same_as else each.placement
    return [each.name, "x".join(map(str, each.shape)) or "()", dtype, place, _size(each.nbytes)]


def _tensor(each: Tensor) -> dict[str, Any]:
    return {
        "name": each.name,
        "shape": list(each.shape),
        "dtype": str(each.dtype).removeprefix("torch."),
        "sharded": each.placement,
        "tied_to": each.same_as or None,
        "bytes": each.nbytes,
    }


def verify(options: argparse.Namespace) -> int:
    """Whether a checkpoint is what was written."""
    found = []
    opened = Opened(options.path)
    for line in opened.damages():
        found.append(line)
        _say_already(options, line)
    items = len(opened.source.items())
    has_manifest = opened.source.manifest is not None
    count = len(found)
    said = f"{count} of {items} items differ" if count else f"all {items} items are as they were written"
    lines = [] if has_manifest else ["it has no manifest: each file was compared with its own checksums alone"]
    data = {"path": str(options.path), "items": items, "differ": count, "damages": found, "manifest": has_manifest}
    _say(options, data, [*lines, f"{options.path}: {said}"])
    return 1 if count else 0


def diff(options: argparse.Namespace) -> int:
    """How two checkpoints differ."""
    found = []
    one, other = Opened(options.path), Opened(options.other)
    for line in differences(one, other, values=options.values):
        found.append(line)
        _say_already(options, line)
    none = "no difference" if options.values else "no difference in names, shapes, dtypes and hyperparameters"
    _say(options, {"differences": found}, [] if found else [none])
    return 1 if found else 0


def export_folder(options: argparse.Namespace) -> int:
    """Write the model as safetensors."""
    dtype = None if options.dtype is None else _DTYPES[options.dtype]
    if options.max_file_bytes < 1:
        raise CheckpointError(f"--max-file-bytes takes a number >= 1, got {options.max_file_bytes}.")
    count = export(options.path, options.folder, Alone(), dtype, options.max_file_bytes)
    _say(options, {"tensors": count, "folder": str(options.folder)}, [f"{count} tensors in {options.folder}"])
    return 0


def prune(options: argparse.Namespace) -> int:
    """Remove old checkpoints."""
    run: Path = options.run
    if options.keep_last < 1:
        raise CheckpointError(f"--keep-last takes a number >= 1, got {options.keep_last}: the newest always stays.")
    steps = steps_in(run)
    if not steps:
        raise CheckpointIncomplete(f"there is no checkpoint in {run}.")
    gone = old_in(run, options.keep_last, options.keep_every)
    failed = [str(each) for each in remove(run, gone)]
    for line in failed:
        print(line, file=sys.stderr)
    count = len(gone) - len(failed)
    data = {"removed": count, "of": len(steps), "failed": failed}
    _say(options, data, [f"removed {count} of {len(steps)} checkpoints"])
    return 1 if failed else 0


def _say(options: argparse.Namespace, data: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the one or the other. What JSON does not know is shown as Python shows it."""
    if options.json:
        print(json.dumps(data, indent=2, default=repr))
    else:
        print(*lines, sep="\n", end="\n" if lines else "")


def _say_already(options: argparse.Namespace, line: str) -> None:
    """Print a line of many as soon as it is known."""
    if not options.json:
        print(line)


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "unreadable"
    size, unit = float(nbytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if not unit else f"{size:.1f} {_UNITS[unit]}"


def _shortened(value: Any, most: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
