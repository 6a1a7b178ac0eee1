"""What happens to a compiled model between its calls: loads, casts, freezing, copies, exceptions, deletion."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from tests.compiled.helpers.models import (
    WIDTH,
    batch_of,
    build,
    build_small,
    by_blocks,
    by_method,
    loss_of,
    multi_rank,
    shard,
    steps_of,
    trainable,
    whole,
)
from tests.compiled.helpers.twins import assert_equal, assert_trains_alike, compiling, mine

WAYS = pytest.mark.parametrize("compile", [whole, by_blocks])
step_once = steps_of(1)


def sharded(model: Any) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def compiled_and_eager(build: Callable[[], nn.Module], compile: Any, backend: Any) -> tuple[list[nn.Module], list[Any]]:
    """Two models that are sharded alike; and the same to be called, the first compiled."""
    models = [build(), build()]
    for model in models:
        shard(model)
    return models, [compile(models[0], backend), models[1]]


def assert_same_gradients(models: Iterable[nn.Module], when: str) -> None:
    for (name, found), (_, expected) in zip(*(model.named_parameters() for model in models), strict=True):
        assert_equal(f"gradient of {name} {when}", mine(found.grad), mine(expected.grad))


def other_state(model: nn.Module, number: int) -> dict[str, Any]:
    """Values that depend on the step, sharded as the model is."""
    return {
        name: DTensor.from_local(
            value.to_local() + number,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        for name, value in model.state_dict().items()
    }


def load(model: nn.Module, number: int) -> None:
    model.load_state_dict(other_state(model, number))


def load_assigned(model: nn.Module, number: int) -> None:
    model.load_state_dict(other_state(model, number), assign=True)


def write_in_place(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5 + number)


def write_locals(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().add_(number)


def set_data(model: nn.Module, number: int) -> None:
    for param in model.parameters():
        param.data = param.data * 1.5


def freeze(model: nn.Module, number: int) -> None:
    model.blocks[0].requires_grad_(number % 2 == 1)


def freeze_some(model: nn.Module, number: int) -> None:
    model.blocks[1][0].bias.requires_grad_(number % 2 == 1)


def unshard_by_hand(model: nn.Module, number: int) -> None:
    model.unshard()
    for block in model.blocks:
        block.unshard()


def eval_and_train(model: nn.Module, number: int) -> None:
    model.train(number % 2 == 1)


CHANGES = [
    load,
    load_assigned,
    write_in_place,
    write_locals,
    freeze,
    freeze_some,
    unshard_by_hand,
    eval_and_train,
]


# Full: 6 s each.
@multi_rank(2)
@pytest.mark.full
@WAYS
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps(change: Callable[[nn.Module, int], None], compile: Any) -> None:
    """Leaves follow: nothing stale is computed with."""
    with compiling() as graphs:
        models, called = compiled_and_eager(build_small, compile, graphs.backend())
        for number in range(5):
            if number in (2, 3):
                for model in models:
                    change(model, number - 2)
            optimizers = [torch.optim.SGD(trainable(model), lr=0.05) for model in models]
            losses = []
            for each in called:
                loss = loss_of(each(batch_of(number, dist.get_rank())))
                loss.backward()
                losses.append(loss.detach())
            assert_equal(f"loss of step {number}", *losses)
            assert_same_gradients(models, f"in step {number}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            pairs = zip(*(model.named_parameters() for model in models), strict=True)
            for (name, found), (_, expected) in pairs:
                assert_equal(f"{name} after step {number}", mine(found), mine(expected))


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
def test_setting_data_is_refused(compile: Any) -> None:
    """As in eager mode, before anything is computed with the former values."""
    with compiling() as graphs:
        model = build_small()
        shard(model)
        called = compile(model, graphs.backend())
        loss_of(called(batch_of(0, 0))).backward()
        set_data(model, 0)
        with pytest.raises(fsdp2.FSDPRuntimeError, match=r"\.data was set on parameter .*parameter\.copy_\(value\)"):
            called(batch_of(1, 0))


@multi_rank(2)
@pytest.mark.full  # 5 s each
@WAYS
@pytest.mark.parametrize("again", [True, False])
def test_a_step_between_forward_and_backward_is_refused(compile: Any, again: bool) -> None:
    """What backward gathers again would be of other values than forward's."""
    with compiling() as graphs:
        model = build_small()
        shard(model, reshard_after_forward=again)
        called = compile(model, graphs.backend())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(called(batch_of(0, 0))).backward()
        loss = loss_of(called(batch_of(1, 0)))
        optimizer.step()
        if again:
            with pytest.raises(RuntimeError, match="changed between a forward and its backward"):
                loss.backward()
        else:
            loss.backward()
        optimizer.zero_grad()
        loss_of(called(batch_of(2, 0))).backward()
        assert all(param.grad is not None for param in model.parameters())


