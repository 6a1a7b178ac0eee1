"""`manifest.json`: what is in a checkpoint, for people and programs. Nothing of it is pickled.

It is written last, and holds the CRC-32 of every item, so that a file of another checkpoint is noticed even if it is
whole; and of `.metadata`, by which `torch.distributed.checkpoint` reads; and of itself.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError

FILE = "manifest.json"
FORMAT = 1


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
        entries: of each tensor and value, by name, what is not empty of these: ``shape`` of the whole (of a tensor),
            ``dtype`` as ``"float32"``, ``placement`` as ``"Shard(dim=0) over 4"``, ``same_as`` (the name of the tensor
            that it is tied to, whose items are its own), and ``items`` in files, in the order of their ``offsets`` in
            the tensor: ``file``, ``start`` and ``nbytes`` there, ``sizes`` along each dim, and ``crc32`` of the item's
            records, by name, as 8 hexadecimal digits.
    """

    step: int | None
    time: str
    versions: Mapping[str, str]
    ranks: int
    mesh: str
    groups: tuple[Mapping[str, Any], ...]
    files: Mapping[str, int]
    metadata_crc32: str
    entries: Mapping[str, Mapping[str, Any]]

    def checksums(self) -> dict[tuple[str, tuple[int, ...]], Mapping[str, str]]:
        """Of each item, by the name of its tensor or value and its offsets; tied ones under all of their names."""
        found = {}
        for name, entry in self.entries.items():
            for item in self.entries.get(entry.get("same_as", ""), entry).get("items", ()):
                found[name, tuple(item["offsets"])] = item["crc32"]
        return found

    def to_json(self) -> str:
        """One line for each entry."""
        head = {name: getattr(self, name) for name in self.__slots__ if name not in ("entries", "files")}
        lines = ["{", f'"format": {FORMAT},']
        lines += [f'"{name}": {json.dumps(value)},' for name, value in head.items()]
        lines += ['"files": {', *_lines(self.files), "},"]
        lines += ['"entries": {', *_lines(self.entries), "},"]
        body = "\n".join(lines)
        return f'{body}\n"crc32": "{crc_text(zlib.crc32(body.encode()))}"\n}}\n'


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in found.items()]
    return [*lines[:-1], lines[-1][:-1]] if lines else []


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
    return Manifest(**found | {"groups": tuple(found["groups"])})
