"""`FSDPParam`, its registrations, and the links from parameters of before to those that took their place."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import FSDPRuntimeError, MixedPrecisionPolicy, fully_shard
from fsdp2.core.param import (
    FSDPParam,
    Registrations,
    WriteCounter,
    carry_over,
    fsdp_param_of,
    is_orphan_copy,
    mark_replaced,
    replacement_of,
)
from tests.harness import fake_world
from tests.harness.internals import groups_of
from tests.unit.helpers import for_each


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is the first of two ranks."""
    with fake_world(2):
        yield


def params_of(model: nn.Module) -> list[FSDPParam]:
    return [param for group in groups_of(model) for param in group.params]


def like(sharded: nn.Parameter) -> nn.Parameter:
    """Another parameter that is sharded in the same way."""
    value = torch.ones(sharded.shape, dtype=sharded.dtype)
    return nn.Parameter(distribute_tensor(value, sharded.device_mesh, sharded.placements))


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


# ---- what a sharded parameter is -------------------------------------------------------------------------


def test_a_sharded_parameter_has_this_ranks_rows_and_the_users_attributes() -> None:
    layer = nn.Linear(2, 5, bias=False)
    original, values = layer.weight, layer.weight.detach().clone()
    original.label = "kept"  # type: ignore[attr-defined]
    fully_shard(layer)
    (param,) = params_of(layer)
    assert layer.weight is param.sharded and fsdp_param_of(layer.weight) is param
    assert param.shape == (5, 2) and param.local_numel == 10
    assert torch.equal(param.local, values[:3]), "rank 0 of 2 has 3 of 5 rows"
    assert layer.weight.label == "kept"
    assert fsdp_param_of(original) is None and replacement_of(original) is layer.weight


def test_a_shared_parameter_is_one_param_registered_in_every_slot() -> None:
    model = fully_shard(Tied())
    (param,) = params_of(model)
    assert [name for _, name in param.uses] == ["weight", "weight"]
    assert model.first.weight is model.second.weight is param.sharded
    replacement = like(param.sharded)
    param.adopt(replacement)
    assert model.first.weight is model.second.weight is replacement


def test_a_module_with_a_setattr_of_its_own_is_registered_by_it() -> None:
    """`nn.RNNBase` keeps a second list of its parameters, which its forward reads."""
    model = fully_shard(nn.LSTM(4, 4))
    assert [id(each) for each in model._flat_weights] == [id(each) for each in model.parameters()]
    assert all(isinstance(each, DTensor) for each in model._flat_weights)


def test_adopting_moves_the_identity_and_the_policy_for_gradients() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.grad_dtype = torch.float64
    fully_shard(layer)
    (param,) = params_of(layer)
    before, changes = param.sharded, FSDPParam.identity_changes
    replacement = like(before)
    param.adopt(replacement)
    assert FSDPParam.identity_changes == changes + 1
    assert layer.weight is replacement and fsdp_param_of(replacement) is param and fsdp_param_of(before) is None
    assert param.local is replacement._local_tensor
    assert param.grad_dtype == (True, torch.float64) and replacement.grad_dtype is torch.float64


def test_adopting_a_frozen_parameter_freezes_the_unsharded_one() -> None:
    layer = fully_shard(nn.Linear(4, 4, bias=False))
    layer(torch.ones(2, 4))
    (param,) = params_of(layer)
    assert param.unsharded is not None and param.unsharded.requires_grad
    param.adopt(like(param.sharded).requires_grad_(False))
    assert not param.requires_grad and not param.unsharded.requires_grad


# ---- dtypes ----------------------------------------------------------------------------------------------


@for_each(
    ("policy", "unsharded", "accumulated"),
    [
        (MixedPrecisionPolicy(), torch.float32, torch.float32),
        (MixedPrecisionPolicy(torch.bfloat16), torch.bfloat16, torch.float32),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float64), torch.bfloat16, torch.float64),
    ],
)
def test_dtypes_follow_the_policy(
    policy: MixedPrecisionPolicy, unsharded: torch.dtype, accumulated: torch.dtype
) -> None:
    (param,) = params_of(fully_shard(nn.Linear(4, 4, bias=False), mp_policy=policy))
    assert param.dtype is torch.float32 and param.param_dtype is unsharded
    assert param.accumulation_dtype is accumulated
    assert param.delivery_dtype(torch.float64) is torch.float32, "the sharded gradient has its parameter's dtype"


def test_integers_are_not_cast() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
    (param,) = params_of(fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16)))
    assert param.param_dtype is torch.int32


@pytest.mark.parametrize(("asked", "delivered"), [(torch.float64, torch.float64), (None, torch.bfloat16)])
def test_the_users_dtype_of_gradients_is_delivered(asked: torch.dtype | None, delivered: torch.dtype) -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.grad_dtype = asked
    (param,) = params_of(fully_shard(layer))
    assert param.delivery_dtype(torch.bfloat16) is delivered
    assert param.accumulation_dtype is asked


def test_a_gradient_is_taken_off_the_unsharded_parameter_once() -> None:
    layer = fully_shard(nn.Linear(4, 4, bias=False))
    (param,) = params_of(layer)
    assert param.pop_grad() is None, "there is no unsharded parameter yet"
    layer(torch.ones(2, 4))
    assert param.unsharded is not None
    gradient = param.unsharded.grad = torch.ones(4, 4)
    assert param.pop_grad() is gradient and param.pop_grad() is None


# ---- what the modules hold -------------------------------------------------------------------------------


