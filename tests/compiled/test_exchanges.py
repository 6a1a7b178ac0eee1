"""What graphs exchange by our own operators: with whom, when, and what is left of it after an exception."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import FSDPRuntimeError, MixedPrecisionPolicy, fully_shard, inference
from fsdp2.compiled import exchanges
from fsdp2.compiled.exchanges import GroupExchanges
from fsdp2.plugs.transports.gloo_p2p import PeerToPeer
from tests.compiled.helpers.models import (
    WIDTH,
    batch,
    batch_of,
    build,
    build_small,
    by_blocks,
    cleared,
    loss_of,
    multi_rank,
    shard,
    steps_of,
    whole,
)
from tests.compiled.helpers.twins import assert_equal, assert_trains_alike, compiling, mine, one_backward
from tests.harness.pooling import needs_pool

WAYS = pytest.mark.parametrize("compile", [whole, by_blocks])


@contextmanager
def recorded() -> Iterator[list[str]]:
    """What this rank begins, and what its graphs wait for, in order: a label, or "wait"."""
    found: list[str] = []
    gather, reduce, end = PeerToPeer.all_gather, PeerToPeer.reduce_scatter, GroupExchanges.end_gather

    def all_gather(self: Any, *arguments: Any, **others: Any) -> None:
        found.append(self.label.text)
        gather(self, *arguments, **others)

    def reduce_scatter(self: Any, *arguments: Any, **others: Any) -> None:
        found.append(self.label.text)
        reduce(self, *arguments, **others)

    def end_gather(self: Any, token: int) -> list[Tensor]:
        values = end(self, token)
        found.append("wait")
        return values

    PeerToPeer.all_gather, PeerToPeer.reduce_scatter = all_gather, reduce_scatter  # type: ignore[method-assign]
    GroupExchanges.end_gather = end_gather  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PeerToPeer.all_gather, PeerToPeer.reduce_scatter = gather, reduce  # type: ignore[method-assign]
        GroupExchanges.end_gather = end  # type: ignore[method-assign]


def gathered(*names: str) -> list[str]:
    return [f"the all-gather of '{name}'" for name in names]


@multi_rank(2)
@pytest.mark.full
def test_blocks_in_graphs_of_their_own_gather_ahead() -> None:
    """The next one is gathered before this one is waited for, once a step has shown which one that is."""
    with compiling() as graphs:
        model = build()
        shard(model)
        by_blocks(model, graphs.backend())
        forwards, backwards, reduced = [], [], []
        for number in range(3):
            with recorded() as forward:
                loss = loss_of(model(batch_of(number, dist.get_rank())))
            with recorded() as backward:
                loss.backward()
            forwards.append([each for each in forward if "Model" not in each])
            backwards.append([each for each in backward if "gather" in each or each == "wait"])
            reduced.append({each for each in backward if "reduction" in each})
    one, two, three = gathered("blocks.0", "blocks.1", "blocks.2")
    assert forwards[0] == [one, "wait", two, "wait", three, "wait"]
    assert forwards[1] == forwards[2] == [one, two, "wait", three, "wait", "wait"]
    assert backwards[0] == [three, "wait", two, "wait", one, "wait"]
    assert backwards[1] == backwards[2] == [three, two, "wait", one, "wait", "wait"]
    # Named as in eager mode: so a watchdog, and an exchange that fails, can say which module it is of.
    units = ("Model", "blocks.0", "blocks.1", "blocks.2")
    assert reduced == [{f"the reduction of '{name}'" for name in units}] * 3


@multi_rank(2)
def test_a_budget_holds_between_graphs_too() -> None:
    with compiling() as graphs:
        model = build()
        shard(model)
        model.set_prefetch_budget(8)
        by_blocks(model, graphs.backend())
        for number in range(2):
            with recorded() as found, torch.no_grad():
                model(batch_of(number, dist.get_rank()))
    one, two, three = gathered("blocks.0", "blocks.1", "blocks.2")
    assert [each for each in found if "Model" not in each] == [one, "wait", two, "wait", three, "wait"]


class Large(nn.Module):
    """A matrix of 1 MiB in fp32, which travels alone, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, 512)
        self.head = nn.Linear(512, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(x)))


