"""Reads what a rank needs of a checkpoint's files, straight to where it is to be, and computes checksums of it.

`torch.load` has to read an item whole. Most items are a header and then a tensor's rows, one after the other; so the
bytes of the rows that a rank needs are read from their place, into the memory of its shard if that is on the host and
of the same dtype. What lies in other ways (transposed, compressed, of a subclass) is read as torch reads it.

[Note: checksums of parts]
The CRC-32 of an item is of all of its bytes, of which a rank may have read some rows. Ranks tell each other what they
have read, with the CRC-32 of it; if that covers the item, the parts' are combined to its own. Where some ranks have
read a part and none the rest, one reads the rest, too.
"""

from __future__ import annotations

import ctypes
import io
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError
from fsdp2.checkpoint.source import Source
from fsdp2.checkpoint.zips import Layout, NoZip, Record, Slice, content_start, crc_of_both, directory_of, layout_of

BLOCK_BYTES = 2 << 20
"""Read, and summed up, at once: what fits into a cache."""

_MOST_OPEN = 16
"""Files at a time, however many ranks have saved."""

Key = tuple[str, tuple[int, ...] | None]
"""An item: the name of a tensor, and the offsets of its part; the name of a value, and None."""


class Piece(NamedTuple):
    """Bytes of an item's record that were read.

    Attributes:
        start: in the record.
        nbytes: how many.
        crc: CRC-32 of them.
        whole_nbytes: of the record.
        whole_crc: what is written of it.
    """

    start: int
    nbytes: int
    crc: int
    whole_nbytes: int
    whole_crc: int


class _Opened(NamedTuple):
    """An item that was looked at.

    Attributes:
        item: its bytes.
        records: of its zip.
        layout: how its tensor lies; None if torch has to read it.
        start: of its content, in the file; 0 if torch has to read it.
        content: the record of that.
        has_sums: whether there are checksums of it, which torch can be told not to write.
    """

    item: Slice
    records: dict[str, Record]
    layout: Layout | None
    start: int
    content: Record | None
    has_sums: bool


class _File(NamedTuple):
    """A file that is open.

    Attributes:
        file: not buffered.
        known: items in it that were looked at.
    """

    file: BinaryIO
    known: dict[Key, _Opened]


