"""Compiled models beside their eager twins: what the tests of `torch.compile` share.

A twin has the same weights, is sharded by the same calls and runs the same batches through the eager runtime, which
other tests hold against the unsharded reference; losses, gradients and parameters must agree bit for bit, and the
graphs must be as few, and communicate as often, as the plan says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.compiled.overlap import overlap

Exchange = tuple[str, int, torch.dtype, str]
GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "begin_gather")
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "begin_reduce")


@dataclass
class Graphs:
    """Every graph that was compiled: its collectives, and the sizes of what it hands on.

    Attributes:
        forward: of each forward graph, how often each operator occurs.
        backward: the same of backward graphs.
        outputs: of each forward graph, the number of elements of what it makes: results and what is saved for backward.
            (What is handed on of its inputs, as shards are, is not made.)
        texts: each graph, readable.
        issued: of each graph, its direction and its collectives in order, with what they return.
        exchanged: of each graph, its direction and its collectives as `tests.harness.parity.trace` counts those
            of eager mode: kind, elements of the larger side, dtype, process group.
        overlaps: whether graphs run in the order that `fsdp2.compiled.overlap` gives them.
    """

    forward: list[dict[str, int]] = field(default_factory=list)
    backward: list[dict[str, int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    issued: list[tuple[str, list[str]]] = field(default_factory=list)
    exchanged: list[tuple[str, list[Exchange]]] = field(default_factory=list)
    overlaps: bool = False

    def backend(self, *, overlaps: bool = False) -> Any:
        """For `torch.compile`: eager operators, partitioned as for inductor, and counted; ``overlaps``: see there."""
        self.overlaps = overlaps
        return aot_autograd(
            fw_compiler=self._compiler(self.forward, self.outputs),
            bw_compiler=self._compiler(self.backward, None),
            inference_compiler=self._compiler(self.forward, self.outputs),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _compiler(self, counts: list[dict[str, int]], outputs: list[list[int]] | None) -> Callable[..., Any]:
        def compile(graph: torch.fx.GraphModule, _: Any) -> Any:
            found: dict[str, int] = {}
            for node in graph.graph.nodes:
                if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                    name = node.target._schema.name.split("::")[1]
                    if name == "begin_reduce" and _is_among_replicas_alone(node):
                        name = "all_reduce"
                    found[name] = found.get(name, 0) + 1
            counts.append(found)
            direction = "backward" if outputs is None else "forward"
            self.issued.append((direction, _collectives(graph)))
            self.exchanged.append((direction, _exchanges(graph)))
            self.texts.append(graph.print_readable(print_output=False))
            if self.overlaps:
                overlap(graph.graph)
                graph.recompile()
            if outputs is not None:
                (results,) = graph.graph.output_node().args
                made = [node for node in results if isinstance(node, torch.fx.Node) and node.op != "placeholder"]
                values = [node.meta.get("val") for node in made]
                outputs.append([value.numel() for value in values if isinstance(value, Tensor)])
            return make_boxed_func(graph.forward)

        return compile

    def collectives(self) -> list[tuple[int, int]]:
        """(all-gathers, reduce-scatters) of each forward graph, then of each backward graph."""
        return [(_count(each, GATHERS), _count(each, SCATTERS)) for each in (*self.forward, *self.backward)]


def _is_among_replicas_alone(begin: torch.fx.Node) -> bool:
    """Whether all of what this reduction sends comes back: nobody else has a shard."""
    end = next(user for user in begin.users if "end_reduce" in str(user.target))
    sent: Any = begin.args[1]
    return sum(each.meta["val"].numel() for each in sent) <= end.meta["val"].numel()


def _communications(graph: torch.fx.GraphModule) -> Iterator[tuple[str, torch.fx.Node]]:
    """What ``graph`` communicates, in order: the name of the functional collective, and its node."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            namespace, name = node.target._schema.name.split("::")
            if namespace == "_c10d_functional" and name != "wait_tensor":
                yield name, node


def _collectives(graph: torch.fx.GraphModule) -> list[str]:
    """Of ``graph``, in order: "all_gather_into_tensor -> float32[272]"."""
    lines = []
    for name, node in _communications(graph):
        value = node.meta["val"]
        dtype = str(value.dtype).removeprefix("torch.")
        operation = [str(each) for each in node.args if each in ("sum", "avg")]
        lines.append(" ".join([name, *operation, "->", f"{dtype}{list(value.shape)}"]))
    return lines


