"""Faults to plant: each of the kind that a program is there to find. On GPUs too, where a program must find one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from fsdp2 import _torch
from fsdp2.core.plan import Scaling
from fsdp2.core.reduce import GradientReducer
from fsdp2.core.root import FSDPRoot
from fsdp2.core.streams import FSDPCommContext, StreamDevice, Wait
from fsdp2.core.transport import Native
from fsdp2.model.graphed_step.step import GraphedStep
from fsdp2.plugs.transports.gloo_p2p import PeerToPeer
from tests.harness.recording.recorder import RecordingDevice

Fault = Callable[[], AbstractContextManager[Any]]


def drops(why: Wait) -> str:
    """The name of the fault that no stream waits for ``why``."""
    return f"drops {why.name}"


def _drops(why: Wait) -> Fault:
    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for device in (StreamDevice, RecordingDevice):
                wait = device.wait

                def unless(self: Any, stream: Any, event: Any, reason: Any, wait: Any = wait) -> None:
                    if reason is not why:
                        wait(self, stream, event, reason)

                stack.enter_context(mock.patch.object(device, "wait", unless))
            yield

    return planted


FAULTS: dict[str, Fault] = {drops(why): _drops(why) for why in Wait}


def fault(plant: Fault) -> Fault:
    """Name ``plant`` by its docstring."""
    assert plant.__doc__ is not None
    FAULTS[plant.__doc__.rstrip(".")] = plant
    return plant


def planted(name: str) -> AbstractContextManager[Any]:
    """A context in which the fault ``name`` is there; "" for none."""
    return FAULTS[name]() if name else nullcontext()


@fault
@contextmanager
def _wrong_reduction() -> Iterator[None]:
    """a reduction adds one to what it reduces."""
    with ExitStack() as stack:
        for transport in (Native, PeerToPeer):
            scatter = transport.reduce_scatter

            def adds(self: Any, members: Any, op: Any, works: Any, *others: Any, scatter: Any = scatter) -> None:
                scatter(self, members, op, works, *others)
                for work in works or ():
                    work.wait()
                for output, _ in members:
                    output.add_(1.0)

            stack.enter_context(mock.patch.object(transport, "reduce_scatter", adds))
        yield


@fault
def _wrong_casts() -> AbstractContextManager[Any]:
    """copies that cast write wrong values."""
    copy = _torch.foreach_copy

    def doubles(destinations: list[torch.Tensor], sources: list[torch.Tensor], **kwargs: Any) -> None:
        copy(destinations, sources, **kwargs)
        for destination, source in zip(destinations, sources, strict=True):
            if destination.dtype != source.dtype:
                destination.mul_(2)

    return mock.patch.object(_torch, "foreach_copy", doubles)


@fault
def _asked_number() -> AbstractContextManager[Any]:
    """a reduction asks the device for a number."""
    reduce = GradientReducer.reduce

    def asks(self: GradientReducer, comm: FSDPCommContext) -> None:
        reduce(self, comm)
        torch.ones((), device=self._mesh.device).item()

    return mock.patch.object(GradientReducer, "reduce", asks)


@fault
def _former_inputs() -> AbstractContextManager[Any]:
    """a graph reads the inputs of its recording."""
    return mock.patch.object(GraphedStep, "_fill", lambda graphed, given: None)


@fault
def _old_name() -> AbstractContextManager[Any]:
    """NCCL is known by its old name only."""
    choose = Scaling.choose

    def without(*args: Any, **kwargs: Any) -> Scaling:
        return choose(*args, **{**kwargs, "premultiplies": False})

    return mock.patch.object(Scaling, "choose", without)


@fault
def _unclean_forward() -> AbstractContextManager[Any]:
    """a forward does not start clean."""
    return mock.patch.object(FSDPRoot, "recover_if_failed", lambda root: None)


@fault
def _empty_load() -> AbstractContextManager[Any]:
    """nothing is loaded."""
    return mock.patch.object(dcp, "load", lambda state, **kwargs: None)
