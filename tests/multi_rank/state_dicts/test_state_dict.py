"""State dicts: sharded whenever they are taken, loaded at any moment, saved with `torch.save`."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import FSDPModule, FSDPRuntimeError, fully_shard
from tests.harness import Reference, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_sharded_same, parameters_of
from tests.harness.shared.state_dicts import STEPS_AFTER, after_training_forward, inputs, optimizer_of
from tests.harness.shared.training import CASE, shard

# ---- the form of a state dict --------------------------------------------------------------------


def fresh(model: nn.Module) -> object:
    return None


def after_evaluation_forward(model: nn.Module) -> object:
    with torch.no_grad():
        return model(inputs())


def after_inference_forward(model: nn.Module) -> object:
    with torch.inference_mode():
        return model(inputs())


def after_backward(model: nn.Module) -> object:
    return model(inputs()).sum().backward()


def after_backward_that_keeps_parameters(model: nn.Module) -> object:
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    return model(inputs()).sum().backward()


def after_unshard(model: nn.Module) -> object:
    for module in reversed(list(model.modules())):
        if isinstance(module, FSDPModule) and module is not model:
            continue
        if isinstance(module, FSDPModule):
            module.unshard()
    return None


def while_unsharding(model: nn.Module) -> object:
    assert isinstance(model, FSDPModule)
    return model.unshard(async_op=True)


MOMENTS = pytest.mark.parametrize(
    "bring",
    [
        fresh,
        after_training_forward,
        after_evaluation_forward,
        after_inference_forward,
        after_backward,
        after_backward_that_keeps_parameters,
        after_unshard,
        while_unsharding,
    ],
    ids=lambda each: each.__name__,
)


@pytest.mark.full
@multi_rank(2, 4)
@MOMENTS
def test_state_dict_is_sharded_at_any_moment(bring: Callable[[nn.Module], object], world_size: int) -> None:
    model, plain = shard(), CASE.build()
    kept = bring(model)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.placements == (Shard(0),), name
        rows, whole = -(-value.shape[0] // world_size), plain.state_dict()[name]
        start = min(rows * dist.get_rank(), value.shape[0])
        assert torch.equal(value.to_local(), whole[start : start + rows]), name
        assert value.full_tensor().equal(whole), name
    kept = bring(model)
    for part in (model[4], model[0]):  # a plain submodule too: its parameters belong to the root's group
        assert all(isinstance(value, DTensor) for value in part.state_dict().values())
    if isinstance(kept, Tensor) and kept.requires_grad:
        kept.sum().backward()
        plain(inputs()).sum().backward()  # of this rank alone; the shapes and the presence of gradients count
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.full
@multi_rank(2, 4)
def test_state_dict_aliases_the_parameters() -> None:
    """As on a plain model: what is written into it shows in the model, and the other way round."""
    model = shard()
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        local = state[name].to_local()
        assert local.data_ptr() == parameter.to_local().data_ptr()
        assert local.untyped_storage().nbytes() == local.nbytes, f"{name} would drag its group along"
    before = model(inputs())
    model(inputs()).sum().backward()
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    assert before.abs().sum() > 0
    assert model(inputs()).abs().sum() == 0


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("bring", [fresh, after_training_forward, after_backward], ids=lambda each: each.__name__)
def test_parameters_lie_in_one_buffer_per_group(bring: Callable[[nn.Module], object]) -> None:
    """Loading must not break that, or every step would copy."""
    model, other = shard(), shard(model=CASE.build(seed=1))
    kept = bring(model)
    model.load_state_dict(other.state_dict())
    del kept
    model.reshard()
    addresses = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    model(inputs()).sum().backward()
    model.reshard()
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == addresses
    assert_sharded_same("loaded", parameters_of(model), dict(CASE.build(seed=1).named_parameters()))


@pytest.mark.full
@multi_rank(2, 4)
@MOMENTS
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_state_dict_at_any_moment(bring: Callable[[nn.Module], object], assign: bool, world_size: int) -> None:
    model = shard()
    kept = bring(model)
    source = shard(model=CASE.build(seed=1))
    result = model.load_state_dict(source.state_dict(), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    del kept
    model.zero_grad()
    model.set_reshard_after_backward(True)
    reference = Reference(CASE, world_size=world_size, model=CASE.build(seed=1))
    assert_trains_like(reference, model, optimizer_of(model), steps=STEPS_AFTER, tolerance=tolerance_for(world_size))


@multi_rank(2)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_whole_tensors_are_loaded(assign: bool) -> None:
    """torch refuses: "got mixed torch.Tensor and DTensor"."""
    source = CASE.build(seed=1)
    model = shard()
    parameters = dict(model.named_parameters())
    model.load_state_dict(source.state_dict(), assign=assign)
    for name, wanted in source.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), wanted), name  # type: ignore[operator]
        assert assign or model.get_parameter(name) is parameters[name]
    with torch.no_grad():
        for each in source.parameters():
            each.zero_()  # nothing lies on it
    reference = Reference(CASE, world_size=2, model=CASE.build(seed=1))
    assert_trains_like(reference, model, optimizer_of(model), steps=2)


@multi_rank(2)
def test_whole_tensors_are_loaded_into_a_part_of_a_group() -> None:
    """torch refuses them everywhere."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 5))))
    whole = nn.Sequential(nn.Tanh(), nn.Linear(3, 5))
    model(torch.ones(2, 3)).sum().backward()  # the root is unsharded after a forward
    model[1].load_state_dict(whole.state_dict())
    assert torch.equal(model[1][1].weight.full_tensor(), whole[1].weight)  # type: ignore[union-attr,operator]
    model[1][1].load_state_dict({"weight": torch.ones(5, 3), "bias": torch.zeros(5)})
    assert torch.equal(model[1][1].weight.full_tensor(), torch.ones(5, 3))  # type: ignore[union-attr,operator]