def _exchanges(graph: torch.fx.GraphModule) -> list[Exchange]:
    found = []
    for name, node in _communications(graph):
        values = [each.meta["val"] for each in (node, node.args[0])]
        kind = name.removesuffix("_tensor").removesuffix("_into")
        found.append((kind, max(value.numel() for value in values), values[0].dtype, str(node.args[-1])))
    return found


def _count(found: dict[str, int], names: Iterable[str]) -> int:
    return sum(found.get(name, 0) for name in names)


@contextmanager
def compiling() -> Iterator[Graphs]:
    """The graphs that are compiled inside. Nothing that was compiled before is used."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
        warnings.filterwarnings("ignore", message=".*isinstance.*treespec.*")
        yield Graphs()
    torch._dynamo.reset()


def mine(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_equal(what: str, found: Tensor | None, expected: Tensor | None, tolerance: float = 0.0) -> None:
    """Bit for bit, or both None; or within ``tolerance``, absolute and relative."""
    assert (found is None) == (expected is None), f"{what}: {found} instead of {expected}"
    if found is not None and expected is not None:
        assert found.dtype == expected.dtype, what
        same = torch.equal(found, expected) or (tolerance and torch.allclose(found, expected, tolerance, tolerance))
        assert same, f"{what}: differs by {(found.double() - expected.double()).abs().max()}"


Step = Callable[[nn.Module, int, int], list[Tensor]]
"""One step's forwards and backwards of a model, given the number of the step and this rank; the losses."""


def one_backward(make_batch: Callable[[torch.Generator], Tensor]) -> Step:
    """Forward, square, sum, backward."""

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        batch = make_batch(torch.Generator().manual_seed(number * 100 + rank))
        loss = model(batch).float().square().sum()
        loss.backward()
        return [loss.detach()]

    return step


def assert_trains_alike(
    graphs: Graphs,
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], None],
    step: Step,
    *,
    compile: Callable[[nn.Module, Any], Callable[..., Any]] | None = None,
    steps: int = 5,
    before_step: Callable[[nn.Module], None] | None = None,
    clip: float | None = None,
    tolerance: float = 0.0,
) -> nn.Module:
    """Train a compiled model beside its eager twin; every loss, gradient and parameter is the same.

    Args:
        graphs: takes note of what is compiled.
        build: makes the model, the same each time it is called.
        shard: calls `fully_shard`.
        step: forwards and backwards.
        compile: given a sharded model and a backend, what to call in its place; None: ``torch.compile`` of the whole.
        before_step: called with each model after its forward and backward, before the optimizer's step.
        clip: the norm to clip to.
        tolerance: where sums come in another order than in eager mode; the test says why.

    Returns:
        The compiled model.
    """
    first = build()
    models = [first, copy.deepcopy(first)]
    for model in models:
        shard(model)
    make = compile or (lambda model, backend: torch.compile(model, backend=backend, fullgraph=True))
    called = [make(models[0], graphs.backend()), models[1]]
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    # On local shards: DTensor's first step alone takes longer than a test may.
    optimizers = [
        fsdp2.optim.local(torch.optim.AdamW, params, lr=1e-2, eps=1e-3, weight_decay=0.1) for params in trained
    ]
    rank = dist.get_rank()
    for number in range(steps):
        losses = [step(model, number, rank) for model in called]
        for index, (found, expected) in enumerate(zip(*losses, strict=True)):
            assert_equal(f"loss {index} of step {number}", found, expected, tolerance)
        for (name, found), (_, expected) in zip(*(model.named_parameters() for model in models), strict=True):
            assert_equal(f"gradient of {name} in step {number}", mine(found.grad), mine(expected.grad), tolerance)
        if before_step is not None:
            for model in models:
                before_step(model)
        if clip is not None:
            norms = [fsdp2.clip_grad_norm_(params, clip) for params in trained]
            assert_equal(f"norm of step {number}", norms[0], norms[1], tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), (_, expected) in zip(*(model.named_parameters() for model in models), strict=True):
        assert_equal(f"{name} after training", mine(found), mine(expected), tolerance)
    return models[0]
