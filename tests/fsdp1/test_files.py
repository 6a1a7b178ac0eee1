"""Checkpoints that torch 2.11, 2.13 and 2.15 wrote under their own FSDP1 load here, whichever torch is installed.

What is loaded is compared, bit by bit, with what FSDP1 held when it saved, and with the plain model of the same
training; then both go on. `tests/fsdp1/helpers/files.py` says what the files are, and writes them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.compat.fsdp1 import FullyShardedDataParallel, StateDictType, flat_optim_state_dict_to_load
from fsdp2.compat.fsdp1.convert import main
from tests.fsdp1.helpers.files import (
    FORMS,
    RANKS,
    STEPS,
    Held,
    archives,
    held_by,
    train_unsharded,
    unpack,
    wrapped_tower,
)
from tests.fsdp1.helpers.flat import OPTIMIZERS, quiet, tower, train
from tests.harness import multi_rank

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself
VERSIONS = {archive.name.removeprefix("torch-").removesuffix(".tar.xz"): archive for archive in archives()}
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT")
WRAPPING = (
    *("--model", "tests.fsdp1.helpers.flat:meta_tower"),
    *("--units", "tests.fsdp1.helpers.flat:tower_units", "--ignored", "ignored"),
)


def read(file: Path) -> Any:
    with quiet():
        return torch.load(file, weights_only=False)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal to the bit, in names and dtypes."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, where


def is_older(version: str, than: str) -> bool:
    """By major and minor number."""
    first, second = ([int(number) for number in each.split(".")[:2]] for each in (version, than))
    return first < second


def goes_on(held: Held, name: str) -> Held:
    """What the plain model comes to from ``held`` in a step."""
    model = tower(seed=1)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    names = [each for each, _ in model.named_parameters()]
    model.load_state_dict(held["model"], strict=False)  # a tie has one name there
    state = {names.index(each): copy.deepcopy(kept) for each, kept in held["optim"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    train_unsharded(model, optimizer, range(STEPS, STEPS + 1))
    return held_by(model, optimizer)


def test_three_versions_are_kept_in_little_room() -> None:
    assert {version.rpartition(".")[0] for version in VERSIONS} == {"2.11", "2.13", "2.15"}
    assert sum(archive.stat().st_size for archive in VERSIONS.values()) < 300_000


@pytest.mark.parametrize("version", VERSIONS)
def test_what_fsdp1_held_is_what_the_plain_model_comes_to(version: str, tmp_path: Path) -> None:
    unpack(VERSIONS[version], tmp_path)
    for name in OPTIMIZERS:
        for form in FORMS:
            assert_same(
                read(tmp_path / name / form / "held.pt"), read(tmp_path / name / "unsharded.pt"), f"{name} {form}"
            )


def as_written(held: Held, name: str, kind: str, form: str) -> Held:
    """What the file of ``kind`` says: the truth, but for one mistake of torch's.

    Its FULL optimizer state of original parameters on the CPU has one tensor's values under the name of another.
    """
    if (name, kind, form) == ("amsgrad", "FULL_STATE_DICT", "original"):
        held = copy.deepcopy(held)
        for each, kept in held["optim"].items():
            if not each.startswith("ignored"):
                kept["exp_avg"] = kept["max_exp_avg_sq"].clone()
    return held


@multi_rank(2)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_state_dicts_load_into_the_wrapper(version: str, kind: str, form: str, world_size: int, tmp_path: Path) -> None:
    folder = tmp_path / str(dist.get_rank())
    unpack(VERSIONS[version], folder)
    for name in OPTIMIZERS:
        held = read(folder / name / form / "held.pt")
        part = {"FULL_STATE_DICT": "full"}.get(kind, f"{kind.split('_')[0].lower()}_{dist.get_rank()}")
        file = folder / name / form / f"{part}.pt"
        if kind != "FULL_STATE_DICT" and is_older(torch.__version__, "2.15") and not is_older(version, "2.15"):
            with pytest.raises(ValueError, match="too many values to unpack"):
                read(file)  # torch's own records of ShardedTensors have a field more since; the converter reads them
            continue
        saved = read(file)
        model = wrapped_tower(FullyShardedDataParallel, FORMS[form], seed=1)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
            model.load_state_dict(saved["model"])
            if kind == "LOCAL_STATE_DICT":  # and what the optimizer said itself, of flat parameters or of pieces
                state = flat_optim_state_dict_to_load(model, optimizer, saved["optim"])
            else:
                state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved["optim"])
        optimizer.load_state_dict(state)
        written = as_written(held, name, kind, form)
        assert_same(held_by(model, optimizer), written, name)
        train(model, optimizer, dist.get_rank(), range(STEPS, STEPS + 1))
        assert_same(held_by(model, optimizer), goes_on(written, name), f"{name}, one step later")


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", FORMS)
def test_flat_files_are_converted(version: str, form: str, tmp_path: Path) -> None:
    """The weights and the state of an optimizer of flat parameters, or of pieces: without ranks."""
    unpack(VERSIONS[version], tmp_path)
    flag = "--use-orig-params" if FORMS[form] else "--no-use-orig-params"
    for name in OPTIMIZERS:
        given = [str(tmp_path / name / form / f"local_{rank}.pt") for rank in range(RANKS)]
        main([*given, str(tmp_path / f"{name}.pt"), "--to", "full", *WRAPPING, flag])
        made = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        expected = read(tmp_path / name / form / "held.pt")
        weights = {each: value for each, value in made["model"].items() if each != "head.weight"}  # a tie
        assert_same(weights, expected["model"], name)
        assert_same(made["optim"]["state"], expected["optim"], name)
        assert made["model"]["head.weight"].equal(weights["embedding.weight"])
