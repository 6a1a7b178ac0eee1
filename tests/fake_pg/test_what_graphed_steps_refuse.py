"""`fsdp2.make_graphed_step`: what a replay would silently do otherwise than the step.

On one simulated rank, whose numbers are real; in the place of a replay the step runs again. (On several ranks:
`tests/multi_rank/training/test_graphed_step.py`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import FSDPRuntimeError, FSDPValueError, _torch, fully_shard
from fsdp2.core.param import fsdp_param_of
from fsdp2.model.graphed_step import step
from fsdp2.model.graphed_step.fixed import Fixed
from tests.harness.fake import fake_world
from tests.harness.recording.graphs import RehearsedGraph, RepeatedStep, graphs
from tests.harness.recording.recorder import recording
from tests.harness.recording.training import Stack

X = torch.arange(8.0).reshape(2, 4)


@dataclasses.dataclass
class Program:
    """A model, its optimizer and a step of them."""

    model: Any
    optimizer: torch.optim.Optimizer

    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def graphed(self, step: Callable[..., Any], **options: Any) -> Any:
        return fsdp2.make_graphed_step(step, self.model, self.optimizer, warm_up=1, **options)


@pytest.fixture
def program() -> Iterator[Program]:
    torch.manual_seed(0)
    with fake_world(1), graphs(RepeatedStep):
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True, capturable=True)
        yield Program(model, optimizer)


def test_gradients_that_wait_are_seen_before_a_recording(program: Program) -> None:
    graphed = program.graphed(program.step)
    graphed(X)
    with fsdp2.accumulate(program.model, last=False):
        program.model(X).sum().backward()
    with pytest.raises(FSDPRuntimeError, match="there are gradients before a step is recorded"):
        graphed(X)
    program.model.zero_grad()
    graphed(X)
    assert graphed.is_recorded


def test_gradients_that_a_step_lets_wait_are_seen(program: Program) -> None:
    def microbatch(x: Tensor) -> None:
        with fsdp2.accumulate(program.model, last=False):
            program.model(x).sum().backward()

    graphed = program.graphed(microbatch)
    graphed(X)
    program.model.zero_grad()
    with pytest.raises(FSDPRuntimeError, match="It leaves gradients"):
        graphed(X)


def test_gradients_that_wait_are_seen_before_a_replay(program: Program) -> None:
    graphed = program.graphed(program.step)
    for _ in range(3):
        graphed(X)
    with fsdp2.accumulate(program.model, last=False):
        program.model(X).sum().backward()
    with pytest.raises(FSDPRuntimeError, match="a parameter has a gradient, reduced or not"):
        graphed(X)


def test_gradients_are_seen_though_parameters_were_unsharded_at_the_recording(program: Program) -> None:
    def leaves(x: Tensor) -> None:
        program.model(x).sum().backward()

    graphed = fsdp2.make_graphed_step(leaves, program.model, warm_up=1)
    graphed(X)
    program.model.zero_grad()
    program.model.unshard()
    with pytest.raises(FSDPRuntimeError, match="It leaves gradients"):
        graphed(X)


def test_a_state_that_was_made_in_a_refused_recording_is_forgotten(program: Program) -> None:
    """Its numbers were never computed."""
    model, optimizer = program.model, program.optimizer

    def step(x: Tensor, steps: bool) -> None:
        model(x).square().sum().backward()
        if steps:
            optimizer.step()
        optimizer.zero_grad()

    graphed = program.graphed(lambda x: step(x, graphed_steps[0]))
    graphed_steps = [False]
    graphed(X)
    graphed_steps[0] = True
    with pytest.raises(FSDPRuntimeError, match=r"the state of 'AdamW\..*' is new.*warm up with such steps"):
        graphed(X)
    assert not optimizer.state
    for _ in range(3):
        graphed(X)
    assert graphed.is_recorded and optimizer.state


def test_buffers_and_hyperparameters_are_those_of_before_a_refused_recording(program: Program) -> None:
    model, optimizer = program.model, program.optimizer
    model.register_buffer("count", torch.zeros(()))

    def step(x: Tensor) -> Tensor:
        model.count = model.count + 1
        optimizer.param_groups[0]["weight_decay"] += 1.0
        return program.step(x)

    graphed = program.graphed(step)
    graphed(X)
    before, decay = model.count, optimizer.param_groups[0]["weight_decay"]
    with pytest.raises(FSDPRuntimeError, match="buffer 'count' is another tensor"):
        graphed(X)
    assert model.count is before and optimizer.param_groups[0]["weight_decay"] == decay


def test_parameters_that_were_replaced_after_the_warm_up_are_taken_over_before_the_recording() -> None:
    """In it, their values would be copied to the group's memory by a copy that is never executed."""
    taken_over = []

    class Looks(RepeatedStep):
        def record(self, run: Callable[[], None]) -> None:
            taken_over.extend(fsdp_param_of(parameter) is not None for parameter in model.parameters())
            super().record(run)

    with fake_world(1), graphs(Looks):
        model = fully_shard(nn.Linear(4, 4))
        program = Program(model, torch.optim.SGD(model.parameters(), lr=0.1))
        graphed = program.graphed(program.step)
        graphed(X)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        with pytest.raises(FSDPRuntimeError, match="the parameters of 'SGD' are others"):
            graphed(X)
        for _ in range(3):
            graphed(X)
        assert graphed.is_recorded and taken_over == [True] * 4


