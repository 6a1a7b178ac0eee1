"""`save`: one checkpoint, committed by a rename. Nothing is ever written into a folder that has its final name.

collect                        what there is, on each rank
agree and plan                 ranks compare what they have; who writes what
write                          into ``.name.writing`` beside it, flushed to disk
tell each other the outcome    one that failed is one that all failed
commit                         the first rank: .metadata, manifest.json, flush, rename, flush the parent
tell each other the outcome
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from fsdp2.arguments import checked
from fsdp2.checkpoint import manifest
from fsdp2.checkpoint.contents import MODEL, Contents, Values
from fsdp2.checkpoint.copies import Samples, refusal_of_copies, samples_of
from fsdp2.checkpoint.errors import CheckpointError, SaveFailed
from fsdp2.checkpoint.folders import flush, text_of, time_after_all
from fsdp2.checkpoint.held import held_by
from fsdp2.checkpoint.manifest import Manifest
from fsdp2.checkpoint.optimizers import CLASS, NAMES, Optimizers
from fsdp2.checkpoint.ranks import Ranks, agree, ranks_of
from fsdp2.checkpoint.rules import OPTIMIZER_RULE, PATH_RULE, STEP_RULE, VALUES_RULE
from fsdp2.checkpoint.writing import Part, Planner, Writer
from fsdp2.errors import FSDPError
from fsdp2.model.broadcast_parameters import GROUP


@checked(
    path=PATH_RULE,
    optimizer=OPTIMIZER_RULE,
    shared=VALUES_RULE,
    per_rank=VALUES_RULE,
    step=STEP_RULE,
    process_group=GROUP,
)
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    shared: Values | None = None,
    per_rank: Values | None = None,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save ``model`` and what belongs to it in the folder ``path``, which is there afterwards, whole, or not at all.

    Collective: all ranks of ``process_group`` must call it, outside of forward and backward. Nothing of the model, its
    gradients or the optimizer is changed, made or stepped. Takes no memory beside the largest tensor.

    Args:
        path: of a folder that is not there yet, where all ranks see the same files.
        model: sharded, plain, or one that contains sharded ones. Its persistent buffers are those of the first rank.
        optimizer: one, several, or none, over parameters of ``model``.
        shared: by names without dots: anything with ``state_dict()`` and ``load_state_dict()``, tensors and plain
            values, the same on all ranks: the first rank's are kept. (Sharded tensors: every rank's part.)
        per_rank: the same, kept for each rank.
        step: of training; `LoadReport` has it.
        process_group: by default that of all ranks.

    Raises:
        FSDPTypeError, FSDPValueError: an argument of another kind.
        SaveFailed: on every rank: the folder is there, ranks have different parameters, one could not write or is gone.
    """
    ranks = ranks_of(process_group)
    Save(Path(path).absolute(), ranks).run(lambda: Contents(model, optimizer, shared, per_rank), step)


