"""What surrounds an optimizer of `fsdp2.optim.local`: checkpoints, schedulers, scalers, hooks, replaced parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import FSDPValueError, fully_shard
from tests.harness import Reference, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_sharded_same, parameters_of
from tests.harness.shared.optimizers import (
    MakeOptimizer,
    adamw_for_loop,
    adamw_foreach,
    adamw_fused,
    distributed_like,
    local_like,
    loss_of,
    number_of_runs,
    sgd_momentum,
    tolerance_of,
    two_groups,
)
from tests.harness.shared.training import CASE, shard, trainable
from tests.multi_rank.optimizers.helpers import formed

FORMS = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
WAYS = ["plain_to_each", "plain_to_flat", "each_to_plain", "flat_to_plain", "each_to_flat", "flat_to_each"]


# ---- checkpoints ---------------------------------------------------------------------------------


def shared_folder(path: Path) -> Path:
    """That of rank 0."""
    folders = [str(path)]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


Pair = tuple[nn.Module, torch.optim.Optimizer]


def by_the_optimizers_methods(saved: Pair, second: Pair, folder: Path) -> None:
    """Through a file of this rank."""
    file = io.BytesIO()
    torch.save(saved[1].state_dict(), file)
    file.seek(0)
    second[1].load_state_dict(torch.load(file, weights_only=False))
    second[0].load_state_dict(saved[0].state_dict())


def by_sharded_state_dicts(saved: Pair, second: Pair, folder: Path, full: bool = False) -> None:
    options = StateDictOptions(full_state_dict=full)
    states = list(copy.deepcopy(get_state_dict(*saved, options=options)))
    if full:  # which rank 0 alone has
        dist.broadcast_object_list(states)
    set_state_dict(*second, model_state_dict=states[0], optim_state_dict=states[1], options=options)


def by_full_state_dicts(saved: Pair, second: Pair, folder: Path) -> None:
    by_sharded_state_dicts(saved, second, folder, full=True)


def by_checkpoints(saved: Pair, second: Pair, folder: Path) -> None:
    dcp.save({"m": saved[0].state_dict(), "o": get_optimizer_state_dict(*saved)}, checkpoint_id=folder)
    state: dict[str, Any] = {"m": second[0].state_dict(), "o": get_optimizer_state_dict(*second)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(*second, state["o"])


def by_checkpoints_in_place(saved: Pair, second: Pair, folder: Path) -> None:
    """`dcp.load` writes into the optimizer's own tensors, of another step, and nothing is set."""
    model, optimizer = second
    for step in range(3):
        loss_of(CASE, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"m": saved[0].state_dict(), "o": get_optimizer_state_dict(*saved)}, checkpoint_id=folder)
    dcp.load({"m": model.state_dict(), "o": get_optimizer_state_dict(*second)}, checkpoint_id=folder)


HOW = (
    *(by_the_optimizers_methods, by_sharded_state_dicts, by_full_state_dicts),
    *(by_checkpoints, by_checkpoints_in_place),
)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("make", [adamw_for_loop, adamw_fused, sgd_momentum, two_groups], ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW, ids=lambda f: f.__name__)
def test_states_go_from_one_to_the_other(
    how: Callable[[Pair, Pair, Path], None], way: str, make: MakeOptimizer, world_size: int, tmp_path: Path
) -> None:
    source, _, target = way.split("_")
    model = shard()
    optimizer = formed(source, make(trainable(model)))
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    tolerance = tolerance_of(make, world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance)
    second = shard(model=CASE.build(seed=1))
    second_optimizer = formed(target, make(trainable(second)))
    how((model, optimizer), (second, second_optimizer), shared_folder(tmp_path))
    for _ in range(2):
        loss_of(CASE, second, reference.steps_done).backward()
        second_optimizer.step()
        second_optimizer.zero_grad()
        assert_sharded_same("parameters", parameters_of(second), reference.step().parameters, tolerance=tolerance)
    if target != "plain" and make is not two_groups:  # in which no two parameters lie side by side
        assert bool(number_of_runs(second_optimizer)) is (target == "flat")


@pytest.mark.full
@multi_rank(2)
@FORMS
def test_counters_in_state_dicts_are_each_parameters_own(flat: bool) -> None:
    """A plain optimizer that loads them adds to each."""
    model = shard()
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    loss_of(CASE, model).backward()
    optimizer.step()
    steps = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)


@multi_rank(2)
@FORMS
def test_a_state_that_is_not_sharded_is_refused(flat: bool) -> None:
    model, plain = shard(), CASE.build()
    optimizer, unsharded = local_like(adamw_foreach(trainable(model)), flat=flat), adamw_foreach(trainable(plain))
    loss_of(CASE, plain).backward()
    unsharded.step()
    loss_of(CASE, model).backward()
    optimizer.load_state_dict(unsharded.state_dict())
    with pytest.raises(FSDPValueError, match=r"state 'exp_avg' of parameter '0\.weight' is a plain tensor"):
        optimizer.step()


