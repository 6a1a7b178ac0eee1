"""`set_communication_memory_pool`: a steady-state step allocates nothing for communication, and addresses repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2._torch
from benchmarks.implementations import ShardingOptions, fake_process_group
from benchmarks.memory import measure_step_memory
from benchmarks.models import LARGE_PARAMETERS
from benchmarks.step import Trainer
from fsdp2 import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, MixedPrecisionPolicy, fully_shard
from fsdp2.plugs.memory.memory_pool import SLACK, MemoryPool
from tests.harness import fake_world
from tests.harness.happens_before import EventRecord, Operation, StreamWait
from tests.harness.internals import allocated_bytes, groups_of, unsharded_bytes
from tests.harness.pooling import needs_pool
from tests.harness.recording.recorder import COMPUTE, recording
from tests.harness.recording.training import Training

POLICIES = {
    "full": MixedPrecisionPolicy(),
    "half": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "reduced_in_half": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
}
WIDTHS = {"packed": 16, "direct": 512}


class Block(nn.Module):
    """Two layers; recomputed in backward if ``recomputes``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False) if self.recomputes else self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def pooled(width: int, blocks: int = 4, **options: object) -> nn.Sequential:
    model = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, 4))
    for block in list(model)[:-1]:
        fully_shard(block, **options)  # type: ignore[arg-type]
    fully_shard(model, **options)  # type: ignore[arg-type]
    model.set_communication_memory_pool(True)
    return model


def plain_step(model: nn.Sequential, width: int) -> None:
    model(torch.ones(2, width)).sum().backward()
    model.zero_grad()


