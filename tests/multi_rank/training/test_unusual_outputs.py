"""Backwards that do not come through a module's outputs: gradients are reduced all the same, or it is an error."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, FSDPNotImplementedError, FSDPTypeError, OffloadPolicy, fully_shard
from tests.harness import multi_rank
from tests.multi_rank.training.helpers import assert_same_gradients, differentiate


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


class Wrapped(nn.Module):
    """Returns an object of a class that nobody knows."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:
        y = self.linear(x)
        return SimpleNamespace(y=y) if self.wrap else lambda: y


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Hiding(nn.Module):
    """Uses its weights twice, element-wise too, and lets nobody see what it has computed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.how = how
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> object:
        y = torch.tanh(self.linear(torch.tanh(self.linear(x) * self.scale)) * self.scale)
        self.kept[:] = [y]
        return {
            "slots": lambda: Slotted(y),
            "set": lambda: {y},
            "deque": lambda: deque([3, y]),
            "closure": lambda: lambda: y,
            "namespaces": lambda: SimpleNamespace(inner=SimpleNamespace(y=y)),
            "nothing": lambda: None,
            "detached": lambda: y.detach(),
        }[self.how]()


class TakesHidden(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.hiding = Hiding(how)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, *, skips_first: bool = False) -> Tensor:
        self.hiding(x if skips_first else self.first(x))
        return self.last(self.hiding.kept[0]).square().mean()


HIDDEN = ["slots", "set", "deque", "closure", "namespaces", "nothing", "detached"]


@multi_rank(2)
@pytest.mark.parametrize("forwards", [1, 2, "retained"])
@pytest.mark.parametrize("skips_first", [False, True], ids=["inputs with gradients", "inputs without"])
@pytest.mark.parametrize("how", HIDDEN)
def test_outputs_that_hide_their_tensors(
    how: str, skips_first: bool, forwards: int | Literal["retained"], world_size: int
) -> None:
    """Where no tensor is found, the parameters stay for the backward, which is noticed when it comes to them."""
    torch.manual_seed(0)
    model, plain = TakesHidden(how), TakesHidden(how)
    plain.load_state_dict(model.state_dict())
    for unit in (model.first, model.hiding, model.last, model):
        fully_shard(unit, reshard_after_forward=True)

    def run(each: nn.Module, step: int, rank: int, part: float = 1.0) -> None:
        if forwards == "retained":
            loss = each(batch(step, rank), skips_first=skips_first) * part
            if not skips_first:
                loss.backward(retain_graph=True)
            loss.backward()
            return
        losses = [each(batch(step + number, rank), skips_first=skips_first) * part for number in range(forwards)]
        for loss in [sum(losses)] if skips_first else losses:
            loss.backward()  # type: ignore[union-attr]

    for step in range(2):
        run(model, step, dist.get_rank())
        for rank in range(world_size):
            run(plain, step, rank, 1 / world_size)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "sharded again"
        assert_same_gradients(model, plain, f"in step {step}")
        for each in (model, plain):
            each.zero_grad()


@multi_rank(4)
@pytest.mark.parametrize("looks", [False, True])
def test_hidden_outputs_between_fewer_ranks(looks: bool, world_size: int) -> None:
    """What the forward has gathered is there for its backward, also if the user looks at the shards before."""
    torch.manual_seed(0)
    model, plain = TakesHidden("closure"), TakesHidden("closure")
    plain.load_state_dict(model.state_dict())
    for unit in (model.first, model.hiding, model.last, model):
        fully_shard(unit, reshard_after_forward=2)
    for step in range(3):
        loss = model(batch(step, dist.get_rank()))
        if looks:
            assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        loss.backward()
        for rank in range(world_size):
            (plain(batch(step, rank)) / world_size).backward()
        assert_same_gradients(model, plain, f"in step {step}")
        with torch.no_grad():
            for each in (model, plain):
                torch._foreach_mul_(list(each.parameters()), 0.9)
                each.zero_grad()


@multi_rank(2)
def test_what_has_no_gradient_does_not_stay(world_size: int) -> None:
    """A frozen teacher, and an evaluation."""
    model = fully_shard(Wrapped(wrap=True).requires_grad_(False), reshard_after_forward=True)
    model(batch(0, 0))
    assert isinstance(model.linear.weight, DTensor)
    model = fully_shard(Wrapped(wrap=True), reshard_after_forward=True)
    model(batch(0, 0))  # nobody keeps the graph
    assert isinstance(model.linear.weight, DTensor)
    assert not any(
        buffers.unsharded.flat.untyped_storage().size()
        for group in model._get_fsdp_state().unit
        for buffers in group.storage.buffers
    )
    model = fully_shard(Wrapped(wrap=False), reshard_after_forward=True)
    with torch.no_grad():
        model(batch(0, 0))
    assert isinstance(model.linear.weight, DTensor)


@multi_rank(2)
def test_a_hidden_graph_that_lives_on_one_rank_alone(world_size: int) -> None:
    """As in garbage that Python has not collected yet: all ranks gather the same in the steps that follow."""
    torch.manual_seed(0)
    model, plain = Hiding("nothing"), Hiding("nothing")
    plain.load_state_dict(model.state_dict())
    fully_shard(model, reshard_after_forward=True)
    model(batch(0, 0).requires_grad_())  # so that the graph saves the weight
    kept = model.kept.copy() if dist.get_rank() == 0 else []
    model.kept.clear()
    plain.how = model.how = "namespaces"
    for step in range(3):

        def loss_of(each: Any, rank: int, step: int = step) -> Tensor:
            output: Any = each(batch(step, rank))
            each.kept.clear()
            return output.inner.y.square().mean()

        differentiate(model, plain, loss_of)
        assert_same_gradients(model, plain, f"in step {step}")
        for each in (model, plain):
            each.zero_grad()
    assert len(kept) == (dist.get_rank() == 0)


@multi_rank(2)
def test_copies_of_saved_tensors_that_are_written_are_refused_by_name() -> None:
    """An all-gather writes what forward has saved, whose memory was free meanwhile."""
    model = fully_shard(Wrapped(wrap=True))
    with (
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.raises(FSDPNotImplementedError, match=r"Wrapped is sharded.*Run the sharded module outside of it"),
    ):
        model(batch(0, 0))
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), torch.no_grad():
        model(batch(0, 0))  # saves nothing
    output: Any = model(batch(0, 0))
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        changed = output.y.exp()
        changed.mul_(2)
        changed.sum().backward()
    assert model.linear.weight.grad is not None


class Lazily(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for row in x:
            yield self.linear(row)


@multi_rank(2)
def test_a_generator_is_refused_by_name(world_size: int) -> None:
    model = fully_shard(Lazily())
    for _ in range(2):
        with pytest.raises(FSDPTypeError, match=r"forward returned a generator.*Return a list or a tuple"):
            model(batch(0, 0))


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 6))

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.positions(len(x))).square().mean()


@multi_rank(2)
def test_an_output_that_is_a_view_of_a_parameter(world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Positioned(), Positioned()
    plain.load_state_dict(model.state_dict())
    fully_shard(model.positions)
    fully_shard(model)
    with torch.no_grad():
        assert torch.equal(model(batch(0, 0)), plain(batch(0, 0)))
    for step in range(2):
        differentiate(model, plain, lambda each, rank, step=step: each(batch(step, rank)))
        assert_same_gradients(model, plain, f"in step {step}")


@multi_rank(2)
def test_a_sparse_gradient_is_refused_by_name(world_size: int) -> None:
    model = fully_shard(nn.Embedding(7, 3, sparse=True))
    with pytest.raises(FSDPNotImplementedError, match=r"'weight' has a sparse gradient.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@multi_rank(2, 4)
@pytest.mark.parametrize("when", ["before the forward", "after the forward"])
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_that_autograd_gives_to_sharded_parameters(offload: bool, when: str, world_size: int) -> None:
    """A regularizer of the sharded parameters, in the same backward: it arrives while others are being reduced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 6))
    plain = copy.deepcopy(model)
    for unit in (*model, model):
        fully_shard(unit, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())

    def loss_of(each: nn.Module, rank: int) -> Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        output = each(x) if when == "after the forward" else None
        if output is not None and each is model:
            for unit in (*each, each):
                unit.reshard()
        penalty = sum(parameter.pow(2).sum() for parameter in each.parameters())
        penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
        return (each(x) if output is None else output).square().mean() + 0.3 * penalty

    for _ in range(2):
        differentiate(model, plain, loss_of)
        assert_same_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad()


