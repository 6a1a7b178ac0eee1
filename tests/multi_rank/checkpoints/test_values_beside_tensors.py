"""What programs save beside model and optimizer, and what they ask for: given back as it was, or refused at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint import CheckpointError, CheckpointMismatch, Checkpoints, SaveFailed, load, save
from tests.harness.checkpoints import anew, assert_equal, begin, snapshot, whole


def average(model: nn.Module) -> list[torch.Tensor]:
    """As programs write it by hand."""
    return [parameter.detach().clone() for parameter in model.parameters()]


SHAPES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": lambda tensors: tensors,
    "tuple": tuple,
    "int keys": lambda tensors: dict(enumerate(tensors)),
    "nested": lambda tensors: {"a": [{"b": (each, 3)} for each in tensors], "decay": 0.9},
    "one": lambda tensors: tensors[0],
}


def save_averages(folder: Path) -> list[torch.Tensor]:
    run = begin("1d")
    values = {name.replace(" ", "_"): make(average(run.model)) for name, make in SHAPES.items()}
    save(folder / "saved", run.model, shared=values)
    return [whole(each) for each in average(run.model)]


def load_averages(folder: Path) -> dict[str, list[torch.Tensor]]:
    run = begin("1d", seed=1)
    values = {name.replace(" ", "_"): make(average(run.model)) for name, make in SHAPES.items()}
    load(folder / "saved", run.model, shared=values)
    assert type(values["tuple"]) is tuple and list(values["int_keys"])[:2] == [0, 1]
    assert values["nested"]["decay"] == 0.9 and values["nested"]["a"][1]["b"][1] == 3
    found = {
        "list": values["list"],
        "tuple": list(values["tuple"]),
        "int keys": list(values["int_keys"].values()),
        "nested": [each["b"][0] for each in values["nested"]["a"]],
        "one": [values["one"]],
    }
    assert all(isinstance(each, DTensor) for each in found["list"])
    return {name: [whole(each) for each in tensors] for name, tensors in found.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_tensors_anywhere_in_a_value(ranks: int, tmp_path: Path) -> None:
    wanted = anew(2, save_averages, tmp_path)[0]
    for found in anew(ranks, load_averages, tmp_path):
        for name, tensors in found.items():
            expected = wanted if name != "one" else wanted[:1]
            assert all(map(torch.equal, tensors, expected)) and len(tensors) == len(expected), name


def refused(folder: Path) -> None:
    """What could not be given back is refused when it is saved."""
    run = begin("1d")
    other = begin("1d", seed=2)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    for arguments, says in [
        ({"shared": {"s": [schedule]}}, r"shared\['s'\] holds a StepLR inside of a list.*a name of its own"),
        ({"shared": {"s": {"a": schedule}}}, r"shared\['s'\] holds a StepLR"),
        ({"shared": {"o": other.optimizer}}, r"shared\['o'\] is an optimizer of sharded parameters.*ModuleDict"),
        ({"per_rank": {"m": other.model}}, r"per_rank\['m'\] has sharded tensors.*pass it in shared"),
    ]:
        with pytest.raises(SaveFailed, match=says):
            save(folder / "saved", run.model, run.optimizer, **arguments)  # type: ignore[arg-type]
    assert not (folder / "saved").exists()
    both = nn.ModuleDict({"g": run.model, "d": other.model})
    run.step(0)
    other.step(1)
    wanted = [snapshot(run), snapshot(other)]
    save(folder / "saved", both, [run.optimizer, other.optimizer])
    again = [begin("1d", seed=seed) for seed in (5, 6)]
    load(
        folder / "saved", nn.ModuleDict({"g": again[0].model, "d": again[1].model}), [each.optimizer for each in again]
    )
    for found, expected in zip(again, wanted, strict=True):
        assert_equal(expected, snapshot(found))


def test_what_could_not_be_given_back_is_refused(tmp_path: Path) -> None:
    anew(2, refused, tmp_path)


def rolled_back(folder: Path) -> None:
    """What is saved after going back is what is found, not what was abandoned."""
    run = begin("1d")
    checkpoints = Checkpoints(folder, run.model, run.optimizer, keep_last=3)
    states = {}
    for step in (10, 20, 30, 40):
        run.step(step)
        checkpoints.save(step)
        states[step] = snapshot(run)
    dist.barrier()
    assert checkpoints.steps() == [20, 30, 40] and checkpoints.restore(20) == 20
    run.step(99)
    checkpoints.save(25)
    after = snapshot(run)
    dist.barrier()
    assert checkpoints.steps() == [30, 40, 25]
    again = begin("1d", seed=3)
    assert Checkpoints(folder, again.model, again.optimizer).restore() == 25
    assert_equal(after, snapshot(again))


def test_a_run_that_goes_back(tmp_path: Path) -> None:
    anew(2, rolled_back, tmp_path / "run")


def asks(folder: Path) -> None:
    run = begin("1d", "adamw")
    run.step(0)
    save(folder / "saved", run.model, run.optimizer, step=3)
    before = snapshot(run)
    first = dist.get_rank() == 0
    with pytest.raises(CheckpointError, match=r"(?s)the ranks differ in what the load of saved .*only"):
        load(folder / "saved", run.model, only="blocks.*" if first else None)
    with pytest.raises(CheckpointError, match=r"(?s)the ranks differ in what the load of saved .*optimizer"):
        load(folder / "saved", run.model, run.optimizer if first else None)
    with pytest.raises(CheckpointError, match=r"only='block\.\*' takes nothing of the model: its names are as"):
        load(folder / "saved", run.model, only="block.*")
    with pytest.raises(CheckpointError, match=r"only='heads\.\*' takes nothing of the model: its names are as 'head"):
        load(folder / "saved", run.model, only=["blocks.*", "heads.*"], strict=False)
    with pytest.raises(CheckpointError, match=r"the checkpoint has nothing of the model: .* rename= finds"):
        load(folder / "saved", run.model, rename=lambda name: f"module.{name}", strict=False)
    with pytest.raises(CheckpointError, match=r"rename takes a function that returns names"):
        load(folder / "saved", run.model, rename=lambda name: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(CheckpointMismatch, match=r"'.*: of AdamW in the checkpoint, of SGD now"):
        load(folder / "saved", run.model, torch.optim.SGD(run.model.parameters(), lr=0.1))
    assert_equal(before, snapshot(run))
    fused = torch.optim.AdamW(run.model.parameters(), fused=True)
    load(folder / "saved", run.model, fused)
    assert fused.param_groups[0]["fused"] is True, "how it computes is the program's"
    with torch.inference_mode():
        save(folder / "inferred", run.model, run.optimizer)
        load(folder / "inferred", run.model, run.optimizer)
    run.step(1)


def test_what_ranks_ask_for(tmp_path: Path) -> None:
    anew(2, asks, tmp_path)


def elsewhere(folder: Path) -> None:
    """A relative path means one folder, wherever the program goes."""
    os.chdir(folder)
    run = begin("1d")
    checkpoints = Checkpoints("run", run.model, run.optimizer)
    checkpoints.save(1, asynchronous=True)
    os.chdir("/")
    checkpoints.save(2)
    assert checkpoints.steps() == [1, 2]
    checkpoints.close()


def test_a_program_that_changes_its_folder(tmp_path: Path) -> None:
    anew(2, elsewhere, tmp_path)


def two_models(folder: Path) -> None:
    run = begin("1d")
    state = run.model.state_dict()
    dcp.save({"ema": state, "net": state, "step": torch.tensor(5)}, checkpoint_id=folder / "two")
    with pytest.raises(CheckpointError, match=r"behind each of \['ema\.', 'net\.'\], and it is not known which"):
        load(folder / "two", run.model)
    dcp.save({"net": state, "step": torch.tensor(5)}, checkpoint_id=folder / "one")
    assert load(folder / "one", run.model).step == 5


def test_torchs_checkpoints_of_two_models(tmp_path: Path) -> None:
    anew(2, two_models, tmp_path)
