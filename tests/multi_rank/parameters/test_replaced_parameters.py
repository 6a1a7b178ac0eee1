"""Parameters replaced, written or added after wrapping: adopted where that is possible, otherwise one clear error.

As in `test_misuse.py`, each test applies the remedy that the message names and trains on beside the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fsdp2 import FSDPModule, FSDPRuntimeError, MixedPrecisionPolicy, fully_shard
from tests.harness import Reference, adamw, assert_trains_like, multi_rank
from tests.harness.compare import SUM_ORDER, assert_sharded_same
from tests.harness.shared.mistakes import BEFORE_AND_AFTER, INPUTS, prepared, train
from tests.harness.shared.training import CASE, shard

# ---- replaced parameters -------------------------------------------------------------------------


def other_values(like: Tensor) -> Tensor:
    return torch.linspace(-0.5, 0.5, like.numel()).view(like.shape)


def resharded(p: DTensor, values: Tensor, placements: list[Placement]) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(values, p.device_mesh, placements))


CANNOT_BE_ADOPTED: dict[str, tuple[Callable[[DTensor], object], str]] = {
    "plain": (
        lambda p: nn.Parameter(other_values(p)),
        r"\(97, 13\).*not a DTensor.*functional_call takes such parameters",
    ),
    "plain and local": (lambda p: nn.Parameter(p.to_local().detach().clone()), "not a DTensor"),
    "another shape": (lambda p: resharded(p, torch.zeros(98, 13), [Shard(0)]), r"\(98, 13\)"),
    "replicated": (lambda p: resharded(p, other_values(p), [Replicate()]), "Replicate"),
    "another dim": (
        lambda p: resharded(p, other_values(p), [Shard(1)]),
        r"Shard\(dim=1\).*Shard\(dim=0\).*distribute_tensor",
    ),
    "nothing": (lambda p: None, "removed, as by a parametrization.*before fully_shard"),
}


@multi_rank(2)
@BEFORE_AND_AFTER
@pytest.mark.parametrize("replacement", CANNOT_BE_ADOPTED)
def test_replacement_that_cannot_be_adopted(replacement: str, ran_before: bool) -> None:
    model = prepared(ran_before)
    before = model[0].weight
    made, expected = CANNOT_BE_ADOPTED[replacement]
    model[0].weight = made(before)
    with pytest.raises(FSDPRuntimeError, match=rf"'0\.weight'.*replaced.*{expected}"):
        model(INPUTS)
    model[0].weight = before
    train(model, steps=1)


def distributed(p: DTensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(values, p.device_mesh, p.placements))


def by_assignment(model: nn.Module, values: Tensor) -> None:
    model[0].weight = distributed(model[0].weight, values)


def by_loading_with_assign(model: nn.Module, values: Tensor) -> None:
    state = dict(model.state_dict())
    state["0.weight"] = distributed(model[0].weight, values).detach()
    model.load_state_dict(state, assign=True)


def by_swap_tensors(model: nn.Module, values: Tensor) -> None:
    torch.utils.swap_tensors(model[0].weight, distributed(model[0].weight, values))


def by_loading_with_swap(model: nn.Module, values: Tensor) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        state = dict(model.state_dict())
        state["0.weight"] = distributed(model[0].weight, values).detach()
        model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def in_place(model: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        model[0].weight.copy_(distributed(model[0].weight, values))


WAYS_TO_REPLACE = [
    by_assignment,
    by_loading_with_assign,
    by_swap_tensors,
    by_loading_with_swap,
    in_place,
]


@pytest.mark.full
@multi_rank(2)
@BEFORE_AND_AFTER
@pytest.mark.parametrize("replace", WAYS_TO_REPLACE, ids=lambda each: each.__name__)
def test_replacement_is_adopted(replace: Callable[[nn.Module, Tensor], None], ran_before: bool) -> None:
    """An optimizer from before keeps its state, as it would had the values been written in place."""
    model, reference = shard(), Reference(CASE, world_size=2)
    optimizer = adamw(list(model.parameters()))
    if ran_before:
        assert_trains_like(reference, model, optimizer, steps=2)
    values = other_values(reference.model[0].weight)
    with torch.no_grad():
        reference.model[0].weight.copy_(values)
    replace(model, values)
    assert_trains_like(reference, model, optimizer, steps=2)


@pytest.mark.full
@multi_rank(2)
def test_replacement_by_a_smaller_dtype_is_adopted() -> None:
    """The group then has two buffers."""
    model = prepared(True)
    model[0].weight = distributed(model[0].weight, other_values(model[0].weight).bfloat16())
    with pytest.raises(RuntimeError, match="same dtype"):  # torch's own complaint, from the linear layer
        model(INPUTS)
    model[0].bfloat16()
    output = model[0](INPUTS.bfloat16())
    plain = CASE.build()[0].bfloat16()
    with torch.no_grad():
        plain.weight.copy_(other_values(plain.weight))
    assert torch.equal(output, plain(INPUTS.bfloat16()))


@multi_rank(2)
@pytest.mark.parametrize("then", ["reshard", "backward", "state_dict", "next_training_step"])
def test_replaced_while_unsharded(then: str) -> None:
    """The root's own parameters stay unsharded after forward: replacing one there has no effect that could last."""
    model = shard()
    loss = model(INPUTS).sum()
    unsharded = model[4].weight
    assert not isinstance(unsharded, DTensor)
    model[4].weight = nn.Parameter(torch.zeros_like(unsharded))
    act = {
        "reshard": model.reshard,
        "backward": loss.backward,
        "state_dict": model.state_dict,
        "next_training_step": lambda: model(INPUTS).sum().backward(),
    }[then]
    with pytest.raises(FSDPRuntimeError, match=r"'4\.weight'.*replaced.*while it was unsharded.*reshard\(\)"):
        act()
    del loss
    model.reshard()
    model.zero_grad()
    train(model)