@multi_rank(2)
@FORMS
def test_copies_and_pickles(flat: bool) -> None:
    model = shard()
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    reference = Reference(CASE, world_size=2, make_optimizer=adamw_foreach)
    assert_trains_like(reference, model, optimizer, steps=2)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert type(twin) is type(optimizer)
    assert_trains_like(copy.deepcopy(reference), twin_model, twin, steps=2)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(optimizer) and isinstance(loaded, torch.optim.AdamW)
    for mine, other in zip(optimizer.state.values(), loaded.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"].to_local(), other["exp_avg"].to_local())
    assert_trains_like(reference, model, optimizer, steps=1)


# ---- parameters that change ----------------------------------------------------------------------


@multi_rank(2)
@FORMS
def test_assigned_converted_and_unwrapped(flat: bool) -> None:
    model = shard()
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    reference = Reference(CASE, world_size=2, make_optimizer=adamw_foreach)
    assert_trains_like(reference, model, optimizer, steps=2)
    with torch.no_grad():
        values = {name: value.clone() for name, value in reference.model.state_dict().items()}
    model.load_state_dict(distributed_like(model, reference.model), assign=True)
    assert_trains_like(reference, model, optimizer, steps=2)
    assert values.keys() == model.state_dict().keys()
    model.to("cpu")
    assert_trains_like(reference, model, optimizer, steps=1)
    fsdp2.unwrap(model)
    for record in reference.run(1):
        for name, parameter in model.named_parameters():
            parameter.grad = record.gradients[name].clone()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(reference.model.named_parameters())[name]), name
    shard(CASE, model)
    assert_trains_like(reference, model, optimizer, steps=1)


@multi_rank(2)
@FORMS
def test_groups_that_are_added(flat: bool) -> None:
    model = shard()
    first, *rest = trainable(model)
    optimizer = fsdp2.optim.local(torch.optim.AdamW, [("0.weight", first)], lr=1e-2, eps=1e-3, foreach=True, flat=flat)
    loss_of(CASE, model).backward()
    optimizer.step()
    optimizer.add_param_group({"params": [(f"{i}", p) for i, p in enumerate(rest)], "lr": 1e-3})
    before = [p.to_local().clone() for p in rest]
    optimizer.step()
    assert any(not torch.equal(a, p.to_local()) for a, p in zip(before, rest, strict=True))
    assert [optimizer.state[p]["step"].item() for p in (first, *rest)] == [2.0, *[1.0] * len(rest)]


# ---- schedulers, scalers, hooks, closures --------------------------------------------------------


@multi_rank(2)
@FORMS
def test_hooks_see_the_sharded_parameters_once(flat: bool) -> None:
    model = shard()
    torch.optim.AdamW([nn.Parameter(torch.ones(1))]).step()  # gives the class's step its hooks
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    seen: list[str] = []

    def look(name: str) -> Any:
        def hook(stepping: torch.optim.Optimizer, *_: Any) -> None:
            seen.append(name)
            assert stepping is optimizer
            assert all(isinstance(p, DTensor) for group in stepping.param_groups for p in group["params"])
            assert all(isinstance(state["exp_avg"], DTensor) for state in stepping.state.values())

        return hook

    handles = [
        optimizer.register_step_pre_hook(look("pre")),
        optimizer.register_step_post_hook(look("post")),
        optimizer.register_state_dict_pre_hook(look("state_dict")),
        optimizer.register_load_state_dict_post_hook(look("loaded")),
        register_optimizer_step_post_hook(look("every")),
    ]
    loss_of(CASE, model).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert seen == ["pre", "post", "every", "state_dict", "loaded", "pre", "post", "every"]
    for handle in handles:
        handle.remove()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.to_local().any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@multi_rank(2)
@FORMS
def test_closures(flat: bool) -> None:
    model = shard()
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    reference = Reference(CASE, world_size=2, make_optimizer=adamw_foreach)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(CASE, model, step)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.requires_grad
        assert_sharded_same("parameters", parameters_of(model), reference.step().parameters)


@multi_rank(2, 4)
@FORMS
@pytest.mark.parametrize("make", [adamw_foreach, two_groups, sgd_momentum], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stepped", [0, 1])
def test_offloaded_state(stepped: int, make: MakeOptimizer, flat: bool, world_size: int) -> None:
    """It is stepped on one parameter group at a time, and comes back when it is brought back."""
    model = shard()
    optimizer = local_like(make(trainable(model)), flat=flat)
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    assert_trains_like(reference, model, optimizer, steps=stepped, tolerance=tolerance_for(world_size))
    offload = fsdp2.offload_optimizer_state(optimizer, pin_memory=False)
    seen: list[type] = []
    plain = type(optimizer)._plain

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ not in ("detach", "empty_like", "copy_"):
                seen.extend(types)
            return func(*args, **(kwargs or {}))

    loss_of(CASE, model, stepped).backward()
    with Watching():
        optimizer.step()
    optimizer.zero_grad()
    expected = reference.step().parameters
    assert_sharded_same("parameters", parameters_of(model), expected, tolerance=tolerance_for(world_size))
    assert isinstance(optimizer, plain) and not any(issubclass(each, DTensor) for each in seen)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_for(world_size))
    names = {"momentum_buffer"} if make is sgd_momentum else {"exp_avg", "exp_avg_sq"}
    assert all(isinstance(state[name], DTensor) for state in optimizer.state.values() for name in names)
    offload.remove()
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2)
def test_one_optimizer_for_two_models() -> None:
    models = [shard(), CASE.build()]
    for unit in CASE.units(models[1]):
        fully_shard(unit)
    optimizer = local_like(adamw_foreach([p for model in models for p in trainable(model)]), flat=True)
    references = [Reference(CASE, world_size=2, make_optimizer=adamw_foreach) for _ in models]
    for step in range(2):
        for model in models:
            loss_of(CASE, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for model, reference in zip(models, references, strict=True):
            assert_sharded_same("parameters", parameters_of(model), reference.step().parameters)