@multi_rank(2)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("compile", [by_method, by_blocks])
def test_copies_of_a_compiled_model(compile: Any) -> None:
    """A copy trains on its own; the original does not notice."""
    with compiling() as graphs:
        models, called = compiled_and_eager(build_small, compile, graphs.backend())
        rank = dist.get_rank()
        for each in called:
            step_once(each, 0, rank)
            each.zero_grad()
        copies = [copy.deepcopy(model) for model in models]
        for each, twin in ((models, 3), (copies, 4), (models, 5)):
            losses = [step_once(model, twin, rank)[0] for model in each]
            assert_equal(f"loss {twin}", *losses)
            assert_same_gradients(each, f"of {twin}")
            for model in each:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()
        for found, expected in zip(copies[0].parameters(), copies[1].parameters(), strict=True):
            assert_equal("parameter of the copy", mine(found), mine(expected))


@multi_rank(2)
@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("compile", [whole, by_method, by_blocks])
def test_unwrapped_and_sharded_again(compile: Any) -> None:
    with compiling() as graphs:
        models, called = compiled_and_eager(build, compile, graphs.backend())
        rank = dist.get_rank()
        assert_equal("loss", *(step_once(each, 0, rank)[0] for each in called))
        for model in models:
            model.zero_grad()
            fsdp2.unwrap(model)
        plain = [step_once(each, 1, rank)[0] for each in called]
        assert_equal("loss of the plain model", *plain)
        for model in models:
            model.zero_grad()
            shard(model)
        assert_equal("loss after sharding again", *(step_once(each, 2, rank)[0] for each in called))
        assert all(isinstance(param, DTensor) for param in models[0].parameters())
        assert_same_gradients(models, "after sharding again")


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("compile", [whole, by_method, by_blocks])
def test_training_goes_on_after_an_exception(compile: Any) -> None:
    """A wrong shape, while the graph is traced or when it runs; then a backward that raises."""
    with compiling() as graphs:
        models, called = compiled_and_eager(build_small, compile, graphs.backend())
        rank = dist.get_rank()
        for number in range(3):
            for each in called:
                with pytest.raises(Exception, match=r"shape|size"):
                    each(torch.randn(4, WIDTH + 1))
                output = each(batch_of(number, rank))
                output.register_hook(interrupt)
                with pytest.raises(ZeroDivisionError):
                    output.sum().backward()
            # An eager module that was interrupted is put right by its next forward.
            assert compile is by_blocks or all(isinstance(param, DTensor) for param in models[0].parameters())
            assert_equal(f"loss of step {number}", *(step_once(each, number, rank)[0] for each in called))
            assert_same_gradients(models, f"in step {number}")
            for model in models:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()


def interrupt(_: Tensor) -> None:
    raise ZeroDivisionError


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_the_state_of_a_model_whose_trace_failed() -> None:
    """The parameters that were swapped in while tracing are not left behind."""
    with compiling() as graphs:
        model = build_small()
        shard(model)
        model.blocks[1].register_forward_hook(fail_when_traced)
        called = whole(model, graphs.backend())
        with pytest.raises(Exception, match="not in a graph"):
            called(batch_of(0, 0))
        assert all(isinstance(param, DTensor) for param in model.parameters())
        twin = build_small()
        shard(twin)
        assert_equal("loss", step_once(model, 0, 0)[0], step_once(twin, 0, 0)[0])


def fail_when_traced(*_: Any) -> None:
    if torch.compiler.is_compiling():
        raise ValueError("not in a graph")


@multi_rank(2)
@pytest.mark.full  # 4 s
def test_a_model_deleted_between_forward_and_backward() -> None:
    """Backward says so, as nobody is left to take the gradients."""
    with compiling() as graphs:
        model = build_small()
        shard(model)
        called = whole(model, graphs.backend())
        step_once(called, 0, 0)
        loss = loss_of(called(batch_of(1, 0)))
        del called, model
        torch._dynamo.reset()
        gc.collect()
        with pytest.raises(fsdp2.FSDPRuntimeError, match="was deleted"):
            loss.backward()


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_a_block_put_in_the_place_of_another_is_refused() -> None:
    """Sharded after the model has run: it belongs to no root, and nothing of it is computed without its gather."""
    with compiling() as graphs:
        model = build_small()
        shard(model)
        called = whole(model, graphs.backend())
        step_once(called, 0, 0)
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        fully_shard(block)
        model.blocks[0] = block
        with pytest.raises(Exception, match="nothing has prepared"):
            step_once(called, 1, 0)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("way", [whole, by_method])