@multi_rank(2)
@pytest.mark.parametrize("then", ["reshard", "state_dict", "train"])
def test_written_in_place_while_unsharded(then: str) -> None:
    """The write went to this rank's copy, which is about to be freed: it must not be lost without a word."""
    model = shard()
    model.unshard()
    with torch.no_grad():
        model[4].weight.zero_()
    act = {
        "reshard": model.reshard,
        "state_dict": model.state_dict,
        "train": lambda: model(INPUTS).sum().backward(),
    }[then]
    with pytest.raises(FSDPRuntimeError, match=r"'4\.weight'.*while it was unsharded.*reshard\(\)"):
        act()
    model.reshard()
    model.zero_grad()
    train(model)


# ---- parameters that no group owns ---------------------------------------------------------------


class WithAdapter(nn.Module):
    """What adapter libraries put in a layer's place."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.adapter = nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x)


def add_extra(module: nn.Module) -> None:
    module.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def in_place_of_a_parameter_that_was_none(model: nn.Module) -> None:
    model[1].register_parameter("optional", None)
    with torch.no_grad():
        model(INPUTS)
    model[1].optional = nn.Parameter(torch.zeros(3))


WAYS_TO_ADD: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "to the root": (add_extra, r"'extra'"),
    "to an owning module": (lambda model: add_extra(model[4]), r"'4\.extra'"),
    "to a sharded child": (lambda model: add_extra(model[0]), r"'0\.extra'"),
    "to a module without parameters": (lambda model: add_extra(model[1]), r"'1\.extra'"),
    "in a new submodule": (lambda model: model.append(nn.Linear(1, 1)), r"'5\.weight'"),
    "in place of a parameter that was none": (in_place_of_a_parameter_that_was_none, r"'1\.optional'"),
    "in a module put in another's place": (lambda model: model.__setitem__(4, nn.Linear(33, 1)), r"'4\.weight'"),
    "in an adapter around a layer": (
        lambda model: model.__setitem__(4, WithAdapter(model[4])),
        r"'4\.adapter\.weight'",
    ),
}


@multi_rank(2)
@BEFORE_AND_AFTER
@pytest.mark.parametrize("way", WAYS_TO_ADD)
def test_parameter_added_after_wrapping(way: str, ran_before: bool) -> None:
    """It would train on each rank's own gradient, and the ranks would drift apart without a word."""
    model = prepared(ran_before)
    add, name = WAYS_TO_ADD[way]
    add(model)
    with pytest.raises(FSDPRuntimeError, match=rf"{name}.*Sequential.*fully_shard.*ignored_params"):
        model(INPUTS)


