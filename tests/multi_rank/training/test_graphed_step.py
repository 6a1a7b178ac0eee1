"""`fsdp2.make_graphed_step` on gloo ranks, where in the place of a replay the step runs again, on the arguments of the
recording: what goes in and comes out, what is refused, and on which ranks. (What is launched is
in `tests/fake_pg/test_graphed_step_launches.py`, the graphs in `tests/gpu`.)"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import FSDPRuntimeError, FSDPValueError, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, assert_sharded_same, full_parameters, parameters_of
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, Batch, ModelCase
from tests.harness.recording.graphs import RepeatedStep, graphs
from tests.harness.reference import Reference
from tests.harness.shared.ways import WAYS

FUSED: dict[str, Any] = {"fused": True, "capturable": True}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), eps=1e-3, **FUSED)


def shard(case: ModelCase, **options: Any) -> Any:
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit, **options)
    return model


def step_of(case: ModelCase, model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: int = 1) -> Any:
    """One step; of several microbatches, which come one after the other."""

    def step(*tensors: Tensor) -> list[Tensor]:
        losses = []
        for index in range(microbatches):
            with fsdp2.accumulate(model, last=index == microbatches - 1):
                loss = case.loss(model, Batch(*tensors[2 * index : 2 * index + 2]))
                loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def assert_steps_are_the_references(
    case: ModelCase, model: Any, *, world_size: int, steps: int = 6, microbatches: int = 1, between: Any = None
) -> Any:
    optimizer = adamw(model.parameters())
    reference = Reference(case, world_size=world_size, make_optimizer=adamw, microbatches=microbatches)
    with graphs(RepeatedStep):
        graphed = fsdp2.make_graphed_step(step_of(case, model, optimizer, microbatches), model, optimizer, warm_up=2)
    found, expected = [], []
    for index in range(steps):
        batches = [case.batch(0, index, dist.get_rank(), micro) for micro in range(microbatches)]
        found += graphed(*(each for batch in batches for each in (batch.inputs, batch.targets)))
        record = reference.step()
        expected += record.losses[dist.get_rank()]
        if between is not None:
            between(index)
    losses = [{str(index): loss for index, loss in enumerate(every)} for every in (found, expected)]
    assert_same("losses, none of which is another's", *losses, tolerance=SUM_ORDER)
    assert_sharded_same("parameters", parameters_of(model), record.parameters, tolerance=SUM_ORDER)
    assert graphed.is_recorded
    return graphed


@multi_rank(4, full=[2])
@pytest.mark.parametrize(
    ("case", "way", "microbatches"),
    [
        (UNEVEN_MLP, "hybrid", 1),
        pytest.param(UNEVEN_MLP, "default", 3, marks=pytest.mark.full),
        pytest.param(TRANSFORMER, "keep", 1, marks=pytest.mark.full),
    ],
)
def test_steps_are_the_references(case: ModelCase, way: str, microbatches: int, world_size: int) -> None:
    model = shard(case, **WAYS[way]())
    assert_steps_are_the_references(case, model, world_size=world_size, microbatches=microbatches)


@pytest.mark.full
@multi_rank(2)
def test_anything_may_run_between_two_calls(world_size: int) -> None:
    """Evaluation that leaves parameters gathered, state dicts, whole parameters."""
    model = shard(UNEVEN_MLP, reshard_after_forward=False)

    def between(index: int) -> None:
        with torch.no_grad():
            model(UNEVEN_MLP.batch(0, index, 0).inputs)
        model.unshard()
        model.state_dict()
        with fsdp2.full_parameters(model):
            pass

    assert_steps_are_the_references(UNEVEN_MLP, model, world_size=world_size, between=between)


def graphed_of(model: Any, optimizer: torch.optim.Optimizer, step: Any = None) -> Callable[..., Any]:
    """A step of which the second call records."""
    step = step_of(UNEVEN_MLP, model, optimizer) if step is None else step
    graphed = fsdp2.make_graphed_step(step, model, optimizer, warm_up=1)
    graphed(*arguments())
    return graphed


def simple() -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model after its recording."""
    model = shard(UNEVEN_MLP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **FUSED)
    graphed = graphed_of(model, optimizer)
    for index in range(2):
        graphed(*arguments(index))
    return model, optimizer, graphed


