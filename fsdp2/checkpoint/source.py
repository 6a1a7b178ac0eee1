"""A checkpoint in a folder, opened: what it holds, under the names of `contents.py`, whoever wrote it.

Programs with plain `torch.distributed.checkpoint` choose the names in front of a model and an optimizer themselves.
They are found by what follows them.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp2.checkpoint.contents import GROUPS, MODEL, OPTIMIZER, STATE
from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointIncomplete
from fsdp2.checkpoint.manifest import Manifest, crc_text, read_manifest
from fsdp2.checkpoint.optimizers import Tail

METADATA = ".metadata"
_GROUPS, _STATE = "param_groups.", "state."

Rename = Callable[[str], str] | None


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint holds.

    Attributes:
        path: of its folder.
        manifest: None if torch wrote it.
        metadata: of `torch.distributed.checkpoint`, by our names.
        original: of each of our names the one in the files.
        tails: of names of optimizer states that lie inside of lists and dicts, which: after that of the parameter.
        told_by: what tells it from other checkpoints of the same things, for people.
    """

    path: Path
    manifest: Manifest | None
    metadata: Metadata
    original: Mapping[str, str]
    tails: Mapping[str, Tail]
    told_by: str

    @property
    def names(self) -> Iterable[str]:
        """Ours."""
        return self.metadata.state_dict_metadata

    def tail_of(self, name: str) -> Tail | None:
        """Of an optimizer's state, where it lies in what the optimizer has of a parameter: keys, indices of lists."""
        return self.tails.get(name)

    def below(self, prefix: str) -> Iterator[str]:
        """Names that begin with ``prefix`` and a dot, without both."""
        start = f"{prefix}."
        return (name[len(start) :] for name in self.names if name.startswith(start))

    def items(self) -> list[MetadataIndex]:
        """One index of each item in files, in their order."""
        places: dict[tuple[str, int], MetadataIndex] = {}
        for index, info in self.metadata.storage_data.items():
            places.setdefault((info.relative_path, info.offset), index)
        return [places[each] for each in sorted(places)]

    def files(self) -> dict[str, int]:
        """Names of files, and how many bytes each has at least; by the manifest, exactly."""
        sizes: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            end = info.offset + info.length
            sizes[info.relative_path] = max(end, sizes.get(info.relative_path, 0))
        return sizes if self.manifest is None else {**sizes, **self.manifest.files}

    def refuse_wrong_sizes(self, files: Iterable[str]) -> None:
        """Look whether ``files`` are there and as long as they were.

        Raises:
            CheckpointDamaged: with all that are not.
            CheckpointError: the system does not say.
        """
        wanted, wrong = self.files(), []
        for name in files:
            try:
                found = (self.path / name).stat().st_size
            except FileNotFoundError as error:
                wrong.append(f"{name} cannot be read: {error.strerror or error}")
                continue
            except OSError as error:
                raise CheckpointError(f"the checkpoint {self.path} cannot be read: {error}.") from error
            if found < wanted[name] or (self.manifest is not None and found != wanted[name]):
                wrong.append(f"{name} has {found} bytes, and had {wanted[name]}")
        if wrong:
            raise CheckpointDamaged(f"the checkpoint {self.path} is damaged: {'; '.join(wrong)}.")


def open_source(path: Path, names: Iterable[str] = (), rename: Rename = None) -> Source:
    """Open the checkpoint in the folder ``path``, for a model of ``names``.

    Raises:
        CheckpointIncomplete: there is none.
        CheckpointDamaged: what says what it holds is not what was written.
        CheckpointError: it cannot be read.
    """
    if not path.is_dir():
        raise CheckpointIncomplete(f"there is no checkpoint {path}: no such folder.")
    manifest = read_manifest(path)
    file = path / METADATA
    try:
        crc = crc_text(zlib.crc32(file.read_bytes()))
        if manifest is not None and crc != manifest.metadata_crc32:
            raise CheckpointDamaged(f"{file} is not what was written: its checksum differs from the manifest's.")
        found = FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        if manifest is not None:
            raise CheckpointDamaged(f"the checkpoint {path} is damaged: {METADATA} is missing.") from error
        raise CheckpointIncomplete(
            f"there is no complete checkpoint in {path}: it has no {METADATA}, which a save writes last.{_hint(path)}"
        ) from error
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        # With a manifest it is what was written: this process cannot read it, as where torch is another.
        is_written = manifest is not None or isinstance(error, OSError)
        kind = CheckpointError if is_written else CheckpointDamaged
        raise kind(f"{file} cannot be read: {type(error).__name__}: {error}.") from error
    told_by = f"{METADATA} {crc}" if manifest is None else f"{METADATA} {crc} of {manifest.time}"
    return _named(path, manifest, found, frozenset(names), rename, told_by)


def _hint(path: Path) -> str:
    steps = sorted(each.name for each in path.glob("step-*"))
    return f" It is a run, with {steps[-1]}: name that." if steps else ""


