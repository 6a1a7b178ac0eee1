"""`torch.optim` optimizers of ordinary programs step on local shards: as through DTensor, bit by bit, and unnoticed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import FSDPTypeError, OptimizerStateOffload, fully_shard
from fsdp2.optim import set_local_steps
from tests.harness import fake_world, multi_rank
from tests.harness.compare import assert_same
from tests.harness.counting import python_calls
from tests.harness.models import Batch, ModelCase
from tests.harness.shared.optimizers import (
    EVERY_KIND,
    MakeOptimizer,
    Parameters,
    adamw_for_loop,
    adamw_foreach,
    adamw_fused,
    assert_states_same,
    loss_of,
    rmsprop,
    sgd_momentum,
    through_dtensor,
)
from tests.harness.shared.training import CASE, shard, trainable
from tests.harness.shared.whole_weights import peak_bytes
from tests.multi_rank.optimizers.helpers import FORMS, formed


def nadam(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=1e-2, foreach=True)


def asgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=1e-2, foreach=False)


def adam_with_tensor_lr(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-2), eps=1e-3, fused=True, amsgrad=True)


class CountsDispatch(TorchDispatchMode):
    """How many operations reach DTensors, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.on_dtensors = self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.on_dtensors += any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


def two_models(case: ModelCase = CASE) -> list[nn.Module]:
    return [shard(case), shard(case)]


def assert_alike(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Parameters, state and state dicts are the same, of the same kinds."""
    assert_same("parameters", *({n: p.to_local() for n, p in model.named_parameters()} for model in models))
    assert_states_same(*optimizers)


def step_and_clear(optimizers: list[torch.optim.Optimizer]) -> None:
    """The first steps as in an ordinary program, the second through DTensor."""
    optimizers[0].step()
    with through_dtensor():
        optimizers[1].step()
    for optimizer in optimizers:
        optimizer.zero_grad()


ROUND_ALIKE = [sgd_momentum, adamw_foreach, adamw_for_loop, rmsprop, nadam, asgd]
"""Wherever an element lies, which the kernels of others do not on a CPU."""
BITWISE = [(make, form) for form in ("plain", "each") for make in [*EVERY_KIND, nadam, asgd, adam_with_tensor_lr]]
BITWISE += [(make, "flat") for make in ROUND_ALIKE]


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(("make", "form"), BITWISE, ids=lambda value: getattr(value, "__name__", value))
def test_bit_by_bit_as_through_dtensor(make: MakeOptimizer, form: str) -> None:
    models = two_models()
    optimizers = [formed(form, make(trainable(models[0]))), make(trainable(models[1]))]
    for step in range(3):
        for model in models:
            loss_of(CASE, model, step).backward()
        step_and_clear(optimizers)
        assert_alike(models, optimizers)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("make", [adamw_foreach, adamw_fused], ids=lambda f: f.__name__)
def test_no_operation_of_a_step_is_on_dtensors(make: MakeOptimizer) -> None:
    """As many operations as of plain tensors, from the first step on; fewer on runs, once their state is shown."""
    model = shard()
    optimizer = make(trainable(model))
    twin = make([nn.Parameter(p.to_local().detach().clone()) for p in trainable(model)])
    for step in range(3):
        loss_of(CASE, model, step).backward()
        for mine, other in zip(trainable(model), twin.param_groups[0]["params"], strict=True):
            other.grad = mine.grad.to_local().clone()
        with CountsDispatch() as counted:
            optimizer.step()
        with CountsDispatch() as expected:
            twin.step()
        assert counted.on_dtensors == 0
        if step == 2:  # of a kernel for all, runs save no operation: a slice for each of two, and two for the counters
            assert counted.all <= expected.all + (4 if make is adamw_fused else 0)
        optimizer.zero_grad()


def calls_beyond_plain_tensors(layers: int, **options: object) -> int:
    """Python calls of one step of AdamW in steady state, less those of a step on plain tensors."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
    twin = torch.optim.AdamW(plain, **options)
    for _ in range(2):
        model(torch.zeros(2, 4)).sum().backward()
        for parameter in plain:
            parameter.grad = torch.zeros_like(parameter)
        counts = [python_calls(each.step) for each in (optimizer, twin)]
    return counts[0] - counts[1]


@pytest.mark.full
def test_a_step_costs_next_to_nothing_beyond_plain_tensors() -> None:
    with fake_world(2):
        few, many = calls_beyond_plain_tensors(2, fused=True), calls_beyond_plain_tensors(40, fused=True)
        in_runs = calls_beyond_plain_tensors(40, foreach=True)
    assert few == many, "the same for 4 and for 80 parameters"
    assert few <= 160  # 118 with torch 2.13
    assert in_runs < -1000, "two runs take the place of 80 parameters"


def _partly_vectors() -> nn.Module:
    """Matrices that leave nothing over in a vector, one that does (and lies behind), and biases that do."""
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 20), nn.Tanh(), nn.Linear(20, 5))