def arguments(index: int = 0) -> tuple[Tensor, Tensor]:
    batch = UNEVEN_MLP.batch(0, index, dist.get_rank())
    return batch.inputs, batch.targets


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    r"the hyperparameter of 'AdamW\.lr' is 3\.0, and was 0\.01": lambda model, optimizer: _new_rate(optimizer),
    "whether it trains, of module '' is False, and was True": lambda model, optimizer: model.eval(),
    r"requires_grad of '0\.weight' is False": lambda model, optimizer: model[0].weight.requires_grad_(False),
    "a setting of '.*' is requires_gradient_sync=False, and was True": (
        lambda model, optimizer: model.set_requires_gradient_sync(False)
    ),
    r"the resharding of '.*' is \(False, True\)": lambda model, optimizer: model.set_reshard_after_forward(False),
    r"the state of 'AdamW\.step' is another tensor": (
        lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ),
    r"parameter '0\.weight' is another tensor|lies elsewhere": (
        lambda model, optimizer: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    ),
    "a parameter has a gradient": (
        lambda model, optimizer: UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, 0)).backward()
    ),
}


def _new_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 3.0


@multi_rank(2)
@pytest.mark.parametrize("says", CHANGES)
def test_what_a_replay_would_not_see_is_refused(says: str) -> None:
    """Then `reset` records it anew, or the change is taken back; nothing was stepped."""
    with graphs(RepeatedStep):
        model, optimizer, graphed = simple()
        CHANGES[says](model, optimizer)
        before = full_parameters(model)
        with pytest.raises(FSDPRuntimeError, match=says):
            graphed(*arguments())
        assert_same("parameters", full_parameters(model), before)


@pytest.mark.full
@multi_rank(2)
def test_a_rate_that_is_a_tensor_may_change(world_size: int) -> None:
    model = shard(UNEVEN_MLP)
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
    with graphs(RepeatedStep):
        graphed = graphed_of(model, optimizer)
        schedule.step()
        for index in range(1, 5):
            graphed(*arguments(index))
            schedule.step()
        before = full_parameters(model)
        graphed(*arguments())
        assert graphed.is_recorded
        assert_same("parameters, at rate 0", full_parameters(model), before)


@multi_rank(2)
def test_other_arguments_are_refused() -> None:
    with graphs(RepeatedStep):
        _, _, graphed = simple()
        inputs, targets = arguments()
        for given in ((inputs[:1], targets), (inputs.double(), targets), (inputs,), (inputs, targets, 3)):
            with pytest.raises(FSDPValueError, match=r"was recorded for arguments .*, and was called with .*one shape"):
                graphed(*given)
        graphed(inputs, targets)


@pytest.mark.full
@multi_rank(2)
def test_reset_records_again() -> None:
    with graphs(RepeatedStep):
        _, optimizer, graphed = simple()
        _new_rate(optimizer)
        graphed.reset()
        assert not graphed.is_recorded
        for index in range(3):
            graphed(*arguments(index))
        assert graphed.is_recorded


class Fails(RepeatedStep):
    """Records nothing on rank 1."""

    def record(self, run: Callable[[], None]) -> None:
        super().record(run)
        if dist.get_rank() == 1:
            raise RuntimeError("operation not permitted when stream is capturing")


@multi_rank(2)
def test_no_rank_replays_what_another_could_not_record() -> None:
    with graphs(Fails), pytest.raises(FSDPRuntimeError, match=r"could not be recorded(.|\n)*operation not permitted"):
        simple()


