"""Folders of safetensors files, as Hugging Face writes them: `load_safetensors`, `save_safetensors`.

The format is that package's own; it is imported when it is needed. Loading reads from the mapped file what this rank
has of each tensor. Saving deals the files out over the ranks: `FolderPlan` says which tensors are in which file and who
writes it, `write_folder` has them assembled one file per rank at a time, from whatever hands out whole tensors by name.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp2.arguments import checked
from fsdp2.checkpoint.boxes import at_box, pieces_of
from fsdp2.checkpoint.copies import agree_on_copies
from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointIncomplete, SaveFailed
from fsdp2.checkpoint.folders import flush
from fsdp2.checkpoint.held import Held, company_of, held_by, refuse_unreadable, settle
from fsdp2.checkpoint.iterating import refuse_dtype, travelling
from fsdp2.checkpoint.ranks import Ranks, who_has
from fsdp2.checkpoint.report import LoadReport
from fsdp2.checkpoint.rules import PATH_RULE
from fsdp2.checkpoint.whole import Offered, Source, Wanted, load_from
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError
from fsdp2.ragged.dtensor import views_of
from fsdp2.ragged.placement import Box

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_SAVES = "save_safetensors()"
_LOADS = "load_safetensors()"

_READ_BYTES = 32 << 20
"""How much is read at a time, at most."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""What the format calls the dtypes that a tensor of torch may have."""