@multi_rank(2)
@pytest.mark.parametrize("wants_slopes", [True, False])
@pytest.mark.parametrize("keeps_graph", [True, False])
def test_a_graph_that_nobody_goes_through(keeps_graph: bool, wants_slopes: bool, world_size: int) -> None:
    """It may hold what a later backward would need. After another one the modules hold the sharded parameters."""
    model, plain = keeping()
    kept = []
    for step in range(3):
        x = torch.randn(world_size, 3, 4, requires_grad=wants_slopes)
        model(x[dist.get_rank()])
        if step == 0:
            kept.append(model.kept)  # as a traceback does
            continue
        model.kept.square().mean().backward(retain_graph=keeps_graph)
        if keeps_graph:
            model.kept.mean().backward()
        for rank in range(world_size):
            plain(x[rank])
            (plain.kept.square().mean() / world_size + (plain.kept.mean() / world_size) * keeps_graph).backward()
        assert_same_gradients(model, plain, f"in step {step}")
        for each in (model, plain):
            each.zero_grad()


class Detaching(nn.Module):
    """A trainable part of which nothing is differentiated, as of a codebook that is learned otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.code(x).detach())


@pytest.mark.full
@multi_rank(2)
def test_a_module_that_takes_no_part_shows_its_sharded_parameters_after_a_backward(world_size: int) -> None:
    """Clipping and averages go over all parameters there."""
    torch.manual_seed(0)
    model = Detaching()
    fully_shard(model.code)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.9)
        optimizer.zero_grad()


@multi_rank(2)
def test_two_forwards_then_a_backward_for_each_of_what_nobody_sees(world_size: int) -> None:
    model, plain = keeping()
    x = torch.randn(2, world_size, 3, 4)
    kept = []
    for batch in x:
        model(batch[dist.get_rank()])
        kept.append(model.kept)
    for mine, batch in zip(kept, x, strict=True):
        mine.square().mean().backward()
        for rows in batch:
            plain(rows)
            (plain.kept.square().mean() / world_size).backward()
    assert_same_gradients(model, plain)


class Keeping(nn.Module):
    """What it computes is left in an attribute."""

    kept: Tensor
    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> None:
        self.kept = self.inner(torch.tanh(self.first(x)))
        if self.fails:
            raise ZeroDivisionError


def keeping(**options: Any) -> tuple[Any, Keeping]:
    torch.manual_seed(0)
    plain = Keeping()
    model = copy.deepcopy(plain)
    fully_shard(model.inner, **options)
    return fully_shard(model, **options), plain


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("reshard_after_forward", [None, True, False, 2])
def test_one_rank_raises_late_in_a_forward_that_hides_its_output(
    reshard_after_forward: Any, evaluates: bool, world_size: int
) -> None:
    """All ranks drop the batch. The others hold unsharded parameters for a backward; all gather the same next."""
    model, plain = keeping(reshard_after_forward=reshard_after_forward)
    x = torch.randn(5, world_size, 3, 4)
    for step, dropped in enumerate((False, True, True, False, False)):
        model.fails = dropped and dist.get_rank() == 0
        with pytest.raises(ZeroDivisionError) if model.fails else contextlib.nullcontext():
            model(x[step, dist.get_rank()])
        model.zero_grad()
        if dropped:
            if evaluates:
                model.fails = False
                with torch.no_grad():
                    model(x[step, dist.get_rank()])
            continue
        model.kept.square().mean().backward()
        plain.zero_grad()
        for rows in x[step]:
            plain(rows)
            (plain.kept.square().mean() / world_size).backward()
        assert_same_gradients(model, plain)


class Head(nn.Module):
    """Hands its weight out, as for a fused loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, self.weight


