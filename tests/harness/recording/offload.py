"""Scenarios of CPU offload: shards and gradients in host memory, copied to the device and back.

A part of `scenarios`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fsdp2.core.mesh
import fsdp2.optim.offload
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, offload_optimizer_state, pending_gradients, share_comm_ctx
from fsdp2.core.buffers import Offloading
from fsdp2.core.gather import Source
from tests.harness.internals import STATE_TO_DEVICE, STATE_TO_HOST
from tests.harness.recording.meshes import HALF, replicate_and_shard
from tests.harness.recording.recorder import Recorder
from tests.harness.recording.training import STEPS, Expected, Stack, Training, write_whole

train = Training.of_stack


@contextmanager
def _host_is_another_place(recorder: Recorder) -> Iterator[None]:
    """Inside, `fully_shard` and its first iteration take the mesh's device for another than the host.

    Of all devices only the CPU can be had here; with an index it equals no tensor's, so the engine takes them for two,
    and copies. Which memory is the host's is known from `Offloading`.
    """

    def on_host(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(self: Offloading, *args: Any) -> Tensor:
            with recorder.on_host() if self.is_host else nullcontext():
                return allocate(self, *args)

        return allocated

    def is_sent_as_it_lies(source: Source) -> bool:
        return source.shard.dtype == source.unsharded.dtype and not recorder.is_on_host(source.shard)

    with (
        mock.patch.object(fsdp2.core.mesh, "device_of", lambda mesh: torch.device("cpu", 0)),
        mock.patch.object(Offloading, "zeros", on_host(Offloading.zeros)),
        mock.patch.object(Offloading, "empty", on_host(Offloading.empty)),
        mock.patch.object(Source, "is_sent_as_it_lies", property(is_sent_as_it_lies)),
    ):
        yield


def offloaded(recorder: Recorder, model: Stack | None = None, **options: Any) -> None:
    """Shards and gradients on the host, which steps there: copied in before gathers, out after reductions."""
    with _host_is_another_place(recorder):
        train(recorder, model, offload_policy=CPUOffloadPolicy(), **options).steps()


def offloaded_written_whole(recorder: Recorder) -> None:
    """Whole parameters are written, of shards in host memory that are on their way to the device."""
    with _host_is_another_place(recorder):
        training = train(recorder, offload_policy=CPUOffloadPolicy())
        for _ in range(STEPS):
            training.steps(1)
            with torch.no_grad():
                training.loss()
            write_whole(training)


def offloaded_direct(recorder: Recorder) -> None:
    """The same with large parameters, which travel alone."""
    offloaded(recorder, Stack(512, 514))


def offloaded_replicas(recorder: Recorder) -> None:
    """The same with HSDP and mixed precision."""
    offloaded(recorder, mesh=replicate_and_shard(), mp_policy=HALF)


def offloaded_cached(recorder: Recorder) -> None:
    """What was copied to the device stays for several backwards, while the host writes between some of them."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cache_shards=True)
    with _host_is_another_place(recorder):
        training = train(recorder, mp_policy=policy, offload_policy=CPUOffloadPolicy())
        for _ in range(STEPS):
            for writes in (False, True, False):
                training.loss().backward()
                if writes:
                    training.model.state_dict()  # after which the host may write
                    _write(training)
            training.update()


def offloaded_sums(recorder: Recorder, *, between: Callable[[Training], None] | None = None, **options: Any) -> None:
    """Shards and gradients on the device; the sum of backwards that are not the last waits on the host.

    ``between`` two of those and the last.
    """
    policy = CPUOffloadPolicy(parameters=False, gradients=True)
    empty_on_host = Offloading.empty_on_host

    def allocated(self: Offloading, *args: Any) -> Tensor:
        with recorder.on_host():
            return empty_on_host(self, *args)

    with mock.patch.object(Offloading, "empty_on_host", allocated):
        training = train(recorder, offload_policy=policy, **options)
        for _ in range(STEPS):
            for last in (False, False, True):
                if last and between is not None:
                    between(training)
                training.model.set_is_last_backward(last)
                training.loss().backward()
            training.update()


def offloaded_sums_are_read(recorder: Recorder) -> None:
    """The program looks at what waits in host memory."""

    def read(training: Training) -> None:
        for pending in pending_gradients(training.model).values():
            assert pending.on_host is not None, "it waits"
            pending.on_host.clone()

    offloaded_sums(recorder, between=read)


def offloaded_sums_are_cleared(recorder: Recorder) -> None:
    """The program makes zeros of what waits in host memory."""
    offloaded_sums(recorder, between=lambda training: training.model.zero_grad(set_to_none=False))


def _write(training: Training) -> None:
    """The host changes the sharded parameters of the blocks, by itself."""
    with torch.no_grad():
        for parameter in training.optimizer.param_groups[0]["params"]:
            parameter.mul_(0.5)