class Renames(nn.Linear):
    """Its weight had another name in older files."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *others)


@multi_rank(2)
def test_whole_tensors_are_loaded_under_the_names_that_a_module_gives_them() -> None:
    model = fully_shard(nn.Sequential(Renames(3, 5)))
    model.load_state_dict({"0.kernel": torch.ones(5, 3), "0.bias": torch.zeros(5)})
    assert torch.equal(model[0].weight.full_tensor(), torch.ones(5, 3))  # type: ignore[operator]


@multi_rank(2)
def test_whole_tensors_of_another_shape_are_named_by_torch() -> None:
    model = shard()
    state = CASE.build().state_dict()
    name = next(iter(state))
    state[name] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}"):
        model.load_state_dict(state)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_dtensors_of_another_mesh_are_loaded(assign: bool) -> None:
    """torch refuses: "different meshes"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    source = CASE.build(seed=1)
    for unit in CASE.units(source):
        fully_shard(unit, mesh=mesh)
    model = shard()
    model.load_state_dict(source.state_dict(), assign=assign)
    for name, wanted in CASE.build(seed=1).named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), wanted), name  # type: ignore[operator]
    with torch.no_grad():
        assert torch.equal(model(inputs()), source(inputs()))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_loading_between_forward_and_backward_is_an_error(assign: bool) -> None:
    """Backward would mix old and new weights. A plain model says "modified by an inplace operation"."""
    model, source = shard(), shard(model=CASE.build(seed=1))
    loss = model(inputs()).sum()
    model.load_state_dict(source.state_dict(), assign=assign)
    with pytest.raises(FSDPRuntimeError, match=r"between a forward and its backward"):
        loss.backward()
    model.zero_grad()
    reference = Reference(CASE, world_size=2, model=CASE.build(seed=1))
    assert_trains_like(reference, model, optimizer_of(model), steps=1)


class WithBuffers(nn.Module):
    """State of every kind: a buffer, a buffer that is not saved, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(13, 5)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.ones(5), persistent=False)
        self.version = 7

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.cache + self.count


@multi_rank(2)
def test_buffers_and_extra_state_are_as_on_a_plain_model() -> None:
    model, plain = WithBuffers(), WithBuffers()
    fully_shard(model.layer)
    fully_shard(model)
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert state["_extra_state"] == {"version": 7} and type(state["count"]) is Tensor
    state["_extra_state"], state["count"] = {"version": 8}, torch.tensor(4)
    model.load_state_dict(state)
    assert model.version == 8 and model.count == 4


# ---- torch.save ----------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("bring", [fresh, after_training_forward], ids=lambda each: each.__name__)
def test_torch_save_writes_this_ranks_share_and_no_more(bring: Callable[[nn.Module], object], world_size: int) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [nn.Linear(13, 403), nn.GELU(), nn.Linear(403, 101), nn.GELU(), nn.Linear(101, 1)]
        return shard(model=nn.Sequential(*layers))

    model = make(0)
    kept = bring(model)
    state = model.state_dict()
    own_bytes = sum(value.to_local().nbytes for value in state.values())
    whole = io.BytesIO()
    torch.save(state, whole)
    overhead_bytes = 8_000  # names, DTensorSpecs, the archive's own records
    assert own_bytes < whole.getbuffer().nbytes < own_bytes + overhead_bytes
    one = io.BytesIO()
    torch.save({"bias": state["0.bias"]}, one)
    assert one.getbuffer().nbytes < state["0.bias"].to_local().nbytes + overhead_bytes, "one parameter, not its group"
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    target = make(1)
    target.load_state_dict(loaded)
    assert_sharded_same("loaded", parameters_of(target), {n: v.full_tensor() for n, v in state.items()})
    del kept


@pytest.mark.full
@multi_rank(2)
def test_torch_load_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(shard().state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_sharded_same("loaded", loaded, dict(CASE.build().named_parameters()))


@multi_rank(2)
def test_state_dict_with_keep_vars_gives_the_parameters() -> None:
    model = shard()
    after = after_training_forward(model)
    state = model.state_dict(keep_vars=True)
    model.reshard()
    assert all(state[name] is parameter for name, parameter in model.named_parameters())
    del after


@multi_rank(2)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_gradients_are_saved_and_copied_by_themselves(how: str, world_size: int) -> None:
    """They lie at offsets of one buffer, which is not dragged along."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    fully_shard(model)
    model(torch.ones(2, 5)).square().sum().backward()
    for parameter in model.parameters():
        gradient = parameter.grad
        if how == "torch.save":
            file = io.BytesIO()
            torch.save({"gradient": gradient}, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)["gradient"]
        else:
            other = copy.deepcopy(gradient) if how == "deepcopy" else pickle.loads(pickle.dumps(gradient))
        assert other.placements == gradient.placements and other.shape == gradient.shape
        assert torch.equal(other.to_local(), gradient.to_local()) and other is not gradient
        assert other.to_local().untyped_storage().nbytes() == gradient.to_local().numel() * 4
