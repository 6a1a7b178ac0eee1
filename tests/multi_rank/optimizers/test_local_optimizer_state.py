"""What surrounds an optimizer of `fsdp2.optim.local`: checkpoints, schedulers, scalers, hooks, replaced parameters."""

from __future__ import annotations

import copy
import io
import warnings
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
from tests.harness import Reference, assert_trains_like, multi_rank, others_full, tolerance_for
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
    rmsprop,
    sgd_momentum,
    tolerance_of,
    two_groups,
)
from tests.harness.shared.training import CASE, shard, trainable

FORMS = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
KINDS = [sgd_momentum, adamw_foreach, adamw_fused, rmsprop, two_groups]
WAYS = ["plain_to_each", "plain_to_flat", "each_to_plain", "flat_to_plain", "each_to_flat", "flat_to_each"]


def made_as(form: str, make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The plain optimizer, or that of `fsdp2.optim.local` in one of its forms."""
    plain = make(trainable(model))
    return plain if form == "plain" else local_like(plain, flat=form == "flat")


# ---- checkpoints ---------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize(  # full: 18 cases, 5 s
    "make", others_full(KINDS, [adamw_foreach, two_groups]), ids=lambda f: f.__name__
)
@pytest.mark.parametrize("way", WAYS)
def test_state_dicts_go_from_one_to_the_other(way: str, make: MakeOptimizer, world_size: int) -> None:
    """By the optimizers' own methods, through a file of this rank."""
    source, _, target = way.split("_")
    model = shard()
    optimizer = made_as(source, make, model)
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    tolerance = tolerance_of(make, world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = shard(model=CASE.build(seed=1))
    second_optimizer = made_as(target, make, second)
    second_optimizer.load_state_dict(torch.load(file, weights_only=False))
    second.load_state_dict(model.state_dict())
    assert_trains_like(reference, second, second_optimizer, steps=2, tolerance=tolerance)


@multi_rank(2, full=[4])  # 12 cases more, 4 s
@pytest.mark.parametrize("api", ["sharded", "full"])
@pytest.mark.parametrize("way", WAYS)
def test_distributed_state_dicts_go_from_one_to_the_other(way: str, api: str, world_size: int) -> None:
    source, _, target = way.split("_")
    options = StateDictOptions(full_state_dict=api == "full")
    model = shard()
    optimizer = made_as(source, adamw_foreach, model)
    reference = Reference(CASE, world_size=world_size, make_optimizer=adamw_foreach)
    tolerance = tolerance_for(world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance)
    states = list(copy.deepcopy(get_state_dict(model, optimizer, options=options)))
    if api == "full":  # which rank 0 alone has
        dist.broadcast_object_list(states)
    second = shard(model=CASE.build(seed=1))
    second_optimizer = made_as(target, adamw_foreach, second)
    set_state_dict(second, second_optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    assert_trains_like(reference, second, second_optimizer, steps=3, tolerance=tolerance_for(world_size))
    assert target == "plain" or bool(number_of_runs(second_optimizer)) is (target == "flat")


def shared_folder(path: Path) -> Path:
    """That of rank 0."""
    folders = [str(path)]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


@multi_rank(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loading", ["set", "in_place"])
def test_distributed_checkpoints_go_from_one_to_the_other(way: str, loading: str, tmp_path: Path) -> None:
    """``in_place``: `dcp.load` writes into the optimizer's own tensors, and nothing is set."""
    source, _, target = way.split("_")
    folder = shared_folder(tmp_path)
    model = shard()
    optimizer = made_as(source, adamw_for_loop, model)
    reference = Reference(CASE, world_size=2, make_optimizer=adamw_for_loop)
    assert_trains_like(reference, model, optimizer, steps=2)
    dcp.save({"m": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    second = shard(model=CASE.build(seed=1))
    second_optimizer = made_as(target, adamw_for_loop, second)
    if loading == "in_place":  # there is a state, of another step
        for step in range(3):
            loss_of(CASE, second, step).backward()
            second_optimizer.step()
            second_optimizer.zero_grad()
    state: dict[str, Any] = {"m": second.state_dict(), "o": get_optimizer_state_dict(second, second_optimizer)}
    dcp.load(state, checkpoint_id=folder)
    if loading == "set":
        set_optimizer_state_dict(second, second_optimizer, state["o"])
    assert_trains_like(reference, second, second_optimizer, steps=2)


@multi_rank(2)
@FORMS
def test_states_are_shown_and_written(flat: bool) -> None:
    """What is read between steps is what the step made, and what is written there the next step takes."""
    model, plain_model = shard(), shard()
    optimizer, plain = local_like(adamw_foreach(trainable(model)), flat=flat), adamw_foreach(trainable(plain_model))
    pairs = list(zip(model.parameters(), plain_model.parameters(), strict=True))
    held = None
    for step in range(4):
        for each, stepping in ((model, optimizer), (plain_model, plain)):
            loss_of(CASE, each, step).backward()
            stepping.step()
            stepping.zero_grad()
        if step == 0:
            held = optimizer.state
        if step == 1:
            for each in (optimizer, plain):
                first, second = list(each.state)[:2]
                each.state[first]["step"].fill_(7.0)
                each.state[second]["exp_avg"].mul_(0.5)
                each.state[second]["exp_avg_sq"] = each.state[second]["exp_avg_sq"] * 2
                del each.state[list(each.state)[2]]
        for mine, other in pairs:
            assert torch.equal(mine.to_local(), other.to_local())
    assert optimizer.state is held
    for mine, other in pairs:
        assert optimizer.state[mine]["step"] == plain.state[other]["step"]
        assert torch.equal(optimizer.state[mine]["exp_avg"].to_local(), plain.state[other]["exp_avg"].to_local())


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


@multi_rank(2, full=[4])  # 10 cases more, 4 s
@FORMS
@pytest.mark.parametrize("make", KINDS, ids=lambda f: f.__name__)
def test_made_before_wrapping(make: MakeOptimizer, flat: bool, world_size: int) -> None:
    """Of whole parameters, which it has stepped; the guard puts the sharded ones in their place."""
    model = CASE.build()
    optimizer = local_like(make(trainable(model)), flat=flat)
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    for record in reference.run(2):
        for name, parameter in model.named_parameters():
            parameter.grad = record.gradients[name]
        optimizer.step()
        optimizer.zero_grad()
    shard(CASE, model)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_of(make, world_size))


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
def test_frozen_and_thawed(flat: bool) -> None:
    model, plain = shard(), CASE.build()
    optimizer, reference = local_like(adamw_foreach(trainable(model)), flat=flat), adamw_foreach(trainable(plain))
    for step in range(5):
        for each in (model, plain):
            each[2].weight.requires_grad_(step not in (1, 2))
        loss_of(CASE, model, step).backward()
        total = None
        for rank in range(2):
            loss = CASE.loss(plain, CASE.batch(0, step, rank)) / 2
            total = loss if total is None else total + loss
        total.backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        assert_sharded_same("parameters", parameters_of(model), expected, tolerance=tolerance_for(4))


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
def test_schedulers(flat: bool) -> None:
    """They wrap ``step`` of the instance, and warn if it was not called."""
    model, plain = shard(), shard()
    optimizers = [local_like(adamw_foreach(trainable(model)), flat=flat), adamw_foreach(trainable(plain))]
    assert isinstance(optimizers[0], torch.optim.AdamW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=5) for each in optimizers]
        for step in range(4):
            for each, optimizer, scheduler in zip((model, plain), optimizers, schedulers, strict=True):
                loss_of(CASE, each, step).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.to_local(), other.to_local())


@multi_rank(2, full=[4])  # 4 cases more, 1 s
@FORMS
@pytest.mark.parametrize("make", [adamw_foreach, adamw_fused], ids=lambda f: f.__name__)
def test_grad_scaler(make: MakeOptimizer, flat: bool, world_size: int) -> None:
    """An infinity on one rank makes all ranks skip; ``fused`` unscales and skips inside its step."""
    model = shard()
    optimizer = local_like(make(trainable(model)), flat=flat)
    reference = Reference(CASE, world_size=world_size, make_optimizer=make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    tolerance = tolerance_of(make, world_size)
    for step in range(4):
        scaler.scale(loss_of(CASE, model, step if step < 2 else step - 1)).backward()
        if step == 2:
            if dist.get_rank() == world_size - 1:
                model[0].weight.grad.to_local()[0, 0] = float("inf")
            before = [parameter.to_local().clone() for parameter in model.parameters()]
        if step == 1 and make is adamw_foreach:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 2:
            assert scaler.get_scale() == 2.0**9
            assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
        else:
            assert_sharded_same("parameters", parameters_of(model), reference.step().parameters, tolerance=tolerance)


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


@multi_rank(2)
@FORMS
def test_a_step_that_raises_can_be_repeated(flat: bool) -> None:
    model = shard()
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    reference = Reference(CASE, world_size=2, make_optimizer=adamw_foreach)
    assert_trains_like(reference, model, optimizer, steps=1)
    loss_of(CASE, model, 1).backward()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    for state in optimizer.state.values():
        state["step"].fill_(1.0)  # which had been counted
    for state, other in zip(optimizer.state.values(), reference.optimizer.state.values(), strict=True):
        assert state["exp_avg"].shape == other["exp_avg"].shape


@multi_rank(2, full=[4])  # 12 cases more, 3 s
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