def _named(
    path: Path, manifest: Manifest | None, found: Metadata, names: frozenset[str], rename: Rename, told_by: str
) -> Source:
    """``found`` by our names."""
    keys = list(found.state_dict_metadata)
    front = f"{MODEL}." if manifest is not None else _front_of_model(keys, names)
    fronts = [f"{OPTIMIZER}."] if manifest is not None else _fronts_of_optimizers(keys, names, front)
    ours: dict[str, str] = {}
    for key in keys:
        name = _our_name(key, front, fronts, names, rename)
        if name in ours:
            raise CheckpointError(f"rename gives '{key}' and '{ours[name]}' of {path} the same name, '{name}'.")
        ours[name] = key
    back = {key: name for name, key in ours.items()}
    metadata = Metadata(
        {name: found.state_dict_metadata[key] for name, key in ours.items()},
        storage_data={
            MetadataIndex(back[index.fqn], index.offset): info
            for index, info in found.storage_data.items()
            if index.fqn in back
        },
        storage_meta=found.storage_meta,
    )
    paths = found.planner_data or {}
    tails = {
        name: tuple(paths[key][3:])
        for name, key in ours.items()
        if manifest is not None
        and key in paths
        and tuple(paths[key][:2]) == (OPTIMIZER, "state")
        and len(paths[key]) > 4
    }
    return Source(path, manifest, metadata, ours, tails, told_by)


def _front_of_model(keys: Iterable[str], names: frozenset[str]) -> str:
    """What stands before the names of a model's tensors: the longest run of matches decides."""
    counts: dict[str, int] = {}
    for key in keys:
        at = 0
        while True:
            if key[at:] in names:
                counts[key[:at]] = counts.get(key[:at], 0) + 1
            at = key.find(".", at) + 1
            if not at:
                break
    if not counts:
        return f"{MODEL}." if any(key.startswith(f"{MODEL}.") for key in keys) else ""
    most = max(counts.values())
    best = [front for front, count in counts.items() if count == most]
    if f"{MODEL}." in best or len(best) == 1:
        return f"{MODEL}." if f"{MODEL}." in best else best[0]
    raise CheckpointError(
        f"the checkpoint has the model's names behind each of {sorted(best)}, and it is not known which is meant: load "
        "it with torch.distributed.checkpoint.load, under the name of the one that you want."
    )


def _fronts_of_optimizers(keys: Iterable[str], names: frozenset[str], model: str) -> list[str]:
    """What stands before the ``state`` and ``param_groups`` of optimizers."""
    found: dict[str, None] = {}
    for key in keys:
        at = key.find(_GROUPS)
        if at >= 0 and (at == 0 or key[at - 1] == ".") and key.removeprefix(model) not in names:
            found[key[:at]] = None
    return list(found)


def _our_name(key: str, model: str, optimizers: list[str], names: frozenset[str], rename: Rename) -> str:
    for index, front in enumerate(optimizers):
        if key.startswith(front + _STATE) or key.startswith(front + _GROUPS):
            rest = key[len(front) :]
            if rest.startswith(_GROUPS):
                # Groups of several optimizers are one list.
                return f"{GROUPS}.{rest[len(_GROUPS) :]}" if not index else f"{GROUPS}.{front}{rest[len(_GROUPS) :]}"
            return f"{OPTIMIZER}.{rest}"
    if key.startswith(model) and (model or key in names or not key.startswith(("shared.", "per_rank."))):
        name = key[len(model) :]
        if not model and key == "step":
            return key
        return f"{MODEL}.{name if rename is None else renamed(rename, name)}"
    return key


def renamed(rename: Callable[[str], str], name: str) -> str:
    """What ``rename``, a function of the user's, makes of ``name``.

    Raises:
        CheckpointError: no name, or an exception.
    """
    try:
        found = rename(name)
    except Exception as error:
        raise CheckpointError(f"rename raised {type(error).__name__} on '{name}': {error}") from error
    if not isinstance(found, str):
        raise CheckpointError(f"rename takes a function that returns names; of '{name}' it returned {found!r}.")
    return found


def is_tensor(source: Source, name: str) -> bool:
    """Whether ``name`` is of a tensor."""
    return isinstance(source.metadata.state_dict_metadata[name], TensorStorageMetadata)


def split_state(
    source: Source, names: frozenset[str], rename: Rename, first: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Of the optimizers' states: by parameter, by state, the name in ``source``.

    ``names``: of parameters, ours; ``rename`` makes them of those in the checkpoint, and ``first`` of other names of
    tied ones.
    """
    found: dict[str, dict[str, str]] = {}
    front = f"{MODEL}."
    known = {source.original[front + name].removeprefix(front): name for name in source.below(MODEL)}
    for rest in source.below(STATE):
        at = len(rest)
        is_of_model = rename is not None and any(rest.startswith(f"{each}.") for each in known)
        while at > 0:
            name = rest[:at]
            if is_of_model:
                name = known.get(name, "")
            elif rename is not None:
                name = renamed(rename, name)
            if first.get(name, name) in names:
                of_one, key = found.setdefault(first.get(name, name), {}), rest[at + 1 :]
                if name in names or key not in of_one:  # its own, if both are there
                    of_one[key] = f"{STATE}.{rest}"
                break
            at = rest.rfind(".", 0, at)
    return found


def saved_groups(source: Source) -> dict[str, dict[str, str]]:
    """Of each parameter group, by index, its hyperparameters: their names in ``source``."""
    found: dict[str, dict[str, str]] = {}
    for rest in source.below(GROUPS):
        index, _, key = rest.rpartition(".")
        head = index.partition(".")[0]
        if head.isdigit() and index != head:  # a value inside of a hyperparameter
            index, key = head, rest[len(head) + 1 :]
        found.setdefault(index, {})[key] = f"{GROUPS}.{rest}"
    return found