@multi_rank(2)
@pytest.mark.parametrize("how", ["eager", "a graph"])
def test_large_gradients_are_sent_as_they_are(how: str) -> None:
    """In eager mode and in graphs: half of the bytes, and what each rank's plain bf16 model finds, added in fp32."""
    sent: list[int] = []
    reduce = PeerToPeer.reduce_scatter

    def reduce_scatter(self: Any, members: Any, *arguments: Any, **others: Any) -> None:
        sent.extend(input.nbytes for _, input in members if input.numel() == 512 * 512)
        reduce(self, members, *arguments, **others)

    torch.manual_seed(0)
    model, plain = Large(), Large()
    plain.load_state_dict(model.state_dict())
    plain.bfloat16()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    batches = [torch.randn(4, 512, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(2)]
    with compiling() as graphs, mock.patch.object(PeerToPeer, "reduce_scatter", reduce_scatter):
        called = model if how == "eager" else whole(model, graphs.backend())
        called(batches[dist.get_rank()]).float().square().sum().backward()
    assert sent == [2 * 512 * 512]
    terms = []
    for each in batches:
        plain.zero_grad()
        plain(each).float().square().sum().backward()
        assert plain.wide.weight.grad is not None
        terms.append(plain.wide.weight.grad.float())
    assert torch.equal(model.wide.weight.grad.full_tensor(), (terms[0] + terms[1]) / 2)  # type: ignore[union-attr,operator]


class Skipping(nn.Module):
    """Blocks in an order that changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return self.head(x)


def build_skipping() -> nn.Module:
    torch.manual_seed(0)
    return Skipping()


@multi_rank(2)
def test_what_was_gathered_ahead_in_vain_is_of_no_account() -> None:
    orders = [[0, 1, 2], [0, 2], [2, 1, 0], [0, 0, 1], [0, 1, 2], [1]]

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        model.order = orders[number]
        return steps_of(1)(model, number, rank)

    with compiling() as graphs:
        # Eager adds up what a block has that was called twice, and reduces once; graphs reduce each.
        assert_trains_alike(graphs, build_skipping, shard, step, compile=by_blocks, steps=6, tolerance=1e-6)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
def test_graphs_inside_of_inference_gather_once_until_weights_change(compile: Any) -> None:
    """Training before and after it is in the graphs that it was in."""
    rank = dist.get_rank()
    with compiling() as graphs:
        model, plain = build_small(), build_small()
        shard(model)
        called = compile(model, graphs.backend())
        sharded = list(model.parameters())
        made = []
        for number in range(2):
            loss_of(called(batch_of(number, rank))).backward()
            cleared(sharded)
            with inference(model):
                for write in range(2):
                    for times in range(2 + rank):  # ranks may differ in how many they run
                        with recorded() as found:
                            output = called(batch_of(times, rank))
                        assert sorted(found) == ([] if times else gathered("Small", "blocks.0", "blocks.1"))
                        torch.testing.assert_close(output, plain(batch_of(times, rank)))
                    if not write:
                        with torch.no_grad():
                            for each in (*sharded, *plain.parameters()):
                                each.mul_(1.5)
            made.append(len(graphs.forward))
        assert made[0] == made[1]
        loss = loss_of(plain(batch_of(0, 0))) + loss_of(plain(batch_of(0, 1)))
        (loss / 2).backward()
        loss_of(called(batch_of(0, rank))).backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
        sharded[0].data = sharded[0].data.clone()
        with pytest.raises(FSDPRuntimeError, match=r"\.data was set"), inference(model):
            called(batch_of(0, rank))


@multi_rank(2)
@pytest.mark.full
def test_parameters_that_are_written_in_a_forward_are_gathered_anew() -> None:
    """Between two blocks, when the second one was gathered ahead already."""

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        def write(*_: Any) -> None:
            with torch.no_grad():
                model.blocks[1][0].weight.mul_(0.5)

        handle = model.blocks[0].register_forward_hook(write)
        with torch.no_grad():
            loss = loss_of(model(batch_of(number, rank)))
        handle.remove()
        return [loss, *steps_of(1)(model, number, rank)]

    with compiling() as graphs:
        assert_trains_alike(graphs, build_small, shard, step, compile=by_blocks)


@multi_rank(4)
@pytest.mark.full  # 2 to 9 s each
@WAYS
def test_equal_models_over_other_ranks_share_graphs(compile: Any) -> None:
    """Graphs know ranks by a handle, an input: what was compiled for one process group is right for another."""
    here = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    first = DeviceMesh.from_group(groups[here // 2], "cpu")
    second = DeviceMesh.from_group(groups[2 + here % 2], "cpu")

    def trained(mesh: DeviceMesh, call: Callable[[nn.Module], Any]) -> nn.Module:
        model = build_small()
        shard(model, mesh=mesh)
        loss_of(call(model)(batch_of(0, here))).backward()
        return model

    with compiling() as graphs:
        backend = graphs.backend()
        for mesh in (first, second):
            found, expected = trained(mesh, lambda model: compile(model, backend)), trained(mesh, lambda model: model)
            for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
                assert_equal(f"gradient of {name} over {mesh}", mine(one.grad), mine(other.grad))
        names = [each.group_name for each in groups if isinstance(each, dist.ProcessGroup)]
        assert not any(f"'{name}'" in text for name in names for text in graphs.texts)


@contextmanager
def generating_code() -> Iterator[None]:
    """Inductor, with a cache of its own in each process."""
    with compiling(), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, when inductor is imported
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        yield


@multi_rank(4, timeout=900)
@pytest.mark.full  # 60 s: a C++ compiler runs
def test_cached_graphs_of_inductor_are_right_over_other_ranks() -> None:
    """The second model's graphs come out of inductor's cache."""
    from torch._dynamo.utils import counters

    here = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    with generating_code():
        for index, group in enumerate((pairs[here // 2], pairs[2 + here % 2])):
            mesh = DeviceMesh.from_group(group, "cpu")
            torch._dynamo.reset()
            models = [build_small(), build_small()]
            for model in models:
                shard(model, mesh=mesh)
            counters.clear()
            called = [torch.compile(models[0], fullgraph=True), models[1]]
            for each in called:
                loss_of(each(batch_of(0, here))).backward()
            if index:
                assert counters["inductor"]["fxgraph_cache_hit"] == 2, dict(counters["inductor"])
            for (name, one), (_, other) in zip(*(each.named_parameters() for each in models), strict=True):
                assert_equal(f"gradient of {name} over {mesh}", mine(one.grad), mine(other.grad), tolerance=1e-4)


class Failing(nn.Module):
    """Blocks, and after each an operator that raises when it is told to, in forward or in backward."""

    fails: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.ops.fsdp2_tests.may_fail(torch.tanh(block(x)), "forward")
        return self.head(x)


def may_fail(x: Tensor, where: str) -> Tensor:
    if where in Failing.fails:
        raise ValueError("as asked")
    return x.clone()


def define_may_fail() -> None:
    schema = "(Tensor x, str where) -> Tensor"
    operator = torch.library.custom_op("fsdp2_tests::may_fail", may_fail, mutates_args=(), schema=schema)
    operator.register_fake(lambda x, where: torch.empty_like(x))
    operator.register_autograd(lambda _, gradient: (torch.ops.fsdp2_tests.may_fail(gradient, "backward"), None))


def build_failing() -> nn.Module:
    torch.manual_seed(0)
    return Failing()


@multi_rank(2)
@pytest.mark.full
@WAYS
def test_an_exception_between_beginning_and_end_leaves_nothing(compile: Any) -> None:
    """On all ranks at once: the next step is right, and what had been begun is held by nobody."""
    define_may_fail()
    left: list[weakref.ref[Any]] = []

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        where = {1: "forward", 2: "backward", 3: "forward"}.get(number)
        if where is not None:
            Failing.fails.add(where)
            with pytest.raises(ValueError, match="as asked"):
                loss_of(model(batch_of(number, rank))).backward()
            Failing.fails.clear()
            cleared(model.parameters())
            left.extend(weakref.ref(each) for each in pending())
        return steps_of(1)(model, number, rank)

    with compiling() as graphs:
        backend = graphs.backend(overlaps=True)
        assert_trains_alike(graphs, build_failing, shard, step, compile=lambda model, _: compile(model, backend))
        gc.collect()
        assert left and not pending()
        assert all(each() is None for each in left)


def pending() -> list[Any]:
    """What was begun in graphs, and not ended."""
    found = [
        each for one in exchanges._EXCHANGES.values() for each in (*one._gathers.values(), *one._reductions.values())
    ]
    return [*found, *(each for course in exchanges._COURSES.values() for each in course.ahead.values())]


@multi_rank(2)
@pytest.mark.full
def test_a_deleted_model_leaves_nothing() -> None:
    with compiling() as graphs:
        model = build_small()
        shard(model)
        called = by_blocks(model, graphs.backend())
        for number in range(2):
            loss_of(called(batch_of(number, dist.get_rank()))).backward()
        shards = [weakref.ref(group.storage.buffers[0].shard) for group in _groups(model)]
        del model, called
        torch._dynamo.reset()
        gc.collect()
        assert not any(each() is not None for each in shards)


def _groups(model: nn.Module) -> list[Any]:
    from fsdp2.core.state import states_below

    return [group for state in states_below(model) for group in state.unit]


class Chain(nn.Module):
    """Blocks of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@multi_rank(2, timeout=900)
@pytest.mark.full  # 30 s each: a C++ compiler runs
@pytest.mark.parametrize(("budget", "most"), [(None, 2), (0, 1)])
def test_inductor_issues_no_gather_too_early(budget: int | None, most: int) -> None:
    """A token has eight bytes: a compiler that orders for memory would have all gathers under way at once."""
    model = Chain()
    shard(model, reshard_after_forward=True)
    if budget is not None:
        model.set_prefetch_budget(budget)
    with generating_code():
        called = torch.compile(model, fullgraph=True)
        for number in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number), requires_grad=True)
            with recorded() as forward:
                loss = called(x).square().sum()
            with recorded() as backward:
                loss.backward()
            for found in (forward, backward):
                under_way = [0]
                for each in found:
                    if "reduction" not in each:
                        under_way.append(under_way[-1] + (-1 if each == "wait" else 1))
                assert len(under_way) == 15 and max(under_way) <= most, found


