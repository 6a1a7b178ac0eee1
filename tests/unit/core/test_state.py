"""`FSDPState`: which modules have one, which root it belongs to, what its hooks register when; and `ShardArguments`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fsdp2.api.policies import offloading_of
from fsdp2.core.mesh import DataParallelMesh, mesh_info
from fsdp2.core.state import ShardArguments, forget_state, state_of, states_below, states_below_all
from tests.harness import fake_world
from tests.unit.helpers import for_each

INPUT = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is the first of two ranks."""
    with fake_world(2):
        yield


def tower() -> nn.Sequential:
    """Two sharded layers, and a third that is the root's own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model[1])
    return fully_shard(model)


def is_sharded(layer: Any) -> bool:
    return isinstance(layer.weight, DTensor)


# ---- who has one -------------------------------------------------------------------------------------------


def test_states_are_found_below_a_module_in_the_order_of_its_modules() -> None:
    model = tower()
    states = [state_of(each) for each in (model, model[0], model[1])]
    assert None not in states and state_of(model[2]) is None
    assert states_below(model) == states
    assert states_below_all([model[1], model]) == [states[2], states[0], states[1]]


def test_a_list_has_one_state_for_all_its_modules() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fully_shard(layers)
    state = state_of(layers[0])
    assert state is not None and state is state_of(layers[1]) and state.modules == tuple(layers)
    assert states_below_all(layers) == [state] and len(state.unit) == 1


def test_a_forgotten_state_leaves_no_hooks() -> None:
    layer = nn.Linear(4, 4)
    before = {name: len(value) for name, value in vars(layer).items() if name.endswith("hooks")}
    fully_shard(layer)
    state = state_of(layer)
    assert state is not None
    forget_state(state)
    after = {name: len(value) for name, value in vars(layer).items() if name.endswith("hooks")}
    assert state_of(layer) is None and after == before


# ---- roots -------------------------------------------------------------------------------------------------


def test_the_outermost_state_to_run_first_is_the_root_of_all_below() -> None:
    model = tower()
    states = states_below(model)
    assert [state.root for state in states] == [None] * 3, "not before the first forward"
    model(INPUT)
    root = states[0].own_root
    assert root is not None and [state.root for state in states] == [root] * 3
    assert [state.is_root for state in states] == [True, False, False]
    assert [group.name for group in root.groups] == ["Sequential", "0", "1"]


def test_settings_of_the_root_are_refused_elsewhere_by_name() -> None:
    model = tower()
    model[1].set_manual_backward_finalization(True)
    with pytest.raises(FSDPRuntimeError, match=r"finalization was called on '1' \(Linear\).* call it on the root, Seq"):
        model(INPUT)


def test_settings_that_come_before_the_root_are_those_of_the_root() -> None:
    model = tower()
    (state, *_) = states_below(model)
    state.configure_root(is_last_backward=False)
    assert not state.ensure_root().settings.is_last_backward
    state.configure_root(is_last_backward=True)
    assert state.ensure_root().settings.is_last_backward


def test_a_parameter_that_is_added_after_sharding_is_refused() -> None:
    model = tower()
    model(INPUT).sum().backward()
    model.append(nn.Linear(4, 4))
    with pytest.raises(FSDPRuntimeError, match=r"3\.weight"):
        model(INPUT)


# ---- what its hooks register -------------------------------------------------------------------------------


@for_each(("reshard_after_forward", "sharded"), [(None, [True, True, False]), (True, [True] * 3), (False, [False] * 3)])
def test_after_forward_parameters_are_registered_as_was_asked(
    reshard_after_forward: bool | None, sharded: list[bool]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[0], model[1], model):
        fully_shard(module, reshard_after_forward=reshard_after_forward)
    computed: list[bool] = []
    for layer in model:
        layer.register_forward_hook(lambda module, *_: computed.append(is_sharded(module)), prepend=True)
    loss = model(INPUT).sum()
    assert computed == [False] * 3, "a module computes with unsharded parameters"
    assert [is_sharded(layer) for layer in model] == sharded
    loss.backward()
    assert [is_sharded(layer) for layer in model] == [True] * 3


def test_quiescing_brings_the_sharded_parameters_back() -> None:
    model = tower()
    output = model(INPUT)
    for state in states_below(model):
        state.quiesce()
    assert all(is_sharded(layer) for layer in model) and output is not None


def test_quiescing_inside_of_a_forward_is_refused() -> None:
    model = tower()
    state = state_of(model[1])
    assert state is not None
    model[1].register_forward_pre_hook(lambda *_: state.quiesce())
    with pytest.raises(FSDPRuntimeError, match="forward"):
        model(INPUT)


# ---- `ShardArguments` --------------------------------------------------------------------------------------


def arguments(**changes: Any) -> ShardArguments:
    """Those of a call without any, but for ``changes``."""
    mesh = changes.pop("mesh", None)
    return ShardArguments(
        **{
            "mesh": DataParallelMesh.from_info(mesh_info(mesh or init_device_mesh("cpu", (2,)))),
            "reshard_after_forward": (None, None),
            "shard_placement_fn": None,
            "mp_policy": MixedPrecisionPolicy(),
            "offload_policy": OffloadPolicy(),
            "ignored_params": frozenset(),
            **changes,
        }
    )


@for_each(
    ("name", "value"),
    [
        ("reshard_after_forward", (True, None)),
        ("shard_placement_fn", lambda parameter: None),
        ("mp_policy", MixedPrecisionPolicy(torch.bfloat16)),
        ("offload_policy", CPUOffloadPolicy()),
        ("ignored_params", frozenset([nn.Parameter(torch.zeros(1))])),
        ("strategy", "zero2"),
    ],
)
def test_the_first_argument_that_differs_is_named(name: str, value: Any) -> None:
    assert arguments().difference(arguments(**{name: value})) == name
    assert arguments(**{name: value}).difference(arguments(**{name: value})) is None


def test_offloading_says_where_shards_gradients_and_state_live() -> None:
    device = torch.device("cuda", 0)
    plain, offloaded = offloading_of(OffloadPolicy(), device), offloading_of(CPUOffloadPolicy(pin_memory=False), device)
    assert not plain.is_host and not plain.state_on_host
    assert offloaded.is_host and offloaded.device == torch.device("cpu")
    only_gradients = CPUOffloadPolicy(pin_memory=False, parameters=False, gradients=True, optimizer_state=False)
    gradients = offloading_of(only_gradients, device)
    assert not gradients.is_host and gradients.sums_on_host and not gradients.state_on_host