def library() -> Any:
    """``safetensors`` with its functions for torch.

    Raises:
        FSDPRuntimeError: it is not installed.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise FSDPRuntimeError(
            'safetensors files need the package of this name, which is not installed: pip install "fsdp2[safetensors]".'
        ) from error
    return safetensors


# ---- loading -------------------------------------------------------------------------------------


@checked(folder_or_file=PATH_RULE)
def load_safetensors(
    model: nn.Module,
    folder_or_file: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] | None = None,
    cast: bool = False,
    strict: bool = True,
) -> LoadReport:
    """Write what safetensors files hold to ``model``, in place: each rank reads the part of each tensor that it has.

    The headers and sizes of all files are read first, and names, shapes and dtypes compared, as `load_full` does, with
    the same errors. Of tied parameters one name is enough, as Hugging Face writes them. Parameters and buffers on meta
    are given memory if they are written.

    Collective: all ranks must call it with the same arguments, outside of forward and backward, and see the same files.

    Args:
        model: sharded, or with sharded modules below, or neither; also on meta.
        folder_or_file: one file, or a folder: with an index, whose files are read, or else all in it.
        rename: from a name in the files to the model's.
        cast: floating-point tensors may be of another dtype.
        strict: False: names that only one of both has are in the report.

    Returns:
        What was loaded, and what was not: the same on all ranks.

    Raises:
        FSDPTypeError: not a module or a path.
        FSDPValueError: two names are one after ``rename``.
        CheckpointIncomplete: there is nothing of that name, or no such file in the folder.
        CheckpointDamaged: a file is missing, cut short, or none of that format: nothing was written. Or it could not be
            read to the end: load again, from another, before the model is used.
        CheckpointMismatch: a table of all that does not fit; nothing was written.
        FSDPRuntimeError: as of `load_full`; the package is not installed.

    Stream: the current one.
    """
    path = Path(folder_or_file)
    arguments = f"{path.name}, rename={'None' if rename is None else 'given'}"
    return load_from(model, _Files(path, rename), _LOADS, arguments=arguments, strict=strict, cast=cast)


class _Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    offered: Offered


class _Files(Source):
    """Files of one folder, or one."""

    def __init__(self, path: Path, rename: Callable[[str], str] | None) -> None:
        self.path = str(path)
        self.what = f"'{path}'"
        self._rename = rename
        self._stored: dict[str, _Stored] = {}

    def offered(self) -> dict[str, Offered]:
        """By the headers, all of which are read here.

        Raises:
            CheckpointIncomplete: there is nothing to read.
            CheckpointDamaged: a file is not what it should be.
            FSDPValueError: two names are one after the function for names.
        """
        self._stored = {}
        for stored in read_headers(Path(self.path)):
            name = stored.name if self._rename is None else self._rename(stored.name)
            other = self._stored.get(name)
            if other is not None:
                raise FSDPValueError(
                    f"{_LOADS}: rename calls both '{other.name}' and '{stored.name}' of {self.what} '{name}'."
                )
            self._stored[name] = stored
        return {name: stored.offered for name, stored in self._stored.items()}

    def write(self, wanted: Sequence[Wanted]) -> int:
        """Read this rank's part of each, file by file, some of it at a time.

        Raises:
            CheckpointDamaged: one cannot be read any more.
        """
        installed, nbytes = library(), 0
        by_file: dict[Path, list[Wanted]] = {}
        for each in wanted:
            by_file.setdefault(self._stored[each.key].file, []).append(each)
        for file, found in by_file.items():
            try:
                with installed.safe_open(str(file), framework="pt") as opened:
                    nbytes += sum(_read(opened, self._stored[each.key], each) for each in found)
            except (OSError, installed.SafetensorError) as error:
                raise CheckpointDamaged(
                    f"{_LOADS} could not read {file} to the end ({error}). Parts of the model were written: load "
                    "again, from other files, before it is used."
                ) from error
        return nbytes


def _read(opened: Any, stored: _Stored, wanted: Wanted) -> int:
    """Copy this rank's part; returns its bytes."""
    local, itemsize = wanted.held.local, stored.offered.dtype.itemsize
    if wanted.boxes == ((),):
        local.copy_(opened.get_tensor(stored.name))
        return itemsize
    nbytes = 0
    for outer, view in zip(wanted.boxes, views_of(local, wanted.boxes), strict=True):
        for box in pieces_of(outer, itemsize, _READ_BYTES):
            part = opened.get_slice(stored.name)[_index(box)]
            at_box(view, box, outer).copy_(part)
            nbytes += part.nbytes
    return nbytes


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def read_headers(path: Path) -> list[_Stored]:
    """All tensors of a file or folder, in the order of the files. Sizes of files are compared with their headers.

    Raises:
        CheckpointIncomplete: there is nothing to read.
        CheckpointDamaged: a file is missing, cut short, or none of this format; or two hold the same name.
        FSDPNotImplementedError: a dtype that torch does not have.
    """
    installed = library()
    files, where = _files_of(path)
    found: dict[str, _Stored] = {}
    for file in files:
        try:
            with installed.safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, it is no mapping
                    if where is not None and where.get(name) != file:
                        continue  # the index says which of several counts, and what is left out
                    if name in found:
                        raise CheckpointDamaged(
                            f"both {found[name].file} and {file} hold '{name}': remove one of them."
                        )
                    found[name] = _Stored(file, name, _offered(opened.get_slice(name), name, file))
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{file} is missing, which {_index_name(path)} names.") from error
        except (OSError, installed.SafetensorError) as error:
            raise CheckpointDamaged(
                f"{file} is cut short, or no safetensors file ({os.path.getsize(file)} bytes; {error}): copy or "
                "download it again."
            ) from error
    absent = [name for name in where or () if name not in found]
    if where is not None and absent:
        raise CheckpointDamaged(
            f"{where[absent[0]]} does not hold '{absent[0]}', which {_index_name(path)} says it does."
        )
    return list(found.values())


def _offered(opened: Any, name: str, file: Path) -> Offered:
    dtype = str(opened.get_dtype())
    if dtype not in _DTYPES:
        raise FSDPNotImplementedError(f"'{name}' in {file} is of dtype {dtype}, which {_LOADS} does not know.")
    return Offered(tuple(opened.get_shape()), _DTYPES[dtype])


def _index_name(path: Path) -> str:
    return str(next(iter(sorted(path.glob(f"*{_INDEX}"))), path)) if path.is_dir() else str(path)