@multi_rank(1, 2)
def test_a_parameter_that_is_returned_in_each_step_has_one_hook(world_size: int) -> None:
    head: Any = fully_shard(Head())
    x = torch.ones(2, 4)
    for _ in range(4):
        hidden, weight = head(x)
        (hidden @ weight.t()).sum().backward()
    unsharded = [param.unsharded for group in head._get_fsdp_state().unit for param in group.params]
    assert all(each is None or len(each._backward_hooks or ()) <= 1 for each in unsharded)
    assert torch.equal(head.weight.grad.full_tensor(), torch.full((8, 4), 16.0))


class Shared(nn.Module):
    """Hands out the weight that layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))

    def forward(self) -> Tensor:
        return self.weight


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + x @ weight)


class AskingEachTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.layers = Shared(), nn.ModuleList(Adding() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.shared())
        return x.sum()


@multi_rank(1, 2)
def test_a_parameter_that_is_returned_several_times_stays_until_it_was_read(world_size: int) -> None:
    """It is not gathered anew ahead, while a layer computes with what the call before has returned."""
    torch.manual_seed(0)
    plain = AskingEachTime()
    model = copy.deepcopy(plain)
    for module in (model.shared, *model.layers, model):
        fully_shard(module)
    for _ in range(3):
        x = torch.linspace(-1, 1, 8).view(2, 4)
        for each in (model, plain):
            each(x).backward()
        assert_same_gradients(model, plain)
        for each in (model, plain):
            each.zero_grad()


class Prompted(nn.Module):
    """Returns a parameter that is left to the program."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.prompt = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x + self.prompt), self.prompt


