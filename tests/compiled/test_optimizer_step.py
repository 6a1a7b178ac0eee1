"""`torch.compile(optimizer.step)` on sharded parameters, and of `fsdp2.optim.local`.

Adam(W) in a graph computes its bias corrections in tensors (it is ``capturable`` there), where eager uses Python's
numbers: not the same bits, with plain tensors either. So its steps are held bit for bit against torch's own compiled
step on plain tensors, and closely against eager; SGD's bit for bit against both.
"""

from __future__ import annotations

import copy
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPNotImplementedError, FSDPRuntimeError, MixedPrecisionPolicy, fully_shard
from tests.compiled.helpers.models import WIDTH, batch_of, loss_of, multi_rank
from tests.compiled.helpers.twins import Graphs, assert_equal, mine
from tests.compiled.helpers.twins import compiling as compiling_models

STEPS = 4


class Uneven(nn.Module):
    """Uneven rows (11), a rank without rows (1), parameters without a gradient, one of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)
        self.one = nn.Parameter(torch.randn(1, WIDTH))
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(torch.tanh(self.up(x))) + x * self.one


@contextmanager
def compiling() -> Iterator[Graphs]:
    """As for models; importing inductor, as tracing an optimizer may, warns."""
    with compiling_models() as graphs, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield graphs


def build() -> Uneven:
    torch.manual_seed(0)
    return Uneven()


def shard(model: Uneven, **arguments: Any) -> Uneven:
    for module in (model.up, model.down, model):
        fully_shard(module, **arguments)
    return model


def adamw(params: Any, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, **arguments})


def single(params: Any, **arguments: Any) -> torch.optim.Optimizer:
    return adamw(params, foreach=False, **arguments)


def foreach(params: Any, **arguments: Any) -> torch.optim.Optimizer:
    return adamw(params, foreach=True, **arguments)


def sgd(params: Any, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=True, **arguments)


def local(params: Any, **arguments: Any) -> torch.optim.Optimizer:
    arguments = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "foreach": True, **arguments}
    return fsdp2.optim.local(torch.optim.AdamW, params, **arguments)


def flat(params: Any, **arguments: Any) -> torch.optim.Optimizer:
    return local(params, flat=True, **arguments)


PLAIN = {local: foreach, flat: foreach}
"""What makes the same of plain tensors, if it is not what makes it of DTensors."""


def beside_reference(make: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    """A sharded model and its optimizer by ``make``, and an unsharded model with the same optimizer."""
    model, unsharded = shard(build()), build()
    return model, make([*model.parameters()]), unsharded, PLAIN.get(make, make)([*unsharded.parameters()])


def plain_twin(model: nn.Module) -> list[nn.Parameter]:
    """This rank's shards as plain parameters."""
    return [nn.Parameter(param.detach().to_local().clone()) for param in model.parameters()]  # type: ignore[attr-defined]


def copy_gradients(model: nn.Module, twin: list[nn.Parameter]) -> None:
    for param, plain in zip(model.parameters(), twin, strict=True):
        gradient = mine(param.grad)
        plain.grad = None if gradient is None else gradient.clone()


def reference_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Of a single process: gradients averaged over the ranks' batches."""
    optimizer.zero_grad()
    size = dist.get_world_size()
    for rank in range(size):
        (loss_of(model(batch_of(number, rank))) / size).backward()
    optimizer.step()


def assert_like_reference(model: nn.Module, reference: nn.Module) -> None:
    for (name, found), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], number: int, called: Any = None
) -> None:
    optimizer.zero_grad()
    loss_of((model if called is None else called)(batch_of(number, dist.get_rank()))).backward()
    step()


