"""Checkpoints without a model: what is in them, whether it is what was written, and how two of them differ.

One process; of tensors one is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint.contents import GROUPS, MODEL
from fsdp2.checkpoint.errors import CheckpointDamaged
from fsdp2.checkpoint.loading import step_of
from fsdp2.checkpoint.reading import Reader
from fsdp2.checkpoint.source import Source, is_tensor, open_source


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a checkpoint.

    Attributes:
        name: in the files.
        shape: of the whole.
        dtype: its own.
        placement: how it was sharded; "" if it was not, or torch wrote it.
        same_as: the name of the one that it is tied to, or "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    same_as: str

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Opened:
    """A checkpoint that is looked at.

    Args:
        path: of its folder.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.source: Source = open_source(path)
        self._reader = Reader(self.source)

    @property
    def step(self) -> int | None:
        """Of training."""
        return step_of(self._reader)

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by our names."""
        found = {}
        manifest = self.source.manifest
        for name in sorted(self.source.names):
            if not is_tensor(self.source, name):
                continue
            meta = cast(TensorStorageMetadata, self.source.metadata.state_dict_metadata[name])
            original = self.source.original[name]
            entry = {} if manifest is None else manifest.entries.get(original, {})
            placement, same_as = entry.get("placement", ""), entry.get("same_as", "")
            found[name] = Tensor(original, tuple(meta.size), meta.properties.dtype, placement, same_as)
        return found

    def model(self) -> dict[str, Tensor]:
        """Those of the model, without what stands before their names."""
        front = f"{MODEL}."
        return {name[len(front) :]: each for name, each in self.tensors().items() if name.startswith(front)}

    def value(self, name: str) -> Any:
        """A value that is no tensor, by our name."""
        return self._reader.value(name)

    def values(self) -> Iterator[str]:
        """Names of all of these."""
        return (name for name in sorted(self.source.names) if not is_tensor(self.source, name))

    def hyperparameters(self) -> dict[str, Any]:
        """Of all parameter groups, by our names."""
        return {name: self.value(name) for name in self.values() if name.startswith(f"{GROUPS}.")}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, by our name, in host memory.

        Raises:
            CheckpointDamaged: it is not what was written.
        """
        meta = cast(TensorStorageMetadata, self.source.metadata.state_dict_metadata[name])
        found = torch.empty(meta.size, dtype=meta.properties.dtype, device="cpu")
        self._reader.read({name: found})
        return found

    def damages(self) -> Iterator[str]:
        """All that is wrong with its files: sizes, and checksums of everything."""
        bad = set()
        for file in sorted(self.source.files()):
            try:
                self.source.refuse_wrong_sizes([file])
            except CheckpointDamaged as error:
                bad.add(file)
                yield str(error)
        for index in self.source.items():
            if self.source.metadata.storage_data[index].relative_path in bad:
                continue
            try:
                self._reader.verify(index)
            except CheckpointDamaged as error:
                yield str(error)


def differences(one: Opened, other: Opened, *, values: bool) -> Iterator[str]:
    """A line for each: names, shapes, dtypes, hyperparameters; ``values``: the largest difference of each tensor."""
    mine, theirs = one.tensors(), other.tensors()
    for name in sorted({*mine, *theirs}):
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None:
            yield f"{name}: only in the {'second' if a is None else 'first'}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{name}: {_kind(a)} and {_kind(b)}"
        elif values and not a.same_as:
            most = _largest(one.read(name), other.read(name))
            if most:
                yield f"{name}: {most}"
    hyper, others = one.hyperparameters(), other.hyperparameters()
    for name in sorted({*hyper, *others}):
        if name not in hyper or name not in others:
            yield f"{name}: only in the {'second' if name not in hyper else 'first'}"
        elif repr(hyper[name]) != repr(others[name]):
            yield f"{name}: {hyper[name]!r} and {others[name]!r}"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.shape}"


def _largest(one: torch.Tensor, other: torch.Tensor) -> str:
    if torch.equal(one, other) or not one.numel():
        return ""
    if not (one.is_floating_point() or one.is_complex()):
        return f"{int((one != other).sum())} of {one.numel()} elements differ"
    one, other = (each.double() if each.is_floating_point() else each for each in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())  # infinities too, whose difference is none
    apart = (one - other).abs()[~same]
    if not apart.numel():
        return ""
    odd = int((~apart.isfinite()).sum())
    most = apart[apart.isfinite()]
    found = [f"differs by up to {most.max().item():.3g}"] if most.numel() else []
    found += [f"{odd} of {one.numel()} elements are NaN or infinite in one of them"] if odd else []
    return ", ".join(found)