def test_sharded_after_it_was_compiled(way: Any, called_before: bool) -> None:
    """The graph of the plain model is not used any more; the next one communicates."""
    with compiling() as graphs:
        models = [build_small(), build_small()]
        called = [way(models[0], graphs.backend()), models[1]]
        rank = dist.get_rank()
        if called_before:
            assert_equal("loss of the plain model", *(step_once(each, 0, rank)[0] for each in called))
            for model in models:
                model.zero_grad()
        for model in models:
            shard(model)
        assert_equal("loss", *(step_once(each, 1, rank)[0] for each in called))
        assert_same_gradients(models, "after sharding")
        assert graphs.collectives()[1 if called_before else 0] == (3, 0)


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("way", [whole, by_method])
def test_a_child_sharded_after_its_parent_was_compiled(way: Any) -> None:
    """The parent leaves it out, and is compiled; before it has run, the child is sharded too."""
    with compiling() as graphs:
        models = [build_small(), build_small()]
        called = []
        for model in models:
            fully_shard(model.blocks[1])
            fully_shard(model, ignored_params=set(model.blocks[0].parameters()))
            called.append(way(model, graphs.backend()) if model is models[0] else model)
            fully_shard(model.blocks[0])
        assert_equal("loss", *(step_once(each, 1, dist.get_rank())[0] for each in called))
        assert_same_gradients(models, "of all")
        assert graphs.collectives()[0] == (3, 0)


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_a_child_sharded_after_its_parent_was_called_is_refused() -> None:
    """The root of the parent does not know it. (An eager call takes it up.)"""
    with compiling() as graphs:
        model = build_small()
        fully_shard(model.blocks[1])
        fully_shard(model, ignored_params=set(model.blocks[0].parameters()))
        called = whole(model, graphs.backend())
        step_once(called, 0, dist.get_rank())
        model.zero_grad()
        fully_shard(model.blocks[0])
        with pytest.raises(Exception, match="nothing has prepared"):
            step_once(called, 1, 0)


@multi_rank(2)
@pytest.mark.full  # 4 s
def test_a_conversion_is_refused_while_a_graph_is_kept() -> None:
    """Torch cannot swap tensors that are referred to, as by what the backend of these tests keeps."""
    with compiling() as graphs:
        models = [build_small(), build_small()]
        for model in models:
            shard(model)
        called = whole(models[0], graphs.backend())
        step_once(called, 0, 0)
        models[0].zero_grad()
        with pytest.raises(fsdp2.FSDPRuntimeError, match="before the first compiled call"):
            models[0].double()
        assert_equal("loss", step_once(called, 1, 0)[0], step_once(models[1], 1, 0)[0])


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_built_on_meta() -> None:
    def shard_meta(model: nn.Module) -> None:
        shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for index, param in enumerate(model.parameters()):
                param.to_local().fill_(0.1 + index / 20)

    def build_meta() -> nn.Module:
        with torch.device("meta"):
            return build_small()

    with compiling() as graphs:
        assert_trains_alike(graphs, build_meta, shard_meta, step_once)


@multi_rank(2)
@pytest.mark.full  # 30 s on a busy machine
@pytest.mark.parametrize("compile", [whole, by_method])
def test_conversion_after_a_compiled_call(compile: Callable[..., Any]) -> None:
    with compiling():
        models = [build_small(), build_small()]
        for model in models:
            shard(model)
        called = [compile(models[0], "aot_eager"), models[1]]
        for number, dtype in enumerate([torch.float32, torch.float64, torch.float32]):
            for model, call in zip(models, called, strict=True):
                model.zero_grad()
                model.to(dtype)
                call(batch_of(number, dist.get_rank()).to(dtype)).square().sum().backward()
            for found, expected in zip(*(model.parameters() for model in models), strict=True):
                assert found.dtype == dtype
                assert_equal("gradient", mine(found.grad), mine(expected.grad))