def test_registrations_swap_all_forms_in_every_slot() -> None:
    model = fully_shard(Tied())
    model(torch.ones(2, 4))
    model.reshard()
    (param,) = params_of(model)
    places = Registrations([param])
    assert len(places.places) == 2 and places.hold_sharded() and not places.hold_unsharded()
    places.register_unsharded()
    assert model.first.weight is model.second.weight is param.unsharded
    assert places.hold_unsharded() and not places.hold_sharded()
    places.register_sharded()
    assert places.hold_sharded()


@for_each("change", ["replaced", "removed", "frozen", "local"])
def test_registrations_notice_what_changed(change: str) -> None:
    layer = fully_shard(nn.Linear(4, 4))
    places = Registrations(params_of(layer))
    assert places.hold_sharded()
    if change == "replaced":
        layer.weight = like(layer.weight)
    elif change == "removed":
        del layer.weight
    elif change == "frozen":
        layer.weight.requires_grad_(False)
    else:
        layer.weight._local_tensor = layer.weight._local_tensor.clone()
    assert not places.hold_sharded()


def test_registrations_notice_freezing_in_either_form() -> None:
    layer = fully_shard(nn.Linear(4, 4))
    layer(torch.ones(2, 4))
    params = params_of(layer)
    places = Registrations(params)
    assert not places.are_toggled()
    for form in (params[0].unsharded, params[0].sharded):
        assert form is not None
        form.requires_grad_(False)
        assert places.are_toggled()
        form.requires_grad_(True)
    assert not places.are_toggled()


def test_restoring_keeps_what_was_frozen_and_names_what_is_lost() -> None:
    layer = fully_shard(nn.Linear(4, 4))
    layer(torch.ones(2, 4))
    weight, bias = params_of(layer)
    places = Registrations([weight, bias])
    places.register_unsharded()
    layer.bias.requires_grad_(False)
    assert places.restore_sharded(by_user=False) is None
    assert layer.bias is bias.sharded and not layer.bias.requires_grad, "frozen while it was unsharded"
    places.register_unsharded()
    layer.weight = nn.Parameter(torch.zeros(4, 4))
    assert places.restore_sharded(by_user=False) is weight and layer.weight is weight.sharded


# ---- what may take a parameter's place -------------------------------------------------------------------


def test_a_replacement_that_is_sharded_alike_is_found() -> None:
    layer = fully_shard(nn.Linear(4, 4, bias=False))
    (param,) = params_of(layer)
    assert param.registered() is param.sharded
    layer.weight = replacement = like(layer.weight)
    assert param.registered() is replacement


@for_each(
    ("replacement", "message"),
    [
        (
            lambda _: nn.Parameter(torch.zeros(4, 4)),
            "'weight' was replaced.* a Parameter of shape .4, 4. that is not a",
        ),
        (lambda _: None, "'weight' was replaced.* by nothing .it was removed"),
        (
            lambda w: nn.Parameter(torch.cat([w.detach(), w.detach()])),
            "'weight' was replaced.* a DTensor of shape .8, 4",
        ),
    ],
)
def test_other_replacements_are_refused_by_name(replacement, message: str) -> None:  # type: ignore[no-untyped-def]
    layer = fully_shard(nn.Linear(4, 4, bias=False))
    (param,) = params_of(layer)
    layer.weight = replacement(layer.weight)
    with pytest.raises(FSDPRuntimeError, match=message):
        param.registered()


def test_the_sharded_parameter_of_another_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer in model:
        fully_shard(layer)
    model[0].weight = model[1].weight
    with pytest.raises(FSDPRuntimeError, match=r"of Linear: tie weights before calling fully_shard"):
        params_of(model[0])[0].registered()


# ---- parameters of before --------------------------------------------------------------------------------


def test_links_lead_to_the_last_successor() -> None:
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    assert replacement_of(first) is None and not is_orphan_copy(first)
    mark_replaced(second, third)
    mark_replaced(first, second)
    assert replacement_of(first) is third and replacement_of(third) is None


def test_a_predecessor_copied_with_its_model_leads_to_the_copied_parameter() -> None:
    layer = nn.Linear(4, 4, bias=False)
    original = layer.weight
    fully_shard(layer)
    for copied, copied_original in (copy.deepcopy((layer, original)), copy.deepcopy((original, layer))[::-1]):
        assert replacement_of(copied_original) is copied.weight and copied.weight is not layer.weight


def test_a_predecessor_copied_alone_or_pickled_is_an_orphan() -> None:
    layer = nn.Linear(4, 4, bias=False)
    original = layer.weight
    fully_shard(layer)
    assert is_orphan_copy(copy.deepcopy(original))
    file = io.BytesIO()
    torch.save(original, file)
    file.seek(0)
    assert replacement_of(torch.load(file, weights_only=False)) is None


def test_hooks_and_attributes_are_carried_over_and_our_own_are_not() -> None:
    before, after = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    seen: list[str] = []
    before.note = "the user's"  # type: ignore[attr-defined]
    mark_replaced(before, after)
    before.register_hook(lambda gradient: seen.append("tensor"))
    before.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    before.requires_grad_(False)
    carry_over(before, after.requires_grad_(False))
    assert after.note == "the user's" and replacement_of(after) is None
    assert not after.requires_grad, "though hooks were registered on it"
    after.requires_grad_(True).sum().backward()
    assert seen == ["tensor", "accumulated"]


# ---- writes ----------------------------------------------------------------------------------------------


def test_a_step_counts_as_a_write_for_the_groups_whose_parameters_it_writes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    counters = [params_of(layer)[0].write_counter for layer in model]
    assert counters[0] is params_of(model[0])[1].write_counter is not counters[1]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    steps, before = WriteCounter.steps, [counter.writes for counter in counters]
    optimizer.step()
    assert counters[0].writes > before[0] and counters[1].writes == before[1]
    assert WriteCounter.steps == steps + 1 and not WriteCounter.unwatched