@multi_rank(2)
@pytest.mark.full  # 5 to 10 s each
@pytest.mark.parametrize("make", [foreach, local, flat, single, sgd])
@pytest.mark.parametrize("captured", [False, True])
def test_steps_like_eager(make: Any, captured: bool) -> None:
    make_plain = PLAIN.get(make, make)
    with compiling() as graphs:
        model, eager, unsharded = shard(build()), shard(build()), build()
        twin = plain_twin(model)
        optimizer, of_eager, of_unsharded = (
            make([*each.parameters()]) if each is not unsharded else make_plain([*each.parameters()])
            for each in (model, eager, unsharded)
        )
        of_twin = make_plain(twin)
        step = torch.compile(optimizer.step, backend=graphs.backend())
        step_of_twin = torch.compile(of_twin.step, backend="aot_eager")
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if captured else model
        for number in range(STEPS):
            train(model, optimizer, lambda: (copy_gradients(model, twin), step()), number, called)
            step_of_twin()
            train(eager, of_eager, of_eager.step, number)
            reference_step(unsharded, of_unsharded, number)
            for (name, found), plain, like in zip(model.named_parameters(), twin, eager.parameters(), strict=True):
                what = f"{name} after step {number}"
                assert_equal(what, mine(found.detach()), plain.detach())
                exact = make is sgd and not captured
                assert_equal(what, mine(found.detach()), mine(like.detach()), 0.0 if exact else 1e-6)
        assert_like_reference(model, unsharded)
        assert len(graphs.forward) == (2 if make is sgd else 1)  # whose first step makes the momentum
        assert torch.equal(mine(model.unused.weight), build_part(model.unused.weight))
        assert of_eager.param_groups[0].keys() == optimizer.param_groups[0].keys()


def build_part(parameter: Tensor) -> Tensor:
    """What this rank has of ``unused.weight`` before training: no gradient, hence no weight decay."""
    assert isinstance(parameter, DTensor)
    whole = build().unused.weight.detach()
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


@multi_rank(2)
@pytest.mark.full  # 3 s each
@pytest.mark.parametrize("make", [adamw, local])
def test_a_learning_rate_that_is_a_tensor_is_scheduled_without_compiling_anew(make: Any) -> None:
    with compiling() as graphs:
        model, unsharded = shard(build()), build()
        # torch takes no tensor for foreach
        optimizer = make([*model.parameters()], lr=torch.tensor(1e-2), foreach=None)
        of_unsharded = foreach([*unsharded.parameters()])
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, of_unsharded)]
        step = torch.compile(optimizer.step, backend=graphs.backend())
        for number in range(STEPS):
            train(model, optimizer, step, number)
            reference_step(unsharded, of_unsharded, number)
            for schedule in schedules:
                schedule.step()
        assert_like_reference(model, unsharded)
        assert len(graphs.forward) == 1


@multi_rank(2)
@pytest.mark.full  # 3 s each
@pytest.mark.parametrize("make", [sgd, local])
def test_functions_that_step_and_clear(make: Any) -> None:
    with compiling() as graphs:
        model, optimizer, unsharded, of_unsharded = beside_reference(make)

        @torch.compile(backend=graphs.backend())
        def step() -> None:
            with torch.no_grad():
                optimizer.step()
                optimizer.zero_grad()

        for number in range(STEPS):
            train(model, optimizer, step, number)
            assert all(param.grad is None for param in model.parameters())
            reference_step(unsharded, of_unsharded, number)
        assert_like_reference(model, unsharded)


@multi_rank(2)
@pytest.mark.full  # 3 s each
@pytest.mark.parametrize("make", [sgd, local])
def test_closures(make: Any) -> None:
    with compiling() as graphs:
        model, optimizer, unsharded, of_unsharded = beside_reference(make)
        step = torch.compile(optimizer.step, backend=graphs.backend())
        for number in range(3):

            def closure(number: int = number) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(batch_of(number, dist.get_rank())))
                loss.backward()
                return loss

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss = step(closure)
            assert loss.item() > 0
            reference_step(unsharded, of_unsharded, number)
        assert_like_reference(model, unsharded)


@multi_rank(2)
def test_gradients_are_what_they_were() -> None:
    """While a step is traced others stand in for them; their buffer is used again, and they can be saved."""
    with compiling() as graphs:
        model = shard(build())
        optimizer = foreach([*model.parameters()])
        step = torch.compile(optimizer.step, backend=graphs.backend())
        found = []
        for number in range(3):
            model.zero_grad()
            loss_of(model(batch_of(number, dist.get_rank()))).backward()
            before = [param.grad for param in model.parameters()]
            step()
            assert all(param.grad is gradient for param, gradient in zip(model.parameters(), before, strict=True))
            torch.save(before, io.BytesIO())
            found.append([id(each) for each in before if each is not None])
            del before
        assert found[0] == found[1] == found[2]


