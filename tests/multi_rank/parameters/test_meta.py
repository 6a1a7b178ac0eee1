"""Models made on the meta device: sharded without memory, materialized shard by shard, trained like the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import CPUOffloadPolicy, FSDPModule, FSDPRuntimeError, fully_shard
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_sharded_same, parameters_of
from tests.harness.models import CONV, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase

CASES = pytest.mark.parametrize("case", [UNEVEN_MLP, TIED, CONV], ids=str)


def shard_on_meta(case: ModelCase, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = case.make_model()
    for unit in case.units(model):
        fully_shard(unit, **options)
    return model


def train(case: ModelCase, model: nn.Module, *, steps: int = 3, reference: Reference | None = None) -> None:
    world_size = dist.get_world_size()
    reference = reference or Reference(case, world_size=world_size)
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    assert_trains_like(reference, model, optimizer, steps=steps, tolerance=tolerance_for(world_size))


def sharded_state(model: nn.Module, source: nn.Module) -> dict[str, Tensor]:
    """The state of ``source`` (plain) in the form of ``model``'s state dict: what a checkpoint loader makes."""
    state = {}
    for name, target in model.state_dict().items():
        value = source.state_dict()[name]
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        state[name] = value
    return state


@multi_rank(2, 4)
@CASES
def test_wrapping_allocates_nothing(case: ModelCase, world_size: int) -> None:
    model = shard_on_meta(case)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.is_meta and parameter.to_local().is_meta, name
        rows = parameter.shape[0]
        share = -(-rows // world_size)
        expected = max(0, min(share, rows - share * dist.get_rank()))
        assert parameter.to_local().shape == (expected, *parameter.shape[1:]), name
    assert all(buffer.is_meta for buffer in model.buffers())
    # A parameter of a petabyte can be sharded where it cannot be allocated.
    huge = nn.Linear(1 << 24, 1 << 24, device="meta")
    assert fully_shard(huge).weight.to_local().shape == ((1 << 24) // world_size, 1 << 24)


@multi_rank(2, 4)
@CASES
def test_to_empty_allocates_a_shard_and_keeps_ties(case: ModelCase, world_size: int) -> None:
    model = shard_on_meta(case)
    names = [name for name, _ in model.named_parameters()]
    model.to_empty(device="cpu")
    assert [name for name, _ in model.named_parameters()] == names, "ties are kept"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and not parameter.is_meta, name
        local = parameter.to_local()
        assert local.untyped_storage().nbytes() == local.nbytes, f"{name} lies on its own slice"


# ---- materialize, then train ---------------------------------------------------------------------


def by_copying(model: nn.Module, source: nn.Module) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(sharded_state(model, source))


def by_assigning(model: nn.Module, source: nn.Module) -> None:
    """Without to_empty: the loaded tensors become the parameters."""
    model.load_state_dict(sharded_state(model, source), assign=True)


def by_assigning_after_to_empty(model: nn.Module, source: nn.Module) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(sharded_state(model, source), assign=True)


def by_writing(model: nn.Module, source: nn.Module) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), source.parameters(), strict=True):
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))


def child_by_child(model: nn.Module, source: nn.Module) -> None:
    """Materializes bottom-up, as loaders of large checkpoints do."""
    for name, child in model.named_children():
        child.to_empty(device="cpu")
        child.load_state_dict(sharded_state(child, source.get_submodule(name)))
    model.load_state_dict(sharded_state(model, source))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    "materialize",
    [by_copying, by_assigning, by_assigning_after_to_empty, by_writing, child_by_child],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER, CONV], ids=str)
def test_materialized_trains_like_the_reference(
    case: ModelCase, materialize: Callable[[nn.Module, nn.Module], None]
) -> None:
    model = shard_on_meta(case)
    materialize(model, case.build())
    train(case, model)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("materialize", [by_copying, by_assigning], ids=lambda each: each.__name__)
def test_materialized_ties_hold(materialize: Callable[[nn.Module, nn.Module], None], world_size: int) -> None:
    """On a plain model assign=True unties; here the group ties again what it had tied, before it is used."""
    model = shard_on_meta(TIED)
    materialize(model, TIED.build())
    optimizer = adamw(list(model.parameters()))
    with torch.no_grad():
        model(TIED.batch(0, 0, 0).inputs)
    model.reshard()
    assert model.head.weight is model.embedding.weight
    reference = Reference(TIED, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance_for(world_size))


# ---- reset_parameters and buffers ----------------------------------------------------------------


class Filled(nn.Module):
    """Initializes itself without random numbers, and has buffers, one of them not saved."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 13))
        self.bias = nn.Parameter(torch.empty(rows))
        self.register_buffer("shift", torch.empty(rows))
        self.register_buffer("scale", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As modules of libraries do it: in place, under no_grad."""
        nn.init.constant_(self.weight, 0.25)
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.shift.fill_(0.5)
            self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight.t() + self.bias) - self.shift


def _filled() -> nn.Module:
    return nn.Sequential(Filled(13), nn.Tanh(), Filled(1))


