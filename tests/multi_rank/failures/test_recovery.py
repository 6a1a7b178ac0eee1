"""An exception anywhere in an iteration costs that iteration, nothing else: the next one equals the reference."""

from __future__ import annotations

import copy
import itertools
import pkgutil
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import FSDPRuntimeError, fully_shard, share_comm_ctx
from fsdp2.core.buffers import Resizable
from fsdp2.core.root import FSDPRoot
from fsdp2.core.state import states_below
from fsdp2.core.streams import PendingReduce
from fsdp2.plugs.transports.gloo_p2p import PeerToPeer, _Sum
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, parameters_of
from tests.harness.reference import Reference, adamw
from tests.harness.shared.ways import hybrid
from tests.harness.training import assert_trains_like
from tests.multi_rank.failures.helpers import (
    CASE,
    Boom,
    assert_gradients,
    assert_same_gradients,
    differentiate,
    loss_of,
    raising,
    sharded,
)


def assert_trains_on(model: nn.Module, world_size: int, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """From where it stands, ``model`` trains like the reference."""
    assert_trains_like(
        Reference(CASE, world_size=world_size), model, optimizer or adamw(list(model.parameters())), steps=3
    )
    assert all(group.phase.value == "sharded" for state in states_below(model) for group in state.unit)


PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "root": lambda model: model,
    "first": lambda model: model.blocks[0],
    "last": lambda model: model.blocks[2],
    "inside": lambda model: model.blocks[1].feed_forward.up,
    "head": lambda model: model.head,
}


