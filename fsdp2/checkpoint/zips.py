"""What a file of torch's distributed checkpoints holds: each item is a zip as `torch.save` writes it, with CRC-32s.

`torch.load` reads an item whole and compares no checksum. Here the directory at the end of an item is read by itself:
where each record lies and which CRC-32 it has, and from the small one that describes it, how a tensor lies in its
record. So a rank can read the rows it needs, straight to where they are to be.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import torch

_HEADER_BYTES, _NAMES_AT = 30, 26


class NoZip(Exception):
    """The bytes are no zip as `torch.save` writes it."""


class Slice(io.RawIOBase):
    """Bytes of a file, as a file of their own. The file itself stays open.

    Args:
        file: not buffered, and read by nobody else meanwhile.
        start: of the first byte.
        nbytes: how many.

    Attributes:
        nbytes: as passed.
    """

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self.nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.nbytes - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.readinto(view[:wanted])  # type: ignore[attr-defined]
        self._at += found or 0
        return found or 0

    def read(self, size: int = -1) -> bytes:
        """As of any file; all that was asked for, if it is there."""
        wanted = self.nbytes - self._at if size is None or size < 0 else min(size, self.nbytes - self._at)
        self._file.seek(self._start + self._at)
        parts: list[bytes] = []
        while wanted > 0 and (found := self._file.read(wanted)):  # one read of Linux returns 2 GiB at most
            parts.append(found)
            self._at += len(found)
            wanted -= len(found)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Record(NamedTuple):
    """One record of a zip.

    Attributes:
        header: where its own header begins, from the beginning of the zip.
        nbytes: of its content, which is not compressed.
        crc: CRC-32 of it.
    """

    header: int
    nbytes: int
    crc: int


def directory_of(item: Slice) -> dict[str, Record]:
    """The records of a zip, by their names without the folder.

    Raises:
        NoZip: it is none, is compressed, or is cut short.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(item) as found:
            entries = found.infolist()
    except (zipfile.BadZipFile, struct.error, ValueError, OSError, NotImplementedError) as error:
        for each in (error, error.__context__):  # the zip's own errors have none of the system's numbers
            if isinstance(each, OSError) and each.errno is not None:
                raise each from error
        raise NoZip(str(error)) from error
    if any(each.compress_type != zipfile.ZIP_STORED for each in entries):
        raise NoZip("it is compressed")
    return {each.filename.partition("/")[2]: Record(each.header_offset, each.file_size, each.CRC) for each in entries}


def content_start(item: Slice | io.BytesIO, record: Record) -> int:
    """Where the content of ``record`` begins, from the beginning of the zip.

    Raises:
        NoZip: there is no record.
    """
    item.seek(max(0, record.header))
    header = item.read(_HEADER_BYTES)
    if record.header < 0 or len(header) < _HEADER_BYTES or header[:4] != b"PK\3\4":
        raise NoZip("a record is not where its directory says")
    return record.header + _HEADER_BYTES + sum(struct.unpack_from("<2H", header, _NAMES_AT))


class Layout(NamedTuple):
    """How a tensor lies in its record.

    Attributes:
        record: its name.
        dtype: of the tensor.
        start: its first element, counted from the beginning of the record.
        shape: of the tensor.
        stride: of the tensor, in elements.
    """

    record: str
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether elements follow each other in the order of their indices."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


def layout_of(description: bytes) -> Layout | None:
    """How the tensor that ``description`` is of lies in its record; None of anything but a plain tensor.

    It is a pickle, of which nothing is executed.
    """
    try:
        found = _Describing(io.BytesIO(description)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, IndexError, AttributeError, KeyError):
        return None
    return found if isinstance(found, Layout) else None


class _Storage(NamedTuple):
    record: str
    dtype: torch.dtype


def _rebuilt(storage: Any, start: int, shape: Any, stride: Any, *more: Any) -> Layout | None:
    if len(more) > 2 and more[2]:  # conjugated or negated, and not yet written so
        return None
    return Layout(storage.record, storage.dtype, start, tuple(shape), tuple(stride))


_DTYPES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class _Describing(pickle.Unpickler):
    """Reads what describes a tensor, and makes none."""

    def find_class(self, module: str, name: str) -> Any:
        """Names for the few that occur there."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a tensor lies on."""
        kind, dtype, record, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(str(pid))
        return _Storage(f"data/{record}", dtype)


# ---- CRC-32 of parts -----------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320


def crc_of_both(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two byte strings, one after the other, from those of each and the length of the second.

    A CRC is a remainder of polynomials over GF(2): bytes that follow multiply it by x to the power of their bits. (As
    zlib's ``crc32_combine``, which Python does not have.)
    """
    return _product(_power_of_bytes(second_bytes), first) ^ second


def _product(one: int, other: int) -> int:
    """Of two polynomials modulo the CRC's; bit 31 is the coefficient of 1."""
    found, bit = 0, 1 << 31
    while one:
        if one & bit:
            found ^= other
            one ^= bit
        bit >>= 1
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
    return found


@functools.lru_cache(maxsize=4096)
def _power_of_bytes(nbytes: int) -> int:
    """x ** (8 * nbytes)."""
    found, base = 1 << 31, 1 << 23  # 1, x ** 8
    while nbytes:
        if nbytes & 1:
            found = _product(base, found)
        base = _product(base, base)
        nbytes >>= 1
    return found