class Reader:
    """Reads items of one checkpoint, on one rank. A context manager, which closes files.

    Args:
        source: the checkpoint.
        sums: whether checksums are computed.

    Attributes:
        source: the checkpoint.
        bytes_read: of files.
        pieces: what was read of each item, if checksums are computed.
        without_sums: names of what was looked at, of which an item has no checksum.
    """

    def __init__(self, source: Source, *, sums: bool = True) -> None:
        self.source = source
        self._sums = sums
        self._files: OrderedDict[str, _File] = OrderedDict()  # what was used last at the end
        self._crcs = {} if source.manifest is None else source.manifest.checksums()
        self.bytes_read = 0
        self.pieces: dict[Key, list[Piece]] = {}
        self.without_sums: set[str] = set()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in self._files.values():
            each.file.close()
        self._files.clear()

    # -- values

    def value(self, name: str) -> Any:
        """A value that is no tensor.

        Raises:
            CheckpointDamaged: it is not what was written.
            CheckpointError: it is, and this process cannot make it; or a file cannot be read.
        """
        key: Key = (name, None)
        with self._reading(key):
            opened = self._open(key, MetadataIndex(name))
            data = self._whole(key, opened)
        return self._unpickled(key, opened, data, weights_only=False)

    # -- tensors

    def read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read ``items`` to where ``planner`` says. In the order in which they lie in files.

        Raises:
            CheckpointDamaged: one is not what was written, as far as this rank can see.
            CheckpointError: a file cannot be read.
        """
        storage = self.source.metadata.storage_data
        for each in sorted(items, key=lambda item: _place(storage[item.storage_index])):
            key = key_of(each.storage_index)
            target = planner.resolve_tensor(each).detach()
            region = (tuple(each.storage_offsets), tuple(each.lengths))
            with self._reading(key):
                opened = self._open(key, each.storage_index)
                if opened.layout is None:
                    self._read_as_torch(key, opened, region, target)
                else:
                    self._read_rows(key, opened, opened.layout, region, target)
            planner.commit_tensor(each, target)

    def _read_rows(self, key: Key, opened: _Opened, layout: Layout, region: Any, target: torch.Tensor) -> None:
        """Of a tensor that lies plainly, the rows of ``region``."""
        offsets, lengths = region
        if not math.prod(lengths):
            return
        itemsize = layout.dtype.itemsize
        row_shape = layout.shape[1:]
        row_bytes = math.prod(row_shape) * itemsize
        first, count = (offsets[0], lengths[0]) if layout.shape else (0, 1)
        start = layout.start * itemsize + first * row_bytes
        is_whole_rows = tuple(lengths[1:]) == row_shape
        if is_whole_rows and target.is_cpu and target.dtype == layout.dtype and _is_flat(target):
            self._read_bytes(key, opened, start, _memory(target))
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)  # as any other write, which optimizers look for
            return
        rows_at_once = max(1, BLOCK_BYTES // max(1, row_bytes))
        # A dtype that the target does not have is cast by `copy_`; columns are cut out of rows in memory.
        at_once = (min(count, rows_at_once), *row_shape)
        block = torch.empty(at_once, dtype=layout.dtype, device="cpu") if layout.shape else None
        for at in range(0, count, rows_at_once):
            size = min(rows_at_once, count - at)
            rows = torch.empty((), dtype=layout.dtype, device="cpu") if block is None else block[:size]
            self._read_bytes(key, opened, start + at * row_bytes, _memory(rows))
            if block is None:
                target.copy_(rows)
                continue
            for dim, (offset, length) in enumerate(zip(offsets[1:], lengths[1:], strict=True), start=1):
                rows = rows.narrow(dim, offset, length)
            target.narrow(0, at, size).copy_(rows)

    def _read_as_torch(self, key: Key, opened: _Opened, region: Any, target: torch.Tensor) -> None:
        found = self._unpickled(key, opened, self._whole(key, opened), weights_only=True)
        for dim, (offset, length) in enumerate(zip(*region, strict=True)):
            found = found.narrow(dim, offset, length)
        if found.shape != target.shape:
            raise self._damaged(key, f"it is of shape {tuple(found.shape)}, not {tuple(target.shape)}")
        target.copy_(found)

    def _unpickled(self, key: Key, opened: _Opened, data: bytes, *, weights_only: bool) -> Any:
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except Exception as error:  # whatever unpickling does
            why = f"{type(error).__name__}: {error}"
            if not opened.has_sums or _is_of_zip(error):
                raise self._damaged(key, why) from error
            self._compare_records(key, opened, data)
            raise CheckpointError(
                f"'{key[0]}' of the checkpoint {self.source.path} is what was written, and cannot be unpickled here: "
                f"{why}. Let what it needs be importable, as where it was saved; or load without it."
            ) from error

    # -- bytes

    def compare(self, key: Key, pieces: Sequence[Piece]) -> None:
        """Compare the checksum of an item with that of ``pieces``, which ranks have read of it; reads what is missing.

        Raises:
            CheckpointDamaged: they differ.
            CheckpointError: a file cannot be read.
        """
        read: dict[tuple[int, int], Piece] = {}
        for piece in pieces:
            if read.setdefault((piece.start, piece.nbytes), piece) != piece:  # as where nodes have folders of their own
                raise self._damaged(key, "ranks have read different bytes in the same place")
        found = covered(pieces)
        parts = [(piece.start, piece.nbytes, piece.crc) for piece in found.pieces]
        parts += [(start, nbytes, self.rest(key, start, nbytes)) for start, nbytes in found.gaps]
        crc, wanted = crc_of(parts), pieces[0].whole_crc
        if crc != wanted:
            raise self._damaged(key, f"its checksum is {crc:08x}, and was {wanted:08x}")

    def compare_all(self) -> None:
        """`compare` what this rank alone has read since the last time.

        Raises:
            CheckpointDamaged: something is not what was written.
        """
        pieces, self.pieces = self.pieces, {}
        for key, of_item in pieces.items():
            self.compare(key, of_item)

    def rest(self, key: Key, start: int, nbytes: int) -> int:
        """CRC-32 of bytes that nobody needs, of the content of an item."""
        with self._reading(key):
            opened = self._open(key, MetadataIndex(*key))
            return self._sum(key, opened.item, opened.start + start, nbytes)

    def _sum(self, key: Key, item: Slice, start: int, nbytes: int) -> int:
        """CRC-32 of bytes of an item."""
        buffer = torch.empty(min(nbytes, BLOCK_BYTES), dtype=torch.uint8, device="cpu")
        crc = 0
        for at in range(start, start + nbytes, BLOCK_BYTES):
            part = _memory(buffer)[: min(BLOCK_BYTES, start + nbytes - at)]
            self._fill(key, item, at, part)
            crc = zlib.crc32(part, crc)
        return crc

    def _read_bytes(self, key: Key, opened: _Opened, start: int, into: memoryview) -> None:
        """Read bytes of the content from ``start`` on, and note what they are."""
        crc = 0
        for at in range(0, len(into), BLOCK_BYTES):
            part = into[at : at + BLOCK_BYTES]
            self._fill(key, opened.item, opened.start + start + at, part)
            if self._sums:
                crc = zlib.crc32(part, crc)
        content = opened.content
        if self._sums and opened.has_sums and content is not None:
            piece = Piece(start, len(into), crc, content.nbytes, self._written(key, opened.layout, content))
            self.pieces.setdefault(key, []).append(piece)

    def _fill(self, key: Key, item: Slice, start: int, part: memoryview) -> None:
        item.seek(start)
        at = 0
        while at < len(part):
            found = item.readinto(part[at:])
            if not found:
                raise self._damaged(key, "the file ends before it")
            at += found
        self.bytes_read += len(part)

    def _whole(self, key: Key, opened: _Opened) -> bytes:
        """The bytes of an item, of which each record is what was written."""
        opened.item.seek(0)
        data = opened.item.read()
        self.bytes_read += len(data)
        if len(data) < opened.item.nbytes:
            raise self._damaged(key, "the file ends before it")
        if self._sums and opened.has_sums:
            self._compare_records(key, opened, data)
        return data

    def _compare_records(self, key: Key, opened: _Opened, data: bytes) -> None:
        for name, record in opened.records.items():
            try:
                start = content_start(io.BytesIO(data), record)
            except NoZip as error:
                raise self._damaged(key, str(error)) from error
            self._compare(key, name, record, zlib.crc32(memoryview(data)[start : start + record.nbytes]))

    # -- items

    def verify(self, key: Key) -> None:
        """Read all of an item, and compare all that is written of it.

        Raises:
            CheckpointDamaged: something differs.
            CheckpointError: a file cannot be read.
        """
        with self._reading(key):
            opened = self._open(key, MetadataIndex(*key))
            for name, record in opened.records.items():
                try:
                    start = content_start(opened.item, record)
                except NoZip as error:
                    raise self._damaged(key, str(error)) from error
                crc = self._sum(key, opened.item, start, record.nbytes)
                if opened.has_sums:
                    self._compare(key, name, record, crc)

    def _compare(self, key: Key, name: str, record: Record, crc: int) -> None:
        wanted = self._crc_in_manifest(key, name)
        if crc != record.crc or (wanted is not None and crc != wanted):
            raise self._damaged(key, f"its checksum is {crc:08x}, and was {wanted or record.crc:08x}")

    def _written(self, key: Key, layout: Layout | None, content: Record) -> int:
        wanted = None if layout is None else self._crc_in_manifest(key, layout.record)
        return content.crc if wanted is None else wanted

    def _crc_in_manifest(self, key: Key, record: str) -> int | None:
        text = self._crcs.get((self.source.original[key[0]], key[1] or ()), {}).get(record)
        return None if text is None else int(text, 16)

    def _open(self, key: Key, index: MetadataIndex) -> _Opened:
        name = self.source.metadata.storage_data[index].relative_path
        entry = self._files.get(name)
        if entry is None:
            while len(self._files) >= _MOST_OPEN:
                self._files.popitem(last=False)[1].file.close()
            path = self.source.path / name
            try:
                entry = self._files[name] = _File(path.open("rb", buffering=0), {})
            except FileNotFoundError as error:
                raise self._damaged(key, str(error)) from error
        self._files.move_to_end(name)
        opened = entry.known.get(key)
        if opened is None:
            try:
                opened = entry.known[key] = self._looked_at(key, index, entry.file)
            except NoZip as error:
                raise self._damaged(key, str(error)) from error
        return opened

    @contextmanager
    def _reading(self, key: Key) -> Iterator[None]:
        """What the system says is no damage of the checkpoint.

        Raises:
            CheckpointError: naming the file.
        """
        try:
            yield
        except OSError as error:
            file = self.source.metadata.storage_data[MetadataIndex(*key)].relative_path
            why = f"{file}, '{key[0]}': {type(error).__name__}: {error}"
            raise CheckpointError(f"the checkpoint {self.source.path} cannot be read: {why}.") from error

    def _looked_at(self, key: Key, index: MetadataIndex, file: BinaryIO) -> _Opened:
        info = self.source.metadata.storage_data[index]
        item = Slice(file, info.offset, info.length)
        if getattr(info, "transform_descriptors", None):
            raise NoZip(f"it was written through {info.transform_descriptors}, which fsdp2.checkpoint cannot read")
        records = directory_of(item)
        described = records.get("data.pkl")
        if described is None:
            raise NoZip("it holds nothing")
        has_sums = bool(described.crc or self._crc_in_manifest(key, "data.pkl"))
        if not has_sums:
            self.without_sums.add(key[0])
        item.seek(content_start(item, described))
        text = item.read(described.nbytes)
        if self._sums and has_sums:
            self._compare(key, "data.pkl", described, zlib.crc32(text))
        layout = layout_of(text)
        content = None if layout is None else records.get(layout.record)
        if layout is None or content is None or not layout.is_plain or content.nbytes < _end_of(layout):
            return _Opened(item, records, None, 0, None, has_sums)
        return _Opened(item, records, layout, content_start(item, content), content, has_sums)

    def _damaged(self, key: Key, why: str) -> CheckpointDamaged:
        return damaged(self.source, key, why)


def _is_of_zip(error: Exception) -> bool:
    """Whether torch says of a zip that it is none: what is around the records has no checksum."""
    return type(error) is RuntimeError and "allocate memory" not in str(error)


def key_of(index: MetadataIndex) -> Key:
    """Of an item."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def damaged(source: Source, key: Key, why: str) -> CheckpointDamaged:
    """The error that names an item, its file and what is wrong."""
    file = source.metadata.storage_data[MetadataIndex(*key)].relative_path
    return CheckpointDamaged(f"the checkpoint {source.path} is damaged: {file}, '{key[0]}': {why}.")


