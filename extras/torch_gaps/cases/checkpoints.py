"""Checkpoints: torch's by `torch.distributed.checkpoint` and its state dict functions, as its documents have it."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from extras.torch_gaps.checks import WIDTH, Wrong, batch, expect_same, squared_output, whole
from extras.torch_gaps.registry import Trial, case

AREA = "Checkpoints"


class _Net(nn.Module):
    """With a layer that may be left out."""

    def __init__(self, *, more: bool = False, uses_all: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses_all = uses_all
        if more:
            self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        x = self.first(x)
        return self.second(x) if self.uses_all else x


@contextmanager
def _folder(trial: Trial) -> Iterator[Path]:
    """One that all ranks see."""
    names = [tempfile.mkdtemp() if trial.rank == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if trial.rank == 0:
            shutil.rmtree(names[0])


def _built(trial: Trial, **arguments: Any) -> tuple[_Net, torch.optim.Optimizer]:
    model = _Net(**arguments)
    trial.api.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(trial: Trial, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    squared_output(model, batch(trial.rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _expect_refusal(what: str, action: Any) -> None:
    """``action`` must raise."""
    try:
        action()
    except Exception:
        return
    raise Wrong(f"{what} was loaded without a word")


def _expect_unchanged(model: nn.Module, before: dict[str, Tensor], what: str) -> None:
    for name, parameter in model.named_parameters():
        if not torch.equal(whole(parameter), before[name]):
            raise Wrong(f"{what}: '{name}' was changed all the same")


@case(AREA, "a checkpoint in whose file one bit is another: an error")
def a_flipped_bit(trial: Trial) -> None:
    model, optimizer = _built(trial)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, optimizer)
        if trial.rank == 0:
            file = folder / "saved" / "__0_0.distcp"
            data = bytearray(file.read_bytes())
            data[data.index(model.first.weight.to_local()[0].detach().numpy().tobytes()) + 2] ^= 1
            file.write_bytes(data)
        dist.barrier()
        _expect_refusal("a damaged checkpoint", lambda: trial.api.load_checkpoint(folder / "saved", model, optimizer))


@case(AREA, "a checkpoint of which a file was cut short: an error, and the model is as it was")
def a_file_cut_short(trial: Trial) -> None:
    model, optimizer = _built(trial)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        before = {name: whole(p) for name, p in model.named_parameters()}
        if trial.rank == 0:
            file = folder / "saved" / "__1_0.distcp"
            os.truncate(file, file.stat().st_size // 2)
        dist.barrier()
        _expect_refusal("a damaged checkpoint", lambda: trial.api.load_checkpoint(folder / "saved", model, optimizer))
        _expect_unchanged(model, before, "an error was raised")


@case(AREA, "a checkpoint with a layer that the model has not: an error")
def more_than_the_model_has(trial: Trial) -> None:
    model, _ = _built(trial, more=True)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, None)
        smaller, _ = _built(trial)
        _expect_refusal("a part", lambda: trial.api.load_checkpoint(folder / "saved", smaller, None))


@case(AREA, "a checkpoint in fp32 and a model in bf16: an error, or a word")
def of_another_dtype(trial: Trial) -> None:
    model, _ = _built(trial)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, None)
        half = _Net().to(torch.bfloat16)
        trial.api.fully_shard(half)
        _expect_refusal("another dtype", lambda: trial.api.load_checkpoint(folder / "saved", half, None))


@case(AREA, "a save before the first step changes nothing of the training after it")
def a_save_at_step_0(trial: Trial) -> None:
    found = []
    with _folder(trial) as folder:
        for saves in (False, True):
            model, optimizer = _built(trial)
            if saves:
                trial.api.save_checkpoint(folder / "saved", model, optimizer)
            for step in range(3):
                _step(trial, model, optimizer, step)
            found.append(whole(model.first.weight))
    expect_same(found[1], found[0], "a weight after three steps", tolerance=0.0)


@case(AREA, "a layer that was not used yet: its optimizer state does not exist, and the checkpoint loads")
def state_that_does_not_exist(trial: Trial) -> None:
    model, optimizer = _built(trial, uses_all=False)
    _step(trial, model, optimizer)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, optimizer)
        other, fresh = _built(trial, uses_all=False)
        trial.api.load_checkpoint(folder / "saved", other, fresh)
    if float(fresh.state[other.first.weight]["step"]) != 1:
        raise Wrong("the state of the layer that was used is not what was saved")


@case(AREA, "an optimizer that has not stepped, and gradients, when its state is loaded")
def gradients_while_loading(trial: Trial) -> None:
    model, optimizer = _built(trial)
    _step(trial, model, optimizer)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, optimizer)
        other, fresh = _built(trial)
        squared_output(other, batch(trial.rank)).backward()
        trial.api.load_checkpoint(folder / "saved", other, fresh)
    if float(fresh.state.get(other.first.weight, {}).get("step", 0)) != 1:
        raise Wrong("the optimizer's state was not loaded")


@case(AREA, "a value that each rank has for itself comes back to it")
def values_of_each_rank(trial: Trial) -> None:
    model, _ = _built(trial)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, None, place=10 + trial.rank)
        found = trial.api.load_checkpoint(folder / "saved", model, None, place=0)
    if found != 10 + trial.rank:
        raise Wrong(f"rank {trial.rank} got the value of another")


@case(AREA, "tied weights are written once")
def tied_weights_once(trial: Trial) -> None:
    model = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 2000, bias=False))
    model[1].weight = model[0].weight
    trial.api.fully_shard(model)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, None)
        dist.barrier()
        written = sum(each.stat().st_size for each in (folder / "saved").glob("__*"))
    if written > 1.5 * 2000 * 64 * 4:
        raise Wrong("they are written twice")


@case(AREA, "a whole state dict with a key missing, strict: an error")
def a_key_missing(trial: Trial) -> None:
    model, _ = _built(trial)
    state = copy.deepcopy(_Net().state_dict())
    del state["first.weight"]

    def load() -> None:
        if trial.api.name == "fsdp2":
            trial.api.load_full(model, state)
        else:
            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=True))

    _expect_refusal("what is left", load)


@case(AREA, "rotary frequencies of a model on meta, which no checkpoint has: an error that names them")
def a_buffer_on_meta(trial: Trial) -> None:
    def built() -> _Net:
        net = _Net()
        net.register_buffer("frequencies", torch.ones(3), persistent=False)
        return net

    model = built()
    trial.api.fully_shard(model)
    with _folder(trial) as folder:
        trial.api.save_checkpoint(folder / "saved", model, None)
        with torch.device("meta"):
            other = built()
        trial.api.fully_shard(other)

        def load() -> None:
            if trial.api.name == "torch":
                other.to_empty(device="cpu")
            trial.api.load_checkpoint(folder / "saved", other, None)

        _expect_refusal("a model with a buffer that nothing has written", load)