def two_forwards(model: nn.Sequential, width: int) -> None:
    losses = [model(torch.ones(2, width)).sum() for _ in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    model.zero_grad()


def microbatches(model: nn.Sequential, width: int) -> None:
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(torch.ones(2, width)).sum().backward()
    model.zero_grad()


def recomputed(model: nn.Sequential, width: int) -> None:
    for block in list(model)[:-1]:
        block.recomputes = True
    plain_step(model, width)


def evaluated_between(model: nn.Sequential, width: int) -> None:
    plain_step(model, width)
    with torch.no_grad():
        model(torch.ones(2, width))


STEPS: list[Callable[[nn.Sequential, int], None]] = [
    plain_step, two_forwards, microbatches, recomputed, evaluated_between,
]  # fmt: skip


def pool_of(model: nn.Module) -> MemoryPool:
    comm = groups_of(model)[0].comm
    assert comm is not None and isinstance(comm.gather_arena, MemoryPool)
    return comm.gather_arena


@contextmanager
def filled() -> Iterator[list[tuple[int, int]]]:
    """Size and address of all memory that is given to buffers."""
    seen: list[tuple[int, int]] = []
    fill = MemoryPool.fill

    def noted(self: MemoryPool, storage: torch.UntypedStorage, nbytes: int) -> None:
        fill(self, storage, nbytes)
        seen.append((nbytes, storage.data_ptr()))

    with mock.patch.object(MemoryPool, "fill", noted):
        yield seen


@contextmanager
def resized() -> Iterator[list[int]]:
    """The sizes that storages are given by resizing."""
    sizes: list[int] = []
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        sizes.append(nbytes)
        return resize(storage, nbytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", noted):
        yield sizes


@pytest.mark.full
@needs_pool
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_steady_state_step_allocates_nothing_and_addresses_repeat(
    step: Callable[[nn.Sequential, int], None], width: int, policy: MixedPrecisionPolicy
) -> None:
    with fake_world(4):
        model = pooled(width, mp_policy=policy)
        for _ in range(4):
            step(model, width)
        before = pool_of(model).allocations
        traces = []
        for _ in range(3):
            with filled() as seen, resized() as sizes:
                step(model, width)
            assert not sizes, "neither allocated nor freed"
            traces.append(seen)
        assert pool_of(model).allocations == before
        assert traces[0] == traces[1] == traces[2]
        assert len(traces[0]) >= 2 * 5


@needs_pool
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_off_again_nothing_is_kept(width: int) -> None:
    with fake_world(4):
        model = pooled(width)
        plain_step(model, width)
        pool = pool_of(model)
        assert pool.idle_bytes > 0
        model(torch.ones(2, width))  # the root stays unsharded, on memory of the pool
        model.set_communication_memory_pool(False)
        assert pool.idle_bytes == 0
        plain_step(model, width)
        assert (pool.idle_bytes, pool.used_bytes) == (0, 0)
        assert not any(map(allocated_bytes, groups_of(model)))


@pytest.mark.full
@needs_pool
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_pool_keeps_what_a_step_has_in_use(width: int) -> None:
    """With blocks alike: the unsharded parameters of three groups, and staging; not of all groups."""
    with fake_world(4):
        model = pooled(width, blocks=12)
        for _ in range(3):
            plain_step(model, width)
        root, block, *_ = map(unsharded_bytes, groups_of(model))
        sharded = sum(parameter.to_local().nbytes for parameter in model.parameters())
        staging = 0 if width == WIDTHS["direct"] else 3 * (block + root)  # gathered; packed gradients
        assert root + 2 * block <= pool_of(model).idle_bytes <= 1.2 * (root + 2 * block + sharded + staging)


@needs_pool
def test_what_was_unsharded_by_hand_is_not_kept_for_long() -> None:
    width = WIDTHS["direct"]
    with fake_world(4):
        model = pooled(width, blocks=12)
        plain_step(model, width)
        plain_step(model, width)
        usual = pool_of(model).idle_bytes
        block = unsharded_bytes(groups_of(model)[1])
        for unit in list(model)[:-1]:
            unit.unshard()
        assert all(unit.up.weight.shape[0] == width for unit in list(model)[:-1])
        addresses = {unit.up.weight.data_ptr() for unit in list(model)[:-1]}
        assert len(addresses) == 12
        for unit in list(model)[:-1]:
            unit.reshard()
        assert pool_of(model).idle_bytes >= 12 * block
        plain_step(model, width)
        plain_step(model, width)
        plain_step(model, width)
        assert pool_of(model).idle_bytes == usual


class Widening(nn.Module):
    """Layers of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16 + 4 * index) for index in range(24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)


@pytest.mark.full
@needs_pool
def test_many_groups_of_different_sizes_stay_within_the_limit() -> None:
    with fake_world(4):
        model = Widening()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        model.set_communication_memory_pool(True)  # type: ignore[operator]
        for _ in range(4):
            model(torch.ones(2, 16, requires_grad=True)).sum().backward()
            model.zero_grad()
            pool = pool_of(model)
            assert pool.idle_bytes + pool.used_bytes <= SLACK * pool._before_bytes
        assert pool.idle_bytes + pool.used_bytes < sum(map(unsharded_bytes, groups_of(model)))


@pytest.mark.full
@needs_pool
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_stale_tensor_never_lies_on_the_memory_of_another_layer(width: int) -> None:
    with fake_world(4):
        model = pooled(width)
        plain_step(model, width)
        model[0].unshard()
        stale = [model[0].up.weight, model[0].up.weight.detach(), model[0].up.weight.detach()[1:]]
        model[0].reshard()
        for _ in range(3):
            plain_step(model, width)
            model[1].unshard()
            for tensor in stale:
                assert tensor.untyped_storage().nbytes() == 0
                assert tensor.untyped_storage().data_ptr() == 0
            model[1].reshard()
        model[0].unshard()
        assert stale[0] is model[0].up.weight, "it is the same parameter, with its values again"
        model[0].reshard()


@pytest.mark.full
@needs_pool
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_costs_no_memory(width: int, when: str) -> None:
    with fake_world(4):
        model = pooled(width)
        for _ in range(3):
            plain_step(model, width)
        usual = (pool_of(model).used_bytes, pool_of(model).idle_bytes)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        for _ in range(3):
            if when == "forward":
                handle = model[1].register_forward_hook(fail)
            else:
                handle = model[1].register_forward_hook(
                    lambda module, args, output: output.register_hook(fail) and None
                )
            with pytest.raises(ZeroDivisionError):
                plain_step(model, width)
            handle.remove()
            model.zero_grad()
        for _ in range(4):
            plain_step(model, width)
        assert (pool_of(model).used_bytes, pool_of(model).idle_bytes) == usual
        before = pool_of(model).allocations
        plain_step(model, width)
        assert pool_of(model).allocations == before


@needs_pool
def test_kept_gradients_do_not_change() -> None:
    with fake_world(4):
        model = pooled(16)
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            model.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        kept = [parameter.grad.to_local() for parameter in model.parameters()]
        for tensor in kept:
            tensor.fill_(5)
        model.zero_grad()
        for _ in range(3):
            plain_step(model, 16)
        assert all((tensor == 5).all() for tensor in kept)


@needs_pool
def test_figures_count_what_is_kept() -> None:
    """Peaks are those without a pool, where a step's largest needs come together; between steps it is live."""
    figures = []
    for pooled_ in (False, True):
        with fake_process_group(8) as mesh:
            trainer = Trainer("fsdp2", LARGE_PARAMETERS, mesh=mesh, options=ShardingOptions(world_size=8))
            trainer.model.set_communication_memory_pool(pooled_)  # type: ignore[operator]
            trainer.warm_up(3)
            figures.append(measure_step_memory(trainer))
    off, on = figures
    block = 4 * LARGE_PARAMETERS.params_per_block * LARGE_PARAMETERS.dim * LARGE_PARAMETERS.hidden_dim
    assert on.at_rest_over >= 2 * block > off.at_rest_over
    assert off.forward_over <= on.forward_over <= off.forward_over + block
    assert off.backward_over <= on.backward_over <= off.backward_over + block


@needs_pool
def test_memory_whose_addresses_a_captured_graph_holds_is_never_given_back() -> None:
    """Steps after that need less of it, or something else; a replay would write where others read."""
    with fake_world(4), recording() as recorder:
        training = Training.of_stack(recorder)
        training.model.set_communication_memory_pool(True)
        training.steps(4)
        recorder.captures = True
        training.loss().backward()
        recorder.captures = False
        training.optimizer.zero_grad()
        comm = groups_of(training.model)[0].comm
        assert comm is not None
        held = {storage.data_ptr() for storage in comm.pooled_storages()}
        training.model.order = [0]
        training.steps(4)
        training.model(
            torch.ones(2, 8),
        )
        with torch.no_grad():
            training.model(torch.ones(2, 8))
        training.model.reshard()
        assert held and held <= {storage.data_ptr() for storage in comm.pooled_storages()}
        with pytest.raises(FSDPRuntimeError, match=r"set_communication_memory_pool\(False\): a graph was captured"):
            training.model.set_communication_memory_pool(False)
        assert groups_of(training.model)[0].comm.pooled_storages()  # type: ignore[union-attr]
        assert training.model._get_fsdp_state().root_settings.pools_memory is True, "nothing was changed"


def test_kept_storages_whose_addresses_a_captured_graph_holds_stay() -> None:
    with fake_world(4), recording() as recorder:
        training = Training.of_stack(recorder)
        training.model.set_keep_unsharded_storage(True)
        training.steps(2)
        training.model.set_keep_unsharded_storage(False)
        training.model.set_keep_unsharded_storage(True)
        recorder.captures = True
        training.loss().backward()
        recorder.captures = False
        with pytest.raises(
            FSDPRuntimeError, match=r"set_keep_unsharded_storage\(False\) on '.*': a graph was captured"
        ):
            training.model.set_keep_unsharded_storage(False)


@pytest.mark.full
@needs_pool
def test_in_a_captured_step_every_stream_comes_back_to_compute() -> None:
    """As capturing a graph asks for; and nothing is allocated or freed."""
    with fake_world(4), recording() as recorder:
        training = Training.of_stack(recorder)
        training.model.set_communication_memory_pool(True)
        training.steps(4)
        recorder.captures = True
        start = len(recorder.trace)
        with resized() as sizes:
            training.loss().backward()
        recorder.captures = False
    trace = recorder.trace[start:]
    assert not sizes
    left: set[int] = set()  # streams with something after the last event that compute, at last, waits for
    events: dict[int, int] = {}
    joined = {event.event for event in trace if isinstance(event, StreamWait) and event.stream == COMPUTE}
    for event in trace:
        if isinstance(event, EventRecord):
            events[event.event] = event.stream
            if event.event in joined:
                left.discard(event.stream)
        elif isinstance(event, (Operation, StreamWait)) and event.stream != COMPUTE:
            left.add(event.stream)
    assert {events[event] for event in joined if event in events} and not left


def test_wrong_uses_are_refused() -> None:
    with fake_world(4):
        model = nn.Sequential(Block(16), Block(16))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        with pytest.raises(FSDPTypeError, match="takes a bool as 'enable', got 1"):
            model.set_communication_memory_pool(1)
        with (
            mock.patch.object(fsdp2._torch, "can_swap_memory", False),
            pytest.raises(FSDPNotImplementedError, match=r"needs torch 2\.13"),
        ):
            model.set_communication_memory_pool(True)
        model[0].set_communication_memory_pool(False)
        with pytest.raises(FSDPRuntimeError, match=r"set_communication_memory_pool was called on '0' .* on the root"):
            model(torch.ones(2, 16))
        model[0]._get_fsdp_state().configure_root(pools_memory=None)
        model(torch.ones(2, 16))
        with pytest.raises(FSDPRuntimeError, match="must be called on the root, Sequential, not on '0'"):
            model[0].set_communication_memory_pool(False)
        handle = model[0].register_forward_hook(lambda *_: model.set_communication_memory_pool(False))
        with pytest.raises(FSDPRuntimeError, match="outside of forward and backward"):
            model(torch.ones(2, 16))
        handle.remove()