def offloaded_and_written(recorder: Recorder) -> None:
    """The host writes the shards: after an evaluation, and after `reshard` where gathers, which read, were in vain."""
    with _host_is_another_place(recorder):
        training = train(recorder, offload_policy=CPUOffloadPolicy())
        for order in ([0, 1], [0, 2]):
            training.model.order = [0, 1, 2]
            training.steps(2)
            with torch.no_grad():
                training.loss()
            _write(training)
            training.model.order = order  # what was gathered for another is dropped
            training.loss()
            training.model.reshard()
            _write(training)
            training.steps(1)


def offloaded_and_loaded(recorder: Recorder) -> None:
    """The host loads the shards after a forward that no backward follows, and while a block is unsharded by hand."""
    with _host_is_another_place(recorder):
        training = train(recorder, offload_policy=CPUOffloadPolicy())
        for _ in range(STEPS):
            training.steps(1)
            training.loss()
            training.model.blocks[1].unshard()
            training.model.load_state_dict({name: value + 1 for name, value in training.model.state_dict().items()})


def offloaded_contexts_joined(recorder: Recorder) -> None:
    """The host writes shards that one root still gathers as it goes over to the streams of another."""
    with _host_is_another_place(recorder):
        first, second = (train(recorder, offload_policy=CPUOffloadPolicy()) for _ in range(2))
        first.steps(2)
        second.steps(2)
        for block in second.model.blocks:
            block.unshard(async_op=True)
        share_comm_ctx([first.model, second.model])
        _write(second)
        second.steps(1)


def offloaded_without_communication(recorder: Recorder) -> None:
    """The host writes the shards after a backward that reduced nothing, so that it waited for nothing."""
    with _host_is_another_place(recorder):
        training = train(recorder, offload_policy=CPUOffloadPolicy())
        for _ in range(STEPS):
            training.model.set_requires_gradient_sync(False)
            training.loss().backward()
            _write(training)
            training.model.set_requires_gradient_sync(True)
            training.steps(1)


def offloaded_and_written_between(recorder: Recorder) -> None:
    """The host writes the shards after a forward that no backward follows: in a step, or after one has said so."""
    with _host_is_another_place(recorder):
        training = train(recorder, offload_policy=CPUOffloadPolicy())
        for _ in range(STEPS):
            training.steps(1)
            training.loss().backward()
            training.loss()
            training.update()
            training.loss()
            training.model.reset_iter_state()
            _write(training)
            for block in training.model.blocks:
                block.unshard()
                block.reshard()
            _write(training)


def offloaded_fails(recorder: Recorder) -> None:
    """A backward raises while gradients are on their way to the host, and a forward before the host writes shards."""

    def fail(gradient: Tensor) -> None:
        raise Expected

    with _host_is_another_place(recorder):
        training = train(recorder, offload_policy=CPUOffloadPolicy())
        for accumulates in (False, True):
            training.steps(2)
            if accumulates:
                training.loss().backward()
            hook = training.model.blocks[0].register_forward_hook(
                lambda module, args, output: output.register_hook(fail) and None
            )
            with suppress(Expected):
                training.loss().backward()
            hook.remove()
            if not accumulates:
                training.start_over()
                _write(training)
            training.optimizer.zero_grad()
            training.steps(2)
            training.model.fails = True
            with suppress(Expected):
                training.loss()
            training.model.fails = False
            if accumulates:
                training.start_over()
            _write(training)
        training.steps(2)


def offloaded_state(recorder: Recorder, *, offloads: bool = True) -> Training:
    """An optimizer steps on the device; its state comes from the host and leaves, a parameter group at a time."""

    def on_host(*args: Any, **kwargs: Any) -> Tensor:
        with recorder.on_host():
            return copy_to_host(*args, **kwargs)

    def on_device(value: Any, device: torch.device, copies: list[tuple[Tensor, Tensor]]) -> Any:
        """(What is made like a tensor of the host would count as the host's.)"""
        local = value.to_local()
        copies.append((torch.empty(local.shape), local))
        return fsdp2.optim.offload._like(value, copies[-1][0])

    copy_to_host = STATE_TO_HOST.function
    with STATE_TO_HOST.replaced_by(on_host), STATE_TO_DEVICE.replaced_by(on_device):
        training = train(recorder, Stack(blocks=4))
        units = [*training.model.blocks, training.model.inputs, training.model.outputs]
        training.optimizer = torch.optim.AdamW([{"params": list(unit.parameters())} for unit in units], foreach=True)
        if offloads:
            offload_optimizer_state(training.optimizer)
        for _ in range(STEPS):
            training.steps(1)
            for state in training.optimizer.state.values():
                state["exp_avg"].to_local().clone()  # on the host
    return training


OFFLOADED = {
    function.__name__: function
    for function in (
        offloaded, offloaded_direct, offloaded_replicas, offloaded_and_written, offloaded_and_loaded,
        offloaded_contexts_joined, offloaded_without_communication, offloaded_and_written_between, offloaded_cached,
        offloaded_fails, offloaded_written_whole, offloaded_sums_are_read, offloaded_sums_are_cleared,
        offloaded_state,
    )
}  # fmt: skip
