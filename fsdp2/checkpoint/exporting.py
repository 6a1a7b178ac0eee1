"""`save_safetensors`: a model, or the model of a checkpoint, as Hugging Face's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from fsdp2.arguments import Rule, checked
from fsdp2.checkpoint import safetensors_files as files
from fsdp2.checkpoint.contents import MODEL
from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.checkpoint.held import agree
from fsdp2.checkpoint.inspection import Opened
from fsdp2.checkpoint.ranks import Ranks, ranks_of
from fsdp2.checkpoint.rules import BYTES_RULE, PATH_RULE
from fsdp2.checkpoint.safetensors_files import Content, refuse_existing, write_folder

MAX_FILE_BYTES = 2 << 30

_MODEL = Rule("a module, or the path of a checkpoint", lambda value: isinstance(value, (nn.Module, str, os.PathLike)))


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
    if isinstance(model, nn.Module):
        files.save_module(model, folder, dtype=dtype, max_file_bytes=max_file_bytes, rename=rename)
        return
    export(Path(model), Path(folder), ranks_of(None), dtype, max_file_bytes, rename)


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

    try:
        files.library()
        refuse_existing(folder)
        opened = Opened(path)
        contents, names = _chosen(opened, path, dtype, rename)
    except Exception as raised:  # whatever it is, other ranks are told
        error = raised
    agree(ranks, error, [] if error is not None else [str(contents)], "save_safetensors()")
    failures: list[Exception] = []

    def whole(wanted: Sequence[str], writer: int) -> Iterator[tuple[str, torch.Tensor]]:
        if writer == ranks.numbers[ranks.rank] and not failures:
            for each in wanted:
                try:
                    found = opened.read(names[each])
                except Exception as raised:  # as above
                    failures.append(raised)
                    return
                yield each, found.to(dtype) if dtype is not None and found.is_floating_point() else found

    write_folder(
        contents,
        whole,
        folder,
        max_file_bytes=max_file_bytes,
        ranks=ranks,
        failed=lambda: failures[0] if failures else None,
    )
    return len(contents)


def _chosen(
    opened: Opened, path: Path, dtype: torch.dtype | None, rename: Callable[[str], str] | None
) -> tuple[list[Content], dict[str, str]]:
    """What is to be written, and where each is in the checkpoint."""
    contents, names = [], {}
    for name, tensor in opened.model().items():
        if tensor.same_as:
            continue
        ours = name if rename is None else rename(name)
        if ours in names:
            raise CheckpointError(f"rename calls two tensors '{ours}', one of them '{name}'.")
        cast = tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype
        contents.append(Content(ours, tensor.shape, cast))
        names[ours] = f"{MODEL}.{name}"
    if not contents:
        raise CheckpointError(f"the checkpoint {path} has no tensors of a model.")
    return contents, names
