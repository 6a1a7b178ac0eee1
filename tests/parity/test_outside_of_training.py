"""Meta devices, conversions, state dicts: what happens to sharded parameters outside of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.harness import assert_same, full_parameters, multi_rank
from tests.harness.models import TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import ROOTED, is_sharded, loss_on, shard, train


def on_meta(case: ModelCase, **options: Any) -> Any:
    """Built and sharded without memory."""
    with torch.device("meta"):
        model = case.make_model()
    return shard(case, model, **options)


def plain_state(case: ModelCase, seed: int = 0) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in case.build(seed).state_dict().items()}


def sharded_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state`` distributed like ``model``'s parameters."""
    own = dict(model.state_dict())
    return {
        name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
        if isinstance(own[name], DTensor)
        else value
        for name, value in state.items()
    }


# ---- meta ----------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    ("case", "empties", "assign"),
    [(UNEVEN_MLP, True, False), (UNEVEN_MLP, True, True), (UNEVEN_MLP, False, True), (TIED, True, False)],
    ids=str,
)
def test_to_empty_then_loading(case: ModelCase, empties: bool, assign: bool, world_size: int) -> None:
    """Or loading by assignment, straight from meta."""
    model = on_meta(case)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.is_meta and parameter.to_local().is_meta
    if empties:
        model.to_empty(device="cpu")
    assert case is not TIED or model.head.weight is model.embedding.weight
    model.load_state_dict(sharded_state(model, plain_state(case)), assign=assign)
    train(case, model)


@multi_rank(2)
def test_running_with_parameters_on_meta_is_an_error() -> None:
    model = on_meta(UNEVEN_MLP)
    with pytest.raises(RuntimeError, match=r"meta.*0\.weight|0\.weight.*meta"):
        loss_on(UNEVEN_MLP, model)


# ---- conversions ---------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
def test_a_conversion_finds_unsharded_parameters_resharded() -> None:
    model = shard(ROOTED, reshard_after_forward=False)
    output = model(ROOTED.batch(0, 0, 0).inputs)
    model.to("cpu")
    assert all(is_sharded(parameter) for parameter in model.parameters())
    del output
    train(ROOTED, model, steps=2)


@multi_rank(2)
def test_train_eval_and_requires_grad_pass_through() -> None:
    model = shard(TRANSFORMER)
    assert model.eval() is model and not model.blocks[0].training
    assert model.train() is model and model.blocks[0].training
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())


# ---- state dicts ---------------------------------------------------------------------------------


@multi_rank(2)
def test_the_state_dict_holds_the_sharded_parameters_whatever_is_registered() -> None:
    model = shard(ROOTED, reshard_after_forward=False)
    before = {name: parameter for name, parameter in model.named_parameters()}
    for step in range(2):
        output = model(ROOTED.batch(0, step, 0).inputs)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        for name, parameter in before.items():
            assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
        del output


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["before_first", "after_first"])
def test_loading_a_state_dict(assign: bool, when: str, world_size: int) -> None:
    model = shard(UNEVEN_MLP, UNEVEN_MLP.build(seed=1))
    if when == "after_first":
        loss_on(UNEVEN_MLP, model).backward()
        model.zero_grad()
    before = list(model.parameters())
    result = model.load_state_dict(sharded_state(model, plain_state(UNEVEN_MLP)), assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert assign or all(mine is its for mine, its in zip(model.parameters(), before, strict=True))
    assert_same("parameters", full_parameters(model), plain_state(UNEVEN_MLP))
    train(UNEVEN_MLP, model)


@multi_rank(2)
def test_loading_a_part_of_the_keys() -> None:
    model = shard(UNEVEN_MLP, UNEVEN_MLP.build(seed=1))
    state = sharded_state(model, plain_state(UNEVEN_MLP))
    state.pop("0.weight")
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["0.weight"]
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        model.load_state_dict(state)
    expected = plain_state(UNEVEN_MLP) | {"0.weight": plain_state(UNEVEN_MLP, seed=1)["0.weight"]}
    assert_same("parameters", full_parameters(model), expected)


@multi_rank(2)
def test_the_state_dict_of_a_submodule() -> None:
    model = shard(TRANSFORMER)
    state = model.blocks[0].state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    other = shard(TRANSFORMER, TRANSFORMER.build(seed=1))
    other.blocks[0].load_state_dict(state)
    mine, theirs = full_parameters(other.blocks[0]), full_parameters(model.blocks[0])
    assert_same("parameters", mine, theirs)


@pytest.mark.full
@multi_rank(2)
def test_api_of_conversions_is_the_modules_own() -> None:
    """`half`, `float`, `bfloat16` and back: values are those of the plain model converted alike."""
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    for each in (model, plain):
        each.bfloat16()
        each.float()
    expected = {name: value.detach() for name, value in plain.named_parameters()}
    assert_same("parameters", full_parameters(model), expected)
    assert isinstance(model, API.FSDPModule)
