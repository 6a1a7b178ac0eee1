"""The overlap pass: what moves in a graph, what a budget allows, and that nothing is computed otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import _torch_compiler, fully_shard
from fsdp2.compiled.overlap import overlap
from tests.compiled.helpers.twins import assert_trains_alike, compiling, one_backward
from tests.harness import FakeWorlds, multi_rank

WIDTH = 16
SHORT = {
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "reduce",
    "all_reduce": "replicate",
    "wait_tensor": "wait",
    "mm": "compute",
}


class Chain(nn.Module):
    """Matrices one after the other, each a block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain()


def shard(model: nn.Module, **arguments: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)


def order_of(graph: torch.fx.Graph) -> str:
    names = []
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            names.append(SHORT.get(node.target._schema.name.split("::")[1], ""))
    return " ".join(name for name in names if name)


def reordering(orders: list[str], after: list[dict[torch.fx.Node, list[torch.fx.Node]]]) -> Any:
    """A backend that runs the pass, as inductor does."""

    def compile(graph: torch.fx.GraphModule, _: Any) -> Any:
        after.append(overlap(graph.graph))
        graph.graph.lint()
        graph.recompile()
        orders.append(order_of(graph.graph))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compile, bw_compiler=compile, partition_fn=min_cut_rematerialization_partition)


def orders_on(simulate: FakeWorlds, budget: int | None = None, **arguments: Any) -> tuple[list[str], Any]:
    model = build()
    shard(model, **arguments)
    if budget is not None:
        model.set_prefetch_budget(budget)
    orders: list[str] = []
    after: list[Any] = []
    with compiling():
        torch.compile(model, backend=reordering(orders, after), fullgraph=True)(torch.ones(2, WIDTH)).sum().backward()
    return orders, after


def test_the_next_gather_is_issued_before_the_wait_for_this_one(simulate: FakeWorlds) -> None:
    simulate(8)
    (forward, backward), after = orders_on(simulate)
    # The root's comes first and is kept; then every block's is in flight while the one before computes.
    assert forward == "gather gather wait gather wait compute gather wait compute wait compute compute"
    # The head's gradients first, as it was kept. The first block is not gathered, for its input needs no gradient. Both
    # gathers are in flight before the first wait; each reduction is, while what follows it computes, and ends when the
    # next is issued.
    assert backward == (
        "compute compute compute gather gather wait compute reduce compute wait compute "
        "wait reduce compute wait reduce wait reduce wait"
    )
    assert all(after), "inductor is told to keep it"


@pytest.mark.full
def test_shards_are_read_where_they_lie(simulate: FakeWorlds) -> None:
    """CUDA graphs (``mode="reduce-overhead"``) have a second copy of inputs that may move, and fill it each time."""
    simulate(8)
    model = build()
    shard(model)
    static: list[set[tuple[int, ...]]] = []

    def compile(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        metadata = torch._guards.TracingContext.get().fw_metadata
        static.append({tuple(inputs[index].shape) for index in metadata.static_input_indices})
        return make_boxed_func(graph.forward)

    with compiling():
        torch.compile(model, backend=aot_autograd(fw_compiler=compile), fullgraph=True)(torch.ones(2, WIDTH))
    assert static == [{(WIDTH * WIDTH // 8,)}]


@pytest.mark.parametrize(("budget", "ahead"), [(0, 0), (4 * WIDTH * WIDTH, 1), (1 << 20, 3)])
def test_a_budget_bounds_what_is_gathered_ahead(simulate: FakeWorlds, budget: int, ahead: int) -> None:
    simulate(8)
    (forward, _), _ = orders_on(simulate, budget)
    in_flight, most = 0, 0
    for name in forward.split():
        in_flight += {"gather": 1, "wait": -1}.get(name, 0)
        most = max(most, in_flight)
    assert most == ahead + 1


def test_over_replicas_a_tail_stays_in_order(simulate: FakeWorlds) -> None:
    simulate(8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    (_, backward), _ = orders_on(simulate, mesh=mesh)
    names = [name for name in backward.split() if name in ("reduce", "replicate")]
    assert names.count("reduce") == names.count("replicate") == 4
    assert names[0] == "reduce" and names[-1] == "replicate"


class UsersPass(CustomGraphPass):
    """Puts a scalar before everything."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        with graph.inserting_before(next(iter(graph.nodes))):
            graph.call_function(torch.ops.aten.scalar_tensor.default, (1.0,))

    def uuid(self) -> Any:
        return "mine"


def users_function(graph: torch.fx.Graph) -> None:
    """The same as a function, which has no identity to cache graphs by."""
    UsersPass()(graph)


@pytest.mark.parametrize(
    ("users", "uuid"),
    [(None, "1"), (UsersPass(), ("1", "mine")), (users_function, None)],
    ids=["none", "pass", "function"],
)
def test_a_pass_of_the_user_runs_first(users: Any, uuid: Any) -> None:
    """And graphs are cached by both."""
    found: list[int] = []

    def ours(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
        found.append(len(graph.nodes))
        return {}

    with torch._inductor.config.patch(post_grad_custom_post_pass=users):
        _torch_compiler.reorder_graphs.__wrapped__(ours, "1")
        installed = torch._inductor.config.post_grad_custom_post_pass
        graph = torch.fx.symbolic_trace(nn.ReLU()).graph
        before = len(graph.nodes)
        installed(graph)
        assert found == [before + (users is not None)]
        assert installed.uuid() == uuid


@multi_rank(2)
def test_reordered_graphs_compute_the_same() -> None:
    orders: list[str] = []

    def compile(model: nn.Module, _: Any) -> Any:
        return torch.compile(model, backend=reordering(orders, []), fullgraph=True)

    with compiling() as graphs:
        step = one_backward(lambda generator: torch.randn(4, WIDTH, generator=generator))
        assert_trains_alike(graphs, build, shard, step, compile=compile)
    assert len(orders) == 2