def _files_of(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The files, and by the index, if there is one, which file has which name."""
    if path.is_file():
        return [path], None
    if not path.is_dir():
        raise CheckpointIncomplete(f"there is no file or folder {path}.")
    indices = sorted(path.glob(f"*{_INDEX}"))
    if not indices:
        files = sorted(path.glob(f"*{_SUFFIX}"))
        if not files:
            raise CheckpointIncomplete(f"there is no *{_SUFFIX} file in the folder {path}.")
        return files, None
    preferred = path / f"model{_INDEX}"
    index = preferred if preferred in indices else indices[0]
    if len(indices) > 1 and index is not preferred:
        raise CheckpointDamaged(f"{path} has several indices, {[each.name for each in indices]}: name one file.")
    try:
        names = json.loads(index.read_text())["weight_map"]
        where = {str(name): path / str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{index} is no index of safetensors files ({error!r}): copy it again.") from error
    return sorted(set(where.values())), where


# ---- saving --------------------------------------------------------------------------------------


def save_module(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    rename: Callable[[str], str] | None,
) -> None:
    """`save_safetensors` of a module. Collective: all ranks that hold it.

    Raises:
        FSDPError: see there.
    """
    refuse_dtype(dtype, _SAVES)
    error: Exception | None = settle(model, _SAVES, frees=False)
    held = [each for each in held_by(model) if not each.transient]
    target = Path(folder)
    _, ranks = company_of(held)
    contents: list[Content] = []
    if error is None:
        try:
            library()
            refuse_unreadable(held, _SAVES, meta=True)
            contents = _contents(held, dtype, rename)
            refuse_existing(target)
        except (FSDPError, OSError) as raised:
            error = raised
    lines = [f"{_SAVES} to {target.name} with dtype={dtype}, max_file_bytes={max_file_bytes}"]
    lines += [f"{each.name} {each.shape} {each.dtype}" for each in contents]
    agree_on_copies(held, ranks, error, lines, _SAVES)
    by_name = {content.name: each for content, each in zip(contents, held, strict=True)}
    budget = max((each.nbytes for each in contents), default=1)

    def whole(names: Sequence[str], writer: int) -> Iterator[tuple[str, torch.Tensor]]:
        return travelling([(name, by_name[name]) for name in names], budget, dtype=dtype, rank=writer)

    write_folder(contents, whole, target, max_file_bytes=max_file_bytes, ranks=ranks)


class Content(NamedTuple):
    """A tensor that is to be written.

    Attributes:
        name: in the file.
        shape: of the whole.
        dtype: in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _contents(held: Sequence[Held], dtype: torch.dtype | None, rename: Callable[[str], str] | None) -> list[Content]:
    contents: dict[str, Content] = {}
    for each in held:
        name = each.name if rename is None else rename(each.name)
        if name in contents:
            raise FSDPValueError(f"{_SAVES}: rename calls two tensors '{name}', one of them '{each.name}'.")
        found = each.tensor.dtype
        found = dtype if dtype is not None and found.is_floating_point else found
        if found not in _DTYPES.values():
            raise CheckpointError(f"'{each.name}' is of {found}, which safetensors files do not have.")
        contents[name] = Content(name, tuple(each.tensor.shape), found)
    return list(contents.values())


def refuse_existing(folder: Path) -> None:
    """Nothing is written over.

    Raises:
        CheckpointError: there is something at ``folder``.
    """
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists, and nothing is written over: pass another folder, or remove it first.")


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """Which tensors are in which file.

    A worked example, ``max_file_bytes=10`` and tensors of 6, 4, 3 bytes: two files, ``model-00001-of-00002`` with the
    first two.

    Attributes:
        files: names of tensors, by the name of the file.
        total_bytes: of all tensors.
        is_one: all are in one file, and there is no index.
    """

    files: Mapping[str, Sequence[str]]
    total_bytes: int
    is_one: bool

    @classmethod
    def of(cls, contents: Sequence[Content], max_file_bytes: int) -> FolderPlan:
        """In the order of ``contents``, as many as fit into each."""
        found: list[list[str]] = [[]]
        used = total = 0
        for each in contents:
            if found[-1] and used + each.nbytes > max_file_bytes:
                found.append([])
                used = 0
            found[-1].append(each.name)
            used, total = used + each.nbytes, total + each.nbytes
        if len(found) == 1:
            return cls({f"model{_SUFFIX}": found[0]}, total, True)
        count = len(found)
        names = (f"model-{number:05d}-of-{count:05d}{_SUFFIX}" for number in range(1, count + 1))
        return cls(dict(zip(names, found, strict=True)), total, False)

    def index(self) -> str:
        """The text of ``model.safetensors.index.json``."""
        where = {name: file for file, names in self.files.items() for name in names}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(where.items()))}
        return json.dumps(index, indent=2) + "\n"


