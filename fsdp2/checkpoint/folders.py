"""The checkpoints of a run: which folders there are, what a killed process left, and which are too old.

step-00000500            complete: nothing else ever gets such a name
.step-00000500.writing   a save that has not come to its end
.step-00000500.old       made way for one of the same step
.step-00000500.removing  being removed
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdp2.checkpoint import manifest
from fsdp2.checkpoint.source import METADATA

LOG = logging.getLogger("fsdp2")

_NAME = re.compile(r"step-(\d{8,})")
_TIME, _HEAD = re.compile(r'^"time": "([^"]+)"', re.MULTILINE), 4096
_LEFT = re.compile(r"\.(step-\d{8,})\.(writing|old|removing)")


def name_of(step: int) -> str:
    """Of the folder of ``step``."""
    return f"step-{step:08d}"


def steps_in(run: Path) -> list[int]:
    """Those that ``run`` has complete checkpoints of, in the order in which they were written.

    After a restore of an earlier one, what is saved then is newer than what was saved at later steps before.
    """
    found = []
    for each in run.iterdir() if run.is_dir() else ():
        match = _NAME.fullmatch(each.name)
        if match and ((each / manifest.FILE).exists() or (each / METADATA).exists()):
            found.append((_written(each), int(match[1])))
    return [step for _, step in sorted(found)]


def _written(folder: Path) -> str:
    """When it was: by its manifest, if it has one. (Else before all that have.)"""
    try:
        with (folder / manifest.FILE).open(errors="replace") as file:
            match = _TIME.search(file.read(_HEAD))
    except OSError:
        return ""
    return match[1] if match else ""


def leftovers(run: Path) -> list[str]:
    """Names of what killed processes have left, and of what is being written or removed now."""
    return sorted(each.name for each in run.iterdir() if _LEFT.fullmatch(each.name)) if run.is_dir() else []


def clean(run: Path) -> None:
    """Remove what killed processes have left, and say so in the log, as what cannot be removed.

    By one rank, while none saves.

    Raises:
        OSError: the folder cannot be read.
    """
    for each in sorted(run.iterdir()) if run.is_dir() else ():
        match = _LEFT.fullmatch(each.name)
        if not match:
            continue
        whole = run / match[1]
        try:
            if match[2] == "old" and not whole.exists():  # it made way, and nothing came
                each.rename(whole)
                LOG.warning("%s is back: a save that was to replace it did not come to its end", whole)
            else:
                _remove(each)
                LOG.warning("removed %s, which a process left that did not come to its end", each)
        except FileNotFoundError:  # another process removes it, too
            continue
        except OSError as error:  # as files that a node of NFS has open yet: the next save tries again
            LOG.warning("%s is left, and could not be removed: %s", each, error)


def _remove(folder: Path) -> None:
    """A folder; where it is a symbolic link, that, and what it points to stays.

    Raises:
        OSError: it cannot be removed, or is not there.
    """
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def too_old(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Of ``steps``, in the order of writing, those to remove.

    Not the last ``keep_last``, nor multiples of ``keep_every``; never the newest.
    """
    if keep_last is None:
        return []
    kept = set(steps[-max(1, keep_last) :])
    return [step for step in steps if step not in kept and not (keep_every and step % keep_every == 0)]


def remove(run: Path, steps: Iterable[int]) -> list[str]:
    """Remove checkpoints: they lose their names first, so that none is there in part. Returns what could not be."""
    failed = []
    for step in steps:
        folder = run / name_of(step)
        gone = folder.with_name(f".{folder.name}.removing")
        try:
            if gone.is_symlink():
                gone.unlink()
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            _remove(gone)
        except FileNotFoundError:  # another process removes it, too
            continue
        except OSError as error:
            failed.append(f"{folder}: {error}")
    return failed


def flush(path: Path) -> None:
    """Let what was written to a file, or the names in a folder, be on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
