"""Checkpoints in programs with a default device, optimizers of their own, and files that come in parts."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

import fsdp2
from fsdp2.checkpoint import CheckpointError, Checkpoints, SaveFailed, load, save
from fsdp2.checkpoint.contents import with_live_tensors
from fsdp2.checkpoint.inspection import Opened
from fsdp2.checkpoint.optimizers import class_of
from fsdp2.checkpoint.ranks import Alone
from fsdp2.checkpoint.runs import _Background
from fsdp2.checkpoint.saving import Save
from tests.harness import multi_rank


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return fsdp2.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


@pytest.mark.full
@multi_rank(1, 2)
def test_a_default_device_changes_nothing(world_size: int, tmp_path: Path) -> None:
    """Memory for files is on the host, whatever device a program makes its tensors on."""
    model, other = build(), build(1).double()
    made = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
    model(torch.ones(2, 8)).square().sum().backward()
    made[0].step()
    expected = [parameter.full_tensor().clone() for parameter in model.parameters()]
    torch.set_default_device("meta")
    try:
        with Checkpoints(tmp_path / "run", model, made[0], shared={"x": 1}) as checkpoints:
            checkpoints.save(1)
            checkpoints.save(2, asynchronous=True)
        steps = []
        for verify in ("reading", "first"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            steps.append(Checkpoints(tmp_path / "run", model, made[0]).restore(verify=verify))  # type: ignore[arg-type]
        load(tmp_path / "run" / "step-00000001", other, made[1], cast=True)  # through memory in between
        opened = Opened(tmp_path / "run" / "step-00000002")
        weight = opened.read("model.0.weight")
        damages = list(opened.damages())
    finally:
        torch.set_default_device(None)
    assert steps == [2, 2] and damages == []
    assert torch.equal(weight, expected[0])
    for one, two, before in zip(model.parameters(), other.parameters(), expected, strict=True):
        assert torch.equal(one.full_tensor(), before)
        assert torch.equal(two.full_tensor(), before.double())


class Lion(Optimizer):
    """Elementwise, and not of torch."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Sign of a mean of gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.add_(mean.sign(), alpha=-group["lr"])


def local_lion(parameters: Any) -> Optimizer:
    return fsdp2.optim.local(Lion, parameters, elementwise=True)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("makes", [(Lion, local_lion), (local_lion, Lion)])
def test_an_optimizer_of_ones_own_loads_into_a_local_one(makes: Any, tmp_path: Path) -> None:
    models = [build(), build(1)]
    made = [make(model.parameters()) for make, model in zip(makes, models, strict=True)]
    assert [class_of(each) for each in made] == ["Lion", "Lion"]
    models[0](torch.ones(2, 8)).square().sum().backward()
    made[0].step()
    save(tmp_path / "c", models[0], made[0])
    load(tmp_path / "c", models[1], made[1])
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
        means = [each.state[p]["mean"].full_tensor() for each, p in zip(made, (one, two), strict=True)]
        assert torch.equal(*means)


class Interrupted(Exception):
    """As a handler of a signal raises it."""


@pytest.mark.full
@multi_rank(1)
@pytest.mark.parametrize("kind", [Interrupted, KeyboardInterrupt])
def test_a_save_whose_wait_is_interrupted_is_waited_for_again(kind: type[BaseException], tmp_path: Path) -> None:
    """What raises there is of the program, and the memory that is written from stays as it is until it is written."""
    model, may_write, write = build(), threading.Event(), Save.write

    def slowly(save: Save, failure: CheckpointError | None) -> None:
        assert may_write.wait(60)
        write(save, failure)

    def interrupted(*_: Any) -> None:
        raise kind("a signal")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "write", slowly)
        checkpoints = Checkpoints(tmp_path / "run", model)
        checkpoints.save(1, asynchronous=True)
        expected = model[0].weight.full_tensor().clone()
        with torch.no_grad():
            model[0].weight.zero_()
        for _ in range(2):
            with pytest.MonkeyPatch.context() as signals:
                signals.setattr(threading.Condition, "wait", interrupted)
                with pytest.raises(kind, match="a signal"):
                    checkpoints.save(2, asynchronous=True)
        may_write.set()
        checkpoints.save(2, asynchronous=True)
        checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    Checkpoints(tmp_path / "run", model).restore(1)
    assert torch.equal(model[0].weight.full_tensor(), expected)