def _place(info: Any) -> tuple[str, int]:
    return info.relative_path, info.offset


def _end_of(layout: Layout) -> int:
    return (layout.start + math.prod(layout.shape)) * layout.dtype.itemsize


def _is_flat(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
    return is_plain and not (tensor.is_conj() or tensor.is_neg())  # whose bytes are of other values


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host. (Not by NumPy, which torch may be without.)"""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


# ---- what all ranks have read --------------------------------------------------------------------


class Covered(NamedTuple):
    """An item by what ranks have read of it.

    Attributes:
        pieces: that do not overlap.
        gaps: start and size of what is between them.
    """

    pieces: tuple[Piece, ...]
    gaps: tuple[tuple[int, int], ...]


def covered(pieces: Sequence[Piece]) -> Covered:
    """Pieces of ``pieces`` that follow each other, and what is between them. See [Note: checksums of parts]."""
    chosen: list[Piece] = []
    gaps: list[tuple[int, int]] = []
    end, whole = 0, pieces[0].whole_nbytes
    for piece in sorted(pieces, key=lambda each: (each.start, -each.nbytes)):
        if piece.start < end or not piece.nbytes:
            continue  # the same rows, by another rank
        if piece.start > end:
            gaps.append((end, piece.start - end))
        chosen.append(piece)
        end = piece.start + piece.nbytes
    if end < whole:
        gaps.append((end, whole - end))
    return Covered(tuple(chosen), tuple(gaps))


def crc_of(parts: Sequence[tuple[int, int, int]]) -> int:
    """CRC-32 of parts (start, size, CRC-32) that follow each other."""
    crc = 0
    for _, nbytes, own in sorted(parts):
        crc = crc_of_both(crc, own, nbytes)
    return crc
