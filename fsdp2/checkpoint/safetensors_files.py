"""Folders of safetensors files, as Hugging Face writes them: `load_safetensors`, `save_safetensors`.

The format is that package's own; it is imported when it is needed. Loading reads from the mapped file what this rank
has of each tensor. Saving deals the files out over the ranks, each of which assembles one at a time, of a model or of a
checkpoint.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp2.arguments import Rule, checked
from fsdp2.checkpoint.boxes import at_box, pieces_of
from fsdp2.checkpoint.contents import MODEL
from fsdp2.checkpoint.copies import agree_on_copies
from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointIncomplete, SaveFailed
from fsdp2.checkpoint.folders import flush
from fsdp2.checkpoint.held import company_of, held_by, refuse_unreadable, settle
from fsdp2.checkpoint.inspection import Opened
from fsdp2.checkpoint.iterating import refuse_dtype, travelling
from fsdp2.checkpoint.ranks import Ranks, agree, ranks_of
from fsdp2.checkpoint.report import LoadReport
from fsdp2.checkpoint.rules import BYTES_RULE, PATH_RULE
from fsdp2.checkpoint.whole import Offered, Source, Wanted, load_from
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError
from fsdp2.ragged.dtensor import views_of

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_SAVES = "save_safetensors()"
_LOADS = "load_safetensors()"

MAX_FILE_BYTES = 2 << 30

_MODEL = Rule("a module, or the path of a checkpoint", lambda value: isinstance(value, (nn.Module, str, os.PathLike)))

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
            part = opened.get_slice(stored.name)[tuple(slice(*each) for each in box)]
            at_box(view, box, outer).copy_(part)
            nbytes += part.nbytes
    return nbytes


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


@checked(model=_MODEL, folder=PATH_RULE, max_file_bytes=BYTES_RULE)
def save_safetensors(
    model: nn.Module | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Write parameters and persistent buffers to a ``folder`` that ``from_pretrained`` reads.

    Files are dealt out over ranks; each is assembled and written on its rank. The folder is there afterwards, whole, or
    not at all. Tied weights are written once.

    Collective: all ranks must call it, with equal arguments, outside of forward and backward. The peak of memory beside
    the shards is one file, and two and a half times the largest parameter, on each rank.

    Args:
        model: a module, sharded or not; or the folder of a checkpoint, of which one process may do it alone.
        folder: that is not there yet.
        dtype: that floating-point values are cast to.
        max_file_bytes: of the tensors of one file; a larger one has a file of its own.
        rename: a function from our name to the one in the files.

    Raises:
        FSDPTypeError, FSDPValueError: an argument of another kind; two names are the same.
        FSDPRuntimeError: safetensors is not installed; inside of a forward or backward; the ranks differ.
        CheckpointError: the folder is there; a dtype that such files do not have; the checkpoint cannot be read.
        SaveFailed: a rank could not write; on all.
    """
    target = Path(folder)
    if isinstance(model, nn.Module):
        _save_module(model, target, dtype, max_file_bytes, rename)
    else:
        export(Path(model), target, ranks_of(None), dtype, max_file_bytes, rename)


def _save_module(
    model: nn.Module,
    target: Path,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    rename: Callable[[str], str] | None,
) -> None:
    refuse_dtype(dtype, _SAVES)
    error: Exception | None = settle(model, _SAVES, frees=False)
    held = [each for each in held_by(model) if not each.transient]
    _, ranks = company_of(held)
    contents: dict[str, Offered] = {}
    if error is None:
        try:
            library()
            refuse_unreadable(held, _SAVES, meta=True)
            found = ((each.name, Offered(tuple(each.tensor.shape), each.tensor.dtype)) for each in held)
            contents = _contents(found, dtype, rename)
            refuse_existing(target)
        except (FSDPError, OSError) as raised:
            error = raised
    lines = [f"{_SAVES} to {target.name} with dtype={dtype}, max_file_bytes={max_file_bytes}", str(contents)]
    agree_on_copies(held, ranks, error, lines, _SAVES)
    by_name = dict(zip(contents, held, strict=True))
    budget = max((each.nbytes for each in contents.values()), default=1)

    def whole(names: Sequence[str], writer: int) -> Iterator[tuple[str, torch.Tensor]]:
        return travelling([(name, by_name[name]) for name in names], budget, dtype=dtype, rank=writer)

    _write_folder(contents, whole, target, max_file_bytes, ranks, [])


def export(
    path: Path,
    folder: Path,
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    rename: Callable[[str], str] | None = None,
) -> int:
    """Write the model of the checkpoint ``path`` to ``folder``; returns how many tensors.

    Raises:
        CheckpointError: as of `save_safetensors`.
    """
    error: Exception | None = None
    contents: dict[str, Offered] = {}
    try:
        library()
        refuse_existing(folder)
        opened = Opened(path)
        names = [name for name, tensor in opened.model().items() if not tensor.same_as]
        found = ((name, Offered(opened.model()[name].shape, opened.model()[name].dtype)) for name in names)
        contents = _contents(found, dtype, rename)
        if not contents:
            raise CheckpointError(f"the checkpoint {path} has no tensors of a model.")
    except Exception as raised:  # whatever it is, other ranks are told
        error = raised
    agree(ranks, error, [str(contents)], _SAVES)
    originals = dict(zip(contents, names, strict=True))
    failures: list[Exception] = []

    def whole(wanted: Sequence[str], writer: int) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for each in wanted if writer == ranks.numbers[ranks.rank] and not failures else ():
                yield each, opened.read(f"{MODEL}.{originals[each]}").to(contents[each].dtype)
        except Exception as raised:  # as above
            failures.append(raised)

    _write_folder(contents, whole, folder, max_file_bytes, ranks, failures)
    return len(contents)


