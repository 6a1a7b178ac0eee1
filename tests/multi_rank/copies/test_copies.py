"""Deep copies of sharded modules: sharded modules of their own, that train like the original would."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from fsdp2 import (
    FSDPModule,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    fully_shard,
    register_fsdp_forward_method,
    unwrap,
)
from fsdp2.core.state import FSDPState, state_of, states_below
from tests.harness import assert_trains_like, multi_rank, others_full
from tests.harness.compare import (
    SUM_ORDER,
    assert_same,
    assert_sharded_same,
    gather,
    gradients_of,
    parameters_of,
    tolerance_for,
)
from tests.harness.models import CONV, FROZEN, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import CASE, loss_on, shard, trainable
from tests.harness.shared.ways import WAYS


def values_of(model: nn.Module) -> list[Tensor]:
    return [DTensor.to_local(p.detach()).clone() for p in model.parameters() if isinstance(p, DTensor)]


def assert_apart(copied: nn.Module, model: nn.Module) -> None:
    """They share classes, and neither memory nor states."""
    assert [type(module) for module in copied.modules()] == [type(module) for module in model.modules()]
    assert not set(copied.modules()) & set(model.modules())
    assert not set(states_below(copied)) & set(states_below(model))
    assert len(states_below(copied)) == len(states_below(model))

    def storages(module: nn.Module) -> set[int]:
        return {p.to_local().untyped_storage().data_ptr() for p in module.parameters() if p.to_local().numel()}

    assert not storages(copied) & storages(model)


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 20 s on two cores
@pytest.mark.parametrize("case", others_full([CASE, TIED, CONV, FROZEN], [CASE]), ids=str)
def test_original_and_copy_train_like_the_reference(case: ModelCase, world_size: int) -> None:
    """The original, its copy and the copy's copy, one after the other and in turn; optimizers are copied along."""
    model = shard(case)
    optimizer = adamw(trainable(model))
    reference, second = Reference(case, world_size=world_size), Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_for(world_size))
    second.run(2)
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    assert_apart(copied, model)
    in_optimizer = copied_optimizer.param_groups[0]["params"]
    assert all(mine is theirs for mine, theirs in zip(in_optimizer, trainable(copied), strict=True))
    for _ in range(2):
        before = values_of(copied)
        assert_trains_like(reference, model, optimizer, steps=1, tolerance=tolerance_for(world_size))
        assert all(torch.equal(mine, now) for mine, now in zip(before, values_of(copied), strict=True))
        before = values_of(model)
        assert_trains_like(second, copied, copied_optimizer, steps=1, tolerance=tolerance_for(world_size))
        assert all(torch.equal(mine, now) for mine, now in zip(before, values_of(model), strict=True))
    again, optimizer_again = copy.deepcopy((copied, copied_optimizer))
    assert_trains_like(second, again, optimizer_again, steps=1, tolerance=tolerance_for(world_size))


MOMENTS: dict[str, Callable[[Any], object]] = {
    "unsharded": lambda model: model.unshard(),
    "gathering": lambda model: model.unshard(async_op=True),
    "evaluation": lambda model: evaluated(model),
    "after_forward": lambda model: loss_on(CASE, model, 0, dist.get_rank()),
    "failed": lambda model: failed(model),
}


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        loss_on(CASE, model, 0, dist.get_rank())


