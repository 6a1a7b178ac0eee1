"""It is really sharded and really batched: bytes at rest, peaks, launches, their order, copies, storage operations.

All on the fake group: one process as one of many ranks, so that nothing depends on load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import FSDPRuntimeError, FSDPValueError, fully_shard
from fsdp2.core.gradients import GradientBuffer
from fsdp2.core.layout import DIRECT_ALIGNMENT_BYTES
from fsdp2.core.state import state_of, states_below
from fsdp2.core.transport import Native
from tests.fake_pg.helpers.stacks import Block, PeakMeter
from tests.harness import fake_world
from tests.harness.internals import (
    gathered_first,
    gradient_buffers,
    groups_of,
    shard_buffers,
    unsharded_bytes,
    unsharded_bytes_now,
)


def stack(blocks: int, *, width: int = 16, layers: int = 3) -> nn.Sequential:
    """Blocks that are groups of their own, and a root with a layer of its own at the end."""
    model = nn.Sequential(*(Block(width, layers) for _ in range(blocks)), nn.Linear(width, 16))
    for block in list(model)[:-1]:
        fully_shard(block)
    fully_shard(model)
    return model


def step(model: nn.Module, width: int = 16) -> None:
    model(torch.zeros(2, width)).sum().backward()


# ---- bytes at rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4, 64])
def test_at_rest_a_rank_holds_its_rows_and_alignment(world_size: int) -> None:
    shapes = [(97, 5), (64, 3), (1, 7), (130,), (256, 512)]
    model = nn.Module()
    for index, shape in enumerate(shapes):
        model.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))
    model.forward = lambda x: sum(p.square().sum() for p in model.parameters()) * x  # type: ignore[method-assign]
    rows_bytes = sum(math.ceil(shape[0] / world_size) * math.prod(shape[1:]) * 4 for shape in shapes)
    alignment = DIRECT_ALIGNMENT_BYTES * (len(shapes) + 1)
    for rank in (0, world_size - 1):
        with fake_world(world_size, rank):
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(())).backward()
            optimizer.step()
            (group,) = groups_of(model)
            (shards,) = shard_buffers(group)
            assert shards.untyped_storage().nbytes() <= rows_bytes + alignment
            assert unsharded_bytes_now(model) == 0
            (gradients,) = gradient_buffers(group)
            assert gradients.untyped_storage().nbytes() <= rows_bytes + alignment
            for parameter, shape in zip(model.parameters(), shapes, strict=True):
                limit = math.ceil(shape[0] / world_size)
                state = optimizer.state[parameter]
                for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
                    assert isinstance(tensor, DTensor)
                    local = tensor.to_local()
                    assert local.shape[0] <= limit
                    if tensor is not parameter.grad:  # gradients lie on one buffer, looked at above
                        assert local.untyped_storage().nbytes() <= limit * math.prod(shape[1:]) * 4
                    assert tensor.shape == shape
            del tensor, local
            optimizer.zero_grad()
            assert gradients.untyped_storage().nbytes() == 0, "as of a plain model"
        model = nn.Module()
        for index, shape in enumerate(shapes):
            model.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))
        model.forward = lambda x, model=model: sum(p.square().sum() for p in model.parameters()) * x  # type: ignore[method-assign,misc]


@pytest.mark.parametrize("who", ["optimizer", "module", "part of it"])
def test_gradients_that_somebody_holds_keep_their_memory(who: str) -> None:
    with fake_world(4):
        model = stack(3, width=16, layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model)
        buffers = [buffer for group in groups_of(model) for buffer in gradient_buffers(group)]
        parameter = next(model[1].parameters())
        held = parameter.grad
        assert isinstance(held, DTensor)
        held.to_local().fill_(3.0)
        {"optimizer": optimizer, "module": model, "part of it": model[1]}[who].zero_grad()
        has_memory = [buffer.untyped_storage().nbytes() > 0 for buffer in buffers]
        assert held.to_local().eq(3.0).all() and parameter.grad is None
        assert sum(has_memory) == (len(buffers) if who == "part of it" else 1)
        optimizer.zero_grad(set_to_none=False)
        assert [buffer.untyped_storage().nbytes() > 0 for buffer in buffers] == has_memory
        del held
        optimizer.zero_grad()
        assert not any(buffer.untyped_storage().nbytes() for buffer in buffers)


def test_hooks_that_clear_one_gradient_each_try_once_to_free_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last of a group, in whose order they come. (The delivery holds it then: the next to clear frees it.)"""
    with fake_world(4):
        model = stack(2, width=16, layers=3)
        freed: list[int] = []
        release = GradientBuffer.release
        monkeypatch.setattr(GradientBuffer, "release", lambda self: (freed.append(1), release(self)))
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.zero_grad())
        step(model)
        groups = groups_of(model)
        assert len(freed) == len(groups) < len(list(model.parameters()))
        model.zero_grad()
        assert not any(buffer.untyped_storage().nbytes() for group in groups for buffer in gradient_buffers(group))


