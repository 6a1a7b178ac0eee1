"""One checkpoint into one folder: torch's planner and writer, driven by our own agreement of ranks.

The files are those of `torch.distributed.checkpoint`. What is added: tied tensors are written once, and found under all
of their names; the CRC-32 of each item is read from the zip that was just written.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2.checkpoint.contents import Path as KeyPath
from fsdp2.checkpoint.contents import is_of_rank_0, is_per_rank
from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.checkpoint.names import Names
from fsdp2.checkpoint.reading import Item, checksums_of


class Pickled(io.BytesIO):
    """A value as it is written. (A program's own `io.BytesIO` is a value that is to be pickled.)"""


class Planner(DefaultSavePlanner):
    """torch's, that knows which tensors are tied, and what the first rank saves for all.

    Args:
        names: of the model.
        aliases: flat keys that are tied to others.
        rank: of this process among those that save.
    """

    def __init__(self, names: Names, aliases: Mapping[str, str], rank: int) -> None:
        super().__init__()
        self._names, self._aliases, self._rank = names, aliases, rank

    def take(self, found: Mapping[KeyPath, Any], copy: Callable[[dict[str, Any]], dict[str, Any]] | None) -> None:
        """Save ``found``, or what ``copy`` makes of it by flat keys.

        Raises:
            CheckpointError: two paths give the same key.
        """
        self.mappings = {".".join(map(str, path)): path for path in found}
        if len(self.mappings) != len(found):
            twice = Counter(".".join(map(str, path)) for path in found).most_common(1)[0][0]
            raise CheckpointError(f"two values would both be saved as '{twice}': give one of them another name.")
        flat = dict(zip(self.mappings, found.values(), strict=True))
        self.state_dict: dict[str, Any] = flat if copy is None else copy(flat)
        self.is_coordinator = self._rank == 0

    def lines(self) -> list[str]:
        """What must be the same on all ranks."""
        return sorted(f"{key} {_described(value)}" for key, value in self.state_dict.items() if not is_per_rank(key))

    def create_local_plan(self) -> SavePlan:
        """Of what this rank has, that which it may have to write."""
        with torch.device("cpu"):  # torch computes offsets with tensors, on the program's default device otherwise
            found = super().create_local_plan()
        items = [
            item
            for item in found.items
            if item.index.fqn not in self._aliases
            and (self._rank == 0 or not is_of_rank_0(item.index.fqn, self.state_dict[item.index.fqn], self._names))
        ]
        self.plan = SavePlan(items, found.storage_data, found.planner_data)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank writes, and what there is by then. The same on every rank."""
        plans, metadata = super().create_global_plan(all_plans)
        for alias, first in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[first]
        return plans, metadata

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """What is pickled already stays."""
        is_value = write_item.type == WriteItemType.BYTE_IO
        if is_value and isinstance(object, Pickled):
            return object
        return super().transform_object(write_item, object)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "a value"


@contextmanager
def with_checksums() -> Iterator[None]:
    """Let what is written have checksums, also in a program that has turned them off (`set_crc32_options`)."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class Part(NamedTuple):
    """What one rank has written.

    Attributes:
        results: as the writer says.
        crcs: of the records of each item, by name, in the same order.
        files: sizes in bytes.
    """

    results: list[WriteResult]
    crcs: list[dict[str, str]]
    files: dict[str, int]


class Writer(FileSystemWriter):
    """torch's, into a folder that is there and empty.

    Args:
        folder: the files are written to.
        aliases: flat keys that are tied to others.
    """

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._aliases = aliases

    def write(self, plan: SavePlan, planner: Planner) -> Part:
        """Write what ``plan`` says, and read the checksums of it."""
        with with_checksums():
            results = self.write_data(plan, planner).wait()
        folder = Path(self.path)
        files = {name: (folder / name).stat().st_size for name in {each.storage_data.relative_path for each in results}}
        crcs = []
        with ExitStack() as stack:
            opened = {name: stack.enter_context((folder / name).open("rb")) for name in files}
            for result in results:
                info = result.storage_data
                item = cast(IO[bytes], Item(opened[info.relative_path], info))
                sums = checksums_of(item, reads=lambda _: False)
                crcs.append({name: crc for name, crc in sums.items() if _is_content(name)})
        return Part(results, crcs, files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`. On one rank."""
        tied: dict[str, list[str]] = {}
        for alias, first in self._aliases.items():
            tied.setdefault(first, []).append(alias)
        also = [
            WriteResult(MetadataIndex(alias, result.index.offset), result.size_in_bytes, result.storage_data)
            for of_rank in results
            for result in of_rank
            for alias in tied.get(result.index.fqn, ())
        ]
        super().finish(metadata, [*results, also])


def _is_content(record: str) -> bool:
    """Whether a record is of the item itself, not of the way it is written."""
    return record == "data.pkl" or record.startswith("data/")