@multi_rank(2)
@BEFORE_AND_AFTER
def test_an_added_parameter_can_be_removed_again(ran_before: bool) -> None:
    model = prepared(ran_before)
    add_extra(model[4])
    with pytest.raises(FSDPRuntimeError, match=r"'4\.extra'"):
        model(INPUTS)
    del model[4].extra
    train(model)


@pytest.mark.full
@multi_rank(2)
@BEFORE_AND_AFTER
def test_a_buffer_may_be_added(ran_before: bool) -> None:
    model = prepared(ran_before)
    model[0].register_buffer("statistics", torch.zeros(3))
    train(model)


@pytest.mark.full
@multi_rank(2)
@BEFORE_AND_AFTER
def test_a_sharded_submodule_may_be_added(ran_before: bool) -> None:
    def longer() -> nn.Module:
        return CASE.build().append(extra_layer())

    def extra_layer() -> nn.Module:
        torch.manual_seed(5)
        return nn.Linear(1, 1)

    model = prepared(ran_before)
    model.append(fully_shard(extra_layer()))
    reference = Reference(CASE, world_size=2, model=longer())
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=2)


@multi_rank(2)
def test_parametrizing_before_wrapping_is_fine_and_after_it_an_error() -> None:
    model, plain = CASE.build(), CASE.build()
    for each in (model, plain):
        nn.utils.parametrizations.weight_norm(each[0])
    for unit in CASE.units(model):
        fully_shard(unit)
    reference = Reference(CASE, world_size=2, model=plain)
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=2)
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(FSDPRuntimeError, match=r"'2\.(parametrizations\.weight\.original0.*added|weight.*replaced)"):
        model(INPUTS)


@multi_rank(2)
@pytest.mark.parametrize("touch", ["forward", "state_dict"])
def test_data_that_is_set_is_refused_for_a_dtensor_ignores_it(touch: str, world_size: int) -> None:
    """The usual swap of averages; in plain PyTorch it works."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    for unit in (model[0], model):
        fully_shard(unit)
    x = torch.ones(2, 5)
    with torch.no_grad():
        before = model(x)
    for parameter in (model[0].weight, model[1].bias):
        zeros = torch.zeros_like(parameter.to_local())
        parameter.data = DTensor.from_local(zeros, parameter.device_mesh, parameter.placements)
        with pytest.raises(FSDPRuntimeError, match=r"\.data was set on parameter '.\.(weight|bias)'.*parameter.copy_"):
            model(x) if touch == "forward" else model.state_dict()
        with torch.no_grad():
            assert torch.equal(model(x), before), "as it was"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    assert not model(x).any()


@multi_rank(2)
def test_data_that_is_set_is_refused_where_buffers_are_laid_out_anew_before(world_size: int) -> None:
    model = nn.Linear(5, 5)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model(torch.ones(2, 5)).sum().backward()
    model.weight.data = torch.zeros_like(model.weight)
    model.set_full_precision(True)
    with pytest.raises(FSDPRuntimeError, match=r"\.data was set on parameter 'weight'"):
        model(torch.ones(2, 5))


class Quantized(nn.Module):
    """As bitsandbytes' layers: forward registers a parameter of a class of its own over the same data."""

    class Parameter(nn.Parameter):
        state: object

    def __init__(self, trainable: bool = False, by_data: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6), requires_grad=trainable)
        self.adapter = nn.Linear(6, 6)
        self.by_data = by_data
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.weight, Quantized.Parameter):
            data = self.weight.data if self.by_data else self.weight
            self.weight = Quantized.Parameter(data, requires_grad=self.weight.requires_grad)
            self.weight.state = "of the class"
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(2)
        return x @ self.weight + self.adapter(x)