@pytest.mark.full
@multi_rank(2)
def test_a_leaf_that_was_returned_is_used_after_the_step() -> None:
    model = Prompted()
    fully_shard(model, ignored_params={model.prompt})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        output, prompt = model(torch.ones(2, 4))
        (output.sum() + prompt.sum() * step).backward()
        assert model.linear.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
        prompt.pow(2).sum().backward()
        assert torch.equal(prompt.grad, 2 * prompt)  # type: ignore[arg-type]
        prompt.grad = None


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda y: y.add_(1),
    "relu": lambda y: y.relu_(),
    "a mask": lambda y: y.masked_fill_(y > 0, 0.5),
    "dropout": lambda y: nn.functional.dropout(y, 0.5, inplace=True),
    "a column": lambda y: (y[..., 0].zero_(), y)[1],
}


class WritesInPlace(nn.Module):
    """Writes into the outputs of its layers, which for inputs of three dims are views."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(4, 6), nn.Linear(6, 4), write

    def forward(self, x: Tensor) -> Tensor:
        write = WRITES[self.write]
        return self.second(write(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_an_output_that_is_a_view_and_is_written_in_place(reshards: bool) -> None:
    for write in WRITES:
        torch.manual_seed(0)
        plain = WritesInPlace(write)
        model = copy.deepcopy(plain)
        for module in (model.first, model.second, model):
            fully_shard(module, reshard_after_forward=reshards)
        for wants_input in (True, False):
            inputs = [torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_(wants_input) for _ in range(2)]
            for each, x in zip((model, plain), inputs, strict=True):
                torch.manual_seed(1)
                WRITES[write](each(x)).sum().backward()
            assert_same_gradients(model, plain, write)
            assert inputs[0].grad is None or torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
            for each in (model, plain):
                each.zero_grad()
