"""`fsdp2.optim.local` without ranks: what it takes and refuses, what it makes, and what a step of it costs."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from benchmarks.counts import LocalDispatchMode, OperationCounter, PythonCallCounter
from benchmarks.implementations import fake_process_group
from benchmarks.models import small_parameters
from benchmarks.optimizers import FLAT, LOCAL, PLAIN, Parameters, optimizer_of, parameters_of
from fsdp2 import FSDPNotImplementedError, FSDPTypeError
from tests.harness.shared.optimizers import number_of_runs
from tests.unit.helpers import for_each


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of a fake process group of 4 ranks."""
    with fake_process_group(4) as made:
        yield made


def parameters() -> Parameters:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


class Mine(torch.optim.Optimizer):
    """Sign descent, of which nobody knows that it is elementwise."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sign"] = parameter.grad.sign()
                    self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Warm(torch.optim.AdamW):
    """Derived from an elementwise one, with its step."""


class Stepping(torch.optim.AdamW):
    """Derived from an elementwise one, with a step of its own."""

    def step(self, closure: object = None) -> None:
        """Does something else."""


# ---- what it takes -------------------------------------------------------------------------------


@for_each(
    ("kind", "why"),
    [
        (torch.optim.LBFGS, "LBFGS takes inner products over all parameters"),
        (torch.optim.Adafactor, "Adafactor keeps sums over the rows and columns"),
        (torch.optim.Muon, "Muon orthogonalizes whole matrices"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (Mine, r"nothing is known of .*Mine.*elementwise=True"),
        (Stepping, r"nothing is known of .*Stepping.*elementwise=True"),
    ],
)
def test_others_are_refused(kind: type[torch.optim.Optimizer], why: str) -> None:
    with pytest.raises(FSDPNotImplementedError, match=why):
        fsdp2.optim.local(kind, parameters())


@for_each("wrong", [torch.optim.AdamW(parameters()), "AdamW", nn.Linear, None])
def test_only_classes_of_optimizers_are_taken(wrong: object) -> None:
    with pytest.raises(FSDPTypeError, match=r"takes a class of torch\.optim\.Optimizer"):
        fsdp2.optim.local(wrong, parameters())  # type: ignore[type-var]


def test_differentiable_steps_are_refused() -> None:
    with pytest.raises(FSDPNotImplementedError, match="differentiable=True"):
        fsdp2.optim.local(torch.optim.AdamW, parameters(), differentiable=True)
    first, second = parameters()
    optimizer = fsdp2.optim.local(torch.optim.SGD, [first], lr=0.1)
    with pytest.raises(FSDPNotImplementedError, match="differentiable=True"):
        optimizer.add_param_group({"params": [second], "differentiable": True})
    assert len(optimizer.param_groups) == 1


def test_the_class_is_derived_and_made_once() -> None:
    optimizer = fsdp2.optim.local(Warm, parameters(), lr=0.5)
    assert isinstance(optimizer, Warm) and isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer) is type(fsdp2.optim.local(Warm, parameters()))
    assert type(optimizer) is type(fsdp2.optim.local(type(optimizer), parameters()))
    assert type(optimizer) is not type(fsdp2.optim.local(Warm, parameters(), flat=True))
    assert type(optimizer).__name__ == "LocalWarm" and "lr: 0.5" in repr(optimizer)


@pytest.mark.parametrize("flat", [False, True])
def test_plain_parameters_are_stepped_on_themselves(flat: bool) -> None:
    """And what an optimizer keeps besides the states of parameters goes with it."""
    mine, plain = parameters(), parameters()
    optimizers = [fsdp2.optim.local(Mine, mine, flat=flat, elementwise=True), Mine(plain)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    assert optimizers[0].state["all"] == optimizers[1].state["all"] == {"steps": 6}
    assert all(torch.equal(optimizers[0].state[p]["sign"], p.grad.sign()) for p in mine if p.grad is not None)
    again = [pickle.loads(pickle.dumps(optimizers[0])), copy.deepcopy(optimizers[0])]
    for each in again:
        assert type(each) is type(optimizers[0])
        assert each.state["all"] == {"steps": 6}
        each.step()


# ---- what a step costs ---------------------------------------------------------------------------


def operations(optimizer: torch.optim.Optimizer) -> int:
    with OperationCounter() as counter:
        optimizer.step()
    return counter.counts.operations


def calls(optimizer: torch.optim.Optimizer) -> int:
    with PythonCallCounter() as counter:
        optimizer.step()
    return counter.calls


@pytest.mark.full
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_operations_are_those_of_plain_tensors(mesh: DeviceMesh, fused: bool) -> None:
    """None is dispatched through DTensor, and in the flat form their number is that of groups, not of parameters."""
    found = {}
    for width in (4, 12):
        of = parameters_of(small_parameters(blocks=3, params_per_block=width), mesh)
        for name in (PLAIN, LOCAL, FLAT):
            optimizer = optimizer_of(name, of[name], fused=fused)
            optimizer.step()
            found[name, width] = operations(optimizer)
    assert found[LOCAL, 4] == found[PLAIN, 4] and found[LOCAL, 12] == found[PLAIN, 12]
    assert found[FLAT, 4] == found[FLAT, 12]


@pytest.mark.full
@pytest.mark.parametrize("name", [LOCAL, FLAT])
def test_python_calls_grow_with_parameters_and_not_faster(mesh: DeviceMesh, name: str) -> None:
    """From the first step on; at most four more for a parameter than on plain tensors."""
    counts = []
    for blocks in (2, 4, 8):
        of = parameters_of(small_parameters(blocks=blocks, params_per_block=12), mesh)
        optimizer, plain = (optimizer_of(each, of[each], fused=True) for each in (name, PLAIN))
        first = calls(optimizer)
        plain.step()
        counts.append((first, calls(optimizer), calls(plain), len(of[name])))
    for few, many in itertools.pairwise(counts):
        assert many[0] - few[0] < 2.2 * few[0]
        assert many[1] - many[2] <= 4 * many[3] + 100


def test_reading_the_state_between_steps_reads_no_counter(mesh: DeviceMesh) -> None:
    """Which would wait for a device; and nothing is copied but counters."""
    of = parameters_of(small_parameters(blocks=2, params_per_block=4), mesh)
    optimizer = optimizer_of(FLAT, of[FLAT], fused=True)
    seen: list[str] = []

    class Watching(LocalDispatchMode):
        def observe(self, op: torch._ops.OpOverload, *_: object) -> None:
            seen.append(op._schema.name)

    for _ in range(2):
        optimizer.step()
        assert all(len(state) == 3 for state in optimizer.state.values())
    with Watching():
        optimizer.step()
        assert len(optimizer.state) == len(of[FLAT])
    assert "aten::_local_scalar_dense" not in seen and "aten::copy_" not in seen
    assert seen.count("aten::repeat") == number_of_runs(optimizer), "counters of all parameters of a run at once"


def test_steps_leave_no_garbage_and_hold_no_gradient(mesh: DeviceMesh) -> None:
    """No more than steps on plain tensors leave, which is nothing but where torch itself does."""
    of = parameters_of(small_parameters(blocks=2, params_per_block=4), mesh)
    left: dict[str, int] = {}
    for name in (PLAIN, LOCAL, FLAT):
        optimizer = optimizer_of(name, of[name], fused=True)
        counts = []
        for _ in range(4):
            optimizer.step()
            counts.append(gc.collect())
        left[name] = min(counts)  # what every step leaves; one collection may find more than its step
    assert max(left[LOCAL], left[FLAT]) <= left[PLAIN], left
    assert all(parameter._local_tensor.grad is None for parameter in of[LOCAL])