# ---- peaks -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("blocks", [4, 12])
@pytest.mark.parametrize("width", [16, 512], ids=["packed", "direct"])
def test_peak_unsharded_memory_is_bounded_by_the_plan(blocks: int, width: int) -> None:
    with fake_world(4):
        model = stack(blocks, width=width, layers=1)
        step(model, width)
        root, block, *_ = map(unsharded_bytes, groups_of(model))
        for run in (lambda: model(torch.zeros(2, width)), lambda: step(model, width)):
            with PeakMeter(model) as meter:
                run()
            assert 0 < meter.peak <= root + 2 * block + DIRECT_ALIGNMENT_BYTES
            step(model, width)
            assert unsharded_bytes_now(model) == 0


# ---- launches and their order --------------------------------------------------------------------------


@contextmanager
def launches(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A trace of launches and of the compute of every sharded module, in the order of issue."""
    trace: list[str] = []
    owner = {id(gathered_first(group)): group.name for group in groups_of(model)}
    gather, reduce = Native.all_gather, Native.reduce_scatter

    def traced_gather(transport, members, *args, **kwargs):  # type: ignore[no-untyped-def]
        trace.append(f"gather {owner[id(members[0][0])]}")
        return gather(transport, members, *args, **kwargs)

    def traced_reduce(transport, members, *args, **kwargs):  # type: ignore[no-untyped-def]
        trace.append("reduce")
        return reduce(transport, members, *args, **kwargs)

    monkeypatch.setattr(Native, "all_gather", traced_gather)
    monkeypatch.setattr(Native, "reduce_scatter", traced_reduce)
    handles = []
    for state in states_below(model):
        name = state.name
        handles.append(
            state.modules[0].register_forward_pre_hook(lambda *_, name=name: trace.append(f"forward {name}"))
        )
        handles.append(
            state.modules[0].register_forward_hook(
                lambda _module, _inputs, output, name=name: (
                    output.register_hook(lambda _gradient: trace.append(f"backward {name}")) and None
                )
            )
        )
    yield trace
    for handle in handles:
        handle.remove()


class CollectiveCounter(TorchDispatchMode):
    """Counts the operations of `c10d`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [1, 50])
def test_packed_parameters_travel_in_one_collective(layers: int) -> None:
    with fake_world(4):
        model = stack(3, layers=layers)
        step(model)
        with CollectiveCounter() as counter:
            step(model)
    assert sorted(counter.counts.values()) == [4, 7], counter.counts  # reductions, gathers


def test_the_next_gather_is_issued_before_the_current_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(4):
        model = stack(3)
        step(model)
        with launches(model, monkeypatch) as trace:
            step(model)
    # From the second iteration on the root's forward gathers block 0 as well. Hooks of the first module run first.
    assert trace == [
        "gather Sequential",
        "gather 0",
        "forward Sequential",
        "gather 1",
        "forward 0",
        "gather 2",
        "forward 1",
        "forward 2",
        "gather 2",
        "backward Sequential",
        "gather 1",
        "backward 2",
        "reduce",
        "gather 0",
        "backward 1",
        "reduce",
        "backward 0",
        "reduce",
        "reduce",
    ]