@multi_rank(1)
def test_an_error_of_the_thread_comes_once(tmp_path: Path) -> None:
    def write(save: Save, failure: CheckpointError | None) -> None:
        raise ValueError("odd")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "write", write)
        checkpoints = Checkpoints(tmp_path / "run", build())
        checkpoints.save(1, asynchronous=True)
        with pytest.raises(SaveFailed, match="an asynchronous save failed: ValueError: odd"):
            checkpoints.wait()
        checkpoints.close()


@multi_rank(1)
def test_the_thread_of_saves_has_the_device_of_the_rank(tmp_path: Path) -> None:
    """A thread begins on the first device, where every rank would make a context."""
    seen: list[tuple[int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(
            torch.accelerator,
            "set_device_index",
            lambda index: seen.append((index, threading.current_thread().name)),
        )
        background = _Background(Alone(), None)
        background.start(lambda ranks: lambda: None)
        background.close()
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        background = _Background(Alone(), None)
        background.start(lambda ranks: lambda: None)
        background.close()
    assert seen == [(3, "fsdp2-checkpoint_0")]


Pair = namedtuple("Pair", "mean count")


@multi_rank(2)
def test_plain_tensors_beside_sharded_ones_are_written_where_they_are(tmp_path: Path) -> None:
    """A program that holds the tensors of its own list sees the values of the checkpoint in all of them."""
    model = build()
    plain = [torch.full((3,), 1.0), torch.full((2, 2), 2.0), torch.ones(1)]
    sharded = [parameter.detach().clone() for parameter in model.parameters()]
    expected = [each.full_tensor() for each in sharded]
    odd = torch.zeros(1).expand(4)
    shared: dict[str, Any] = {
        "ema": [sharded[0], plain[0], *sharded[1:]],
        "plain": {"deep": OrderedDict(a=(plain[1], 7)), "pair": Pair(plain[2], 3), "odd": odd, "new": torch.ones(2)},
    }
    mine = torch.full((2,), float(dist.get_rank()))
    run = Checkpoints(tmp_path / "run", model, shared=shared, per_rank={"mine": mine})
    run.save(1)
    ema, before = shared["ema"], shared["plain"]
    with torch.no_grad():
        for each in (*sharded, *plain, mine):
            each.zero_()
    before["new"] = torch.zeros(3)
    before["deep"]["a"] = (plain[1], 8)
    assert run.restore() == 1
    assert plain[0].tolist() == [1.0] * 3 and plain[1].tolist() == [[2.0] * 2] * 2 and plain[2].item() == 1
    assert ema[1] is plain[0] and mine.tolist() == [float(dist.get_rank())] * 2
    assert all(torch.equal(each.full_tensor(), values) for each, values in zip(sharded, expected, strict=True))
    after = shared["plain"]
    assert [id(each) for each in shared["ema"]] == [id(each) for each in ema]
    assert type(after["deep"]) is OrderedDict and after["deep"]["a"][0] is plain[1] and after["deep"]["a"][1] == 7
    assert type(after["pair"]) is Pair and after["pair"].mean is plain[2] and after["pair"].count == 3
    assert after["new"].tolist() == [1.0] * 2 and after["odd"].tolist() == [0.0] * 4


def test_live_tensors_take_the_places_of_what_was_read() -> None:
    state: list[Any] = [torch.ones(2), torch.ones(2), {"a": 1}]
    state.append(state)
    with torch.inference_mode():
        frozen = torch.zeros(2)
    live: list[Any] = [torch.zeros(2), frozen]
    made = with_live_tensors(state, [*live, {"a": torch.ones(1), "b": 2}, live, "more"])
    assert made is state and made[0] is live[0] and live[0].tolist() == [1.0, 1.0]
    assert made[1] is frozen and frozen.tolist() == [1.0, 1.0]
    assert made[2] == {"a": 1} and made[3] is state
    assert with_live_tensors(torch.ones(2), torch.empty(2, device="meta")).tolist() == [1.0, 1.0]
    assert with_live_tensors((1, torch.ones(1), 2), [0]) == (1, torch.ones(1), 2)
    twice = torch.zeros(1)
    made = with_live_tensors([torch.ones(1), torch.zeros(1)], [twice, twice])
    assert [each.item() for each in made] == [1, 0] and made[0] is twice
