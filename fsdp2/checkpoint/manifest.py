"""`manifest.json`: what is in a checkpoint, for people and programs. Nothing of it is pickled.

It is written last, and holds the CRC-32 of every item, so that a file of another checkpoint is noticed even if it is
whole; and of `.metadata`, by which `torch.distributed.checkpoint` reads; and of itself.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError

FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Item:
    """One part of a tensor, or a value, in a file.

    Attributes:
        file: in the checkpoint's folder.
        start: its first byte there.
        nbytes: how many.
        offsets: of the part in its tensor, along each dim; empty of a value.
        sizes: of the part, along each dim; empty of a value.
        crc32: of its records, by name, as 8 hexadecimal digits.
    """

    file: str
    start: int
    nbytes: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    crc32: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or a value.

    Attributes:
        shape: of the whole tensor; None of a value.
        dtype: as ``"float32"``; "" of a value.
        placement: how it was sharded: ``"Shard(dim=0) over 4"``; "" if it was not.
        same_as: the name of the tensor that it is tied to, whose items are its own; "" if it is not.
        items: in the order of their offsets.
    """

    shape: tuple[int, ...] | None
    dtype: str = ""
    placement: str = ""
    same_as: str = ""
    items: tuple[Item, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of its items in files."""
        return 0 if self.same_as else sum(item.nbytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Manifest:
    """See the module.

    Attributes:
        step: the training step; None if none was said.
        time: when it was made, in UTC, as of ISO 8601.
        versions: of python, torch and fsdp2.
        ranks: how many saved it.
        mesh: over which its tensors were sharded, for people.
        groups: parameter groups: names of parameters (``params``) and hyperparameters, for people.
        files: sizes in bytes.
        metadata_crc32: of the file `.metadata`.
        entries: by name.
    """

    step: int | None
    time: str
    versions: Mapping[str, str]
    ranks: int
    mesh: str
    groups: tuple[Mapping[str, Any], ...]
    files: Mapping[str, int]
    metadata_crc32: str
    entries: Mapping[str, Entry]

    def checksums(self) -> dict[tuple[str, tuple[int, ...]], Mapping[str, str]]:
        """Of each item, by the name of its tensor or value and its offsets; tied ones under all of their names."""
        found = {}
        for name, entry in self.entries.items():
            for item in self.entries.get(entry.same_as, entry).items:
                found[name, item.offsets] = item.crc32
        return found

    def to_json(self) -> str:
        """One line for each entry."""
        head = {name: getattr(self, name) for name in self.__slots__ if name not in ("entries", "files")}
        lines = ["{", f'"format": {FORMAT},']
        lines += [f'"{name}": {json.dumps(value)},' for name, value in head.items()]
        lines += ['"files": {', *_lines(self.files), "},"]
        lines += ['"entries": {', *_lines({name: _short(entry) for name, entry in self.entries.items()}), "},"]
        body = "\n".join(lines)
        return f'{body}\n"crc32": "{crc_text(zlib.crc32(body.encode()))}"\n}}\n'


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in found.items()]
    return [*lines[:-1], lines[-1][:-1]] if lines else []


def _short(entry: Entry) -> dict[str, Any]:
    """Without what is as by default."""
    found = {name: value for name, value in asdict(entry).items() if value}
    if entry.shape is not None:
        found["shape"] = entry.shape
    return found


def crc_text(crc: int) -> str:
    """As it stands in files."""
    return f"{crc:08x}"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it has none, as one that torch wrote.

    Raises:
        CheckpointDamaged: it is not what was written.
        CheckpointError: a newer fsdp2 wrote it, or it cannot be read.
    """
    path = folder / FILE
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}.") from error
    except OSError as error:  # of the system, which says nothing of what was written
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    body, _, _ = text.rpartition('\n"crc32": ')
    try:
        found = json.loads(text)
        crc, version = found.pop("crc32"), found.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointDamaged(f"{path} is damaged: {error}.") from error
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(f"{path} is of format {version}, and this fsdp2 reads up to {FORMAT}: update fsdp2.")
    if crc != crc_text(zlib.crc32(body.encode())):
        raise CheckpointDamaged(f"{path} is not what was written: its own checksum differs.")
    entries = {name: _entry(each) for name, each in found.pop("entries").items()}
    return Manifest(entries=entries, **found | {"groups": tuple(found["groups"])})


def _entry(found: dict[str, Any]) -> Entry:
    items = tuple(
        Item(**each | {"offsets": tuple(each["offsets"]), "sizes": tuple(each["sizes"])})
        for each in found.pop("items", ())
    )
    shape = found.pop("shape", None)
    return Entry(None if shape is None else tuple(shape), items=items, **found)