@multi_rank(2)
@pytest.mark.parametrize("by_data", [False, True])
def test_a_frozen_parameter_may_be_replaced_over_the_same_memory(by_data: bool, world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Quantized(by_data=by_data), Quantized(by_data=by_data)
    plain.load_state_dict(model.state_dict())
    fully_shard(model, reshard_after_forward=True)
    for step in range(2):
        model(torch.full((2, 6), float(dist.get_rank() + step))).square().sum().backward()
        assert isinstance(model.weight, DTensor) and not model.weight.requires_grad, "the shard is back"
        for rank in range(world_size):
            (plain(torch.full((2, 6), float(rank + step))).square().sum() / world_size).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_sharded_same("gradients", found, expected, tolerance=SUM_ORDER)


@multi_rank(2)
@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("how", ["written", "trainable"])
def test_a_replacement_that_would_lose_something_is_refused(how: str, by_data: bool, world_size: int) -> None:
    model = fully_shard(Quantized(trainable=how == "trainable", by_data=by_data), reshard_after_forward=True)
    model.writes = how == "written"
    with pytest.raises(FSDPRuntimeError, match="'weight' was replaced, converted or written while it was unsharded"):
        model(torch.ones(2, 6))


def summoned(model: nn.Module, by_data: bool) -> list[nn.Parameter]:
    """As fairseq2 shows whole parameters: all modules are unsharded, and hold new parameters over the same memory."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.data if by_data else parameter.detach()))
            found.append(module._parameters[name])
    return found  # type: ignore[return-value]


def reshard_all(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@multi_rank(2)
@pytest.mark.parametrize("by_data", [False, True])
def test_parameters_over_the_same_memory_may_be_shown_for_a_while(by_data: bool, world_size: int) -> None:
    model: nn.Module = shard()
    sharded = list(model.parameters())
    reference = Reference(CASE, world_size=world_size)
    for _ in range(2):
        whole = summoned(model, by_data)
        optimizer = adamw(whole) if not by_data else adamw(sharded)
        for found, expected in zip(whole, reference.model.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), expected.detach())
        reshard_all(model)
        assert all(one is other for one, other in zip(model.parameters(), sharded, strict=True))
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=SUM_ORDER)


@multi_rank(2)
@pytest.mark.parametrize("by_data", [False, True])
def test_what_is_lost_with_them_is_refused(by_data: bool, world_size: int) -> None:
    was_replaced = r"was replaced, converted or written while it was unsharded"
    model: nn.Module = shard()
    with torch.no_grad():
        summoned(model, by_data)[0].mul_(2)
    with pytest.raises(FSDPRuntimeError, match=rf"'0\.weight' {was_replaced}"):
        reshard_all(model)
    reshard_all(model)
    first = summoned(model, by_data)[0]
    loss = first.sum()  # whose backward reads no memory that is gone
    reshard_all(model)
    with pytest.raises(FSDPRuntimeError, match=r"gradient of parameter '0\.weight' arrived at another.* reshard\(\)"):
        loss.backward()
    first = summoned(model, by_data)[0]
    first.grad = torch.ones_like(first)
    with pytest.raises(FSDPRuntimeError, match=rf"'0\.weight' {was_replaced}"):
        reshard_all(model)
    reshard_all(model)
    train(model)