class Around:
    """Holds a tensor, and prints its shape alone."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __repr__(self) -> str:
        return f"Around({list(self.x.shape)})"


class Only(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Around(X), "was given tensors inside of a Around"),
        (Only(x=X), "was given tensors inside of a Only"),
        ({"x": [Around(X)]}, "was given tensors inside of a Around"),
        (iter([X]), "was given an iterator"),
        ((x for x in (X,)), "was given an iterator"),
        (X.numpy(), "was given an array that is no tensor"),
        (X.clone().requires_grad_(), "requires a gradient"),
    ],
    ids=["object", "mapping", "inside", "iterator", "generator", "array", "differentiable"],
)
def test_arguments_that_a_graph_would_take_for_those_of_the_recording(program: Program, given: Any, why: str) -> None:
    graphed = program.graphed(lambda given: program.step(X))
    graphed(given)
    with pytest.raises(FSDPValueError, match=why):
        graphed(given)


def test_outputs_that_the_next_replay_would_write_over(program: Program) -> None:
    graphed = program.graphed(lambda x: Around(program.step(x)))
    graphed(X)
    with pytest.raises(FSDPRuntimeError, match="a graphed step returns tensors inside of a Around"):
        graphed(X)


class Setting:
    """Plain, and the same in each call."""


def test_plain_values_and_objects_are_compared(program: Program) -> None:
    graphed = program.graphed(lambda x, *others: program.step(x))
    setting, values = Setting(), ({"a", "b"}, Only(a=1), numpy.float32(2.0), torch.float32, program.model, 1, None)
    for _ in range(3):
        graphed(X, setting, *values)
    assert graphed.is_recorded
    graphed(X, setting, {"b", "a"}, Only(a=1), numpy.float32(2.0), *values[3:])
    for others in ((Setting(), *values), (setting, {"a"}, *values[1:]), (setting, *values[:5], True, None)):
        with pytest.raises(FSDPValueError, match="was recorded for arguments"):
            graphed(X, *others)


def test_a_replay_is_given_nothing_to_differentiate(program: Program) -> None:
    graphed = program.graphed(program.step)
    for _ in range(3):
        graphed(X)
    with pytest.raises(FSDPValueError, match="requires a gradient, which no graph gives back: detach it"):
        graphed(X.clone().requires_grad_())
    assert not any(each.requires_grad for each in graphed._inputs)


def test_a_rate_on_the_host_is_a_number_to_a_graph_of_a_device() -> None:
    """Kernels were launched with it; a schedule that writes into it changes nothing."""
    with fake_world(1):
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
        fixed = Fixed([model], [model._get_fsdp_state()], [optimizer], torch.device("cuda"))
        assert fixed.change() is None
        optimizer.param_groups[0]["lr"].fill_(0.25)
        assert fixed.change() == "the hyperparameter of 'SGD.lr' is 0.25, and was 0.5"


class Silent(RepeatedStep):
    """Replays without the host's seeing what is written, as a device does."""

    write: Callable[[], None] = staticmethod(lambda: None)

    def replay(self) -> None:
        self.write()


