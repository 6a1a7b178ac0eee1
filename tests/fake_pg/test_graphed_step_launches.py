"""`fsdp2.make_graphed_step` on a device that only records: what is launched, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
    fully_shard,
)
from fsdp2.model.graphed_step.recording import OF_DEVICES
from tests.harness.fake import fake_world
from tests.harness.internals import groups_of
from tests.harness.recording.graphs import RehearsedGraph, RepeatedStep, graphs
from tests.harness.recording.recorder import RecordingDevice, recording
from tests.harness.recording.training import Expected, Stack

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), fused=True, capturable=True),
    "local": lambda params: fsdp2.optim.local(torch.optim.SGD, params, lr=0.1, momentum=0.9, foreach=True),
}
SHARDED: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "fewer": {"reshard_after_forward": 2},
    "half": {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32, cache_shards=True)},
}


def sharded(width: int = 8, **options: Any) -> Stack:
    torch.manual_seed(0)
    model = Stack(width)
    for unit in [*model.blocks, model]:
        fully_shard(unit, **options)
    return model


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(batch: Tensor, scale: float = 1.0) -> Any:
        loss = model(batch).float().square().mean() * scale
        loss.backward()
        fsdp2.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "scale": scale}

    return step


@pytest.mark.full
@pytest.mark.parametrize("options", SHARDED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replays_launch_the_same_on_the_same_memory(optimizer: str, options: str) -> None:
    """And the host neither waits for the device nor for anything from before the graph."""
    with fake_world(4), recording() as recorder, graphs(lambda: RehearsedGraph(recorder)):
        model = sharded(**SHARDED[options])
        steps = OPTIMIZERS[optimizer](model.parameters())
        step = step_of(model, steps)
        graphed = fsdp2.make_graphed_step(step, model, steps, warm_up=4)
        for _ in range(3):
            for _ in range(3):
                graphed(torch.ones(2, 8))
            model(torch.ones(5, 8)).sum()
            step(torch.ones(3, 8))
            with torch.no_grad():
                model(torch.ones(2, 8))
        assert graphed.is_recorded


@pytest.mark.parametrize("where", ["forward", "backward", "second backward"])
def test_a_recording_that_raises_is_not_waited_for_afterwards(where: str) -> None:
    """Nothing of it ran, and CUDA refuses to wait for an event that was recorded in a capture."""
    with fake_world(4), recording() as recorder, graphs(lambda: RehearsedGraph(recorder)):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        block = model.blocks[1]

        sums = [where == "second backward"]

        def fail(*arguments: object) -> None:
            if recorder.captures and not sums[0]:
                raise Expected

        (block.register_forward_hook if where == "forward" else block.register_full_backward_hook)(fail)
        last = step_of(model, optimizer)

        def step(batch: Tensor) -> None:
            if where == "second backward":
                sums[0] = True
                model.set_requires_gradient_sync(False)
                model(batch).sum().backward()
                model.set_requires_gradient_sync(True)
                sums[0] = False
            last(batch)

        graphed = fsdp2.make_graphed_step(step, model, optimizer, warm_up=2)
        record, wait = RecordingDevice.record, RecordingDevice.wait
        captured: set[int] = set()
        waited: list[int] = []

        def noted_record(device: RecordingDevice, stream: int) -> int:
            event = record(device, stream)
            if device._recorder is recorder and recorder.captures:
                captured.add(event)
            return event

        def noted_wait(device: RecordingDevice, stream: int, event: int, why: object) -> None:
            if device._recorder is recorder and not recorder.captures:  # models of other tests count theirs from 0, too
                waited.append(event)
            wait(device, stream, event, why)

        with mock.patch.multiple(RecordingDevice, record=noted_record, wait=noted_wait):
            for _ in range(2):
                graphed(torch.ones(2, 8))
            with pytest.raises(FSDPRuntimeError, match="Expected"):
                graphed(torch.ones(2, 8))
            step(torch.ones(2, 8))
        assert captured and waited and not captured & set(waited)


@pytest.mark.parametrize("replicas", [1, 4])
def test_where_no_group_gathers(replicas: int) -> None:
    """The all-gather stream has no part in the graph, and cannot be waited for there."""
    with fake_world(replicas), recording() as recorder, graphs(lambda: RehearsedGraph(recorder)):
        mesh = init_device_mesh("cpu", (replicas, 1), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphed = fsdp2.make_graphed_step(step_of(model, optimizer), model, optimizer, warm_up=2)
        for _ in range(4):
            graphed(torch.ones(2, 8))
        assert graphed.is_recorded


def test_gradient_memory_that_a_graph_writes_is_never_freed() -> None:
    """What the gradients of before it lay in, cleared or not, as the graph knows the address."""
    with fake_world(4), recording() as recorder:
        model = sharded()
        buffers = [bucket.delivered for group in groups_of(model) for bucket in group.reducer.buckets]
        assert buffers == [None] * len(buffers)
        for captures in (False, True, False):
            recorder.captures = captures
            model(torch.ones(2, 8)).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
        model(torch.ones(2, 8)).sum()
        buffers = [bucket.delivered for group in groups_of(model) for bucket in group.reducer.buckets]
        assert buffers and all(buffer is not None and buffer.resizable.has_memory for buffer in buffers)


def test_a_recording_that_fails_leaves_the_current_stream() -> None:
    """torch comes back to it only where a capture ends well."""
    current = ["own"]

    class Graph:
        def __init__(self, graph: object, *, pool: object, stream: str, capture_error_mode: str) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            current[0] = self._stream

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    fakes = {
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda device: "side",
        "CUDAGraph": mock.Mock(),
        "device": lambda device: nullcontext(),
        "graph": Graph,
        "current_stream": lambda device: current[0],
        "set_stream": lambda stream: current.__setitem__(0, stream),
    }
    with mock.patch.multiple(torch.cuda, **fakes):
        made = OF_DEVICES["cuda"](torch.device("cuda", 0), None)
        with pytest.raises(RuntimeError, match=r"previous error"):
            made.record(lambda: None)
        assert current == ["own"]
        made.close()
        fakes["CUDAGraph"]().reset.assert_called_once_with()  # type: ignore[operator]


def test_another_graph_may_use_the_same_memory() -> None:
    pools = []

    def make(device: torch.device, pool: Any) -> RepeatedStep:
        pools.append(pool)
        return RepeatedStep()

    with fake_world(4), mock.patch.dict(OF_DEVICES, {"cpu": make}):
        model = sharded()
        train = fsdp2.make_graphed_step(step_of(model, torch.optim.SGD(model.parameters())), model)
        fsdp2.make_graphed_step(torch.no_grad()(model.forward), model, pool=train.pool)
    assert pools == [None, RepeatedStep.pool]


def test_wrong_uses_are_refused() -> None:
    with fake_world(4):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = step_of(model, optimizer)
        with pytest.raises(FSDPNotImplementedError, match=r"the model is on cpu\. Call the step itself"):
            fsdp2.make_graphed_step(step, model, optimizer)
        with pytest.raises(FSDPTypeError, match="a function that does a step"):
            fsdp2.make_graphed_step(3, model, optimizer)
        with pytest.raises(FSDPTypeError, match="takes modules, one or a list"):
            fsdp2.make_graphed_step(step, optimizer, model)
        with pytest.raises(FSDPTypeError, match="takes optimizers, one or a list"):
            fsdp2.make_graphed_step(step, model, [model])
        with pytest.raises(FSDPRuntimeError, match="nothing that contains a sharded module"):
            fsdp2.make_graphed_step(step, nn.Linear(2, 2), optimizer)
        with pytest.raises(FSDPValueError, match="takes a number >= 1 as 'warm_up', got 0"):
            fsdp2.make_graphed_step(step, model, optimizer, warm_up=0)
        offloaded = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
        with graphs(RepeatedStep), pytest.raises(FSDPNotImplementedError, match="'Linear' is offloaded"):
            fsdp2.make_graphed_step(step, offloaded)


def unsharded_ahead(model: Any) -> None:
    """A gather that nobody has waited for."""
    for block in model.blocks:
        block.unshard(async_op=True)


def unsharded_and_given_up(model: Any) -> None:
    for block in model.blocks:
        block.unshard(async_op=True)
        block.reshard()


def used_and_not_differentiated(model: Any) -> None:
    model(torch.ones(2, 8))


def failed(model: Any) -> None:
    model.fails = True
    with pytest.raises(Expected):
        model(torch.ones(2, 8))
    model.fails = False


@pytest.mark.parametrize("begin", [unsharded_ahead, unsharded_and_given_up, used_and_not_differentiated, failed])
def test_what_runs_on_other_streams_comes_before_the_graph(begin: Callable[[Any], None]) -> None:
    with fake_world(4), recording() as recorder, graphs(lambda: RehearsedGraph(recorder)):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphed = fsdp2.make_graphed_step(step_of(model, optimizer), model, optimizer, warm_up=4)
        for _ in range(3):
            for _ in range(5):
                graphed(torch.ones(2, 8))
            begin(model)


def test_reductions_that_are_finished_by_hand() -> None:
    """A handle that nobody has waited for is an error, before anything is launched."""
    with fake_world(4), recording() as recorder, graphs(lambda: RehearsedGraph(recorder)):
        model = sharded()
        model.set_manual_backward_finalization(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Tensor) -> None:
            model(batch).square().mean().backward()
            model.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()

        graphed = fsdp2.make_graphed_step(step, model, optimizer, warm_up=4)
        for _ in range(6):
            graphed(torch.ones(2, 8))
        model(torch.ones(2, 8)).sum().backward()
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(FSDPRuntimeError, match="a parameter has a gradient"):
            graphed(torch.ones(2, 8))
        handle.wait()
        model.zero_grad()
        graphed(torch.ones(2, 8))