@pytest.mark.parametrize(("blocks_ahead", "gathers"), [(0, 0), (1, 1), (2, 2), (2.9, 2), (100, 5)])
def test_a_budget_of_bytes_says_how_far_ahead_is_gathered(
    blocks_ahead: float, gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many gathers have been issued beyond the block that computes, at its forward and its backward."""
    with fake_world(4):
        model = stack(6)
        step(model)
        block = unsharded_bytes(groups_of(model)[1])
        model.set_prefetch_budget(int(blocks_ahead * block))
        with launches(model, monkeypatch) as trace:
            step(model)
        order = [str(index) for index in range(6)]
        for compute, names in (("forward", order), ("backward", order[::-1])):
            passes = trace[: trace.index("backward 5")] if compute == "forward" else trace[trace.index("forward 5") :]
            for position, name in enumerate(names):
                issued = passes[: passes.index(f"{compute} {name}")]
                ahead = [other for other in names[position + 1 :] if f"gather {other}" in issued]
                assert ahead == names[position + 1 : position + 1 + gathers], (compute, name)
        model.set_prefetch_budget(None)
        with launches(model, monkeypatch) as trace:
            step(model)
        assert trace.index("gather 2") > trace.index("forward 0"), "one unit again"


@pytest.mark.parametrize("blocks_ahead", [0, 2])
def test_a_budget_bounds_the_peak(blocks_ahead: int) -> None:
    with fake_world(4):
        model = stack(8, width=512, layers=1)  # gathered in place: no staging buffers
        step(model, 512)
        root, block, *_ = map(unsharded_bytes, groups_of(model))
        model.set_prefetch_budget(blocks_ahead * block)
        with PeakMeter(model) as meter:
            step(model, 512)
        assert (
            root + (1 + blocks_ahead) * block
            <= meter.peak
            <= root + (1 + blocks_ahead) * block + DIRECT_ALIGNMENT_BYTES
        )


@pytest.mark.parametrize("when", ["after", "never"])
def test_backward_gathers_after_a_unit_or_nothing_ahead(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(4):
        model = stack(3)
        step(model)
        model.set_backward_prefetch(when)
        with launches(model, monkeypatch) as trace:
            step(model)
        backward = trace[trace.index("forward 2") + 1 :]
        ahead = ["gather 1", "reduce"] if when == "after" else ["reduce", "gather 1"]
        then = ["gather 0", "reduce"] if when == "after" else ["reduce", "gather 0"]
        names = [each for each in backward if not each.startswith("backward")]
        assert names == ["gather 2", *ahead, *then, "reduce", "reduce"]
        begins = [backward.index(f"backward {name}") for name in "210"]
        assert begins[0] < backward.index("gather 1") and begins[1] < backward.index("gather 0"), "none beside another"
        assert trace.index("gather 2") < trace.index("forward 1"), "forwards gather ahead as ever"
        model.set_backward_prefetch("before")
        with launches(model, monkeypatch) as trace:
            step(model)
        assert trace.index("gather 1") < trace.index("backward 2")


@pytest.mark.parametrize(("when", "blocks"), [("before", 2), ("after", 1), ("never", 1)])
def test_gathering_after_a_unit_takes_its_memory_less(when: str, blocks: int) -> None:
    with fake_world(4):
        model = stack(8, width=512, layers=1)  # gathered in place: no staging buffers
        step(model, 512)
        root, block, *_ = map(unsharded_bytes, groups_of(model))
        model.set_backward_prefetch(when)
        loss = model(torch.ones(2, 512)).sum()
        with PeakMeter(model) as meter:
            loss.backward()
        assert root + blocks * block <= meter.peak <= root + blocks * block + DIRECT_ALIGNMENT_BYTES


def test_a_wrong_moment_is_refused() -> None:
    with fake_world(4):
        model = stack(2)
        with pytest.raises(FSDPValueError, match="takes 'before', 'after' or 'never', got 'post'"):
            model.set_backward_prefetch("post")
        step(model)
        with pytest.raises(FSDPRuntimeError, match="must be called on the root, Sequential, not on '0'"):
            model[0].set_backward_prefetch("after")


def test_a_wrong_budget_is_refused() -> None:
    with fake_world(4):
        model = stack(2)
        for wrong in (-1, 1.5, True, "2GB"):
            with pytest.raises(FSDPValueError, match="number of bytes"):
                model.set_prefetch_budget(wrong)  # type: ignore[arg-type]
        model[0].set_prefetch_budget(5)
        with pytest.raises(FSDPRuntimeError, match=r"set_prefetch_budget was called on '0' .* call it on the root"):
            step(model)
        model[0].set_prefetch_budget(None)
        step(model)
        with pytest.raises(FSDPRuntimeError, match="must be called on the root, Sequential, not on '0'"):
            model[0].set_prefetch_budget(5)
        handle = model[0].register_forward_hook(lambda *_: model.set_prefetch_budget(5))
        with pytest.raises(FSDPRuntimeError, match="outside of forward and backward"):
            step(model)
        handle.remove()
        step(model)


# ---- copies and storage operations ---------------------------------------------------------------------


COPYING = ("copy", "cat", "clone", "split_with_sizes_copy", "_to_copy", "stack", "contiguous")


class CopiedBytes(TorchDispatchMode):
    """Bytes written by operations that only move data."""

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and any(word in func._opname for word in COPYING):
            written = (kwargs or {}).get("out", result if result is not None else args[0])
            tensors = written if isinstance(written, (list, tuple)) else [written]
            self.by_op[func._opname] += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        return result


def test_even_large_fp32_parameters_are_not_copied_around_collectives() -> None:
    with fake_world(4):
        width = 512
        model = nn.Sequential(*(Block(width, 2) for _ in range(3)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        inputs = torch.zeros(2, width)
        for _ in range(2):
            model(inputs).sum().backward()
            model.zero_grad()
        with CopiedBytes() as forward:
            output = model(inputs)
        assert not forward.by_op
        loss = output.sum()
        with CopiedBytes() as backward:
            loss.backward()
    # What is left is the presence of gradients, one element per parameter and rank: of two padded to 16 bytes.
    assert backward.by_op == {"_chunk_cat": 3 * 4 * 16}


class AllocationCounter(TorchDispatchMode):
    """Counts operations that allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func._opname in ("empty", "new_empty", "zeros", "empty_like", "empty_strided", "zeros_like")
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_storage_operations_do_not_grow_with_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    resize = torch.UntypedStorage.resize_
    for layers in (1, 50):
        resizes = 0

        def counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            nonlocal resizes
            resizes += 1
            return resize(storage, size)

        with fake_world(4), monkeypatch.context() as patch:
            model = stack(2, layers=layers)
            for _ in range(2):
                step(model)
                model.zero_grad()
            patch.setattr(torch.UntypedStorage, "resize_", counted)
            with AllocationCounter() as allocations:
                step(model)
        found[layers] = (resizes, allocations.count)
    assert found[1] == found[50], found


def test_gradients_are_delivered_on_the_same_buffer_in_steady_state() -> None:
    with fake_world(4):
        model = stack(2)
        gradients = set()
        for _ in range(4):
            step(model)
            gradients.add(tuple(id(parameter.grad) for parameter in model.parameters()))
            model.zero_grad()
        assert len(gradients) == 1


def test_cleared_gradients_have_no_memory_from_the_next_forward_on() -> None:
    with fake_world(4):
        model = stack(2)
        step(model)
        (buffer, *_) = gradient_buffers(groups_of(model)[0])
        assert buffer.untyped_storage().nbytes() > 0
        model(torch.zeros(2, 16))
        assert buffer.untyped_storage().nbytes() > 0
        model.zero_grad()
        model(torch.zeros(2, 16))
        assert buffer.untyped_storage().nbytes() == 0
        step(model)
        assert buffer.untyped_storage().nbytes() > 0


@pytest.mark.parametrize("kept", ["gradient", "local", "view", "storage"])
def test_a_gradient_that_is_kept_never_changes(kept: str) -> None:
    with fake_world(2):
        model = stack(1)
        weight = model[0].layers[0].weight
        step(model)
        model.zero_grad()
        step(model)
        gradient = weight.grad
        assert isinstance(gradient, DTensor)
        local = gradient._local_tensor
        before = id(gradient)
        hold = {
            "gradient": lambda: weight.grad,
            "local": lambda: weight.grad.to_local(),  # type: ignore[union-attr]
            "view": lambda: weight.grad.to_local()[:1],  # type: ignore[union-attr]
            "storage": lambda: weight.grad.to_local().untyped_storage(),  # type: ignore[union-attr]
        }[kept]()
        del gradient, local
        model.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        assert hold is not None
        assert id(weight.grad) != before
        del hold


def test_the_plan_prints_and_is_hashable() -> None:
    with fake_world(4):
        model = stack(1, width=512, layers=1)
        step(model, 512)
        plans = [group.plan for group in groups_of(model)]
        assert len({hash(plan) for plan in plans}) == 2
        assert str(plans[1]) == (
            "over 4 ranks\n"
            "  torch.float32: 65536 elements per rank\n"
            "    layers.0.weight [512, 512]: 128 rows per rank, direct\n"
            "  gradients in torch.float32: 65568 elements, direct"
        )
        assert state_of(model) is not None
