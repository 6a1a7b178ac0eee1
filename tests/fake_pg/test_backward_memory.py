"""What is alive at the peak of a backward, and in which order the collectives are that make it so.

See [Note: half a backward each] in `fsdp2.features.half_backward`. What is measured are storages, on the fake group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.implementations import ShardingOptions, fake_process_group
from benchmarks.memory import StepMemory, measure_step_memory
from benchmarks.models import LARGE_PARAMETERS, ModelSpec
from benchmarks.step import Trainer
from fsdp2 import fully_shard
from fsdp2.core.transport import Native
from tests.harness import fake_world, others_full
from tests.harness.internals import gathered_first, groups_of

WIDTH = 512  # a matrix of 1 MiB, which travels by itself


def memory_of(name: str, world_size: int, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> StepMemory:
    with fake_process_group(world_size) as mesh:
        options = ShardingOptions(world_size=world_size, param_dtype=dtype)
        trainer = Trainer(name, spec, mesh=mesh, options=options)
        trainer.warm_up(2)
        return measure_step_memory(trainer)


@pytest.mark.parametrize(
    ("name", "world_size", "blocks"), [("fsdp2", 8, 0.95), ("fsdp2", 64, 0.45), ("fsdp2-no-prefetch", 64, 0.95)]
)
@pytest.mark.parametrize("matrices", others_full([2, 6], [2]))  # 12 s
def test_backward_holds_less_than_torch(matrices: int, name: str, world_size: int, blocks: float) -> None:
    """A block less; half of one where the order of collectives must not depend on when gradients arrive.

    Unless nothing is gathered ahead.
    """
    spec = replace(LARGE_PARAMETERS, dim=1024, hidden_dim=1024, params_per_block=matrices)
    block = 4 * matrices * spec.dim * spec.hidden_dim
    ours, theirs = (memory_of(each, world_size, spec) for each in (name, "torch"))
    assert ours.backward_over <= theirs.backward_over - blocks * block
    assert ours.forward_over <= theirs.forward_over


@pytest.mark.parametrize(
    ("name", "world_size", "matrices", "blocks"),
    [("fsdp2", 8, 2, 1.1), ("fsdp2", 8, 6, 1.2), ("fsdp2", 64, 2, 0.45), ("fsdp2-no-prefetch", 64, 2, 0.95)],
)
def test_gradients_go_one_by_one_when_they_are_cast(matrices: int, name: str, world_size: int, blocks: float) -> None:
    """Parameters in bf16, reduced in fp32: of a block's gradients both forms would be three blocks."""
    spec = replace(LARGE_PARAMETERS, dim=1024, hidden_dim=1024, params_per_block=matrices)
    block = 2 * matrices * spec.dim * spec.hidden_dim
    ours, theirs = (memory_of(each, world_size, spec, torch.bfloat16) for each in (name, "torch"))
    assert ours.backward_over <= theirs.backward_over - blocks * block
    # Slots lie at multiples of 16 bytes, and so do the rows of up to 64 ranks in two gathers (torch 2.15's do not).
    assert ours.forward_over <= theirs.forward_over + 2 * 64 * 32


class Block(nn.Module):
    """Matrices one after the other; those in ``skipped`` are there and not used."""

    def __init__(self, matrices: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(matrices))
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index in self.skipped else torch.tanh(layer(x))
        return x


class Nested(nn.Module):
    """A unit within another one: its backward is in the middle of that of the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = Block(2), Block(1), Block(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Checkpointed(Block):
    """Recomputes its forward in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def sharded(*blocks: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4))
    for block in blocks:
        if isinstance(block, Nested):
            fully_shard(block.inner)
        fully_shard(block)
    fully_shard(model)
    return model