def _contents(
    found: Iterable[tuple[str, Offered]], dtype: torch.dtype | None, rename: Callable[[str], str] | None
) -> dict[str, Offered]:
    """The values to write, by their names in the files, in the order in which they were ``found``.

    Raises:
        FSDPValueError: two names are one.
        CheckpointError: a dtype that such files do not have.
    """
    contents: dict[str, Offered] = {}
    for name, (shape, own) in found:
        renamed = name if rename is None else rename(name)
        if renamed in contents:
            raise FSDPValueError(f"{_SAVES}: rename calls two tensors '{renamed}', one of them '{name}'.")
        cast = dtype if dtype is not None and own.is_floating_point else own
        if cast not in _DTYPES.values():
            raise CheckpointError(f"'{name}' is of {cast}, which safetensors files do not have.")
        contents[renamed] = Offered(shape, cast)
    return contents


def refuse_existing(folder: Path) -> None:
    """Nothing is written over.

    Raises:
        CheckpointError: there is something at ``folder``.
    """
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists, and nothing is written over: pass another folder, or remove it first.")


def files_for(contents: Mapping[str, Offered], max_file_bytes: int) -> dict[str, list[str]]:
    """The names of tensors in each file, by its name: in their order, as many as fit.

    >>> bytes_ = {name: Offered((size,), torch.uint8) for name, size in {"a": 6, "b": 4, "c": 3}.items()}
    >>> files_for(bytes_, 10)
    {'model-00001-of-00002.safetensors': ['a', 'b'], 'model-00002-of-00002.safetensors': ['c']}
    """
    found: list[list[str]] = [[]]
    used = 0
    for name, each in contents.items():
        if found[-1] and used + each.nbytes > max_file_bytes:
            found.append([])
            used = 0
        found[-1].append(name)
        used += each.nbytes
    if len(found) == 1:
        return {f"model{_SUFFIX}": found[0]}
    return {f"model-{number:05d}-of-{len(found):05d}{_SUFFIX}": names for number, names in enumerate(found, start=1)}


def _index_of(files: Mapping[str, Sequence[str]], total_bytes: int) -> str:
    where = {name: file for file, names in files.items() for name in names}
    return (
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}, indent=2)
        + "\n"
    )


def _write_folder(
    contents: Mapping[str, Offered],
    whole: Callable[[Sequence[str], int], Iterator[tuple[str, torch.Tensor]]],
    folder: Path,
    max_file_bytes: int,
    ranks: Ranks,
    failures: list[Exception],
) -> None:
    """Write ``contents`` to ``folder``, which is not there yet. Collective over ``ranks``, which have agreed on all.

    Args:
        contents: what is to be in the folder.
        whole: gives these names' whole tensors to the rank (of all) ``writer``; the others must iterate as well.
        folder: its parent is made if it is not there.
        max_file_bytes: of the tensors of one file.
        ranks: file number i is written by the i-th of them, and so on in turns.
        failures: why ``whole`` has given nothing, or not all, on this rank alone.

    Raises:
        SaveFailed: a rank could not write, on all.
    """
    files = files_for(contents, max_file_bytes)
    writing = folder.parent / f".{folder.name}.writing"

    def together(action: Callable[[], None]) -> None:
        error = None
        try:
            action()
        except Exception as raised:  # whatever it is, the other ranks wait
            why = f"{type(raised).__name__}: {raised}"
            error = SaveFailed(
                f"{_SAVES} to {folder} failed ({why}); what was written of it is removed, and the model is as it was."
            )
        agree(ranks, error, [], _SAVES)

    def begin() -> None:
        if ranks.rank == 0:
            if writing.exists():
                shutil.rmtree(writing)  # what a killed save has left
            writing.mkdir(parents=True)

    def write(mine: str | None) -> None:
        for each in failures:
            raise each
        if mine is not None:
            library().torch.save_file(assembled, str(writing / mine), metadata={"format": "pt"})
            flush(writing / mine)

    def finish() -> None:
        if ranks.rank:
            return
        if len(files) > 1:
            index = writing / f"model{_INDEX}"
            index.write_text(_index_of(files, sum(each.nbytes for each in contents.values())))
            flush(index)
        flush(writing)
        refuse_existing(folder)  # else an empty folder that has come since would be replaced
        os.rename(writing, folder)
        flush(folder.parent)

    assembled: dict[str, torch.Tensor] = {}
    try:
        together(begin)
        for first in range(0, len(files), ranks.size):
            names = list(files)[first : first + ranks.size]
            for place, file in enumerate(names):
                for name, tensor in whole(files[file], ranks.numbers[place]):
                    try:
                        if not failures:
                            assembled[name] = tensor.cpu().contiguous()
                    except Exception as error:  # as no memory: the other ranks go on to send, and are told after that
                        failures.append(error)
                    del tensor
            together(functools.partial(write, names[ranks.rank] if ranks.rank < len(names) else None))
            assembled.clear()
        together(finish)
    except SaveFailed:
        if ranks.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise
