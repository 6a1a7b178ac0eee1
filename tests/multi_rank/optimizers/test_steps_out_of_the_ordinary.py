"""Steps and clipping where something is out of the ordinary: refused gradients, inference mode, a norm of NaN."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2 import balanced_owners, fully_shard, offload_optimizer_state, step_on_owners
from fsdp2.optim import torch_clipping
from fsdp2.optim.guard import GUARD
from tests.harness import multi_rank


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.full
@multi_rank(2)
def test_a_gradient_that_owners_cannot_take_leaves_the_optimizer_as_it_was() -> None:
    """Though it is the second one's."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, shard_placement_fn=balanced_owners(list(model.parameters()), mesh))
    optimizer, reference = momentum(model.parameters()), momentum(plain.parameters())
    for each, step in ((model, lambda: step_on_owners(optimizer)), (plain, reference.step)):
        each(torch.ones(2, 6)).square().sum().backward()
        step()
        each.zero_grad()
        each(torch.ones(2, 6)).square().sum().backward()
    params = list(model.parameters())
    good: Any = params[1].grad
    params[1].grad = distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)])  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        step_on_owners(optimizer)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == list(map(id, params))
    assert set(map(id, optimizer.state)) == set(map(id, params))
    params[1].grad = good
    step_on_owners(optimizer)
    reference.step()
    for parameter, expected in zip(params, plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach())  # type: ignore[attr-defined]
        assert isinstance(optimizer.state[parameter]["momentum_buffer"], DTensor)


@multi_rank(2)
@pytest.mark.parametrize("flat", [False, True])
def test_state_that_is_offloaded_does_not_live_on_on_the_device(flat: bool) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), flat=flat, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    inside = weakref.ref(vars(optimizer)["_inside"])
    offloaded = offload_optimizer_state(optimizer, pin_memory=False)
    optimizer.step()
    assert "_inside" not in vars(optimizer) and inside() is None
    offloaded.remove()
    optimizer.step()
    first = next(model.parameters())
    assert optimizer.state[first]["step"] == 4


@multi_rank(1, 2)
@pytest.mark.parametrize("kind", ["ordinary", "each", "flat"])
def test_a_first_step_in_inference_mode(kind: str) -> None:
    """What it makes is stepped on later, too."""
    models, made = [], []
    for index in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        models.append(model if index else fully_shard(model))
        plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        is_local = kind != "ordinary" and not index
        made.append(
            fsdp2.optim.local(torch.optim.AdamW, model.parameters(), flat=kind == "flat", lr=0.1) if is_local else plain
        )
    for step in range(3):
        for model, optimizer in zip(models, made, strict=True):
            model(torch.ones(2, 8)).square().sum().backward()
            with torch.inference_mode(step == 0 and optimizer is made[0]):
                optimizer.step()
            optimizer.zero_grad()
        for parameter, expected in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), expected.detach())  # type: ignore[attr-defined]
    first = next(models[0].parameters())
    assert made[0].state[first]["step"] == 3 and not made[0].state[first]["exp_avg"].is_inference()


@multi_rank(2)
def test_a_norm_of_nan_ends_with_its_gradients() -> None:
    """Rows are uneven: there is padding between gradients, which gradients are added to as long as they are kept."""
    models = []
    for index in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(5, 3))
        models.append(model if index else fully_shard(model))
    rank = dist.get_rank()
    for step in range(4):
        batches = [torch.full((2, 5), 0.1 * (each + step + 1)) for each in range(2)]
        if step == 1:
            batches[0][0, 0] = torch.nan
        models[0](batches[rank]).square().sum().backward()
        (sum(models[1](each).square().sum() for each in batches) / 2).backward()
        norms = [
            fsdp2.clip_grad_norm_(models[0].parameters(), 0.5),
            nn.utils.clip_grad_norm_(models[1].parameters(), 0.5),
        ]
        assert bool(norms[0].isnan()) == (step == 1)
        torch.testing.assert_close(*norms, equal_nan=True)
        for parameter, expected in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, equal_nan=True)
        for model in models:
            model.zero_grad(set_to_none=False)


# ---- ordinary optimizers: what programs do between steps ----------------------------------------------


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def both(make: Any, **arguments: Any) -> tuple[Any, Any]:
    """A plain model and a sharded one, each with its optimizer."""
    plain, model = layers(), fully_shard(layers())
    return (plain, make(plain.parameters(), **arguments)), (model, make(model.parameters(), **arguments))


def backward(model: Any, step: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    model(x).square().sum().backward()


def train(model: Any, optimizer: Any, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_same(plain: nn.Module, model: nn.Module) -> None:
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach())  # type: ignore[attr-defined]


@multi_rank(2)
def test_what_leaves_a_run_keeps_no_other_state_alive() -> None:
    (plain, reference), (model, optimizer) = both(torch.optim.AdamW, lr=0.1, foreach=True)
    for each, its in ((plain, reference), (model, optimizer)):
        train(each, its, 2)
        backward(each)
        next(each.parameters()).grad = None
        its.step()
        train(each, its)
    assert_same(plain, model)
    leaver = next(iter(model.parameters()))
    moment = optimizer.state[leaver]["exp_avg"].to_local()
    del optimizer, reference
    moment = moment.untyped_storage()
    assert moment.resizable(), "no part of another storage"


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("way", ["data", "broadcast", "other steps"])
def test_counters_that_are_written_unseen_count(way: str) -> None:
    (plain, reference), (model, optimizer) = both(torch.optim.AdamW, lr=0.1, foreach=True)
    for each, its in ((plain, reference), (model, optimizer)):
        train(each, its, 3)
        if way == "other steps" and each is model:
            fsdp2.optim.set_local_steps(False)
            train(each, its)
            fsdp2.optim.set_local_steps(True)
        elif way == "other steps":
            train(each, its)
        else:
            for state in its.state.values():
                zero = torch.zeros(())
                if way == "broadcast":
                    state["step"].copy_(zero) if each is plain else state["step"].data.copy_(zero)
                else:
                    state["step"].data.zero_()
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
        train(each, its, 2)
    assert_same(plain, model)
    counts = {float(state["step"]) for state in optimizer.state.values()}
    assert counts == {6.0 if way == "other steps" else 2.0}


class SetsData(torch.optim.Optimizer):
    """As many older optimizers are written."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


@multi_rank(2)
@pytest.mark.parametrize("way", ["local", "flat", "owners"])
def test_a_step_that_sets_data_trains(way: str) -> None:
    plain = layers()
    mesh = init_device_mesh("cpu", (2,))
    placing = {}
    model = layers()
    if way == "owners":
        placing = {"shard_placement_fn": balanced_owners([p for p in model.parameters() if p.dim() == 2], mesh)}
    fully_shard(model, mesh=mesh, **placing)
    params: Any = [p for p in model.parameters() if p.dim() == 2]
    if way == "owners":
        optimizer: Any = SetsData(params)
    else:
        optimizer = fsdp2.optim.local(SetsData, params, elementwise=True, flat=way == "flat")
    reference = SetsData([p for p in plain.parameters() if p.dim() == 2])
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            backward(each, step)
        reference.step()
        step_on_owners(optimizer) if way == "owners" else optimizer.step()
    assert_same(plain, model)


@multi_rank(2)
def test_an_error_inside_of_a_step_steps_once() -> None:
    _, (model, optimizer) = both(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
    train(model, optimizer, 1)
    backward(model, 1)
    first, *_, last = model.parameters()
    before = first.full_tensor()
    state = optimizer.state[last]
    state["momentum_buffer"] = 0
    gradient = first.grad.full_tensor()
    momentum_before = optimizer.state[first]["momentum_buffer"].full_tensor()
    with pytest.raises(AttributeError):
        optimizer.step()
    stepped = before - 0.1 * (0.9 * momentum_before + gradient)
    found = first.full_tensor()
    assert torch.equal(found, before) or torch.allclose(found, stepped)


@multi_rank(2)
def test_hooks_of_steps_see_the_groups() -> None:
    (plain, reference), (model, optimizer) = both(torch.optim.AdamW, lr=0.1)
    seen: list[int] = []

    def look(stepping: Any, args: Any, kwargs: Any) -> None:
        for parameter in stepping.param_groups[0]["params"] if stepping is optimizer else ():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            assert all(isinstance(stepping.state[parameter][name], DTensor) for name in ("exp_avg",) if stepping.state)
        seen.append(sum(len(group["params"]) for group in args[0].param_groups))

    for its in (reference, optimizer):
        its.register_step_pre_hook(look)
        its.register_step_post_hook(look)
    for each, its in ((plain, reference), (model, optimizer)):
        train(each, its, 2)
    assert seen == [6] * 8
    assert_same(plain, model)


@multi_rank(2)
def test_what_the_state_has_beside_that_of_parameters_is_the_programs() -> None:
    _, (model, optimizer) = both(torch.optim.AdamW, lr=0.1, foreach=True)
    for epoch in range(1000, 1004):
        optimizer.state["epoch"] = epoch
        train(model, optimizer)
        assert optimizer.state["epoch"] == epoch


@pytest.mark.full
@multi_rank(2)
def test_state_that_a_program_holds_stays_the_optimizers() -> None:
    """As torch's: a dict of it that was made once is saved in every epoch."""
    _, (model, optimizer) = both(torch.optim.AdamW, lr=0.1, foreach=True)
    train(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    held = {index: state["exp_avg"] for index, state in optimizer.state_dict()["state"].items()}
    train(model, optimizer, 3)
    for index, state in optimizer.state_dict()["state"].items():
        assert torch.equal(held[index].full_tensor(), state["exp_avg"].full_tensor())


@pytest.mark.full
@multi_rank(2)
def test_runs_are_made_though_the_first_step_had_other_gradients() -> None:
    (plain, reference), (model, optimizer) = both(torch.optim.AdamW, lr=0.1, foreach=True)
    for each, its in ((plain, reference), (model, optimizer)):
        backward(each)
        its.zero_grad()
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
        its.step()
        train(each, its, 3)
    assert_same(plain, model)
    locals_ = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    ends = {each.data_ptr() + each.nbytes for each in locals_}
    assert sum(each.data_ptr() in ends for each in locals_) >= 4, "one lies behind the other"


@multi_rank(2)
def test_an_optimizer_that_is_given_other_parameters_trains_them() -> None:
    model = layers()
    first, second = [*model[0].parameters()], [*model[1].parameters()]
    fully_shard(model)
    optimizer = torch.optim.SGD(first, lr=0.1)
    train(model, optimizer)
    optimizer.param_groups[0]["params"] = list(second)
    before = [parameter.full_tensor() for parameter in model.parameters()]
    train(model, optimizer)
    changed = [
        not torch.equal(one, parameter.full_tensor()) for one, parameter in zip(before, model.parameters(), strict=True)
    ]
    assert changed == [False, False, True, True, False, False]


@multi_rank(2)
@pytest.mark.parametrize("closure", ["none", "positional", "keyword"])
@pytest.mark.every_combination
def test_a_hook_that_raises_after_a_step_hides_no_write(closure: str) -> None:
    (plain, reference), (model, optimizer) = both(torch.optim.AdamW, lr=0.1, foreach=True)
    model.set_reshard_after_backward(False)
    for each, its in ((plain, reference), (model, optimizer)):
        train(each, its)
        its.zero_grad()
        handle = its.register_step_post_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            if closure == "none":
                backward(each, 1)
                its.step()
            elif closure == "positional":
                its.step(lambda each=each: backward(each, 1))
            else:
                its.step(closure=lambda each=each: backward(each, 1))
        handle.remove()
    x = torch.ones(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


@multi_rank(2)
def test_steps_on_owners_count_as_writes() -> None:
    """Parameters that stay unsharded are gathered anew."""
    plain, model = layers(), layers()
    mesh = init_device_mesh("cpu", (2,))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    fully_shard(model, mesh=mesh, shard_placement_fn=balanced_owners(matrices, mesh))
    model.set_reshard_after_backward(False)
    optimizer = momentum([p for p in model.parameters() if p.dim() == 2])
    reference = momentum([p for p in plain.parameters() if p.dim() == 2])
    for step in range(3):
        for each in (plain, model):
            backward(each, step)
        reference.step()
        step_on_owners(optimizer)
        reference.zero_grad()
        optimizer.zero_grad()
    model.reshard()
    assert_same(plain, model)


@multi_rank(2)
def test_a_closure_may_run_the_backward_alone() -> None:
    (plain, reference), (model, optimizer) = both(torch.optim.AdamW, lr=0.1)
    for each, its in ((plain, reference), (model, optimizer)):
        for step in range(2):
            loss = each(torch.full((2, 8), float(step))).square().sum()

            def closure(its: Any = its, loss: torch.Tensor = loss) -> float:
                its.zero_grad()
                loss.backward()
                return float(loss.detach())

            its.step(closure)
    assert_same(plain, model)


class TwoNumbers(nn.Module):
    """A layer between a scale and a shift, which have no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.shift


@multi_rank(1, 2)
@pytest.mark.parametrize("way", ["made with its state", "stepped before"])
def test_state_from_before_of_parameters_without_dims(way: str, world_size: int) -> None:
    """Its counters are one number for a parameter, as the parameter is."""
    model, plain = TwoNumbers(), TwoNumbers()
    plain.load_state_dict(model.state_dict())
    make = torch.optim.Adagrad if way == "made with its state" else torch.optim.AdamW
    made = [make(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(4):
        if step == (0 if way == "made with its state" else 2):
            fully_shard(model)
        for each, optimizer in zip((model, plain), made, strict=True):
            each(torch.linspace(-1, step, 8).view(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other.data)


@multi_rank(2)
def test_a_run_that_is_laid_out_anew_takes_its_state_along() -> None:
    """Alignment counts elements of another dtype then."""
    model = nn.Sequential(nn.Linear(19, 8, bias=False), nn.Linear(19, 8, bias=False))
    model.forward = lambda x: model[0](x) * model[1](x)  # type: ignore[method-assign, assignment]
    fully_shard(model)
    optimizer = fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9, flat=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        model(torch.ones(2, 19, dtype=dtype)).square().sum().backward()
        before = [each.full_tensor().clone() for each in model.parameters()]  # type: ignore[attr-defined]
        optimizer.step()
        for old, each in zip(before, model.parameters(), strict=True):
            assert not torch.equal(each.full_tensor(), old), "it was stepped on"  # type: ignore[attr-defined]
        optimizer.zero_grad()


@multi_rank(1, 2)
@pytest.mark.parametrize("frozen", [slice(None), slice(1)], ids=["all", "some"])
def test_models_that_are_frozen_in_turns_train_and_copy_no_state(frozen: slice, world_size: int) -> None:
    """As where two of them play against each other. An optimizer's state lies where it lay the step before."""

    def build(sharded: bool) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        models: list[nn.Module] = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)]
        if sharded:
            models = [fully_shard(each) for each in models]
        return models, [torch.optim.AdamW(each.parameters(), lr=0.1) for each in models]

    def losses(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Iterator[float]:
        maker, judge = models
        for step in range(4):
            inputs = torch.linspace(-1, step, 8).view(2, 4)
            for each in list(judge.parameters())[frozen]:
                each.requires_grad_(False)
            judge(maker(inputs)).square().sum().backward()
            optimizers[0].step()
            for each in judge.parameters():
                each.requires_grad_(True)
                each.grad = None
            loss = judge(maker(inputs).detach()).sin().sum()
            loss.backward()
            optimizers[1].step()
            for each in models:
                each.zero_grad()
            yield loss.item()

    models, optimizers = build(sharded=True)
    places: list[list[int]] = []
    for loss, expected in zip(losses(models, optimizers), losses(*build(sharded=False)), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        states = [state for each in optimizers for state in each.state.values()]
        places.append([state[name].to_local().data_ptr() for state in states for name in ("exp_avg", "exp_avg_sq")])
    assert places[1] == places[2] == places[3]


@multi_rank(1, 2)
@pytest.mark.parametrize("kernel", [{}, {"foreach": True}, {"fused": True}, {"flat": True}, {"flat": False}], ids=str)
@pytest.mark.parametrize("keeps", [False, True], ids=["cleared", "kept"])
def test_parameters_are_frozen_and_thawed_while_one_optimizer_steps(
    kernel: dict[str, bool], keeps: bool, world_size: int
) -> None:
    """As where layers are unfrozen one by one. A gradient that is ``kept`` is stepped with when frozen, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    model = fully_shard(copy.deepcopy(plain))
    local: Any = partial(fsdp2.optim.local, torch.optim.AdamW) if "flat" in kernel else torch.optim.AdamW
    made = [local(model.parameters(), lr=0.1, **kernel)]
    made += [torch.optim.AdamW(plain.parameters(), lr=0.1, **({} if "flat" in kernel else kernel))]
    for step, frozen in enumerate([(), (0,), (0, 1, 2), (2, 5), (), (), range(5), ()]):
        for each, optimizer in zip((model, plain), made, strict=True):
            for index, parameter in enumerate(each.parameters()):
                parameter.requires_grad_(index not in frozen)
            each(torch.linspace(-1, step, 8).view(2, 4)).square().sum().backward()
            optimizer.step()
            if not (keeps and step % 2):
                optimizer.zero_grad()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other.detach())  # type: ignore[attr-defined]
            state, expected = made[0].state[one], made[1].state[other]
            assert state["step"] == expected["step"]
            torch.testing.assert_close(state["exp_avg"].full_tensor(), expected["exp_avg"])


class Branches(nn.Module):
    """Two layers, of which only ranks that want it use the second."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        once = self.always(x).square().sum()
        return once + self.sometimes(x).sum() if both else once


@multi_rank(2)
@pytest.mark.parametrize("offloads", [False, True])
def test_a_default_device_is_not_where_the_engine_takes_memory(offloads: bool, world_size: int) -> None:
    """Mixed precision, a parameter that one rank does not use, clipping: as without."""
    found = []
    inputs = torch.ones(2, 4)
    for device in (None, "meta"):
        torch.manual_seed(0)
        model = Branches()
        offload = fsdp2.CPUOffloadPolicy() if offloads else fsdp2.OffloadPolicy()
        policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        torch.set_default_device(device)
        try:
            fully_shard(model, mp_policy=policy, offload_policy=offload)
            optimizer = momentum(model.parameters())
            for _ in range(2):
                model(inputs, dist.get_rank() == 0).backward()
                torch_clipping.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_default_device(None)
        found.append([each.full_tensor() for each in model.parameters()])  # type: ignore[attr-defined]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@multi_rank(2)
def test_a_closure_brings_the_gradients_of_its_step() -> None:
    """What waits before it is called is reduced with its backward, and nothing is said of it; what it leaves is."""
    GUARD._has_warned = False
    (plain, reference), (model, optimizer) = both(torch.optim.SGD, lr=0.1)
    for each, its in ((plain, reference), (model, optimizer)):
        if each is model:
            model.set_requires_gradient_sync(False)
        backward(each, 0)
        if each is model:
            model.set_requires_gradient_sync(True)
        its.step(lambda each=each: backward(each, 1))
    assert not GUARD._has_warned
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach())
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    optimizer.step(lambda: backward(model, 2))
    assert GUARD._has_warned
    GUARD._has_warned = False
