"""Checkpoints of torch's own FSDP1, kept for the versions of torch that will not have it, or write it otherwise.

``python -m tests.fsdp1.helpers.files`` writes ``tests/fsdp1/files/torch-<version>.tar.xz`` with the installed
torch: two ranks of gloo train a small model for two steps under each optimizer and form, and save what they hold:

    <optimizer>/<form>/full.pt           FULL state dicts of the model and of the optimizer, on rank 0
    <optimizer>/<form>/sharded_<rank>.pt SHARDED ones
    <optimizer>/<form>/local_<rank>.pt   the LOCAL state dict, and `optimizer.state_dict()` as it is
    <optimizer>/<form>/held.pt           what FSDP1 held then, as plain tensors: `held`
    <optimizer>/unsharded.pt             the same of the plain model, trained in one process

One archive holds them all: the same numbers in every file cost little together.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

from tests.fsdp1.helpers.flat import (
    OPTIMIZERS,
    local_state_dict,
    quiet,
    tokens,
    tower,
    tower_units,
    train,
    wrap_units,
)
from tests.harness.compare import gather

FILES = Path(__file__).resolve().parents[1] / "files"
FORMS = {"flat": False, "original": True}
"""``use_orig_params`` by the folder's name."""
RANKS, STEPS = 2, 2

Held = dict[str, dict[str, Any]]
"""``{"model": {name: tensor}, "optim": {name: {key: value}}}``, plain and whole, each tensor under its first name."""


def archives() -> list[Path]:
    """One for each version of torch."""
    return sorted(FILES.glob("torch-*.tar.xz"))


def unpack(archive: Path, folder: Path) -> None:
    """Put the files of ``archive`` into ``folder``."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")


def wrapped_tower(kind: Any, use_orig_params: bool, seed: int = 0) -> Any:
    """The model that is trained, its units under wrappers of ``kind``: torch's or ours."""
    model = tower(seed=seed)
    arguments = {"use_orig_params": use_orig_params, "ignored_modules": [model.ignored]}
    return wrap_units(kind, model, tower_units(model), **arguments)


# ---- writing ----------------------------------------------------------------------------------------


def main() -> None:
    """Write the archive of the installed torch."""
    version = torch.__version__.split("+")[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        torch.multiprocessing.spawn(_write_on_rank, (folder,), nprocs=RANKS)
        for name in OPTIMIZERS:
            torch.save(_train_unsharded(name), folder / name / "unsharded.pt")
        FILES.mkdir(exist_ok=True)
        with tarfile.open(FILES / f"torch-{version}.tar.xz", "w:xz", preset=9) as archive:
            for file in sorted(folder.rglob("*.pt")):
                archive.add(file, file.relative_to(folder), filter=_without_owner)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nothing of the machine and the hour that wrote it."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def _write_on_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    for name in OPTIMIZERS:
        for form, use_orig_params in FORMS.items():
            place = folder / name / form
            place.mkdir(parents=True, exist_ok=True)
            _write_form(place, name, use_orig_params, rank)
    dist.destroy_process_group()


def _write_form(place: Path, name: str, use_orig_params: bool, rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = wrapped_tower(FullyShardedDataParallel, use_orig_params)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, rank, range(STEPS))
    with quiet():
        torch.save({"model": local_state_dict(model), "optim": optimizer.state_dict()}, place / f"local_{rank}.pt")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            torch.save({"model": model.state_dict(), "optim": state}, place / f"sharded_{rank}.pt")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        held = {
            "model": _held_weights(model),
            "optim": {
                parameter: {key: put_together(value) for key, value in kept.items()}
                for parameter, kept in state["state"].items()
                if kept
            },
        }
        if rank == 0:
            torch.save(full, place / "full.pt")
            torch.save(held, place / "held.pt")


def _held_weights(model: Any) -> dict[str, Tensor]:
    """Whole parameters, and buffers, without a state dict."""
    with type(model).summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): tensor.detach().clone() for name, tensor in named_tensors(model)
        }


def put_together(value: Any) -> Any:
    """The whole of a ShardedTensor that is cut into rows; anything else as it is. Collective."""
    if not hasattr(value, "local_shards"):
        return value
    with quiet():
        whole = torch.zeros(value.shape, dtype=value.dtype)
        for shard in value.local_shards():
            start = shard.metadata.shard_offsets[0]
            whole[start : start + shard.tensor.shape[0]] = shard.tensor
    dist.all_reduce(whole)
    return whole


def _train_unsharded(name: str) -> Held:
    model = tower()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train_unsharded(model, optimizer, range(STEPS))
    return held_by(model, optimizer)


def train_unsharded(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The plain model: gradients averaged over the ranks' batches; of what FSDP1 ignores, added up (see `train`)."""
    for step in steps:
        total: dict[str, Tensor] = {}
        for rank in range(RANKS):
            model(tokens(rank, step)).square().sum().backward()
            for each, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[each] = total[each] + parameter.grad if each in total else parameter.grad
                    parameter.grad = None
        for each, parameter in model.named_parameters():
            if each in total:
                parameter.grad = total[each] if each.startswith("ignored") else total[each] / RANKS
        optimizer.step()
        optimizer.zero_grad()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """What a model and its optimizer hold, whole. Collective, where they are DTensors."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "model": {name: gather(tensor.detach()) for name, tensor in named_tensors(model)},
        "optim": {
            names[parameter]: {
                key: gather(value) if isinstance(value, Tensor) else value for key, value in kept.items()
            }
            for parameter, kept in optimizer.state.items()
        },
    }


if __name__ == "__main__":
    main()