class Twice(nn.Module):
    """Calls its one block twice, so that two gathers of it are under way at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[0]):
            x = torch.tanh(block(x))
        return self.head(x)


def build_twice() -> nn.Module:
    torch.manual_seed(0)
    return Twice()


@multi_rank(2, full=[4])
@pytest.mark.full  # 1 to 3 s each
@pytest.mark.parametrize("reshard", [True, False])
@WAYS
def test_a_block_that_is_called_twice(compile: Any, reshard: bool) -> None:
    with compiling() as graphs:
        assert_trains_alike(
            graphs,
            build_twice,
            lambda model: shard(model, reshard_after_forward=reshard),
            one_backward(batch),
            compile=compile,
            tolerance=1e-6,  # eager reduces the sum, graphs each call
        )


@multi_rank(2)
@pytest.mark.full  # 3 s each
@needs_pool
@WAYS
def test_beside_a_memory_pool(compile: Any) -> None:
    """What graphs are handed never goes back there; what they need for a time does."""

    def shard_pooled(model: nn.Module) -> None:
        shard(model)
        model.set_communication_memory_pool(True)

    with compiling() as graphs:
        model = assert_trains_alike(graphs, build, shard_pooled, steps_of(2), compile=compile)
        comm = _groups(getattr(model, "_orig_mod", model))[0].comm
        assert comm.gather_arena.used_bytes == comm.reduce_arena.used_bytes == 0


@multi_rank(2)
@pytest.mark.full
def test_gradients_that_are_kept_never_change() -> None:
    """Delivery takes the memory of what a graph has reduced; it does not take what somebody holds."""
    with compiling() as graphs:
        model = build_small()
        shard(model)
        called = whole(model, graphs.backend())
        kept: list[tuple[Tensor, Tensor]] = []
        for number in range(4):
            loss_of(called(batch_of(number, dist.get_rank()))).backward()
            gradients = [param.grad for param in model.parameters() if param.grad is not None]
            held = gradients[number % len(gradients)]
            kept.append((held, held.to_local().clone()))
            for param in model.parameters():
                param.grad = None
            del gradients, held
        for gradient, before in kept:
            assert torch.equal(gradient.to_local(), before)


def test_fully_shard_is_imported_for_its_operators() -> None:
    """Graphs that are loaded from a cache find them: importing the package defines them."""
    assert fully_shard is not None
    names = ("begin_gather", "end_gather", "begin_reduce", "end_reduce")
    assert all(hasattr(torch.ops.fsdp2, name) for name in names)
    for name in names:
        schema = getattr(torch.ops.fsdp2, name).default._schema
        assert not schema.is_mutable, "what they are given they only read"
        assert all(each.alias_info is None for each in schema.returns)


class InTwoDtypes(nn.Module):
    """Two weights whose gradients are reduced in a dtype each; ranks may use one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = x @ self.first
        return x @ self.second if both else x