def failed(model: nn.Module) -> None:
    handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_on(CASE, model, 0, dist.get_rank())
    handle.remove()


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("reshards", [None, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_at_any_moment_between_iterations(moment: str, reshards: bool | None, world_size: int) -> None:
    model = shard(CASE, reshard_after_forward=reshards)
    pending = MOMENTS[moment](model)
    copied = copy.deepcopy(model)
    assert all(isinstance(p, DTensor) for p in (*copied.parameters(), *model.parameters()))
    reference = Reference(CASE, world_size=world_size)
    assert_trains_like(reference, copied, adamw(trainable(copied)), steps=2, tolerance=tolerance_for(world_size))
    if moment == "after_forward":
        assert isinstance(pending, Tensor)
        pending.backward()
        expected = Reference(CASE, world_size=world_size).step().gradients
        assert_sharded_same("gradients", gradients_of(model), expected)


@multi_rank(2)
def test_not_inside_an_iteration() -> None:
    model = shard(CASE)
    assert isinstance(model, FSDPModule)
    errors: list[str] = []

    def inside(*_: object) -> None:
        with pytest.raises(FSDPRuntimeError, match="cannot be copied") as caught:
            copy.deepcopy(model[0])
        errors.append(str(caught.value))

    handle = model[2].register_forward_pre_hook(inside)
    loss = loss_on(CASE, model, 0, dist.get_rank())
    handle.remove()
    loss.register_hook(inside)
    model.set_requires_gradient_sync(False)
    loss.backward()
    inside()
    assert ["inside a forward or backward" in error for error in errors] == [True, True, False]
    assert "wait for their reduction" in errors[2]


SETTINGS: dict[str, Callable[[], dict[str, object]]] = {
    "hybrid": WAYS["hybrid"],
    "offloaded": WAYS["offloaded"],
    "neighbours": lambda: {"reshard_after_forward": 2},
    "ignored": lambda: {},
}


@multi_rank(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_call(name: str, world_size: int) -> None:
    model = TRANSFORMER.build()
    settings = SETTINGS[name]()
    if name == "ignored":
        model.head.weight.requires_grad_(False)
        settings = {"ignored_params": {model.head.weight}}
    for unit in TRANSFORMER.units(model):
        fully_shard(unit, **settings)
    plain = TRANSFORMER.build()
    plain.head.weight.requires_grad_(name != "ignored")
    copied = copy.deepcopy(model)
    if name == "ignored":
        settings = {"ignored_params": {copied.head.weight}}
        assert copied.head.weight is not model.head.weight and not isinstance(copied.head.weight, DTensor)
    for unit in TRANSFORMER.units(copied):
        fully_shard(unit, **settings)  # equal arguments: nothing happens
    reference = Reference(TRANSFORMER, world_size=world_size, model=plain)
    assert_trains_like(reference, copied, adamw(trainable(copied)), steps=2, tolerance=tolerance_for(world_size))


@multi_rank(2)
def test_what_was_said_of_the_dtype_of_gradients() -> None:
    model = UNEVEN_MLP.build()
    model[0].weight.grad_dtype = torch.bfloat16
    model[2].weight.grad_dtype = None
    copied = copy.deepcopy(copy.deepcopy(fully_shard(model)))
    assert copied[0].weight.grad_dtype == torch.bfloat16 and copied[2].weight.grad_dtype is None
    loss_on(UNEVEN_MLP, copied, 0, dist.get_rank()).backward()
    assert copied[0].weight.grad.dtype == torch.bfloat16 and copied[4].weight.grad.dtype == torch.float32


@multi_rank(2)
def test_gradients_attributes_and_hooks() -> None:
    """As Python and torch copy them: also hooks that hold the module itself."""
    model = shard(CASE)
    loss_on(CASE, model, 0, dist.get_rank()).backward()
    model.calls = []
    model[0].weight.tag = ["mine"]

    class Hook:
        def __init__(self, owner: nn.Module) -> None:
            self.owner = owner

        def __call__(self, *_: object) -> None:
            self.owner.calls.append(self.owner)

    model[0].register_forward_hook(Hook(model))
    copied = copy.deepcopy(model)
    assert_sharded_same("gradients", gradients_of(copied), Reference(CASE, world_size=2).step().gradients)
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and mine.grad is not theirs.grad
        assert mine._spec is theirs._spec  # or every foreach operation on both compares them slowly
    assert copied[0].weight.tag == ["mine"] and copied[0].weight.tag is not model[0].weight.tag
    loss_on(CASE, copied, 0, dist.get_rank()).backward()
    assert copied.calls == [copied] and model.calls == []
    total = Reference(CASE, world_size=2).step().gradients
    twice = {name: None if gradient is None else gradient * 2 for name, gradient in total.items()}
    assert_sharded_same("gradients", gradients_of(copied), twice, tolerance=SUM_ORDER)
    assert_sharded_same("gradients", gradients_of(model), total)


@multi_rank(2)
def test_what_setters_have_set() -> None:
    model = shard(TRANSFORMER)
    assert isinstance(model, FSDPModule)
    model.set_gradient_divide_factor(5.0)
    model.blocks[0].set_reshard_after_backward(False)
    model.blocks[1].set_reshard_after_forward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    model.set_reduce_scatter_unused_params(True)
    model.set_is_last_backward(False)
    model.blocks[2].set_unshard_in_backward(True)
    model.set_reduce_scatter_max_input_buffers(3)
    copied, part = copy.deepcopy(model), copy.deepcopy(model.blocks[0])
    assert len(list(part.modules())) == len(list(model.blocks[0].modules()))
    again = copy.deepcopy(copied)
    for each in (copied, again):
        with torch.no_grad():
            loss_on(TRANSFORMER, each, 0, dist.get_rank())
        states = [state_of(module) for module in (each, *each.blocks)]
        root, *blocks = states
        assert root.unit[0].settings.divide_factor == 5.0 and blocks[0].unit[0].settings.divide_factor is None
        assert not blocks[0].reshard_after_backward and blocks[1].reshard_after_forward is False
        assert blocks[0].forward_prefetch == (blocks[1].unit, blocks[2].unit)
        assert blocks[2].backward_prefetch == (blocks[1].unit,)
        assert blocks[1].forward_prefetch is None
        assert all(
            state.unit[0].settings.zeros_for_unused and state.unit[0].settings.max_pending == 3 for state in states
        )
        assert not root.root_settings.is_last_backward
    part(torch.ones(2, 3, 32))
    assert state_of(part).forward_prefetch is None  # they are not part of the copy


@multi_rank(2)
def test_parts_and_containers(world_size: int) -> None:
    """A sharded block becomes a root of its own; a plain container of sharded modules is copied with them."""
    model = shard(TRANSFORMER)
    loss_on(TRANSFORMER, model, 0, dist.get_rank()).backward()
    block, plain = copy.deepcopy(model.blocks[1]), TRANSFORMER.build().blocks[1]
    blocks = copy.deepcopy(model.blocks)
    assert all(state_of(each) is not None for each in blocks) and isinstance(blocks, nn.ModuleList)
    inputs = torch.linspace(-1, 1, 2 * 3 * 32).view(2, 3, 32)
    for each in (block, blocks[1], plain):
        each.zero_grad()
        each(inputs).sum().backward()
    for each in (block, blocks[1]):
        assert_sharded_same("gradients", gradients_of(each), gradients_of(plain), tolerance=SUM_ORDER)
    attention = copy.deepcopy(model.blocks[0].attention)  # not a group: its parameters come, and nothing else
    assert len(list(attention.modules())) == 3 and state_of(attention) is None
    attention.state_dict()


class Encoder(nn.Module):
    """With a second way in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2


@multi_rank(2)
def test_other_forward_methods() -> None:
    model = fully_shard(Encoder())
    register_fsdp_forward_method(model, "encode")
    expected = {name: gather(p.detach()) for name, p in model.named_parameters()}
    copied = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    x = torch.ones(2, 5)
    wanted = 2 * nn.functional.linear(x, expected["layer.weight"], expected["layer.bias"])
    assert torch.equal(copied.encode(x), wanted) and not model.encode(x).any()
    unwrap(copied)
    assert "encode" not in vars(copied) and torch.equal(copied.encode(x), wanted)


@pytest.mark.full
@multi_rank(2)
def test_state_dicts_and_conversions_of_a_copy() -> None:
    """The copy's own parameters are settled and adopted, and the original's are left alone."""
    model = shard(CASE)
    copied = copy.deepcopy(model)
    assert isinstance(copied, FSDPModule) and isinstance(model, FSDPModule)
    model.unshard()
    copied.unshard()
    assert all(isinstance(value, DTensor) for value in copied.state_dict().values())
    assert not isinstance(model[4].weight, DTensor)
    copied.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, assign=True)
    assert not loss_on(CASE, copied, 0, 0).isnan()
    copied.double()
    assert copied[0].weight.dtype == torch.float64 and model[0].weight.dtype == torch.float32


@pytest.mark.full
@multi_rank(2)
def test_on_meta(world_size: int) -> None:
    with torch.device("meta"):
        model = CASE.build()
    copied = copy.deepcopy(shard(CASE, model))
    assert all(parameter.is_meta for parameter in copied.parameters())
    copied.to_empty(device="cpu")
    with torch.no_grad():
        for mine, theirs in zip(copied.parameters(), shard(CASE).parameters(), strict=True):
            mine.copy_(theirs)
    reference = Reference(CASE, world_size=world_size)
    assert_trains_like(reference, copied, adamw(trainable(copied)), steps=2, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 20 s on two cores
def test_an_exponential_moving_average(world_size: int) -> None:
    model = shard(TRANSFORMER)
    optimizer = adamw(list(model.parameters()))
    reference = Reference(TRANSFORMER, world_size=world_size)
    average, expected = copy.deepcopy(model), copy.deepcopy(reference.model)
    average.requires_grad_(False)
    for step in range(3):
        assert_trains_like(reference, model, optimizer, steps=1, tolerance=tolerance_for(world_size))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.25)
            torch._foreach_lerp_(list(expected.parameters()), list(reference.model.parameters()), 0.25)
            losses = [loss_on(TRANSFORMER, each, step, dist.get_rank()) for each in (average, expected)]
        tolerance = tolerance_for(world_size)
        assert_same("losses", {"": losses[0]}, {"": losses[1]}, tolerance=tolerance)
        assert_sharded_same("averages", parameters_of(average), parameters_of(expected), tolerance=tolerance)


@pytest.mark.full
@multi_rank(2)
def test_copies_below_one_root(world_size: int) -> None:
    """An online and a target network in one model: each prefetches within itself."""
    online = shard(TRANSFORMER)
    online.blocks[0].set_modules_to_forward_prefetch([online.blocks[1]])
    target = copy.deepcopy(online)
    both = fully_shard(_Both(online, target))
    loss_on(TRANSFORMER, both, 0, dist.get_rank()).backward()
    assert state_of(both.target.blocks[0]).forward_prefetch == (state_of(both.target.blocks[1]).unit,)
    expected = Reference(TRANSFORMER, world_size=world_size).step().gradients
    half = {name: None if gradient is None else gradient / 2 for name, gradient in expected.items()}
    assert_sharded_same("gradients", gradients_of(both.online), half, tolerance=SUM_ORDER)
    assert_sharded_same("gradients", gradients_of(both.target), half, tolerance=SUM_ORDER)


class _Both(nn.Module):
    def __init__(self, online: nn.Module, target: nn.Module) -> None:
        super().__init__()
        self.online, self.target = online, target

    def forward(self, x: Tensor) -> Tensor:
        return (self.online(x) + self.target(x)) / 2


class Stubborn(nn.Linear):
    """Copies itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Stubborn:
        return Stubborn(self.in_features, self.out_features)

    def __reduce__(self) -> Any:
        return Stubborn, (self.in_features, self.out_features)


@multi_rank(2)
def test_classes_with_ways_of_their_own_are_refused() -> None:
    model = fully_shard(Stubborn(3, 4))
    with pytest.raises(FSDPNotImplementedError, match="Stubborn defines __deepcopy__"):
        copy.deepcopy(model)
    with pytest.raises(FSDPNotImplementedError, match="Stubborn says itself how it is copied"):
        pickle.dumps(model)


@multi_rank(2)
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "of a wrapper"])
def test_pickles_are_refused_with_the_remedy(inside: bool) -> None:
    """Also of a class that a pickle could not name; the parameters themselves are pickled as torch's."""

    class Local(nn.Linear):
        pass

    sharded = fully_shard(Local(3, 4))
    model = nn.Sequential(sharded) if inside else sharded
    for write in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(FSDPNotImplementedError, match=r"a sharded Local cannot be pickled.*state_dict\(\)"):
            write(model)
    again = pickle.loads(pickle.dumps(model.state_dict()))
    for name, value in model.state_dict().items():
        assert torch.equal(again[name].to_local(), value.to_local())


@pytest.mark.full
@multi_rank(2)
def test_a_copy_that_failed_leaves_nothing_behind(world_size: int) -> None:
    """Its state waits for a module that never comes, and goes with it."""
    model = CASE.build()
    first, *_ = model
    fully_shard(list(model))
    fully_shard(model)
    first.cannot_be_copied = (each for each in ())
    gc.collect()
    states = [each for each in gc.get_objects() if type(each) is FSDPState]
    with pytest.raises(TypeError, match="generator"):
        copy.deepcopy(model)
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is FSDPState] == states
    del first.cannot_be_copied
    copied, reference = copy.deepcopy(model), Reference(CASE, world_size=world_size)
    assert_trains_like(reference, copied, adamw(trainable(copied)), steps=2, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile], ids=["checkpoint", "compile"])
def test_a_copy_of_a_wrapper_is_a_wrapper(wrap: Any) -> None:
    wrapper = wrap(fully_shard(nn.Linear(4, 4)))
    copied = copy.deepcopy(wrapper)
    assert type(copied) is type(wrapper)
    inside, original = (next(m for m in each.modules() if isinstance(m, FSDPModule)) for each in (copied, wrapper))
    assert inside is not original
    for each in (inside, original):
        each(torch.ones(1, 4)).sum().backward()
    assert torch.equal(inside.weight.grad.to_local(), original.weight.grad.to_local())  # type: ignore[union-attr,operator]