@multi_rank(2)
def test_the_guard_is_not_lost() -> None:
    with compiling() as graphs:
        model, unsharded = build(), build()
        optimizer = sgd([*model.parameters()])  # before fully_shard
        of_unsharded = sgd([*unsharded.parameters()])
        shard(model)
        step = torch.compile(optimizer.step, backend=graphs.backend())
        for number in range(2):
            train(model, optimizer, step, number)
            reference_step(unsharded, of_unsharded, number)
        assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
        assert_like_reference(model, unsharded)
        loss = loss_of(model(batch_of(0, dist.get_rank())))
        step()
        with pytest.raises(FSDPRuntimeError, match="changed between a forward and its backward"):
            loss.backward()
        copied = copy.deepcopy(sgd([*model.parameters()]))
        with pytest.raises(FSDPRuntimeError, match="train nothing"):
            torch.compile(copied.step, backend="aot_eager")()


@multi_rank(2)
@pytest.mark.parametrize("make", [sgd, local])
def test_offloaded_state_is_refused(make: Any) -> None:
    with compiling() as graphs:
        model = shard(build())
        optimizer = make([*model.parameters()])
        fsdp2.offload_optimizer_state(optimizer)
        with pytest.raises(FSDPNotImplementedError, match="whose state is offloaded"):
            train(model, optimizer, torch.compile(optimizer.step, backend=graphs.backend()), 0)
        train(model, optimizer, optimizer.step, 1)


@multi_rank(2)
@pytest.mark.full  # 3 s each
@pytest.mark.parametrize("make", [sgd, local])
def test_a_whole_graph_is_out_of_reach_as_in_torch(make: Any) -> None:
    with compiling():
        for model in (build(), shard(build())):
            optimizer = make([*model.parameters()])
            with pytest.raises(torch._dynamo.exc.Unsupported):
                train(model, optimizer, torch.compile(optimizer.step, backend="aot_eager", fullgraph=True), 0)


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_conversion_after_a_compiled_step() -> None:
    with compiling() as graphs:
        model = shard(build())
        optimizer = sgd([*model.parameters()])
        train(model, optimizer, torch.compile(optimizer.step, backend=graphs.backend()), 0)
        before = [param.detach().to_local().clone() for param in model.parameters()]  # type: ignore[attr-defined]
        with pytest.raises(FSDPRuntimeError, match=r"holds weak references to parameter 'up\.weight'"):
            model.double()
        for found, expected in zip(model.parameters(), before, strict=True):
            assert_equal("parameter", mine(found.detach()), expected)
        model = shard(build())
        optimizer = local([*model.parameters()])
        step = torch.compile(optimizer.step, backend=graphs.backend())
        train(model, optimizer, step, 0)
        model.double()
        optimizer = local([*model.parameters()])  # the state of the other is in the old dtype
        before = [param.detach().to_local().clone() for param in model.parameters()]  # type: ignore[attr-defined]
        loss_of(model(batch_of(1, dist.get_rank()).double())).backward()
        torch.compile(optimizer.step, backend=graphs.backend())()
        for param, unchanged in zip(model.parameters(), before, strict=True):
            found = mine(param.detach())
            assert found is not None and found.dtype is torch.float64
            assert not found.numel() or param.grad is None or not torch.equal(found, unchanged)


# Full: 20 s each when nothing else runs: a C++ compiler runs.
@multi_rank(2, timeout=900)
@pytest.mark.full
@pytest.mark.parametrize("make", [foreach, local, flat])
def test_generated_code(make: Any) -> None:
    with compiling(), tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        model, unsharded = shard(build()), build()
        optimizer, of_unsharded = make([*model.parameters()]), foreach([*unsharded.parameters()])
        step = torch.compile(optimizer.step)
        for number in range(3):
            train(model, optimizer, step, number)
            reference_step(unsharded, of_unsharded, number)
        assert_like_reference(model, unsharded)


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_any_compiled_function_takes_parameters_and_gradients(dtype: torch.dtype | None) -> None:
    """As optimizers of other projects compile their arithmetic for one parameter."""

    @torch.compile(backend="aot_eager", dynamic=False)
    def update(parameter: Tensor, gradient: Tensor, moment: Tensor) -> Tensor:
        moment = moment * 0.9 + gradient
        return parameter - 0.1 * moment

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.LayerNorm(7))
    for unit in (model[0], model):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    for _ in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            updated = update(parameter.detach(), gradient, torch.zeros_like(gradient))
            torch.testing.assert_close(updated.to_local(), (parameter - 0.1 * gradient).to_local())
        model.zero_grad()