FILLED = ModelCase("filled", _filled, UNEVEN_MLP.make_batch, ("0",), UNEVEN_MLP.loss_of)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("device_argument", [True, False], ids=["to_empty_root", "to_empty_each"])
def test_reset_parameters_after_to_empty(device_argument: bool) -> None:
    model = shard_on_meta(FILLED)
    if device_argument:
        model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, Filled):
            if not device_argument:
                module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    assert all(not buffer.is_meta for buffer in model.buffers())
    train(FILLED, model)
    assert not any(isinstance(buffer, DTensor) for buffer in model.buffers())
    assert set(model.state_dict()) == {f"{n}.{p}" for n in (0, 2) for p in ("weight", "bias", "shift")}


# ---- mistakes ------------------------------------------------------------------------------------


@multi_rank(2)
def test_partly_on_meta_names_only_those() -> None:
    model = shard_on_meta(UNEVEN_MLP)
    by_copying(model, UNEVEN_MLP.build())
    model[2].to_empty(device="meta")
    inputs = UNEVEN_MLP.batch(0, 0, 0).inputs
    with pytest.raises(FSDPRuntimeError, match=r"parameters of Sequential.*meta.*: 2\.weight, 2\.bias\.") as failure:
        model(inputs)
    assert "0.weight" not in str(failure.value) and "4.weight" not in str(failure.value)


@multi_rank(2)
def test_back_to_meta_after_training_and_again() -> None:
    """Offloading a model by dropping it: not common, but `to_empty` allows it."""
    model = shard_on_meta(UNEVEN_MLP)
    by_copying(model, UNEVEN_MLP.build())
    train(UNEVEN_MLP, model)
    model.zero_grad()
    model.to_empty(device="meta")
    with pytest.raises(FSDPRuntimeError, match="meta"):
        model(UNEVEN_MLP.batch(0, 0, 0).inputs)
    by_copying(model, UNEVEN_MLP.build())
    train(UNEVEN_MLP, model)


@multi_rank(2)
def test_plain_tensors_are_assigned() -> None:
    """A whole, unsharded checkpoint: each rank takes its rows."""
    model = shard_on_meta(UNEVEN_MLP)
    model.load_state_dict(UNEVEN_MLP.build().state_dict(), assign=True)
    train(UNEVEN_MLP, model)


@multi_rank(2)
def test_unshard_on_meta_is_refused_too() -> None:
    model = shard_on_meta(UNEVEN_MLP)
    assert isinstance(model, FSDPModule)
    with pytest.raises(FSDPRuntimeError, match=r"meta.*to_empty"):
        model.unshard()


def emptied(model: nn.Module) -> None:
    model.to_empty(device="cpu")


def emptied_child_by_child(model: nn.Module) -> None:
    for child in model.children():
        child.to_empty(device="cpu")


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy()}])
@pytest.mark.parametrize("materialize", [emptied, emptied_child_by_child])
@multi_rank(2, 4)
def test_never_initialized(materialize: Callable[[nn.Module], None], options: dict[str, Any]) -> None:
    """What lies in new memory would look like values."""
    model = shard_on_meta(UNEVEN_MLP, **options)
    materialize(model)
    with pytest.warns(
        UserWarning, match=r"never initialized: '4\.weight|never initialized: '0\.weight', .* and \d more"
    ):
        assert model(UNEVEN_MLP.batch(0, 0, 0).inputs).isnan().all()
    by_writing_into(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(UNEVEN_MLP, model)


def by_writing_into(model: nn.Module) -> None:
    model.load_state_dict(sharded_state(model, UNEVEN_MLP.build()))


@multi_rank(4)
def test_never_initialized_over_replicas_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_on_meta(UNEVEN_MLP, mesh=mesh)
    emptied(model)
    model[0].reset_parameters()
    model[4].reset_parameters()
    with pytest.warns(UserWarning, match=r"never initialized: '2\.weight', '2\.bias'\. to_empty"):
        model(UNEVEN_MLP.batch(0, 0, 0).inputs)


def by_resetting(model: nn.Module) -> None:
    for module in model:  # type: ignore[attr-defined]
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.normal_()


def through_local_tensors(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_zero_([parameter.to_local() for parameter in model.parameters()])


def through_detached_views(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().fill_(1)


@pytest.mark.parametrize("write", [by_resetting, through_data, through_local_tensors, through_detached_views])
@multi_rank(2)
def test_initialized_in_ways_that_no_version_counter_sees(write: Callable[[nn.Module], None]) -> None:
    model = shard_on_meta(UNEVEN_MLP)
    emptied(model)
    write(model)
    assert not model(UNEVEN_MLP.batch(0, 0, 0).inputs).isnan().any()  # a warning is an error here


# ---- a mixture -----------------------------------------------------------------------------------


@multi_rank(2)
def test_one_group_partly_on_meta() -> None:
    """A new head, on meta, on a pretrained body: sharded in one group."""
    model = UNEVEN_MLP.build()
    model[4] = nn.Linear(33, 1, device="meta")
    fully_shard(model)
    source = UNEVEN_MLP.build()
    model[4].to_empty(device="cpu")
    model[4].load_state_dict(sharded_state(model[4], source[4]))
    assert_sharded_same("parameters", parameters_of(model), parameters_of(source))
    train(UNEVEN_MLP, model)


@multi_rank(2)
def test_a_buffer_on_meta_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean = model[1].running_mean.to("meta")
    fully_shard(model)
    with pytest.raises(FSDPRuntimeError, match=r"buffers of Sequential .*meta device: 1\.running_mean\."):
        model(torch.ones(2, 3))