def test_a_backward_across_a_replay_is_refused() -> None:
    """As it is across a step of the optimizer: its forward read other parameters."""
    with fake_world(1), graphs(Silent):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program = Program(model, optimizer)
        graphed = program.graphed(program.step)
        graphed(X)
        graphed(X)
        loss = model(X.clone().requires_grad_()).square().sum()
        graphed(X)
        with pytest.raises(FSDPRuntimeError, match="were changed between a forward and its backward"):
            loss.backward()


def test_a_replay_that_writes_nothing_is_no_step() -> None:
    with fake_world(1), graphs(Silent):
        model = fully_shard(nn.Linear(4, 4))
        validate = fsdp2.make_graphed_step(torch.no_grad()(lambda x: model(x)), model, warm_up=1)
        for _ in range(3):
            validate(X)
        loss = model(X).square().sum()
        validate(X)
        loss.backward()
        assert validate.is_recorded and model.weight.grad is not None


def test_a_reduction_by_tokens_may_be_set_inside() -> None:
    """What it divides by is in the graph."""
    with fake_world(1), graphs(Silent):
        model = fully_shard(nn.Linear(4, 4))
        program = Program(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step(x: Tensor, tokens: Tensor) -> Tensor:
            model.set_gradient_reduction(tokens)
            return program.step(x)

        graphed = program.graphed(step)
        for tokens in (3.0, 4.0, 5.0, 5.0, 6.0):
            graphed(X, torch.tensor(tokens))
        assert graphed.is_recorded
        step(X[:1], torch.tensor(7.0))  # an eager one, of another shape
        graphed(X, torch.tensor(6.0))


def test_a_reduction_by_tokens_that_is_set_outside_must_stay_the_tensor_that_it_was() -> None:
    with fake_world(1), graphs(Silent):
        model = fully_shard(nn.Linear(4, 4))
        program = Program(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.set_gradient_reduction(torch.tensor(2.0))
        graphed = program.graphed(lambda x, tokens: program.step(x))
        for _ in range(3):
            graphed(X, torch.tensor(5.0))
        model.set_gradient_reduction(torch.tensor(2.0))
        with pytest.raises(
            FSDPRuntimeError, match=r"the denominator of set_gradient_reduction\(\) .* is another tensor"
        ):
            graphed(X, torch.tensor(5.0))


def test_a_buffer_of_inference_mode_is_nobodys_business(program: Program) -> None:
    """As a cache of generation is."""
    with torch.inference_mode():
        program.model.register_buffer("cache", torch.zeros(2), persistent=False)
    graphed = program.graphed(program.step)
    for _ in range(3):
        graphed(X)
    assert graphed.is_recorded


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda model: model.__setitem__(1, fully_shard(nn.Linear(4, 2))), r"module '1' is another one, or is not"),
        (lambda model: model.append(fully_shard(nn.Linear(4, 4))), r"module '2' is new"),
        (lambda model: model[0].add_module("adapter", fully_shard(nn.Linear(4, 4))), r"module '0\.adapter' is new"),
        (lambda model: model.add_module("tied", model[0]), r"module 'tied' is new"),
        (lambda model: model.__delitem__(1), r"module '1' is another one, or is not there"),
    ],
    ids=["replaced", "appended", "below a leaf", "tied", "deleted"],
)
def test_submodules_that_come_and_go_are_seen(change: Callable[[Any], None], found: str) -> None:
    """A replay would train the modules of before: their parameters are where they were."""
    with fake_world(1), graphs(RepeatedStep):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        program = Program(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().sum()
            loss.backward()
            program.optimizer.step()
            model.zero_grad()
            return loss

        graphed = program.graphed(step)
        for _ in range(3):
            graphed(X)
        change(model)
        with pytest.raises(FSDPRuntimeError, match=found):
            graphed(X)
        graphed.reset()
        program.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            graphed(X)
        assert graphed.is_recorded


def test_a_step_that_was_closed_is_refused(program: Program) -> None:
    """NCCL waits for a graph of its collectives where a process group is destroyed: so it can be let go of."""
    closed: list[object] = []

    class Closes(RepeatedStep):
        def close(self) -> None:
            closed.append(self)
            super().close()

    with graphs(Closes):
        graphed = program.graphed(program.step)
    for _ in range(3):
        graphed(X)
    for _ in range(2):
        graphed.close()
    assert len(closed) == 1 and not graphed.is_recorded and not graphed._inputs and graphed._outputs is None
    with pytest.raises(FSDPRuntimeError, match=r"was called after close\(\): call reset\(\) first"):
        graphed(X)
    graphed.reset()
    for _ in range(3):
        graphed(X)
    assert graphed.is_recorded and len(closed) == 1
    graphed.reset()  # which lets go of the graph that it gives up
    assert len(closed) == 2


def test_steps_are_closed_when_the_program_ends(program: Program) -> None:
    graphed = program.graphed(program.step)
    for _ in range(3):
        graphed(X)
    step._close_all()
    with pytest.raises(FSDPRuntimeError, match=r"was called after close\(\)"):
        graphed(X)


def test_parameter_groups_that_come_and_go_are_seen() -> None:
    with fake_world(1), graphs(RepeatedStep):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for each in (*model, model):
            fully_shard(each)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            model.zero_grad()

        graphed = fsdp2.make_graphed_step(step, model, optimizer, warm_up=1)
        for _ in range(3):
            graphed(X)
        optimizer.add_param_group({"params": list(model[1].parameters())})
        with pytest.raises(FSDPRuntimeError, match="the parameters of 'SGD' are others"):
            graphed(X)
        optimizer.param_groups.pop()
        graphed(X)
        optimizer.param_groups.pop()
        with pytest.raises(FSDPRuntimeError, match="the parameters of 'SGD' are others"):
            graphed(X)


@pytest.mark.skipif(not _torch.can_swap_memory, reason="the pool, in which memory stays, needs torch 2.13")
def test_a_gradient_that_is_held_for_longer_is_seen() -> None:
    """Another buffer has taken its place since; the graph may still write where it lies."""
    with fake_world(4), recording() as recorder, graphs(lambda: RehearsedGraph(recorder)):
        model = Stack(8)
        for unit in [*model.blocks, model]:
            fully_shard(unit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        graphed = fsdp2.make_graphed_step(step, model, optimizer, warm_up=3)
        x = torch.ones(2, 8)
        for _ in range(5):
            graphed(x)
        model(x).sum().backward()
        held = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        step(x)
        with pytest.raises(FSDPRuntimeError, match=r"somebody holds a gradient of .* earlier step.*keep"):
            graphed(x)
        held.clear()
        graphed(x)


def test_a_module_below_the_root_is_refused() -> None:
    with fake_world(1), graphs(RepeatedStep):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
        model(X)
        with pytest.raises(FSDPRuntimeError, match="was given '0', which is a part of Sequential: pass that"):
            fsdp2.make_graphed_step(model.forward, model[0])