class Swapped(nn.Module):
    """Two weights of one shape, of which one is trained at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full((WIDTH, WIDTH), 0.5))
        self.q = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.p).tanh() @ self.q


# Full: two compilations.
@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("wanted", ["sum", 8.0, torch.tensor(8.0)])
def test_a_gradient_reduction_that_is_set_after_the_forward(wanted: Any) -> None:
    """The first graph was made for the mean; its backward delivers what eager mode does."""
    with compiling() as graphs:
        models, called = compiled_and_eager(build_small, whole, graphs.backend())
        for number, reduction in enumerate([wanted, "mean", wanted]):
            for model, each in zip(models, called, strict=True):
                model.zero_grad()
                loss = loss_of(each(batch_of(number, dist.get_rank())))
                if isinstance(reduction, float):
                    model.set_gradient_divide_factor(reduction)
                else:
                    model.set_gradient_reduction(reduction)
                loss.backward()
            assert_same_gradients(models, f"in step {number}")


# Full: two compilations.
@multi_rank(2)
@pytest.mark.full
def test_other_parameters_that_are_trained_before_the_backward() -> None:
    """The gradient of one is not taken for that of another of its size."""
    with compiling() as graphs:
        model = Swapped()
        fully_shard(model)
        called = whole(model, graphs.backend())
        loss = called(batch_of(0, dist.get_rank())).sum()
        model.p.requires_grad_(False)
        model.q.requires_grad_(True)
        called(batch_of(1, dist.get_rank()))
        with pytest.raises(fsdp2.FSDPRuntimeError, match=r"require gradients.*Change it before the forward"):
            loss.backward()
        assert model.p.grad is None and model.q.grad is None
        called(batch_of(1, dist.get_rank())).sum().backward()
        assert model.p.grad is None and model.q.grad is not None


def all_frozen(model: nn.Module, called: Any, x: Tensor) -> Callable[[], object]:
    model.requires_grad_(False)
    return called(x).sum().backward


def of_inputs_alone(model: nn.Module, called: Any, x: Tensor) -> Callable[[], object]:
    loss = called(x).sum()
    return lambda: torch.autograd.grad(loss, x)


def with_another_plan(model: nn.Module, called: Any, x: Tensor) -> Callable[[], object]:
    loss = called(x).sum()

    def backward() -> None:
        model.set_gradient_divide_factor(3.0)
        called(x)
        loss.backward()

    return backward


def recomputed(model: nn.Module, called: Any, x: Tensor) -> Callable[[], object]:
    return checkpoint(called, x, use_reentrant=False).sum().backward


# Full: a compilation each.
@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("begin", [all_frozen, of_inputs_alone, with_another_plan, recomputed])
@pytest.mark.parametrize("compile", [whole, by_blocks])
def test_writes_before_a_backward_are_refused(begin: Any, compile: Any) -> None:
    """Whichever way backward comes to values that it gathers again."""
    with compiling() as graphs:
        model = build_small()
        shard(model, reshard_after_forward=True)
        called = compile(model, graphs.backend())
        for writes in (False, True):
            backward = begin(model, called, batch_of(0, dist.get_rank()).requires_grad_())
            if not writes:
                backward() if begin is not with_another_plan else None
                continue
            write_in_place(model, 1)
            with pytest.raises(RuntimeError, match=r"changed between a forward and its backward|inplace operation"):
                backward()


# Full: a compilation.
@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("compile", [whole, by_method])
def test_a_parameter_that_is_added_after_a_call_is_refused(compile: Any) -> None:
    """As in eager mode: nobody would reduce its gradient."""
    with compiling() as graphs:
        model = build_small()
        shard(model)
        called = compile(model, graphs.backend())
        step_once(called, 0, dist.get_rank())
        model.head.register_parameter("scale", nn.Parameter(torch.ones(3)))
        with pytest.raises(fsdp2.FSDPRuntimeError, match=r"head\.scale"):
            step_once(called, 1, dist.get_rank())


# Full: a compilation.
@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("policy", ["keep_accumulated", "drop_step"])
def test_what_a_step_has_computed_before_a_backward_that_raises(policy: Any) -> None:
    """Is dropped by the next forward if asked for, as in eager mode."""
    with compiling() as graphs:
        models, called = compiled_and_eager(build_small, whole, graphs.backend())
        for model, each in zip(models, called, strict=True):
            model.set_recovery(on_error=policy)
            weight = model.head.weight
            step_once(each, 0, dist.get_rank())
            output = each(batch_of(1, dist.get_rank()))
            output.register_hook(interrupt)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
            assert weight.grad is not None
            each(batch_of(2, dist.get_rank()))
            assert (weight.grad is None) == (policy == "drop_step")
            step_once(each, 3, dist.get_rank())
        assert_same_gradients(models, "after the failure")
        assert len(graphs.forward) == len(graphs.backward) == 1


class Skipping(nn.Module):
    def __init__(self, skip: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skip:
                x = x + block(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of what it looks at
@multi_rank(2)
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("units", [True, False])
def test_numbers_in_a_list_of_the_program_change(units: bool, kind: Callable[..., Any]) -> None:
    """What is not guarded by itself by Dynamo in modules that FSDP manages: the graph of the old list would run."""
    torch.manual_seed(0)
    model, plain = Skipping(kind()), Skipping(kind())
    plain.load_state_dict(model.state_dict())
    if units:
        for block in model.blocks:
            fully_shard(block)
    compiled = torch.compile(fully_shard(model), backend="eager")
    for skip in ((), (1,), (0,), (0, 2), (1,)):
        model.skip = plain.skip = kind(skip)
        x = torch.randn(2, WIDTH)
        assert_equal(f"output without {skip}", compiled(x), plain(x))