# Full: a compilation.
@multi_rank(2)
@pytest.mark.full
def test_a_dtype_of_which_a_rank_has_no_gradient() -> None:
    """It reduces zeros, as in eager mode, where the other rank has some."""
    dtypes = {"first": torch.float32, "second": torch.float64}
    with compiling() as graphs:
        models = [InTwoDtypes(), InTwoDtypes()]
        for model in models:
            fully_shard(model, mp_policy=lambda name, _: MixedPrecisionPolicy(reduce_dtype=dtypes[name]))
        x = batch_of(0, dist.get_rank())
        for each in (whole(models[0], graphs.backend()), models[1]):
            each(x, dist.get_rank() == 0).sum().backward()
        for found, expected in zip(*(model.parameters() for model in models), strict=True):
            assert_equal("gradient", mine(found.grad), mine(expected.grad))
            assert found.grad is not None


class Rows(nn.Module):
    """Some rows of a table: so few that partitioners save them, or so many that they gather the table again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight[torch.arange(len(x))] * x)


class ScalesByRows(nn.Module):
    """The table, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.head = nn.Linear(WIDTH, WIDTH), Rows(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(self.first(x)))


# Full: a compilation.
@multi_rank(2)
@pytest.mark.full
def test_ranks_whose_batches_differ_where_a_table_is_not_gathered_again() -> None:
    """What the page about compilation advises: sizes then decide nothing of what graphs exchange."""
    torch.manual_seed(0)
    with compiling() as graphs:
        model = ScalesByRows()
        fully_shard(model.rows, reshard_after_forward=False)
        fully_shard(model)
        rows = 2 + dist.get_rank()
        loss_of(whole(model, graphs.backend())(batch_of(0, dist.get_rank(), rows))).backward()
        assert graphs.collectives() == [(2, 0), (0, 2)]
        assert all(param.grad is not None for param in model.parameters())


class Branches(nn.Module):
    """Uses its weight on one rank; on others, its output only depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if dist.get_rank() == 0 else x + 0 * self.weight.sum()


# Full: a compilation.
@multi_rank(2)
@pytest.mark.full
def test_a_module_that_one_rank_does_without() -> None:
    """The other thing that the page about compilation advises: it gathers and reduces all the same."""
    torch.manual_seed(0)
    with compiling() as graphs:
        models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Branches(), nn.Linear(WIDTH, 3)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        for model in models:
            fully_shard(model[1], reshard_after_forward=False)
            fully_shard(model)
        for each in (whole(models[0], graphs.backend()), models[1]):
            loss_of(each(batch_of(0, dist.get_rank()))).backward()
        for found, expected in zip(*(model.parameters() for model in models), strict=True):
            assert_equal("gradient", mine(found.grad), mine(expected.grad))