PARTLY_VECTORS = ModelCase(
    "partly-vectors",
    _partly_vectors,
    lambda g: Batch(torch.randn(4, 16, generator=g), torch.randn(4, 5, generator=g)),
    (),
    nn.functional.mse_loss,
)


def fused_sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)


def fused_adagrad(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2, fused=True)


class CountsFused(TorchDispatchMode):
    """On how many tensors fused operators are called."""

    tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("aten::_fused_"):
            self.tensors += len(args[0])
        return func(*args, **(kwargs or {}))


BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.full)  # 4 s


@multi_rank(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("make", [adamw_fused, adam_with_tensor_lr, fused_sgd, fused_adagrad], ids=lambda f: f.__name__)
def test_fused_steps_take_together_what_fills_vectors(make: MakeOptimizer, dtype: torch.dtype) -> None:
    """The bits are those of torch's optimizer on each shard by itself. (DTensor knows two of these operators only.)"""
    model = PARTLY_VECTORS.build().to(dtype)
    fully_shard(model)
    optimizer = make(list(model.parameters()))
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
    twin = make(plain)
    for step in range(4):
        inputs, targets = (each.to(dtype) for each in dataclasses.astuple(PARTLY_VECTORS.batch(0, step, 0)))
        nn.functional.mse_loss(model(inputs), targets).backward()
        for mine, other in zip(model.parameters(), plain, strict=True):
            other.grad = mine.grad.to_local().clone()
        with CountsFused() as counted:
            optimizer.step()
        twin.step()
        # Whether shards of 96 bytes leave something over depends on the width of this processor's vectors.
        may_leave_over = dtype == torch.bfloat16 and dist.get_world_size() == 3
        assert counted.tensors == 5 or (may_leave_over and counted.tensors == 6)
        names = [name for name, _ in model.named_parameters()]
        shards = [parameter.to_local() for parameter in model.parameters()]
        assert_same("shards", *(dict(zip(names, each, strict=True)) for each in (shards, plain)))
        optimizer.zero_grad()


class UnevenRooms(nn.Module):
    """On the second of two ranks both shards fill vectors; the room of the first, which is for 80 bytes, does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(9, 4))
        self.b = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a.T).tanh().sum() + (x @ self.b.T).tanh().sum()


@pytest.mark.full
@multi_rank(2)
def test_fused_steps_look_at_the_room_of_what_is_ahead() -> None:
    torch.manual_seed(0)
    model = UnevenRooms()
    fully_shard(model)
    optimizer = fused_sgd(list(model.parameters()))
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
    twin = fused_sgd(plain)
    for step in range(30):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).backward()
        for mine, other in zip(model.parameters(), plain, strict=True):
            other.grad = mine.grad.to_local().clone()
        optimizer.step()
        twin.step()
        for mine, other in zip(model.parameters(), plain, strict=True):
            assert torch.equal(mine.to_local(), other), step
        optimizer.zero_grad()


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("make", [adamw_foreach, adamw_fused], ids=lambda f: f.__name__)
@pytest.mark.parametrize("failing_step", [0, 2])
def test_a_step_that_raises_in_its_second_group(make: MakeOptimizer, failing_step: int) -> None:
    """The first has been stepped on, and its state says so."""
    models = two_models(PARTLY_VECTORS)
    optimizers = [
        make([{"params": [p for p in model.parameters() if (p.ndim > 1) == matrices]} for matrices in (True, False)])
        for model in models
    ]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(PARTLY_VECTORS, model, step).backward()
            with through_dtensor() if optimizer is optimizers[1] else contextlib.nullcontext():
                if step == failing_step:
                    right = optimizer.param_groups[1].pop("betas")
                    with pytest.raises(KeyError, match="betas"):
                        optimizer.step()
                    optimizer.param_groups[1]["betas"] = right
                else:
                    optimizer.step()
            optimizer.zero_grad()
        assert_alike(models, optimizers)


@pytest.mark.full
@multi_rank(2)
def test_fused_steps_of_a_gradient_scaler_take_together_what_fills_vectors() -> None:
    """It unscales inside of the kernel, and skips an infinity of one rank."""
    models = two_models(PARTLY_VECTORS)
    optimizers = [adamw_fused(list(model.parameters())) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in models]
    for step in range(4):
        for model, scaler in zip(models, scalers, strict=True):
            factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
            scaler.scale(loss_of(PARTLY_VECTORS, model, step) * factor).backward()
        with CountsFused() as counted:
            scalers[0].step(optimizers[0])
        assert counted.tensors in ((0, 5) if step == 1 else (5,))
        with through_dtensor():
            scalers[1].step(optimizers[1])
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.update()
            optimizer.zero_grad()
        assert_alike(models, optimizers)


@pytest.mark.full
@multi_rank(2)
def test_an_optimizer_that_becomes_fused_takes_together_only_what_fills_vectors() -> None:
    """As a program may that loads groups of another, and back."""
    models = two_models(PARTLY_VECTORS)
    optimizers = [adamw_foreach(list(model.parameters())) for model in models]
    for step in range(6):
        is_fused = step in (2, 3)
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(PARTLY_VECTORS, model, step).backward()
            optimizer.param_groups[0].update(fused=is_fused, foreach=not is_fused)
        with CountsFused() as counted:
            optimizers[0].step()
        assert counted.tensors == (5 if is_fused else 0)
        with through_dtensor():
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_alike(models, optimizers)


@pytest.mark.full
@multi_rank(2, 4)
@FORMS
@pytest.mark.parametrize("make", [adamw_foreach, sgd_momentum], ids=lambda f: f.__name__)
def test_gradients_that_are_missing_now_and_then(make: MakeOptimizer, form: str) -> None:
    """Runs are made anew where they break, and after some times there are none: as through DTensor all the time."""
    models = two_models()
    optimizers = [make(trainable(model)) for model in models]
    optimizers[0] = formed(form, optimizers[0])
    for step in range(8):
        for model in models:
            loss_of(CASE, model, step).backward()
            for index, parameter in enumerate(trainable(model)):
                if (step in (1, 3, 4, 6) and index % 3 == step % 3) or step == 5:
                    parameter.grad = None
        step_and_clear(optimizers)
        assert_alike(models, optimizers)


@pytest.mark.full
@multi_rank(2)
def test_a_load_holds_no_second_copy_of_the_state() -> None:
    """Run by run what was loaded is let go of as it is copied."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.zeros(2, 256)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    loaded = [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    nbytes = sum(each.nbytes for each in loaded)
    peak = peak_bytes(optimizer.step, (loaded.pop() for _ in range(len(loaded))))
    assert nbytes <= peak <= 1.7 * nbytes, "one copy, one of a run of eight, and what the arithmetic takes"


class Boom(Exception):
    """What the tests throw."""


@multi_rank(2)
@FORMS
def test_an_exception_in_a_step_leaves_everything_in_its_place(form: str) -> None:
    model = shard()
    optimizer = formed(form, adamw_foreach(trainable(model)))
    params = list(optimizer.param_groups[0]["params"])

    class Throws(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "foreach" in str(func):
                raise Boom
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        loss_of(CASE, model).backward()
        with Throws(), pytest.raises(Boom):
            optimizer.step()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
        assert all(isinstance(key, DTensor) for key in optimizer.state)
        assert all(p.grad is not None and p._local_tensor.grad is None for p in params)
        optimizer.step()
        optimizer.zero_grad()
        assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())


@multi_rank(2)
@FORMS
@pytest.mark.parametrize("how", ["load", "clear", "replace", "write", "add"])
def test_state_that_programs_change_between_steps(how: str, form: str) -> None:
    models = two_models()
    optimizers = [adamw_foreach(trainable(model)) for model in models]
    optimizers[0] = formed(form, optimizers[0])

    def step(index: int) -> None:
        for model in models:
            loss_of(CASE, model, index).backward()
        step_and_clear(optimizers)

    step(0)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    step(1)
    for model, optimizer, state in zip(models, optimizers, saved, strict=True):
        if how == "load":
            optimizer.load_state_dict(state)
        elif how == "clear":
            optimizer.state.clear()
        elif how == "replace":
            for each in optimizer.state.values():
                each["exp_avg"] = each["exp_avg"] * 2
        elif how == "write":
            for each in optimizer.state.values():
                each["exp_avg"].mul_(2)
                each["step"] += 1
        else:
            added = nn.Parameter(distribute_tensor(torch.ones(6), next(model.parameters()).device_mesh, [Shard(0)]))
            added.grad = torch.ones_like(added)
            optimizer.add_param_group({"params": [added], "lr": 0.5})
    step(2)
    assert_alike(models, optimizers)
    step(3)
    assert_alike(models, optimizers)


@pytest.mark.full
@multi_rank(2)
def test_nothing_that_was_given_up_is_kept() -> None:
    """State that is cleared or loaded anew, and optimizers, go at once."""
    model = shard()
    optimizer = adamw_foreach(trainable(model))
    loss_of(CASE, model).backward()
    optimizer.step()

    def locals_of(optimizer: torch.optim.Optimizer) -> list[weakref.ref[Any]]:
        return [weakref.ref(state["exp_avg"]._local_tensor) for state in optimizer.state.values()]

    gc.disable()
    try:
        gone = locals_of(optimizer)
        optimizer.state.clear()
        assert all(each() is None for each in gone)
        optimizer.step()
        gone, saved = locals_of(optimizer), copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        del saved
        assert all(each() is None for each in gone)
        optimizer.step()
        gone = [weakref.ref(optimizer), *locals_of(optimizer)]
        del optimizer
        assert all(each() is None for each in gone)
    finally:
        gc.enable()


class Scaled(torch.optim.AdamW):
    """Computes otherwise: gathers twice the gradients."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for parameter in group["params"]:
            assert isinstance(parameter, DTensor), "as it was written for"
        return super()._init_group(group, *lists)


class Named(torch.optim.AdamW):
    """Changes nothing of a step."""

    def describe(self) -> str:
        return "mine"


@multi_rank(2)
def test_what_goes_the_old_way() -> None:
    def steps_on_dtensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
        model.zero_grad()
        loss_of(CASE, model).backward()
        with CountsDispatch() as counted:
            optimizer.step()
        return counted.on_dtensors > 0

    model = shard()
    assert steps_on_dtensors(Scaled(trainable(model), lr=1e-3), model)
    assert not steps_on_dtensors(Named(trainable(model), lr=1e-3), model)
    assert not steps_on_dtensors(fsdp2.optim.local(torch.optim.AdamW, trainable(model), lr=1e-3), model)
    with through_dtensor():
        assert steps_on_dtensors(torch.optim.AdamW(trainable(model), lr=1e-3), model)
    optimizer = torch.optim.SGD(trainable(model), lr=1e-3)
    assert not steps_on_dtensors(optimizer, model)
    for parameter in trainable(model):  # whole on every rank: DTensor has its own word on that
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    before = [parameter.full_tensor() for parameter in trainable(model)]
    gradients = [parameter.grad.to_local() for parameter in trainable(model)]
    try:
        optimizer.step()
    except RuntimeError as error:  # up to torch 2.11 it takes this rank's rows of the gradient
        assert "placement" in str(error) and not isinstance(error, fsdp2.FSDPError)
        assert not isinstance(error.__context__, fsdp2.FSDPError)
        return
    for parameter, value, gradient in zip(trainable(model), before, gradients, strict=True):
        assert torch.equal(parameter.full_tensor(), torch.add(value, gradient, alpha=-1e-3))


@multi_rank(2)
def test_state_that_is_offloaded_later() -> None:
    models = two_models()
    optimizers = [adamw_foreach(trainable(model)) for model in models]
    for step in range(4):
        for model in models:
            loss_of(CASE, model, step).backward()
        step_and_clear(optimizers)
        if step == 1:
            offload = OptimizerStateOffload(optimizers[0], lambda parameter: True, pin_memory=False)
        if step == 2:
            offload.remove()
    assert_alike(models, optimizers)


def test_the_switch_takes_a_bool() -> None:
    with pytest.raises(FSDPTypeError, match="enabled"):
        set_local_steps("no")  # type: ignore[arg-type]
