"""The checkpoints of a run: which folders there are, what a killed process left, and which are too old.

step-00000500            complete: nothing else ever gets such a name
.step-00000500.writing   a save that has not come to its end
.step-00000500.old       made way for one of the same step
.step-00000500.removing  being removed
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from fsdp2.checkpoint import manifest
from fsdp2.checkpoint.source import METADATA

LOG = logging.getLogger("fsdp2")

_NAME = re.compile(r"step-(\d{8,})")
_TIME, _HEAD = re.compile(r'^"time": "([^"]+)"', re.MULTILINE), 4096
_LAST = "9999"
"""After all times."""
_LEFT = re.compile(r"\.(step-\d{8,})\.(writing|old|removing)")


def name_of(step: int) -> str:
    """Of the folder of ``step``."""
    return f"step-{step:08d}"


class Written(NamedTuple):
    """A complete checkpoint of a run.

    Attributes:
        time: when it was written, as of ISO 8601; "" if that is not said, as in torch's.
        step: of training.
        is_known: whether its manifest says that; else it is a guess, as the manifest cannot be read.
    """

    time: str
    step: int
    is_known: bool


def written_in(run: Path) -> list[Written]:
    """The complete checkpoints of ``run``, in the order in which they were written."""
    found = []
    for each in run.iterdir() if run.is_dir() else ():
        match = _NAME.fullmatch(each.name)
        if match and ((each / manifest.FILE).exists() or (each / METADATA).exists()):
            time, is_known = _time_of(each)
            found.append(Written(time, int(match[1]), is_known))
    return sorted(found)


def steps_in(run: Path) -> list[int]:
    """Those that ``run`` has complete checkpoints of, in the order in which they were written.

    After a restore of an earlier one, what is saved then is newer than what was saved at later steps before.
    """
    return [each.step for each in written_in(run)]


def _time_of(folder: Path) -> tuple[str, bool]:
    """When it was written: by its manifest, if it has one (else before all that have); and whether that is known."""
    path = folder / manifest.FILE
    try:
        with path.open(errors="replace") as file:
            match = _TIME.search(file.read(_HEAD))
    except FileNotFoundError:
        return "", True
    except OSError:
        match = None
    if match:
        return match[1], True
    try:
        return text_of(datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)), False
    except OSError:  # as what was written last, whose error a restore says
        return _LAST, False


def text_of(time: datetime) -> str:
    """So that the order of texts is that of times."""
    return time.isoformat(timespec="microseconds")


def time_after_all(run: Path) -> str:
    """Now, or a moment after the newest checkpoint of ``run``, should a clock have been put back since."""
    now = datetime.now(timezone.utc)
    for each in written_in(run):
        with contextlib.suppress(ValueError, TypeError, OverflowError):  # whatever another program has written there
            now = max(now, datetime.fromisoformat(each.time) + timedelta(microseconds=1))
    return text_of(now)


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


def old_in(run: Path, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Of the checkpoints of ``run``, those to remove. Those whose manifest cannot be read stay, and do not count."""
    return too_old([each.step for each in written_in(run) if each.is_known], keep_last, keep_every)


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