@multi_rank(4)
def test_nor_what_a_rank_of_another_replica_could_not() -> None:
    """Ranks that share no group with it learn of it through those that do; and none waits for ever."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with graphs(Fails):
        model = shard(UNEVEN_MLP, mesh=mesh)
        optimizer = adamw(model.parameters())
        graphed = graphed_of(model, optimizer)
        with pytest.raises(FSDPRuntimeError, match=r"could not be recorded(.|\n)*operation not permitted"):
            graphed(*arguments())


@multi_rank(2)
def test_a_gradient_that_is_held_is_not_written_over() -> None:
    """It lies where the graph writes."""
    with graphs(RepeatedStep):
        model, _, graphed = simple()
        UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, 0)).backward()
        held = model.get_parameter("0.weight").grad
        model.zero_grad()
        with pytest.raises(FSDPRuntimeError, match=r"somebody holds a gradient of '.*' of an earlier step"):
            graphed(*arguments())
        del held
        graphed(*arguments())


@multi_rank(2)
def test_no_rank_records_what_another_does_not() -> None:
    with graphs(RepeatedStep):
        model = shard(UNEVEN_MLP)
        optimizer = adamw(model.parameters())
        graphed = graphed_of(model, optimizer)
        inputs, targets = arguments()
        what = "requires a gradient" if dist.get_rank() == 0 else "The ranks differ(.|\n)*requires a gradient"
        with pytest.raises((FSDPValueError, FSDPRuntimeError), match=what):
            graphed(inputs.requires_grad_(dist.get_rank() == 0), targets)
        graphed(*arguments())
        assert graphed.is_recorded


def _leaves_gradients(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    def step(*tensors: Tensor) -> None:
        optimizer.zero_grad()
        UNEVEN_MLP.loss(model, Batch(*tensors)).backward()
        optimizer.step()

    return step


def _makes_buffers(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    model.register_buffer("count", torch.zeros(()))
    inner = step_of(UNEVEN_MLP, model, optimizer)

    def step(*tensors: Tensor) -> None:
        model.count = model.count + 1
        inner(*tensors)

    return step


REFUSED = {
    _leaves_gradients: "there are gradients before a step is recorded.*End the step with optimizer.zero_grad",
    _makes_buffers: "buffer 'count' is another tensor.*buffers must be written in place",
}


@multi_rank(2)
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_steps_that_no_graph_repeats_are_refused(make: Callable[..., Any]) -> None:
    with graphs(RepeatedStep):
        model = shard(UNEVEN_MLP)
        optimizer = adamw(model.parameters())
        graphed = graphed_of(model, optimizer, make(model, optimizer))
        with pytest.raises(FSDPRuntimeError, match=REFUSED[make]):
            graphed(*arguments())


@multi_rank(2)
def test_optimizers_that_count_on_the_host_are_refused() -> None:
    """By their argument, or by what they were seen to count; and a state that is made while it is recorded."""
    with graphs(RepeatedStep):
        model = shard(UNEVEN_MLP)
        for optimizer, why in (
            (torch.optim.Adam(model.parameters()), "Adam counts its steps on the host. Make it with capturable=True"),
            (Counting(model.parameters()), "Counting keeps 'steps' on the host, which a replay does not change"),
        ):
            graphed = graphed_of(model, optimizer)
            with pytest.raises(FSDPRuntimeError, match=why):
                graphed(*arguments())


class Counting(torch.optim.Optimizer):
    """Plain gradient descent that counts in Python."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Ends(RepeatedStep):
    """As a graph that is ended by an exception, which has one of its own to raise."""

    def record(self, run: Callable[[], None]) -> None:
        try:
            super().record(run)
        except Exception:
            raise RuntimeError("capture was invalidated") from None


@multi_rank(2)
def test_what_a_step_raises_while_it_is_recorded_is_told() -> None:
    """Then nothing was stepped, no gradient is left, and the step works as before."""
    with graphs(Ends):
        model = shard(UNEVEN_MLP)
        optimizer = adamw(model.parameters())
        inner, fails = step_of(UNEVEN_MLP, model, optimizer), []

        def step(*tensors: Tensor) -> list[Tensor]:
            if fails:
                UNEVEN_MLP.loss(model, Batch(*tensors)).backward()
                raise ZeroDivisionError("of the program")
            return inner(*tensors)  # type: ignore[no-any-return]

        graphed = graphed_of(model, optimizer, step)
        before = full_parameters(model)
        fails.append(True)
        with pytest.raises(FSDPRuntimeError, match=r"was stepped\. ZeroDivisionError: of the program") as raised:
            graphed(*arguments())
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_same("parameters", full_parameters(model), before)
        fails.clear()
        for _ in range(3):
            graphed(*arguments())
        assert graphed.is_recorded
