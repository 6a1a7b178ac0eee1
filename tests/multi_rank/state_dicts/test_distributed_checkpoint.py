"""Distributed checkpoints: saved and loaded on any number of ranks, sharded or full, with the optimizer's state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.harness import Reference, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same, parameters_of
from tests.harness.models import CONV, FROZEN, TIED, TRANSFORMER, ModelCase
from tests.harness.pool import WorkerPools
from tests.harness.shared.state_dicts import (
    STEPS_AFTER,
    STEPS_BEFORE,
    after_training_forward,
    inputs,
    optimizer_of,
    run_on,
)
from tests.harness.shared.training import CASE, shard


def train_and_save(case: ModelCase, folder: Path, way: str) -> None:
    """`STEPS_BEFORE` steps on this world, then a checkpoint."""
    model = shard(case)
    optimizer = optimizer_of(model)
    reference = Reference(case, world_size=dist.get_world_size())
    assert_trains_like(reference, model, optimizer, steps=STEPS_BEFORE, tolerance=tolerance_for(dist.get_world_size()))
    if way == "bare":
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
    else:
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        options = full if way == "full" else StateDictOptions()
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        if way == "sharded":
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        elif dist.get_rank() == 0:
            torch.save({"model": model_state, "optimizer": optimizer_state}, folder / "full.pt")
    if dist.get_rank() == 0:
        # What the run would have gone on with: the reference as it is, on the world that saved.
        torch.save((reference.model.state_dict(), reference.optimizer.state_dict()), folder / "reference.pt")


def load_and_train(case: ModelCase, folder: Path, way: str) -> None:
    """A fresh model takes the checkpoint and goes on like a reference that never stopped."""
    world_size = dist.get_world_size()
    model = shard(model=case.build(seed=1), case=case)
    optimizer = optimizer_of(model)
    if way == "full":
        loaded = torch.load(folder / "full.pt", weights_only=False)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, loaded["model"], options=options)
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"], options=options)
    elif way == "bare":
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)  # in place: the model has it now
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    reference = Reference(case, world_size=world_size)
    model_state, optimizer_state = torch.load(folder / "reference.pt", weights_only=False)
    reference.model.load_state_dict(model_state)
    reference.optimizer.load_state_dict(optimizer_state)
    reference.steps_done = STEPS_BEFORE
    tolerance = tolerance_for(max(world_size, int((folder / "world_size").read_text())))
    if (
        tolerance is not None
    ):  # the saving world rounded its sums otherwise than the reference: start from what it saved
        with torch.no_grad():
            for name, parameter in reference.model.named_parameters():
                parameter.copy_(model.state_dict()[name].full_tensor())
    assert_trains_like(reference, model, optimizer, steps=STEPS_AFTER, tolerance=tolerance)


@pytest.mark.full  # 7 s together
@pytest.mark.parametrize(
    ("case", "way", "saving", "loading"),
    [
        *[(CASE, "sharded", *worlds) for worlds in ((2, 2), (2, 4), (2, 1), (4, 2), (1, 2))],
        *[(CASE, "bare", *worlds) for worlds in ((2, 2), (2, 4))],
        *[(CASE, "full", *worlds) for worlds in ((2, 4), (2, 1))],
        *[(case, "sharded", 2, 2) for case in (TRANSFORMER, TIED, CONV)],
        *[(case, "full", 2, 2) for case in (TIED, FROZEN)],
    ],
    ids=str,
)
def test_checkpoint_moves_between_worlds(
    case: ModelCase, way: str, saving: int, loading: int, pools: WorkerPools, tmp_path: Path
) -> None:
    (tmp_path / "world_size").write_text(str(saving))
    run_on(pools, saving, train_and_save, case, tmp_path, way)
    (tmp_path / "store").unlink(missing_ok=True)
    run_on(pools, loading, load_and_train, case, tmp_path, way)


@multi_rank(2, 4)
def test_full_state_dict_is_the_plain_models(world_size: int) -> None:
    model, plain = shard(), CASE.build()
    kept = after_training_forward(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert_same("full state", state, plain.state_dict())
    else:
        assert state == {}
    del kept


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("meta", [False, True])
def test_full_state_dict_from_rank_0_alone_is_broadcast(meta: bool, world_size: int) -> None:
    """The usual way to load a large checkpoint: only rank 0 reads it."""
    with torch.device("meta" if meta else "cpu"):
        model = CASE.make_model()
    shard(model=model)
    if meta:
        model.to_empty(device="cpu")
    source = CASE.build(seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if dist.get_rank() == 0 else {}, options=options)
    reference = Reference(CASE, world_size=world_size, model=source)
    assert_trains_like(reference, model, optimizer_of(model), steps=2, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_optimizer_state_right_after_an_evaluation(full: bool) -> None:
    """Evaluate, then save: the usual order. And the same for loading."""
    options = StateDictOptions(full_state_dict=full)
    model = shard()
    optimizer = optimizer_of(model)
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=2)
    with torch.no_grad():
        model(inputs())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if not full or dist.get_rank() == 0:
        assert set(saved["state"]) == set(dict(CASE.build().named_parameters()))
    second = shard()
    second.load_state_dict(model.state_dict())
    second_optimizer = optimizer_of(second)
    with torch.no_grad():
        second(inputs())
    set_optimizer_state_dict(second, second_optimizer, saved if not full else broadcast(saved), options=options)
    second.reshard()
    assert_trains_like(reference, second, second_optimizer, steps=2)


def broadcast(value: Any) -> Any:
    """Rank 0's object, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


@pytest.mark.full
@multi_rank(2)
def test_asynchronous_checkpoint_is_of_the_moment_it_was_taken(tmp_path: Path) -> None:
    """Training goes on, over the same buffers, while the checkpoint is written."""
    model = shard()
    optimizer = optimizer_of(model)
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=1)
    expected = {name: value.clone() for name, value in reference.model.state_dict().items()}
    own_group = dist.new_group(backend="gloo")  # a thread's collectives must not meet those of the training
    writing = dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path, process_group=own_group)
    assert_trains_like(reference, model, optimizer, steps=2)
    writing.result()
    second = shard(model=CASE.build(seed=1))
    state = {"model": second.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    assert_sharded_same("checkpoint", parameters_of(second), expected)