class Save:
    """One save under way.

    Args:
        path: the folder, by its final name.
        ranks: that save together.
        replaces: whether a folder of that name makes way, at the very end.
    """

    def __init__(self, path: Path, ranks: Ranks, *, replaces: bool = False) -> None:
        self._path, self._ranks, self._replaces = path, ranks, replaces
        self.folder = path.with_name(f".{path.name}.writing")
        self._head: dict[str, Any] = {}
        self._planner: Planner
        self._samples: Samples = {}
        self._aliases: dict[str, str] = {}

    def run(self, collect: Callable[[], Contents], step: int | None) -> None:
        """All of it."""
        with torch.inference_mode(False):
            self.write(self.attempt(lambda: self.collect(collect(), step)))

    def collect(
        self, contents: Contents, step: int | None, copy: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> None:
        """What there is, on this rank; ``copy`` makes it independent of what happens to the model."""
        step = None if step is None else int(step)
        ranks = self._ranks
        self._aliases = {f"{MODEL}.{name}": f"{MODEL}.{first}" for name, first in contents.aliases.items()}
        self._planner = Planner(contents.names, self._aliases, ranks.rank)
        self._planner.take(contents.to_save(step, ranks.rank), copy)
        self._samples = samples_of(held_by(contents.model), ranks)
        classes = contents.optimizers.classes
        self._head = {
            "step": step,
            "versions": {"python": sys.version.split()[0], "torch": str(torch.__version__), "fsdp2": _version()},
            "ranks": ranks.size,
            "groups": tuple(
                {**_readable(group), CLASS: classes.get(group[NAMES][0], "") if group[NAMES] else ""}
                for group in contents.optimizers.groups
            ),
        }

    def write(self, error: CheckpointError | None) -> None:
        """Write and commit; ``error``: why this rank cannot, if so. Collective over the ranks.

        Raises:
            SaveFailed: on every rank.
        """
        plans: list[SavePlan] = []

        def prepare() -> None:
            self._prepare()
            plans.append(self._planner.create_local_plan())

        error = error or self.attempt(prepare)
        lines = [] if error is not None else [*self._planner.lines(), f"step {self._head['step']}"]
        found = self._together(error, lines, (plans, self._samples))
        if refusal := refusal_of_copies([samples for _, samples in found], self._ranks.numbers):
            self._together(CheckpointError(refusal))
        parts: list[Part] = []
        metadata = self._write_parts([of_rank[0] for of_rank, _ in found], parts)
        self._together(self.attempt(lambda: self._commit(metadata, parts)) if self._ranks.rank == 0 else None)

    # -- what ranks tell each other

    def attempt(self, action: Callable[[], Any]) -> CheckpointError | None:
        """Why ``action`` failed, if it did."""
        try:
            action()
        except (Exception, SystemExit) as error:  # every rank is told, and raises it
            return CheckpointError(_cause(error))
        return None

    def _together(self, error: Exception | None, lines: Sequence[str] = (), own: Any = None) -> list[Any]:
        """`agree`; whatever speaks against that is the end of the save."""
        try:
            return agree(self._ranks, error, lines, f"the save of {self._path.name}", own)
        except RuntimeError as failure:
            if self._ranks.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise SaveFailed(
                f"the checkpoint {self._path} was not saved: {failure}\nThe model, the optimizer and earlier "
                "checkpoints are as they were; training may go on."
            ) from failure

    # -- files

    def _prepare(self) -> None:
        """Make the folder to write to."""
        if self._path.exists() and not self._replaces:
            raise CheckpointError(f"{self._path} is there already: save under another name, or remove it first.")
        if self._ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def _write_parts(self, plans: list[SavePlan], parts: list[Part]) -> Metadata:
        """Write what is this rank's; ``parts`` are then those of all. Returns the metadata."""
        made: list[Metadata] = []
        part: list[Part] = []
        writer = Writer(self.folder, self._aliases)

        def write() -> None:
            if not self.folder.is_dir():
                raise CheckpointError(
                    f"{self.folder.parent} is not the same folder on all ranks: checkpoints need one that all see."
                )
            ours, metadata = self._planner.create_global_plan(plans)
            made.append(metadata)
            mine = self._planner.finish_plan(writer.prepare_global_plan(ours)[self._ranks.rank])
            part.append(writer.write(mine, self._planner))

        error = self.attempt(write)
        parts += self._together(error, [], part[0] if part else None)
        return made[0]

    def _commit(self, metadata: Metadata, parts: list[Part]) -> None:
        """Finish the folder, and give it its name. On the first rank."""
        Writer(self.folder, self._aliases).finish(metadata, [part.results for part in parts])
        whole = self._manifest(metadata, parts)
        with (self.folder / manifest.FILE).open("w") as file:
            file.write(whole.to_json())
            file.flush()
            os.fsync(file.fileno())
        flush(self.folder)
        if self._path.exists():  # a step that is saved again: the old one stays until the new one has its place
            old = self._path.with_name(f".{self._path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            self._path.rename(old)
            try:
                self.folder.rename(self._path)
            except BaseException:
                old.rename(self._path)
                raise
            flush(self._path.parent)
            shutil.rmtree(old, ignore_errors=True)  # what stays of it, the next run removes
        else:
            self.folder.rename(self._path)
            flush(self._path.parent)

    def _manifest(self, metadata: Metadata, parts: list[Part]) -> Manifest:
        placements, mesh = _placements(self._planner.state_dict)
        items: dict[str, list[dict[str, Any]]] = {}
        files: dict[str, int] = {}
        tensors = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        sizes = {(n, tuple(chunk.offsets)): tuple(chunk.sizes) for n, m in tensors.items() for chunk in m.chunks}
        for part in parts:
            files |= part.files
            for result, crcs in zip(part.results, part.crcs, strict=True):
                info, offsets = result.storage_data, tuple(result.index.offset or ())
                item = {"file": info.relative_path, "start": info.offset, "nbytes": info.length, "offsets": offsets}
                item |= {"sizes": sizes.get((result.index.fqn, offsets), ()), "crc32": crcs}
                items.setdefault(result.index.fqn, []).append(item)
        entries: dict[str, dict[str, Any]] = {}
        for name in metadata.state_dict_metadata:
            entry: dict[str, Any] = {"items": sorted(items.get(name, ()), key=lambda item: item["offsets"])}
            if name in tensors:
                entry |= {"dtype": str(tensors[name].properties.dtype).removeprefix("torch.")}
                entry |= {"placement": placements.get(name, ""), "same_as": self._aliases.get(name, "")}
            entries[name] = {key: value for key, value in entry.items() if value}
            if name in tensors:
                entries[name]["shape"] = tuple(tensors[name].size)
        data = (self.folder / ".metadata").read_bytes()
        files[".metadata"] = len(data)
        now = text_of(datetime.now(timezone.utc))
        time = time_after_all(self._path.parent) if self._replaces else now  # which makes it the newest of its run
        own = manifest.crc_text(zlib.crc32(data))
        return Manifest(time=time, mesh=mesh, files=files, metadata_crc32=own, entries=entries, **self._head)


def _cause(error: BaseException) -> str:
    """What went wrong, in a line or more."""
    chain = [error]
    while chain[-1].__cause__ is not None or chain[-1].__context__ is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)  # type: ignore[arg-type]
    if isinstance(error, FSDPError):
        return str(error)
    texts = dict.fromkeys(f"{type(each).__name__}: {each}".strip() for each in chain if str(each))
    return "; ".join(texts) or type(error).__name__


def _placements(flat: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """How each tensor is sharded, for people, and over what mesh most are."""
    found: dict[str, str] = {}
    meshes: dict[str, int] = {}
    for key, value in flat.items():
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            of_dims = zip(map(repr, value.placements), mesh.shape, strict=True)
            found[key] = ", ".join(f"{placement} over {size}" for placement, size in of_dims)
            text = " x ".join(map(str, mesh.shape))
            text += f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
            meshes[text] = meshes.get(text, 0) + 1
    return found, max(meshes, key=meshes.__getitem__, default="")


def _readable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parameter group what JSON can say, and the rest as Python does."""
    return {key: _json(value) for key, value in group.items()}


def _json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(each) for each in value]
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return repr(value)


@functools.cache
def _version() -> str:
    try:
        return version("fsdp2")
    except PackageNotFoundError:
        return "from a folder"
