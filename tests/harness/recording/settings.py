"""Scenarios of `fully_shard`'s policies and of the communication settings. A part of `scenarios`."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard, pending_gradients, share_comm_ctx, synchronize_gradients
from tests.harness.internals import WITHOUT_MISSING
from tests.harness.recording.meshes import HALF, replicate_and_shard
from tests.harness.recording.recorder import COMPUTE, Recorder, RecordingDevice
from tests.harness.recording.training import STEPS, Expected, Stack, Training

train = Training.of_stack

# ---- mixed precision -----------------------------------------------------------------------------------------


def half(recorder: Recorder, model: Stack | None = None) -> None:
    """Cast before the gather; reduced in another dtype than delivered, so that arriving is one more copy."""
    train(recorder, model, mp_policy=HALF).steps()


def half_in_part(recorder: Recorder) -> None:
    """Biases keep their dtype: two dtypes are gathered as bytes, and reduced in one."""

    def chosen(parameter: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if parameter.dim() == 1 else None

    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False, param_dtype_override_fn=chosen)
    model = Stack()
    for layer in (model.inputs, model.outputs, *(block.up for block in model.blocks)):
        layer.forward = partial(_mixed_linear, layer)  # type: ignore[method-assign]
    for block in model.blocks:
        block.down.forward = partial(_mixed_linear, block.down)  # type: ignore[method-assign]
    train(recorder, model, mp_policy=policy).steps()


def _mixed_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    result = nn.functional.linear(x.to(layer.weight.dtype), layer.weight).float()
    return result if layer.bias is None else result + layer.bias


CACHED = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cache_shards=True)


def half_cached(recorder: Recorder, model: Stack | None = None) -> None:
    """Cast once for several backwards; cast anew after a write, dropped by a state dict, used from two streams."""
    training = train(recorder, model, mp_policy=CACHED)
    for step in range(2 * STEPS):
        training.model._set_unshard_async_op(step % 3 == 2)
        for micro in range(3):
            training.loss().backward()
            if micro == step % 4:
                with torch.no_grad():
                    training.loss()
                    training.model.outputs.weight.mul_(0.5)
        if step % 2:
            training.model.state_dict()
        training.loss().backward()
        training.update()


# ---- gradients ---------------------------------------------------------------------------------------------------


def _units(model: Any) -> list[Any]:
    return [*model.blocks, model]


def hooked(recorder: Recorder, *, own_stream: bool = False, **options: Any) -> None:
    """`set_all_reduce_hook`: an all-reduce of the user's own, on a stream of ours or of theirs."""
    training = train(recorder, **options)
    stream = RecordingDevice(recorder).new_stream() if own_stream else None
    for unit in _units(training.model):
        unit.set_all_reduce_hook(lambda flat: dist.all_reduce(flat, dist.ReduceOp.AVG), stream=stream)
    training.steps()


def hook_fails(recorder: Recorder) -> None:
    """The hook raises after it has launched something, on a stream of its own."""
    training = train(recorder)
    fails = False

    def hook(flat: Tensor) -> None:
        dist.all_reduce(flat, dist.ReduceOp.AVG)
        if fails:
            raise Expected

    for unit in _units(training.model):
        unit.set_all_reduce_hook(hook, stream=RecordingDevice(recorder).new_stream())
    for _ in range(2):
        training.steps(2)
        fails = True
        with suppress(Expected):
            training.loss().backward()
        fails = False
        training.start_over()
    training.steps(2)


def hooked_deleted_in_flight(recorder: Recorder) -> None:
    """A model is dropped while the hook runs on its stream; another is trained on the streams of the first."""
    stream = RecordingDevice(recorder).new_stream()
    for deleted in (True, False):
        recorder.new_streams = count(10)
        training = train(recorder, mp_policy=HALF)
        if deleted:
            for unit in _units(training.model):
                unit.set_all_reduce_hook(lambda flat: dist.all_reduce(flat, dist.ReduceOp.AVG), stream=stream)
        training.steps(2)
        if deleted:
            training.model.set_is_last_backward(False)
            training.loss().backward()
            del unit
        del training
        gc.collect()


def zeros_for_unused(recorder: Recorder) -> None:
    """`set_reduce_scatter_unused_params(True)`: a block that is never called gets zeros."""
    training = train(recorder)
    training.model.set_reduce_scatter_unused_params(True)
    training.model.order = [0, 2]
    training.steps()