@multi_rank(2)
@pytest.mark.parametrize(
    "exception",
    # Each of the others takes 7 seconds, at all places.
    [
        Boom,
        pytest.param(KeyboardInterrupt, marks=pytest.mark.full),
        pytest.param(torch.OutOfMemoryError, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("where", ["before", "after", "backward"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("first_iteration", [True, False], ids=["first", "later"])
def test_the_next_iteration_is_clean(
    place: str, where: str, exception: type[BaseException], first_iteration: bool, world_size: int
) -> None:
    model = sharded()
    optimizer = adamw(list(model.parameters()))
    if not first_iteration:
        loss_of(model).backward()
        optimizer.zero_grad()
    with raising(PLACES[place](model), where, exception), pytest.raises(exception):
        loss_of(model).backward()
    optimizer.zero_grad()
    assert_trains_on(model, world_size, optimizer=optimizer)


@multi_rank(2)
@pytest.mark.parametrize("clears", [None, "to None", "to zero"])
def test_no_sync_accumulation_is_dropped_with_a_backward_that_failed(clears: str | None, world_size: int) -> None:
    """torch 2.13 leaves the gradients of the next iteration 2.00 times too large here, even after its reset.

    Nothing is said of it where all gradients are cleared, in parts: nothing is lost that anybody wants.
    """
    model = sharded()
    parts = [
        adamw(list(model.blocks.parameters())),
        adamw([each for name, each in model.named_parameters() if not name.startswith("blocks.")]),
    ]
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    with raising(model.blocks[1], "backward"), pytest.raises(Boom):
        loss_of(model).backward()
    model.set_requires_gradient_sync(True)
    if clears is None:
        with pytest.warns(UserWarning, match="accumulated without communication were dropped"), torch.no_grad():
            loss_of(model)
        model.zero_grad()
    else:
        for part in parts:
            part.zero_grad(set_to_none=clears == "to None")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(model)
    assert_trains_on(model, world_size)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("late", ["root", "last"])
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_one_rank_fails_late_in_its_forward_and_all_skip_the_batch(
    reshard_after_forward: bool | None, late: str, replicas: int, world_size: int
) -> None:
    """The right recovery. What is gathered next is the same on all ranks, and an earlier microbatch is not lost."""
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    model = sharded(reshard_after_forward=reshard_after_forward, mesh=mesh)
    reference, optimizer = Reference(CASE, world_size=world_size), adamw(list(model.parameters()))
    for accumulates in (False, True):
        if accumulates:
            model.set_requires_gradient_sync(False)
            loss_of(model, 1).backward()
            model.set_requires_gradient_sync(True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if dist.get_rank() == 1:
                with raising(PLACES[late](model), "after"), pytest.raises(Boom):
                    loss_of(model, 2)
            else:
                loss_of(model, 2)
            loss_of(model, 3).backward()
        assert_gradients(model, (1, 3) if accumulates else (3,))
        optimizer.zero_grad()
    assert_trains_like(reference, model, optimizer, steps=2)


class Retrying(nn.Sequential):
    """Runs a layer again that has found no memory."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            try:
                y = layer(x)
            except torch.OutOfMemoryError:
                y = layer(x)
            x = torch.tanh(y)
        return x


@multi_rank(4)
@pytest.mark.parametrize("reshard_after_forward", [True, 2])
def test_one_rank_fails_after_its_parameters_were_left_as_they_rest(
    reshard_after_forward: bool | int, world_size: int
) -> None:
    """All skip the batch, and gather the same next, from neighbours or from all."""
    torch.manual_seed(0)
    model = Retrying(*(nn.Linear(4, 4) for _ in range(3)))
    plain = copy.deepcopy(model)
    blocks = list(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    model.zero_grad()
    fails = dist.get_rank() == 1
    with raising(blocks[2], "after") if fails else nullcontext(), pytest.raises(Boom) if fails else nullcontext():
        model(x)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("place", ["root", "last"])
@pytest.mark.parametrize("finalizes", [False, True], ids=["by itself", "finalized"])
def test_a_forward_fails_and_the_backward_of_an_earlier_one_follows(
    finalizes: bool, place: str, world_size: int
) -> None:
    """The second loss of a step is given up: the first one's gradients are right, and the next forward is a new one."""
    model, reference = sharded(), Reference(CASE, world_size=world_size)
    model.set_manual_backward_finalization(finalizes)
    optimizer = adamw(list(model.parameters()))
    loss = loss_of(model, 1)
    if finalizes:
        loss.backward()
    with raising(PLACES[place](model), "after"), pytest.raises(Boom):
        loss_of(model, 2)
    if finalizes:
        model.finalize_backward()
    else:
        loss.backward()
    assert_gradients(model, (1,))
    state = model.state_dict()
    assert all(torch.equal(state[name], parameter) for name, parameter in model.named_parameters())
    optimizer.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        begun, begin = [], FSDPRoot.begin_forward
        patch.setattr(FSDPRoot, "begin_forward", lambda root: begun.append(root) or begin(root))
        loss_of(model, 3).backward()
        if finalizes:
            model.finalize_backward()
    assert len(begun) == 1
    optimizer.zero_grad()
    model.set_manual_backward_finalization(False)
    assert_trains_like(reference, model, optimizer, steps=2)


@multi_rank(2)
@pytest.mark.parametrize("by", ["model", "optimizer", "another_optimizer", "plain_parent", "parts"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_accumulation_that_was_given_up_does_not_come_back(set_to_none: bool, by: str, world_size: int) -> None:
    """The loss, the loader or the loop raises; all gradients are cleared, and the step is run again."""
    model, plain = sharded(), CASE.build()
    optimizers = [adamw(list(each.parameters())) for each in (model, plain)]

    def clear(each: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        {
            "model": each.zero_grad,
            "optimizer": optimizer.zero_grad,
            "another_optimizer": torch.optim.SGD(each.parameters(), lr=1.0).zero_grad,
            "plain_parent": nn.ModuleDict({"inner": each}).zero_grad,
            "parts": torch.optim.SGD(each.blocks[0].parameters(), lr=1.0).zero_grad,
        }[by](set_to_none)

    model.set_requires_gradient_sync(False)
    loss_of(model, 1).backward()
    clear(model, optimizers[0])
    model.set_requires_gradient_sync(True)
    loss_of(model, 2).backward()
    differentiate(plain, 1)
    clear(plain, optimizers[1])
    differentiate(plain, 2)
    assert_same_gradients(model, plain)


@pytest.mark.full
@multi_rank(2)
def test_reset_iter_state_drops_an_accumulation(world_size: int) -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    model.set_requires_gradient_sync(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was asked for
        model.reset_iter_state()
    assert_trains_on(model, world_size)


@pytest.mark.full
@multi_rank(2)
def test_what_must_not_be_taken_for_a_failure(world_size: int) -> None:
    """Accumulated gradients survive a forward without backward, an evaluation, and an exception that is caught."""
    model = sharded()
    model.set_requires_gradient_sync(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, 1).backward()
        with torch.no_grad():
            loss_of(model, 2)
        loss_of(model, 3)
        model.set_requires_gradient_sync(True)
        loss_of(model, 4).backward()
    assert_gradients(model, (1, 4))


@pytest.mark.full
@multi_rank(2)
def test_an_exception_that_the_model_catches_itself(world_size: int) -> None:
    class Forgiving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky = nn.Linear(4, 4)
            self.safe = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.risky(x)
            except Boom:
                return self.safe(x)

    torch.manual_seed(0)
    model, plain = Forgiving(), Forgiving()
    plain.load_state_dict(model.state_dict())
    for unit in (model.risky, model.safe, model):
        fully_shard(unit)
    x = torch.ones(2, 4)
    for fails in (False, True, True, False):
        with raising(model.risky, "after" if fails else "backward") if fails else nullcontext():
            model(x).square().sum().backward()
        (plain.safe if fails else plain.risky)(x).square().sum().backward()
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert all(parameter.device.type == "cpu" for parameter in parameters_of(model).values())


@multi_rank(2)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("target", ["Gather.allocate", "Gather.copy_in", "GroupStorage.outdate", "Gather.copy_out"])
def test_a_gather_that_failed_is_not_taken_for_one_in_flight(target: str, reshards: bool, world_size: int) -> None:
    """The model catches what left the gather of a layer, or of the next one ahead of it, and goes on."""
    torch.manual_seed(0)
    model = Retrying(*(nn.Linear(4, 4) for _ in range(4)))
    plain = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshards)
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    x = torch.ones(2, 4)
    for call in (None, 0, 1, 2, 3):
        with nullcontext() if call is None else failing_call(f"fsdp2.core.gather.{target}", call) as failed:
            found, expected = model(x), plain(x)
            assert call is None or failed
        assert torch.equal(found, expected)
        for output, optimizer in zip((found, expected), optimizers, strict=True):
            output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@multi_rank(4)
def test_a_gather_fails_while_gradients_are_on_their_way(world_size: int) -> None:
    """The root's, whose reduction is in flight: it is laid out anew, and what waits for an all-reduce is not lost."""
    model = sharded(**hybrid())
    model.set_is_last_backward(False)
    model.set_requires_all_reduce(False)
    loss_of(model, 1).backward()
    with (
        failing_call("fsdp2.plugs.transports.gloo_p2p.PeerToPeer.all_gather", 0),
        pytest.raises(torch.OutOfMemoryError),
    ):
        loss_of(model, 2)
    model.set_is_last_backward(True)
    model.set_requires_all_reduce(True)
    loss_of(model, 3).backward()
    assert_gradients(model, (1, 3))


@contextmanager
def failing_call(target: str, call: int) -> Iterator[list[bool]]:
    """Patch ``target`` so that its call number ``call`` raises."""
    path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(path)
    original, calls, failed = getattr(owner, name), itertools.count(), []

    def patched(*args: object, **kwargs: object) -> object:
        if next(calls) == call:
            failed.append(True)
            raise torch.OutOfMemoryError(target)
        return original(*args, **kwargs)

    setattr(owner, name, patched)
    try:
        yield failed
    finally:
        setattr(owner, name, original)


@multi_rank(2)
def test_a_manual_unshard_that_fails(world_size: int) -> None:
    model = sharded()
    model.unshard()
    with failing_call("fsdp2.core.gather.Gather.allocate", 0), pytest.raises(torch.OutOfMemoryError):
        model.blocks[0].unshard()
    assert_trains_on(model, world_size)


@multi_rank(2)
@pytest.mark.parametrize("waits_again", [False, True])
def test_a_manual_unshard_that_fails_when_it_is_waited_for(waits_again: bool, world_size: int) -> None:
    """What has arrived was not moved to where parameters lie: nothing computes with what lies there instead."""
    model = sharded()
    model.unshard()
    model.reshard()
    handle = model.blocks[0].unshard(async_op=True)
    with failing_call("fsdp2.core.gather.Gather.copy_out", 0), pytest.raises(torch.OutOfMemoryError):
        handle.wait()
    if waits_again:
        with pytest.raises(FSDPRuntimeError, match=r"'blocks.0' was interrupted.*call reshard\(\)"):
            handle.wait()
    assert_trains_on(model, world_size)


def _step(model: nn.Module) -> None:
    loss_of(model, 2).backward()
    adamw(list(model.parameters())).step()


def _multiply(model: nn.Module) -> None:
    model.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("write", [_step, _multiply, _load], ids=lambda write: write.__name__)
def test_writes_between_a_forward_and_its_backward_are_errors(write: Callable[[Any], None]) -> None:
    """As in plain PyTorch, where the backward finds its saved parameters modified."""
    model = sharded()
    loss = loss_of(model)
    write(model)
    with pytest.raises(FSDPRuntimeError, match="parameters of 'Transformer' were changed between a forward and its"):
        loss.backward()
    model.zero_grad()
    loss_of(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.full
@multi_rank(2)
def test_gradients_accumulated_before_freezing_are_still_reduced(world_size: int) -> None:
    model, plain = sharded(), CASE.build()
    model.set_requires_gradient_sync(False)
    loss_of(model, 1).backward()
    model.set_requires_gradient_sync(True)
    model.blocks[1].requires_grad_(False)
    loss_of(model, 2).backward()
    differentiate(plain, 1)
    plain.blocks[1].requires_grad_(False)
    differentiate(plain, 2)
    assert_same_gradients(model, plain)


@multi_rank(1)
def test_ctrl_c_at_random_moments(world_size: int) -> None:
    """KeyboardInterrupt anywhere, also inside the engine and inside a collective's launch: the next step is clean."""
    model = sharded()
    optimizer = adamw(list(model.parameters()))
    reference = Reference(CASE, world_size=1)
    generator = random.Random(0)
    interrupted = 0
    report = sys.unraisablehook

    def report_others(lost: Any) -> None:
        """Python drops an interrupt that comes in a `__del__`: nobody could tell."""
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            report(lost)

    sys.unraisablehook = report_others
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for attempt in range(120):
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.0005, 0.02))
                for _ in range(10):
                    loss_of(model).backward()
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            optimizer.zero_grad()
            if attempt % 10 == 9:
                assert_trains_like(reference, model, optimizer, steps=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = report
    assert interrupted > 60  # the others were through before their alarm, on a quiet machine


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("touch", ["to", "state_dict"])
def test_the_model_is_touched_before_the_next_forward(touch: str, world_size: int) -> None:
    """The reductions of the iteration that failed are not delivered after its gradients were cleared."""
    model = sharded()
    optimizer = adamw(list(model.parameters()))
    with raising(model.blocks[0], "backward"), pytest.raises(Boom):
        loss_of(model).backward()
    optimizer.zero_grad()
    model.to("cpu") if touch == "to" else model.state_dict()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_trains_on(model, world_size, optimizer=optimizer)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("failing", "fails_in"), [([0, 3, 4], 4), ([0, 1, 2], 2), ([0, 1, 2, 3], 3), ([0, 1, 2, 3, 4], 3)], ids=str
)
def test_one_rank_fails_where_the_order_changes(failing: list[int], fails_in: int, trains: bool) -> None:
    """After its last layer, or after the one before, while that is gathered ahead. All skip the batch."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
    plain, model = copy.deepcopy(layers), nn.Module()
    model.layers = layers

    def run(layers: nn.ModuleList, order: list[int], fails_in: int = -1) -> Tensor:
        x = torch.ones(2, 8)
        for index in order:
            x = torch.tanh(layers[index](x))
            if index == fails_in:
                raise Boom
        return x

    model.forward = lambda *args: run(layers, *args)  # type: ignore[method-assign]
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    whole, other = [0, 1, 2, 3, 4], [0, 1, 2]
    for order in (whole, failing, other, other, whole, failing, whole, other):
        with torch.set_grad_enabled(trains):
            if order is failing:
                fails = dist.get_rank() == 1
                with pytest.raises(Boom) if fails else nullcontext():
                    model(order, fails_in if fails else -1)
                continue
            outputs = model(order), run(plain, order)
            assert torch.equal(*outputs)
        if trains:
            for output in outputs:
                output.sum().backward()
            assert_same_gradients(model.layers, plain)
            model.zero_grad()
            plain.zero_grad()


@multi_rank(4)
@pytest.mark.parametrize("waits", ["for its all-reduce", "in flight", "in part"])
def test_what_waits_elsewhere_is_cleared_too(waits: str, world_size: int) -> None:
    """Under torch what awaits its all-reduce survives `zero_grad`; a plain model's gradients do not."""
    model, plain = sharded(**hybrid()), CASE.build()
    if waits == "in flight":
        model.set_is_last_backward(False)
    else:
        model.set_requires_all_reduce(False)
    loss_of(model, 1).backward()
    differentiate(plain, 1)
    for each in (model, plain):
        cleared = each.blocks[1] if waits == "in part" else each
        torch.optim.SGD(cleared.parameters(), lr=1.0).zero_grad()
    model.set_is_last_backward(True)
    model.set_requires_all_reduce(True)
    loss_of(model, 2).backward()
    differentiate(plain, 2)
    assert_same_gradients(model, plain)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another root"])
def test_an_exception_between_an_all_reduce_and_its_work(beside: bool, call: int, world_size: int) -> None:
    """The launch has happened, and nobody can wait for it: the memory that it uses stays.

    Also if it came in ``finalize_backward``, and another root that shares the communication context notices it first.
    """
    options = hybrid()
    model, other = sharded(**options), sharded(**options)
    model.set_manual_backward_finalization(True)
    if beside:
        share_comm_ctx([model, other])
    optimizer = adamw(list(model.parameters()))
    calls, original = itertools.count(), PeerToPeer.sum
    in_flight, freed = [], []  # addresses: a reference would keep the memory

    def launched_in_vain(self: PeerToPeer, tensor: torch.Tensor, *args: Any) -> None:
        original(self, tensor, *args)
        if next(calls) == call:
            in_flight.append(tensor.data_ptr())
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerToPeer, "sum", launched_in_vain)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model).backward()
            model.finalize_backward()
    optimizer.zero_grad()
    if beside:
        loss_of(other)
    with pytest.MonkeyPatch.context() as patch:
        free = Resizable.free

        def noted(buffer: Resizable) -> None:
            freed.append(buffer.flat.data_ptr())
            free(buffer)

        patch.setattr(Resizable, "free", noted)
        loss_of(model).backward()
        model.finalize_backward()
    used = {parameter.grad.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(in_flight) == 1
    assert not set(in_flight) & {*freed, *used}, "the thread of the collective may still write there"
    optimizer.zero_grad()
    model.set_manual_backward_finalization(False)
    reference = Reference(CASE, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=SUM_ORDER)


class Tokens(nn.Module):
    """An embedding's backward saves no parameter, a large matrix's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 520), nn.Linear(520, 520, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.embedding(tokens))
        return hidden.square().mean()


@multi_rank(2)
@pytest.mark.parametrize("unit", ["embedding", "layer"])
@pytest.mark.parametrize("forward_between", [False, True])
@pytest.mark.every_combination
def test_a_gather_fails_between_a_forward_and_its_backward(forward_between: bool, unit: str, world_size: int) -> None:
    """What that forward computed with lies where nothing comes any more: its backward raises, and nothing is lost."""
    torch.manual_seed(0)
    model = Tokens()
    plain = copy.deepcopy(model)
    for child in model.children():
        fully_shard(child)
    fully_shard(model)
    tokens = torch.arange(9)
    model(tokens).backward()
    model.zero_grad()
    losses = [model(tokens)]
    call = ["embedding", "layer"].index(unit)
    with (
        failing_call("fsdp2.plugs.transports.gloo_p2p.PeerToPeer.all_gather", call),
        pytest.raises(torch.OutOfMemoryError),
    ):
        model(tokens)
    if forward_between:
        losses.append(model(tokens))
    with pytest.raises(RuntimeError, match=r"changed between a forward and its|modified by an inplace|laid out anew"):
        torch.stack(losses).sum().backward()
    model.zero_grad()
    model(tokens).backward()
    plain(tokens).backward()
    assert_same_gradients(model, plain)


@multi_rank(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_settings_can_change_after_a_failure(where: str, world_size: int) -> None:
    """Nothing runs any more, so nothing refuses; the next iteration equals the reference."""
    for method, value in (
        ("set_prefetch_budget", 0),
        ("set_backward_prefetch", "never"),
        ("set_recovery", "drop_step"),
        ("set_full_precision", True),
        ("set_manual_backward_finalization", True),
    ):
        model = sharded()
        with raising(model.get_submodule("blocks.1"), where), pytest.raises(Boom):
            loss_of(model).backward()
        getattr(model, method)(value)
        loss_of(model).backward()
        if method == "set_manual_backward_finalization":
            model.finalize_backward()
        assert_gradients(model, (7,))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.every_combination
def test_gradients_are_cleared_after_a_reduction_that_was_interrupted(sent: bool, world_size: int) -> None:
    """Of a step that accumulates: what is yet to arrive has its memory until the next forward waits for it."""
    model = sharded()

    def accumulate() -> None:
        model.set_requires_gradient_sync(False)
        loss_of(model, 1).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, 2).backward()

    accumulate()
    model.zero_grad()
    original = PendingReduce.launch

    def interrupted(pending: PendingReduce) -> None:
        original(pending)
        raise KeyboardInterrupt

    def unsent(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if sent:
            patch.setattr(PendingReduce, "launch", interrupted)
        else:
            patch.setattr(_Sum, "launch", unsent)
        with pytest.raises(KeyboardInterrupt):
            accumulate()
    model.zero_grad()
    accumulate()
    assert_gradients(model, (1, 2))
