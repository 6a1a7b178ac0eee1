"""What cannot be part of a graph says so while the graph is made; compiled by blocks it trains as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import CPUOffloadPolicy, Owned, fully_shard
from tests.compiled.helpers.models import WIDTH, batch, batch_of, build, multi_rank, rank, shard, steps_of, whole
from tests.compiled.helpers.twins import assert_equal, assert_trains_alike, compiling, mine, one_backward
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter


class Net(nn.Module):
    """Two layers that are sharded, and a head."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


def offloaded(model: nn.Module) -> None:
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def custom_gather(model: nn.Module) -> None:
    shard(model)
    for block in model.blocks:
        block.set_custom_all_gather(custom_all_gather([]))


def custom_scatter(model: nn.Module) -> None:
    shard(model)
    for block in model.blocks:
        block.set_custom_reduce_scatter(custom_reduce_scatter([]))


def to_fewer(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2)  # of 4 ranks
    fully_shard(model)


def list_of_modules(model: nn.Module) -> None:
    fully_shard(list(model.blocks))
    fully_shard(model)


def without_sync(model: nn.Module) -> None:
    shard(model)
    model.set_requires_gradient_sync(False)


def without_all_reduce(model: nn.Module) -> None:
    shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    model.set_requires_all_reduce(False)


def forward_prefetch(model: nn.Module) -> None:
    shard(model)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])


def backward_prefetch(model: nn.Module) -> None:
    shard(model)
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def owned(model: nn.Module) -> None:
    shard(model, shard_placement_fn=lambda param: Owned(1) if param.dim() > 1 else None)


