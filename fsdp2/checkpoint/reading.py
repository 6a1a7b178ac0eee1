"""Reads what a rank needs of a checkpoint's files: torch's reader, which compares checksums before it unpickles.

A file of torch's distributed checkpoints is a row of items, each a zip as `torch.save` writes it, with the CRC-32 of
each of its records; the manifest has the same ones. `torch.load` compares none of them. So an item is read twice, the
second time from the system's cache: by `zipfile`, which computes checksums, and by `torch.load`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError
from fsdp2.checkpoint.manifest import crc_text
from fsdp2.checkpoint.source import Source

_BLOCK_BYTES = 2 << 20
"""Read, and summed up, at once: what fits into a cache."""

_NONE = crc_text(0)
"""In the place of a checksum, where torch was told to write none."""


class Item(io.RawIOBase):
    """Bytes of a file, as a file of their own. (torch's own view cannot seek from its end, as `zipfile` does.)"""

    def __init__(self, file: BinaryIO, info: Any) -> None:
        self._file, self._start, self.nbytes, self._at = file, info.offset, info.length, 0

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether `seek` works: always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to ``offset`` bytes from the beginning, the present place or the end of the item."""
        at = (0, self._at, self.nbytes)[whence] + offset
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` from the present place, up to the end of the item. Returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        found = self._file.readinto(view[: max(0, self.nbytes - self._at)])  # type: ignore[attr-defined]
        self._at += found
        return int(found)


def checksums_of(item: IO[bytes], *, reads: Callable[[Mapping[str, str]], bool]) -> dict[str, str]:
    """The CRC-32 of each record that an item's directory names; if ``reads`` of them, compared with their bytes.

    Raises:
        zipfile.BadZipFile: one differs, or it is no zip.
    """
    with zipfile.ZipFile(item) as found:
        records = found.infolist()
        checksums = {each.filename.partition("/")[2]: crc_text(each.CRC) for each in records}
        for each in records if reads(checksums) else ():
            with found.open(each) as content:
                while content.read(_BLOCK_BYTES):
                    pass
    return checksums


class Reader(FileSystemReader):
    """Reads items of one checkpoint, on one rank.

    Args:
        source: the checkpoint.
        sums: whether checksums are compared.

    Attributes:
        source: the checkpoint.
        bytes_read: of files.
        without_sums: names of what was read of which an item has no checksum, which torch can be told not to write.
    """

    def __init__(self, source: Source, *, sums: bool = True) -> None:
        super().__init__(source.path)
        self.source, self._sums = source, sums
        self._wanted = {} if source.manifest is None else source.manifest.checksums()
        self.bytes_read = 0
        self.without_sums: set[str] = set()
        self.set_up_storage_reader(source.metadata, False)

    def value(self, name: str) -> Any:
        """A value that is no tensor.

        Raises:
            CheckpointDamaged: it is not what was written.
            CheckpointError: it is, and this process cannot make it; or a file cannot be read.
        """
        return self._unpickled(MetadataIndex(name), weights_only=False)

    def read(self, into: dict[str, torch.Tensor]) -> None:
        """Read tensors by name; of a DTensor this rank's part.

        Raises:
            CheckpointDamaged: one is not what was written.
            CheckpointError: a file cannot be read.
        """
        if not into:
            return
        chosen = Metadata({name: self.source.metadata.state_dict_metadata[name] for name in into})
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with torch.no_grad():
            with torch.device("cpu"):  # torch computes offsets with tensors, on the program's default device otherwise
                planner.set_up_planner(dict(into), chosen, False)
                plan = planner.create_local_plan()
            self.read_data(plan, planner)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors to where ``planner`` says, in the order in which they lie in files; of each item all."""
        place, found = ("", 0), torch.empty(0, device="cpu")
        for each in sorted(plan.items, key=self._place):
            if place != self._place(each):
                del found  # before the next is read
                found, place = self._unpickled(each.storage_index, weights_only=True), self._place(each)
            part, target = found, planner.resolve_tensor(each).detach()
            for dim, (offset, length) in enumerate(zip(each.storage_offsets, each.lengths, strict=True)):
                part = part.narrow(dim, offset, length)
            if part.shape != target.shape:
                raise self._damaged(each.storage_index, f"it is of shape {part.shape}, not {tuple(target.shape)}")
            target.copy_(part)
            planner.commit_tensor(each, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def verify(self, index: MetadataIndex) -> None:
        """Read all of an item, and compare all that is written of it.

        Raises:
            CheckpointDamaged: something differs.
            CheckpointError: a file cannot be read.
        """
        with self._opened(index) as item:
            self._compare(index, item)

    def _place(self, item: ReadItem) -> tuple[str, int]:
        info = self.storage_data[item.storage_index]
        return info.relative_path, info.offset

    @contextmanager
    def _opened(self, index: MetadataIndex) -> Iterator[IO[bytes]]:
        """An item. What the system says is no damage of the checkpoint, but that a file is not there."""
        info = self.storage_data[index]
        if getattr(info, "transform_descriptors", None):
            raise self._damaged(index, f"it was written through {info.transform_descriptors}, which is not read here")
        try:
            with (self.source.path / info.relative_path).open("rb") as file:
                item = cast(IO[bytes], Item(file, info))
                yield item if info.length > _BLOCK_BYTES else io.BytesIO(item.read())
        except FileNotFoundError as error:
            raise self._damaged(index, str(error)) from error
        except OSError as error:
            why = f"{info.relative_path}, '{index.fqn}': {type(error).__name__}: {error}"
            raise CheckpointError(f"the checkpoint {self.source.path} cannot be read: {why}.") from error

    def _compare(self, index: MetadataIndex, item: IO[bytes]) -> bool:
        """Compare checksums, of an item; whether there are any."""
        self.bytes_read += self.storage_data[index].length
        wanted = self._wanted.get((self.source.original[index.fqn], tuple(index.offset or ())), {})
        try:
            found = checksums_of(item, reads=lambda found: bool(wanted) or found.get("data.pkl") != _NONE)
        except Exception as error:  # whatever a parser of bytes that are something else may raise
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise self._damaged(index, f"its checksum is another than was written, or it is cut ({error})") from error
        for record, crc in wanted.items():
            if found.get(record) != crc:
                raise self._damaged(index, f"its checksum is {found.get(record)}, and was {crc}")
        if not wanted and found.get("data.pkl") == _NONE:
            self.without_sums.add(index.fqn)
            return False
        return True

    def _unpickled(self, index: MetadataIndex, *, weights_only: bool) -> Any:
        with self._opened(index) as item:
            has_sums = self._sums and self._compare(index, item)
            self.bytes_read += 0 if self._sums else self.storage_data[index].length
            item.seek(0)
            try:
                return torch.load(item, map_location="cpu", weights_only=weights_only)
            except Exception as error:  # whatever unpickling does
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                why = f"{type(error).__name__}: {error}"
                if not (has_sums or self._compare(index, item)) or _is_of_zip(error):
                    raise self._damaged(index, why) from error
                raise CheckpointError(
                    f"'{index.fqn}' of the checkpoint {self.source.path} is what was written, and cannot be unpickled "
                    f"here: {why}. Let what it needs be importable, as where it was saved; or load without it."
                ) from error

    def _damaged(self, index: MetadataIndex, why: str) -> CheckpointDamaged:
        """The error that names an item, its file and what is wrong."""
        file = self.storage_data[index].relative_path
        return CheckpointDamaged(f"the checkpoint {self.source.path} is damaged: {file}, '{index.fqn}': {why}.")


def _is_of_zip(error: Exception) -> bool:
    """Whether torch says of a zip that it is none: what is around the records has no checksum."""
    return type(error) is RuntimeError and "allocate memory" not in str(error)