def unused(recorder: Recorder) -> None:
    """A block that is never called, and one of which a part is not: `.grad` depends on what other ranks have."""
    training = train(recorder)
    training.model.order = [0, 2]
    training.steps()


def unused_on_this_rank(recorder: Recorder) -> None:
    """A parameter has no gradient here for a time, and one on other ranks; in another dtype, added up too."""
    training = train(recorder, mp_policy=HALF)
    block = training.model.blocks[1]

    def without_bias(module: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        return nn.functional.linear(args[0], module.weight)

    everywhere = WITHOUT_MISSING.replaced_by(staticmethod(lambda presence, missing: presence))
    for is_used in (False, True, False):
        handle = None if is_used else block.up.register_forward_hook(without_bias)
        with everywhere:
            training.loss().backward()
            training.steps(2)
        if handle is not None:
            handle.remove()


def settings_in_flight(recorder: Recorder) -> None:
    """Settings change while reductions are in flight, which are added to `.grad` first."""
    training = train(recorder)
    changes: list[Callable[[Any], None]] = [
        lambda model: model.set_gradient_divide_factor(3.0),
        lambda model: model.set_separate_reduce_scatter_group(True),
        lambda model: model.set_reduce_scatter_unused_params(True),
    ]
    for change in changes:
        training.steps(1)
        training.loss().backward()
        training.model.set_is_last_backward(False)
        training.loss().backward()
        training.model.set_is_last_backward(True)
        change(training.model)
        training.update()
    training.steps(2)


def summed(recorder: Recorder) -> None:
    """Collectives only sum, scaled before (of narrow range) and after; another divisor."""
    for dtype in (torch.float32, torch.float16):
        training = train(recorder, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        for unit in _units(training.model):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(3.0)
        training.steps(3)


# ---- gathers -----------------------------------------------------------------------------------------------------


def storage_kept(recorder: Recorder, **options: Any) -> None:
    """`set_keep_unsharded_storage`, from the start, then no more, then again."""
    training = train(recorder, **options)
    for keep in (True, False, True):
        training.model.set_keep_unsharded_storage(keep)
        training.steps(2)


def pooled(recorder: Recorder, model: Stack | None = None, **options: Any) -> None:
    """Memory that moves from buffer to buffer, from the first iteration on; then no more, then again."""
    training = train(recorder, model, **options)
    for enable in (True, False, True):
        training.model.set_communication_memory_pool(enable)
        training.steps(2)
    recorder.captures = True
    training.steps(1)
    recorder.captures = False


def gathered_on_compute(recorder: Recorder) -> None:
    """All-gathers as asynchronous works of the current stream; also turned off and on in between."""
    training = train(recorder)
    for enable in (True, False, True):
        training.model._set_unshard_async_op(enable)
        training.steps(2)
        training.model.blocks[0].unshard(async_op=True)
        training.model.blocks[1].unshard(async_op=True)
        training.model.blocks[1].reshard()
        training.steps(1)


def gathered_far_ahead(recorder: Recorder) -> None:
    """Explicit prefetching of two blocks at a time; one of the blocks is not gathered in backward."""
    training = train(recorder)
    blocks = training.model.blocks
    training.model.set_modules_to_forward_prefetch(list(blocks[:2]))
    blocks[0].set_modules_to_forward_prefetch(list(blocks[1:]))
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    training.steps()


def gathered_by_extensions(recorder: Recorder, **options: Any) -> None:
    """Some parameters gather themselves: sent in half, and unsharded in memory of their own or where they arrived."""
    training = train(recorder, **options)
    for index, block in enumerate(training.model.blocks):
        _extend(block.down.weight, rows=8, widens=index != 1)
    training.steps()
    training.model.set_keep_unsharded_storage(True)
    training.steps(2)


def _extend(parameter: Any, *, rows: int, widens: bool) -> None:
    """Give the local tensor of ``parameter``, a sharded one of so many ``rows``, the methods of an extension."""
    local = parameter.to_local().detach()
    dtype = torch.bfloat16 if widens else torch.float32

    def send(mesh: object) -> tuple[tuple[Tensor, ...], None]:
        padded = torch.zeros(-(-rows // dist.get_world_size()), *local.shape[1:], dtype=dtype)
        padded[: local.shape[0]] = local
        return (padded,), None

    def receive(outputs: Any, metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        (values,) = outputs
        if out is None:
            whole = values[:rows].float()
            return whole, (whole,) if widens else ()
        if widens:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(values[:rows])
        return None

    parameter._local_tensor.fsdp_pre_all_gather = send
    parameter._local_tensor.fsdp_post_all_gather = receive


class _Cached:
    """A custom collective whose buffers are used again, one for each size."""

    def __init__(self, collective: Callable[..., Any], *, again: bool) -> None:
        self._collective = collective
        self._again = again
        self._buffers: dict[object, Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh, or the one of before."""
        key = (tuple(size), dtype)
        if not self._again or key not in self._buffers:
            self._buffers[key] = torch.empty(*size, dtype=dtype, device=device)
        return self._buffers[key] if self._again else self._buffers.pop(key)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        """torch.distributed's."""
        return self._collective(output_tensor, input_tensor, **kwargs)


def custom_collectives(recorder: Recorder, **options: Any) -> None:
    """Set on some blocks, after an optimizer step that the next gathers need not wait for but for the event."""
    training = train(recorder, **options)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for again in (False, True):
        training.steps(2)
        _set_post_optim_event(recorder, training)
        for block in training.model.blocks[:2]:
            block.set_custom_all_gather(_Cached(gather, again=again))
            block.set_custom_reduce_scatter(_Cached(reduce, again=False))
        _unshard_by_hand(training)
        training.steps(1)
    training.model.set_requires_gradient_sync(False)
    training.loss().backward()
    training.model.set_requires_gradient_sync(True)
    training.steps(2)


def _unshard_by_hand(training: Training) -> None:
    """Which a custom all-gather is asked to do asynchronously; some handles are waited for, some forwards find it."""
    for number, block in enumerate(training.model.blocks):
        handle = block.unshard(async_op=True)
        if number % 2:
            handle.wait()


def memory_of_the_process_group(recorder: Recorder) -> None:
    """Buffers of the process group, which reductions have of their own."""
    training = train(recorder, mp_policy=HALF)
    training.model.set_separate_reduce_scatter_group(True)
    for enable in (True, False):
        for unit in _units(training.model):
            unit.set_allocate_memory_from_process_group_for_comm(enable)
        training.steps(1)
        _unshard_by_hand(training)
        training.steps(1)


def denominators(recorder: Recorder) -> None:
    """Tensors on the device that reductions divide by; the last replaces one that is in use."""
    training = train(recorder)
    model = training.model
    for number in range(STEPS):
        model.set_gradient_reduction(torch.full((), 1.0 + number))
        training.steps(1)
    model.set_is_last_backward(False)
    training.loss().backward()
    model.set_gradient_reduction(torch.full((), 7.0))
    model.set_is_last_backward(True)
    training.loss().backward()
    training.update()


# ---- iterations --------------------------------------------------------------------------------------------------


class Event(int):
    """Events of devices are objects of a class of their own; the recorder's are numbers."""


def _set_post_optim_event(recorder: Recorder, training: Training) -> None:
    training.model.set_post_optim_event(Event(RecordingDevice(recorder).record(COMPUTE)))


def post_optim_event(recorder: Recorder) -> None:
    """Gathers of a forward wait for the optimizer's step only, not for what comes between."""
    training = train(recorder)
    for _ in range(STEPS):
        training.steps(1)
        _set_post_optim_event(recorder, training)
        torch.ones(4).add_(1.0)


def _steps_updated_elsewhere(recorder: Recorder, training: Training) -> Iterator[None]:
    """Steps whose optimizer runs on a stream of the program's; after each, what the program does next."""
    device = RecordingDevice(recorder)
    stream = device.new_stream()
    for _ in range(STEPS):
        training.loss().backward()
        device.wait(stream, device.record(COMPUTE), "the program's own")
        with device.use(stream):
            training.update()
        training.model.set_post_optim_event(Event(device.record(stream)))
        yield


def only_replicated_updated_elsewhere(recorder: Recorder) -> None:
    """Compute reads parameters where they lie."""
    for _ in _steps_updated_elsewhere(recorder, train(recorder, strategy="replicate")):
        pass


def updated_elsewhere_before_a_compiled_call(recorder: Recorder) -> None:
    """A graph reads the shards on the current stream."""
    training = train(recorder)
    for _ in _steps_updated_elsewhere(recorder, training):
        training.model._get_fsdp_state().root.begin_compiled_call()
        for parameter in training.model.parameters():
            parameter.to_local().clone()


def synchronized_outside_of_backward(recorder: Recorder) -> None:
    """Gradients of several backwards are looked at, and then reduced."""
    training = train(recorder, mesh=replicate_and_shard())
    training.model.set_is_last_backward(False)  # reductions are left in flight
    for step in range(STEPS):
        for reduces in (False, step == 1):
            training.model.set_requires_gradient_sync(reduces)
            training.model.set_requires_all_reduce(False)
            training.loss().backward()
        for pending in pending_gradients(training.model).values():
            for each in (pending.unreduced, pending.over_shards):
                if each is not None:
                    each.sum()
        synchronize_gradients(training.model)
        training.update()


def finalized_by_hand(recorder: Recorder) -> None:
    """Two backwards that only `finalize_backward` ends, at once or by a handle; then one that reduces itself."""
    training = train(recorder)
    model = training.model
    model.set_manual_backward_finalization(True)
    for step in range(STEPS):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            training.loss().backward()
        handle = model.finalize_backward(async_op=step % 2 == 0)
        if handle is not None:
            handle.wait()
        training.update()
    model.set_manual_backward_finalization(False)
    training.steps(1)


def shared_context(recorder: Recorder) -> None:
    """Two roots on the same streams, from the start."""
    first, second = train(recorder), train(recorder, Stack(width=3))
    share_comm_ctx([first.model, second.model])
    for _ in range(STEPS):
        made = first.model(torch.ones(2, 8))
        loss = second.model(made).sum()
        loss.backward()
        first.update()
        second.update()


def shared_context_late(recorder: Recorder) -> None:
    """The second root gives up its streams while its gradients are added to those of before."""
    first, second = train(recorder), train(recorder)
    first.steps(2)
    second.steps(2)
    second.loss().backward()
    second.model.set_is_last_backward(False)
    second.loss().backward()
    second.model.set_is_last_backward(True)
    share_comm_ctx([first.model, second.model])
    second.update()
    for training in (first, second, first, second):
        training.steps(1)


def copied(recorder: Recorder) -> None:
    """A deep copy while the reduction of gradients that it copies is in flight; both go on."""
    training = train(recorder)
    for _ in range(2):
        training.steps(1)
        training.loss().backward()
        training.model.set_is_last_backward(False)
        training.loss().backward()
        training.model.set_is_last_backward(True)
        model = copy.deepcopy(training.model)
        model(torch.ones(2, 8)).sum().backward()
        training.update()


def one_group_reduces_twice(recorder: Recorder) -> None:
    """One group, whose next reduction comes while its last, which may stay in flight, is delivered by a copy."""
    model = nn.Linear(8, 8)
    fully_shard(model, mp_policy=HALF)
    model.set_reduce_scatter_max_input_buffers(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for _ in range(STEPS):
        for last in (False, False, True):
            model.set_is_last_backward(last)
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


SETTINGS = {
    function.__name__: function
    for function in (
        half, half_in_part, settings_in_flight, hooked, hook_fails, hooked_deleted_in_flight, zeros_for_unused,
        unused, unused_on_this_rank, summed, storage_kept, gathered_on_compute, gathered_far_ahead,
        gathered_by_extensions, custom_collectives, memory_of_the_process_group, denominators, post_optim_event,
        only_replicated_updated_elsewhere, updated_elsewhere_before_a_compiled_call,
        synchronized_outside_of_backward, finalized_by_hand, shared_context, shared_context_late,
        one_group_reduces_twice, copied,
    )
} | {
    "half_cached_direct": lambda recorder: half_cached(recorder, Stack(512, 514)),
    "half_direct": lambda recorder: half(recorder, Stack(512, 514)),
    "pooled_in_half_on_replicas": lambda recorder: pooled(recorder, mp_policy=HALF, mesh=replicate_and_shard()),
    "hooked_on_its_own_stream": partial(hooked, own_stream=True, mp_policy=HALF),
    "hooked_replicas": lambda recorder: hooked(recorder, mesh=replicate_and_shard()),
    "extensions_on_neighbours": partial(gathered_by_extensions, reshard_after_forward=2),
    "custom_collectives_on_neighbours": partial(custom_collectives, reshard_after_forward=2),
    "storage_kept_by_neighbours": partial(storage_kept, reshard_after_forward=2),
}  # fmt: skip