class SendsHalf(torch.Tensor):
    """Gathers itself in another dtype."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, data)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.as_subclass(torch.Tensor).bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None) -> Any:
        (gathered,) = outputs
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered.to(dtype))
            return None
        return gathered.to(dtype), (gathered,)


def extended(model: nn.Module) -> None:
    for block in model.blocks:
        weight = block[0].weight
        block[0].weight = nn.Parameter(SendsHalf(weight.detach()))
    shard(model)


ROWS = [
    (offloaded, linear, "offloaded; leave out offload_policy"),
    (custom_gather, linear, "custom all-gather or reduce-scatter"),
    (custom_scatter, linear, "custom all-gather or reduce-scatter"),
    (list_of_modules, linear, "list of modules; call it on each of them"),
    (without_sync, linear, r"set_requires_gradient_sync\(False\).*reduce every microbatch"),
    (without_all_reduce, linear, r"set_requires_all_reduce\(False\); all-reduce every microbatch"),
    (forward_prefetch, linear, "set_modules_to_forward_prefetch"),
    (backward_prefetch, linear, "set_modules_to_backward_prefetch"),
    (owned, linear, "owned parameters"),
    (extended, linear, "fsdp_pre_all_gather"),
    (shard, Recurrent, "LSTM keeps its parameters in a way of its own"),
]
QUICK = {list_of_modules}
PARTLY_IN_GRAPHS = (forward_prefetch, backward_prefetch)
IDS = [f"{way.__name__}-{layer.__name__}" for way, layer, _ in ROWS]


def made(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Net(layer)


# Quick: one row. Full: 3 s each.
@multi_rank(2)
@pytest.mark.parametrize(
    ("way", "layer", "message"),
    [
        pytest.param(*row, marks=[] if row[0] in QUICK else [pytest.mark.full], id=id)
        for row, id in zip(ROWS, IDS, strict=True)
    ],
)
def test_raises_while_it_is_traced(way: Any, layer: Any, message: str) -> None:
    """At the first call and at the second; the model goes on in eager mode, as its twin that was never compiled."""
    with compiling() as graphs:
        model, twin = made(layer), made(layer)
        way(model), way(twin)
        called = whole(model, graphs.backend())
        for _ in range(2):
            with pytest.raises(Exception, match=message) as caught:
                called(batch_of(0, rank()))
            assert "block.compile()" in str(caught.value), caught.value
            assert "FSDPNotImplementedError" in f"{type(caught.value).__name__}: {caught.value}", caught.value
        assert graphs.forward == []
        losses = [steps_of(1)(each, 0, rank())[0] for each in (model, twin)]
        assert_equal("loss in eager mode", *losses)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize(("way", "layer", "message"), ROWS, ids=IDS)
def test_blocks_are_compiled_without_their_communication(way: Any, layer: Any, message: str) -> None:
    """What cannot be in a graph stays outside of it, and the numbers are those of eager mode."""

    def by_blocks(model: nn.Module, backend: Any) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=layer is not Recurrent)
        return model

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        if way is without_sync:
            model.set_requires_gradient_sync(number % 2 == 1)
        if way is without_all_reduce:
            model.set_requires_all_reduce(number % 2 == 1)
        return steps_of(1)(model, number, rank)

    with compiling() as graphs:
        if way in (without_sync, without_all_reduce):
            assert_accumulates_alike(graphs, lambda: made(layer), way, step, by_blocks)
        else:
            assert_trains_alike(graphs, lambda: made(layer), way, step, compile=by_blocks)
            assert way in PARTLY_IN_GRAPHS or set(graphs.collectives()) <= {(0, 0)}
        # Of an LSTM nothing is compiled; nor is an nn.Sequential by Dynamo of 2.11, as below torch's fully_shard.
        may_be_eager = layer is Recurrent or torch.__version__ < "2.12"
        assert may_be_eager or graphs.forward != []


def assert_accumulates_alike(graphs: Any, build: Any, way: Any, step: Any, compile: Any) -> None:
    """Two backwards, of which the second reduces for both."""
    models = [build(), build()]
    for model in models:
        way(model)
    compile(models[0], graphs.backend())
    for number in range(4):
        assert_equal(f"loss {number}", *(step(model, number, rank())[0] for model in models))
        if number % 2:
            for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
                close(mine(found.grad), mine(expected.grad))
            for model in models:
                torch.optim.SGD(model.parameters(), lr=0.01).step()
                model.zero_grad()


def close(found: Tensor | None, expected: Tensor | None) -> None:
    """Within rounding: what adds up unsharded in one is reduced each time in the other."""
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected)


@multi_rank(4)
@pytest.mark.full  # 6 s
def test_resharding_to_fewer_ranks_is_refused() -> None:
    with compiling() as graphs:
        model = made(linear)
        to_fewer(model)
        with pytest.raises(Exception, match="reshard_after_forward is an int; use True or False"):
            whole(model, graphs.backend())(batch_of(0, rank()))


@multi_rank(2)
@pytest.mark.full  # 4 s
def test_a_setting_that_changes_after_compiling_is_noticed() -> None:
    """Refused as long as it holds, and compiled again afterwards."""
    with compiling() as graphs:
        model = made(linear)
        shard(model)
        called = whole(model, graphs.backend())
        called(batch_of(0, rank())).sum().backward()
        model.set_requires_gradient_sync(False)
        with pytest.raises(Exception, match="reduce every microbatch"):
            called(batch_of(1, rank()))
        model.set_requires_gradient_sync(True)
        model.zero_grad()
        twin = made(linear)
        shard(twin)
        losses = [steps_of(1)(each, 2, rank())[0] for each in (called, twin)]
        assert_equal("loss", *losses)
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert_equal("gradient", mine(found.grad), mine(expected.grad))


# Full: three compilations.
@multi_rank(2)
@pytest.mark.full
def test_capture_can_be_disabled() -> None:
    """Blocks that are compiled one by one then gather and reduce in their hooks, which travel with copies."""

    def uncaptured(model: nn.Module) -> None:
        shard(model)
        fsdp2.set_graph_capture(model, False)

    def by_blocks(model: nn.Module, backend: Any) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    with compiling() as graphs:
        model = assert_trains_alike(graphs, build, uncaptured, one_backward(batch), compile=by_blocks)
        assert set(graphs.collectives()) == {(0, 0)}
        assert not fsdp2.compile_report(copy.deepcopy(model)).is_complete
        with pytest.raises(Exception, match="set_graph_capture"):
            torch.compile(model, backend=graphs.backend(), fullgraph=True)(batch(torch.Generator()))
        fsdp2.set_graph_capture(model, True)
    with compiling() as graphs:
        torch.compile(model, backend=graphs.backend(), fullgraph=True)(batch(torch.Generator())).sum().backward()
        assert sum(gathers for gathers, _ in graphs.collectives()) > 0


def test_capture_of_what_is_not_sharded() -> None:
    with pytest.raises(fsdp2.FSDPValueError, match="no module of Linear"):
        fsdp2.set_graph_capture(nn.Linear(2, 2), False)
    with pytest.raises(fsdp2.FSDPTypeError, match="takes a bool as 'enabled', got None"):
        fsdp2.set_graph_capture(nn.Linear(2, 2), None)  # type: ignore[arg-type]


# Full: a compilation.
@multi_rank(2)
@pytest.mark.full
def test_a_function_is_not_prepared_by_a_call_of_the_model() -> None:
    """What a compiled call has prepared is for itself."""
    with compiling() as graphs:
        model = made(linear)
        shard(model)
        called = whole(model, graphs.backend())
        called(batch_of(0, rank())).sum().backward()
        function = torch.compile(lambda x: model(x).sum(), backend=graphs.backend(), fullgraph=True)
        with pytest.raises(Exception, match="nothing has prepared"):
            function(batch_of(1, rank()))
        fsdp2.prepare_compile(model)
        function(batch_of(1, rank())).backward()
        called(batch_of(2, rank())).sum().backward()
        assert len(graphs.forward) == 2