def write_folder(
    contents: Sequence[Content],
    whole: Callable[[Sequence[str], int], Iterator[tuple[str, torch.Tensor]]],
    folder: Path,
    *,
    max_file_bytes: int,
    ranks: Ranks,
    failed: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Write ``contents`` to ``folder``, which is not there yet. Collective over ``ranks``, which have agreed on all.

    Args:
        contents: what is to be in the folder.
        whole: gives these names' whole tensors to the rank (of all) ``writer``, and nothing to the others, which must
            iterate as well.
        folder: its parent is made if it is not there.
        max_file_bytes: of the tensors of one file.
        ranks: file number i is written by the i-th of them, and so on in turns.
        failed: why ``whole`` has given nothing, or not all, on this rank alone.

    Raises:
        SaveFailed: a rank could not write, on all; what was written is removed.
    """

    def write(mine: str | None) -> None:
        error = failures[0] if failures else failed()
        if error is not None:
            raise error
        if mine is not None:
            _write(assembled, writing / mine)

    def assemble(name: str, tensor: torch.Tensor) -> None:
        try:
            if not failures:
                assembled[name] = tensor.cpu().contiguous()
        except Exception as error:  # as no memory: the other ranks go on to send, and are told after that
            failures.append(error)
            assembled.clear()

    failures: list[Exception] = []
    plan = FolderPlan.of(contents, max_file_bytes)
    writing = folder.parent / f".{folder.name}.writing"
    try:
        _together(ranks, folder, lambda: _begin(writing) if ranks.rank == 0 else None)
        files = list(plan.files.items())
        assembled: dict[str, torch.Tensor] = {}
        for first in range(0, len(files), ranks.size):
            for place, (_, names) in enumerate(files[first : first + ranks.size]):
                for name, tensor in whole(names, ranks.numbers[place]):
                    assemble(name, tensor)
                    del tensor
            mine = files[first + ranks.rank][0] if first + ranks.rank < len(files) else None
            _together(ranks, folder, functools.partial(write, mine))
            assembled.clear()
        _together(ranks, folder, lambda: _finish(plan, writing, folder) if ranks.rank == 0 else None)
    except SaveFailed:
        if ranks.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise


def _together(ranks: Ranks, folder: Path, action: Callable[[], None]) -> None:
    """Do this rank's part, and go on if all ranks could."""
    failure: str | None = None
    try:
        action()
    except Exception as error:  # whatever it is, the other ranks wait
        failure = f"{type(error).__name__}: {error}"
    found = ranks.all_gather(failure, f"the outcome of {_SAVES}")
    text = next((each for each in found if each is not None), None)
    if text is not None:
        who = who_has(text, found, ranks.numbers) or "all ranks"
        raise SaveFailed(
            f"{_SAVES} to {folder} failed on {who} ({text}); what was written of it is removed, and the model is as it "
            "was."
        )


def _begin(writing: Path) -> None:
    if writing.exists():
        shutil.rmtree(writing)  # what a killed save has left
    writing.mkdir(parents=True)


def _write(assembled: dict[str, torch.Tensor], file: Path) -> None:
    library().torch.save_file(assembled, str(file), metadata={"format": "pt"})
    flush(file)


def _finish(plan: FolderPlan, writing: Path, folder: Path) -> None:
    if not plan.is_one:
        index = writing / f"model{_INDEX}"
        index.write_text(plan.index())
        flush(index)
    flush(writing)
    refuse_existing(folder)  # else an empty folder that has come since would be replaced
    os.rename(writing, folder)
    flush(folder.parent)
