"""Parameters that a program unshards itself, and computes with outside of their module's forward: they get gradients.

Nothing crashes, in whatever order the graphs are differentiated. torch's own loses the gradient, or reads freed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, fully_shard
from tests.harness import full_gradients, multi_rank

INPUT = torch.tensor([[1.0, -2.0]])


class Program:
    """A step over a model, which is sharded or not, in which weights are used outside of forward."""

    def __init__(self, model: nn.Sequential, is_sharded: bool) -> None:
        self.model = model
        self._is_sharded = is_sharded

    def loss(self) -> Tensor:
        return self.model(INPUT).sum()  # type: ignore[no-any-return]

    def penalty(self, *, reshards: bool = True) -> Tensor:
        layer: Any = self.model[1]
        if self._is_sharded:
            layer.unshard()
        value = layer.weight.pow(2).sum()
        if self._is_sharded and reshards:
            layer.reshard()
        return value  # type: ignore[no-any-return]


def only_a_penalty(program: Program) -> None:
    program.penalty(reshards=False).backward()


def only_a_penalty_later(program: Program) -> None:
    program.penalty().backward()


def a_sum(program: Program) -> None:
    penalty = program.penalty()
    (program.loss() + penalty).backward()


def a_sum_of_a_later_penalty(program: Program) -> None:
    loss = program.loss()
    (loss + program.penalty()).backward()


def a_sum_while_unsharded(program: Program) -> None:
    penalty = program.penalty(reshards=False)
    (program.loss() + penalty).backward()


def one_after_the_other(program: Program) -> None:
    penalty, loss = program.penalty(), program.loss()
    loss.backward()
    penalty.backward()


def the_penalty_first(program: Program) -> None:
    penalty, loss = program.penalty(), program.loss()
    penalty.backward()
    loss.backward()


def between(program: Program) -> None:
    loss, penalty = program.loss(), program.penalty()
    penalty.backward()
    loss.backward()


def twice(program: Program) -> None:
    penalty = program.penalty()
    penalty.backward(retain_graph=True)
    program.loss().backward()
    penalty.backward()


ORDERS: tuple[Callable[[Program], None], ...] = (
    *(only_a_penalty, only_a_penalty_later, a_sum, a_sum_of_a_later_penalty, a_sum_while_unsharded),
    *(one_after_the_other, the_penalty_first, between, twice),
)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5), nn.Linear(5, 1))


def sharded(**arguments: Any) -> nn.Sequential:
    made = model()
    for layer in made:
        fully_shard(layer, **arguments)
    return fully_shard(made, **arguments)


def arguments_of(kind: str) -> dict[str, Any]:
    if kind == "replicas":
        return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    kinds = {"kept": {"reshard_after_forward": False}, "fewer": {"reshard_after_forward": 2}}
    return kinds.get(kind, {"offload_policy": CPUOffloadPolicy()} if kind == "offload" else {})


@multi_rank(4)
@pytest.mark.parametrize("kind", ["plain", "kept", "fewer", "offload", "replicas"])
def test_gradients_are_those_of_the_whole_model(kind: str) -> None:
    for order in ORDERS:
        plain, ours = model(), sharded(**arguments_of(kind))
        order(Program(plain, is_sharded=False))
        order(Program(ours, is_sharded=True))
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for name, gradient in full_gradients(ours).items():
            if expected[name] is None or gradient is None:
                assert gradient is None and expected[name] is None, (order.__name__, name)
            else:
                torch.testing.assert_close(gradient, expected[name], msg=f"{order.__name__}: {name}")


@multi_rank(2)
def test_memory_is_kept_only_for_what_reads_it() -> None:
    ours = sharded()
    layer: Any = ours[1]
    (group,) = layer._get_fsdp_state().unit

    def has_memory() -> bool:
        return bool(group.storage.buffers[0].unsharded.flat.untyped_storage().size())

    for _ in range(2):
        layer.unshard()
        layer.weight.detach().sum()
        layer.reshard()
        assert not has_memory(), "nothing reads it"
        layer.unshard()
        ours(INPUT).sum()
        assert not has_memory(), "what forward has saved is gathered again"
        penalty = Program(ours, is_sharded=True).penalty()
        assert has_memory()
        penalty.backward()
        assert not has_memory(), "the graph has gone"


@multi_rank(2)
def test_a_step_between_is_noticed() -> None:
    ours = sharded()
    program = Program(ours, is_sharded=True)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    penalty = program.penalty()
    program.loss().backward()
    optimizer.step()
    program.loss().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
