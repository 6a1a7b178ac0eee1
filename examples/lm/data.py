"""The text: which files to train on, and which bytes are held out.

Without `--data` the text is the source code of the Python standard library, which every machine with Python
has (tens of megabytes with its tests; a distribution that strips the tests leaves about ten).
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.errors import UserError

Bytes = NDArray[np.uint8]

HELD_OUT_EVERY = 20
"""One file in this many is held out; of a text in fewer files, that part of each file's end."""

SEPARATOR = b"\x00"
"""Stands between two files."""

# Installed packages are not the standard library, and the character tables of `encodings` are machine-made
# near-copies of one another: held out, they would still be known.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two disjoint texts: `train` (train_bytes,) and `held_out` (held_out_bytes,), both uint8."""

    train: Bytes
    held_out: Bytes
    description: str

    def fingerprint(self) -> int:
        """Return a checksum of both texts: a resumed run, and every rank, must see the same."""
        return zlib.crc32(self.held_out.data, zlib.crc32(self.train.data))


def load_corpus(paths: Sequence[Path], *, context: int) -> Corpus:
    """Read `paths`, or the standard library's sources where there are none, and hold a part out.

    Raises:
        UserError: a file cannot be read, or either text is shorter than `context` + 1 bytes.
    """
    files = tuple(paths) or standard_library_files()
    train, held_out = split([read(path) for path in files])
    for name, text in (("training", train), ("held-out", held_out)):
        if len(text) < context + 1:
            raise UserError(
                f"the {name} text has {len(text):,} bytes, fewer than --context {context} + 1: "
                "name more --data or lower --context"
            )
    source = "--data" if paths else "the Python standard library"
    description = f"{source}: {len(files):,} files, {len(train):,} bytes to train on, {len(held_out):,} held out"
    return Corpus(train=train, held_out=held_out, description=description)


def standard_library_files() -> tuple[Path, ...]:
    """Return the paths of the standard library's Python files, sorted by their place in it."""
    root = sysconfig.get_path("stdlib")
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"no Python files under {root}: name texts with --data")
    return tuple(sorted(files, key=lambda path: path.parts))


def read(path: Path) -> bytes:
    """Return the contents of the file at `path`."""
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise UserError(f"--data {path} is a folder: name files, as in --data {path}/*.txt") from None
    except OSError as error:
        raise UserError(f"--data {path} cannot be read: {error.strerror}") from None


def split(texts: Iterable[bytes]) -> tuple[Bytes, Bytes]:
    """Split `texts` into a training and a held-out text with no file in both.

    Copies of an earlier text are dropped first, so that none can stand on both sides.
    """
    unique = list({sha256(text).digest(): text for text in texts if text}.values())
    if len(unique) >= HELD_OUT_EVERY:
        held_out = unique[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
        del unique[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
        return join(unique), join(held_out)
    cuts = [len(text) - len(text) // HELD_OUT_EVERY for text in unique]
    return (
        join(text[:cut] for text, cut in zip(unique, cuts, strict=True)),
        join(text[cut:] for text, cut in zip(unique, cuts, strict=True)),
    )


def join(texts: Iterable[bytes]) -> Bytes:
    """Return `texts` one after the other, a separator between them, as one array."""
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)