def run(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    model.zero_grad()


@contextmanager
def backward_trace(model: nn.Module) -> Iterator[list[str]]:
    """Collectives and gradients of a backward in the order in which they are issued or computed."""
    trace: list[str] = []
    groups = groups_of(model)
    names = {id(gathered_first(group)): group.name for group in groups}
    gather, reduce = Native.all_gather, Native.reduce_scatter

    def traced(kind: str, issue: Callable[..., None]) -> Callable[..., None]:
        def issued(transport, members, *args, **kwargs):  # type: ignore[no-untyped-def]
            name = names.get(id(members[0][0])) if kind == "gather" else None
            in_flight = " beside a reduction" if kind == "gather" and groups[0].comm.is_reducing else ""  # type: ignore[union-attr]
            trace.append(f"gather {name}{in_flight}" if name else kind)
            issue(transport, members, *args, **kwargs)

        return issued

    handles = [
        param.unsharded.register_post_accumulate_grad_hook(lambda _, name=param.path: trace.append(name))
        for group in groups
        for param in group.params
    ]
    with (
        mock.patch.object(Native, "all_gather", traced("gather", gather)),
        mock.patch.object(Native, "reduce_scatter", traced("reduce", reduce)),
    ):
        yield trace
    for handle in handles:
        handle.remove()


def of_backward(model: nn.Module) -> list[str]:
    """The trace of a backward, gradients of the root left out."""
    loss = model(torch.ones(2, WIDTH)).sum()
    with backward_trace(model) as trace:
        loss.backward()
    model.zero_grad()
    return [event for event in trace if "Sequential" not in event and not event.startswith("3.")]


def test_the_next_gather_takes_the_place_of_the_reduction_in_flight() -> None:
    with fake_world(4):
        model = sharded(Block(), Block(), Block())
        run(model)
        assert of_backward(model) == [
            "gather 2",  # nothing is being reduced yet
            "gather 1",
            "2.layers.1.weight",
            "2.layers.0.weight",
            "reduce",
            "1.layers.1.weight",
            "gather 0",
            "1.layers.0.weight",
            "reduce",
            "0.layers.1.weight",
            "0.layers.0.weight",
            "reduce",
            "reduce",
        ]


def collectives_of(trace: list[str]) -> list[str]:
    return [event for event in trace if event.startswith(("gather", "reduce"))]


@pytest.mark.parametrize("skipped", [(1,), (0,), (0, 1)], ids=["first", "second", "both"])
def test_missing_gradients_do_not_change_the_order(skipped: tuple[int, ...]) -> None:
    """Another rank may have them."""
    with fake_world(4):
        model = sharded(Block(), Block(), Block())
        run(model)
        before = collectives_of(of_backward(model))
        model[1].skipped = skipped
        after = collectives_of(of_backward(model))
        model[1].skipped = ()
        assert before == after == collectives_of(of_backward(model))
        assert before.count("reduce") == 4


def test_a_unit_within_another_is_gathered_ahead_of_it() -> None:
    """Its backward comes before half of the outer one's gradients: to postpone its gather would overlap nothing."""
    with fake_world(4):
        model = sharded(Nested(), Nested(), Nested())
        run(model)
        trace = of_backward(model)
        assert trace.index("gather 1.inner beside a reduction") < trace.index("1.last.layers.0.weight")
        assert trace.index("1.inner.layers.0.weight") < trace.index("gather 0") < trace.index("1.first.layers.1.weight")


def test_a_recomputed_block_is_gathered_ahead_all_the_same() -> None:
    with fake_world(4):
        model = sharded(Checkpointed(), Checkpointed(), Checkpointed())
        run(model)
        trace = of_backward(model)
        assert trace.index("1.layers.1.weight") < trace.index("gather 0") < trace.index("1.layers.0.weight")


def test_what_the_user_has_set_is_not_postponed() -> None:
    with fake_world(4):
        model = sharded(Block(), Block(), Block())
        run(model)
        for begin, end in (
            (lambda: model.set_prefetch_budget(4 * 2 * WIDTH * WIDTH), lambda: model.set_prefetch_budget(None)),
            (
                lambda: model[1].set_modules_to_backward_prefetch([model[0]]),
                lambda: model[1].set_modules_to_backward_prefetch([]),
            ),
            (
                lambda: model.set_reduce_scatter_max_input_buffers(2),
                lambda: model.set_reduce_scatter_max_input_buffers(1),
            ),
        ):
            begin()
            assert "gather 0 beside a reduction" in of_backward(model)
            end()
            assert "gather 0" in of_backward(model)


def test_an_exception_in_between_leaves_nothing_behind() -> None:
    with fake_world(4):
        model = sharded(Block(), Block(), Block())
        run(model)
        expected = of_backward(model)
        for index in (0, 1):
            parameter = groups_of(model)[2].params[index].unsharded  # of block 1
            assert groups_of(model)[2].name == "1" and parameter is not None

            def fail(_: Tensor) -> None:
                raise ZeroDivisionError

            handle = parameter.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                run(model)
            handle.remove()
            model.zero_grad()
            assert of_backward(model) == expected
            hooks = [
                param.unsharded._post_accumulate_grad_hooks for group in groups_of(model) for param in group.params
            ]  # type: ignore[union-attr]
            assert not any(hooks)
