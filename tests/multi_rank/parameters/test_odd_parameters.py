"""Parameters that torch's `fully_shard` refuses: of no dims, not contiguous, uneven in a dim behind the first, packed.

One model has them all, trained beside the plain one with everything that changes how parameters travel.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from fsdp2 import (
    DataParallelMeshDims,
    FSDPNotImplementedError,
    MixedPrecisionPolicy,
    Owned,
    fully_shard,
    unwrap,
)
from fsdp2 import full_parameters as whole_parameters
from tests.harness import Reference, adamw, multi_rank
from tests.harness.compare import (
    SUM_ORDER,
    assert_same,
    assert_sharded_same,
    full_parameters,
    gradients_of,
    tolerance_for,
)
from tests.harness.internals import AS_REAL
from tests.harness.shared.odd_parameters import ODD, Odd
from tests.harness.training import assert_trains_like


def last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.dim() - 1) if parameter.dim() else None


def middle_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() > 1 else None


PLACEMENTS: dict[str, Callable[[nn.Parameter], Any] | None] = {"first": None, "last": last_dim, "middle": middle_dim}


def sharded(model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = ODD.build() if model is None else model
    for unit in ODD.units(model):
        fully_shard(unit, **options)
    return model


def train(model: nn.Module) -> None:
    world_size = dist.get_world_size()
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    reference = Reference(ODD, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_odd_parameters_train_like_the_reference(
    placement: str, reshard_after_forward: bool | None, world_size: int
) -> None:
    options = {"shard_placement_fn": PLACEMENTS[placement], "reshard_after_forward": reshard_after_forward}
    train(sharded(**options))


# ---- what they look like -------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_strides_are_kept(placement: str, world_size: int) -> None:
    """In the sharded parameter, its gradient and the unsharded one, where the original was dense."""
    plain = ODD.build()
    model: Any = sharded(shard_placement_fn=PLACEMENTS[placement], reshard_after_forward=False)
    kept = ("conv.weight", "mix", "stack", "table")
    for name in kept:
        parameter = model.parts[0].get_parameter(name)
        original = plain.parts[0].get_parameter(name)
        assert isinstance(parameter, DTensor) and parameter.stride() == original.stride()
        local = parameter.to_local()
        dims = [dim for dim in range(local.dim()) if local.shape[dim] > 1]
        assert sorted(dims, key=local.stride, reverse=True) == sorted(dims, key=original.stride, reverse=True)
    loss = ODD.loss(model, ODD.batch(0, 0, dist.get_rank()))
    for name in kept:
        assert model.parts[0].get_parameter(name).stride() == plain.parts[0].get_parameter(name).stride()
    assert model.parts[0].conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.parts[0].offset.is_contiguous()
    loss.backward()
    model.reshard()
    for name in kept[:3]:
        parameter = model.parts[0].get_parameter(name)
        assert parameter.grad.to_local().stride() == parameter.to_local().stride()
        assert parameter.grad.placements == parameter.placements


@multi_rank(2, 4)
def test_a_parameter_of_no_dims_is_replicated(world_size: int) -> None:
    model = sharded()
    for parameter in (model.temperature, model.parts[0].gain, model.parts[1].steps):
        assert parameter.placements == (Replicate(),) and parameter.to_local().shape == ()
    assert model.parts[0].steps.to_local().item() == 3


@multi_rank(2, 4)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_frozen_bytes_are_exact(placement: str, world_size: int) -> None:
    """Bit patterns that arithmetic would change: not-a-numbers of bf16, negative zeros, every byte."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            bits = torch.arange(-(2**15), 2**15, 13, dtype=torch.int32).to(torch.int16)
            for name, values in {
                "bytes": torch.arange(255, dtype=torch.uint8).view(17, 15),
                "bf16": bits[:5040].view(torch.bfloat16).view(90, 56).t(),
                "fp16": bits[:35].view(torch.float16).view(5, 7),
                "flag": torch.tensor([[True, False, True]]),
                "fp8": torch.arange(33, dtype=torch.uint8).view(11, 3).view(torch.float8_e4m3fn),
            }.items():
                self.register_parameter(name, nn.Parameter(values, requires_grad=False))

        def forward(self) -> Tensor:
            self.seen = {name: _bits(getattr(self, name)).clone() for name in expected}
            return self.scale * 2

    expected: dict[str, Tensor] = {}
    model = Quantized()
    expected = {name: _bits(p) for name, p in model.named_parameters() if name != "scale"}
    fully_shard(model, shard_placement_fn=PLACEMENTS[placement], mp_policy=MixedPrecisionPolicy(None, torch.float32))
    model().backward()
    assert_same("bytes", model.seen, expected)


class LargeIntegers(nn.Module):
    """Of a dtype that backends do not know, and large enough to travel alone."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(2**19, dtype=torch.int32).to(torch.int16).view(2**9, -1)
        self.steps = nn.Parameter(values, requires_grad=False)


@multi_rank(2)
@pytest.mark.parametrize("way", ["unwrap", "full_parameters", "unshard"])
def test_large_integers_travel_as_bytes(way: str) -> None:
    """Backends' own gathers know no int16."""
    model: Any = LargeIntegers()
    wanted = LargeIntegers().steps
    with mock.patch.dict("os.environ", FSDP2_COMM="native"):
        fully_shard(model)
        if way == "unshard":
            model.unshard()
        elif way == "unwrap":
            unwrap(model)
        with whole_parameters(model) if way == "full_parameters" else contextlib.nullcontext():
            assert torch.equal(model.steps, wanted)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_state_dicts_go_out_and_come_back(placement: str, world_size: int, tmp_path: Path) -> None:
    options = {"shard_placement_fn": PLACEMENTS[placement]}
    model = sharded(**options)
    ODD.loss(model, ODD.batch(0, 0, dist.get_rank())).backward()
    expected = {name: parameter.detach() for name, parameter in ODD.build().named_parameters()}
    assert_same("full parameters", full_parameters(model), expected)
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    others = {"loaded": sharded(ODD.build(seed=1), **options), "assigned": sharded(ODD.build(seed=1), **options)}
    others["loaded"].load_state_dict(model.state_dict())
    others["assigned"].load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    others["restored"] = sharded(ODD.build(seed=1), shard_placement_fn=middle_dim)
    state = {"model": others["restored"].state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    others["restored"].load_state_dict(state["model"])
    for what, other in others.items():
        assert_same(what, full_parameters(other), expected)
        train(other)


@pytest.mark.full
@multi_rank(2)
def test_on_meta_then_loaded(world_size: int) -> None:
    with torch.device("meta"):
        model = Odd()
    sharded(model, shard_placement_fn=last_dim)
    model.to_empty(device="cpu")
    plain = ODD.build().state_dict()
    state = {
        name: distribute_tensor(plain[name], value.device_mesh, value.placements)
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state)
    assert model.parts[0].mix.stride() == ODD.build().parts[0].mix.stride()
    train(model)


# ---- what is refused -----------------------------------------------------------------------------


class _Sends:
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0], ()


@multi_rank(2)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.tensor(1.0), "has no dims"),
        (torch.randn(4, 6).t(), "is not contiguous"),
        (torch.randn(4, 3), "has 3 entries in dim 1, uneven over 2 ranks"),
    ],
    ids=["no dims", "transposed", "uneven"],
)
def test_a_parameter_that_gathers_itself_is_none_of_these(data: Tensor, message: str) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(_WithExtension(data))
    with pytest.raises(FSDPNotImplementedError, match=f"'weight' of Module.*{message}.*shard its dim 0"):
        fully_shard(module, shard_placement_fn=last_dim)


class _WithExtension(torch.Tensor):
    fsdp_pre_all_gather = _Sends.fsdp_pre_all_gather
    fsdp_post_all_gather = _Sends.fsdp_post_all_gather

    @staticmethod
    def __new__(cls, data: Tensor) -> Tensor:
        return torch.Tensor._make_subclass(cls, data)


RESIDENCES: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "resharded": {"reshard_after_forward": True},
    **{each: {"strategy": each} for each in ("zero1", "zero2", "zero3", "replicate")},
    "owned": {"shard_placement_fn": lambda parameter: Owned(parameter.dim() - 1)},
}


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("residence", list(RESIDENCES))
@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize("of", ["module", "sharded"])
def test_toggled_after_a_forward_without_a_backward(of: str, thaws: bool, residence: str, world_size: int) -> None:
    """As after a validation without no_grad: the root's parameters are unsharded then, or those of all modules."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    model = copy.deepcopy(plain)
    for each in (plain, model):
        each[0].requires_grad_(not thaws)
    fully_shard(model, **RESIDENCES[residence])
    sharded = list(model[0].parameters())
    x = torch.randn(3, world_size, 2, 7)
    model(x[0][dist.get_rank()])
    plain[0].requires_grad_(thaws)
    for parameter in sharded if of == "sharded" else model[0].parameters():
        parameter.requires_grad_(thaws)
    for batch in x:
        model(batch[dist.get_rank()]).square().mean().backward()
        for rows in batch:
            (plain(rows).square().mean() / world_size).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)
        for each in (model, plain):
            each.zero_grad()


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("comm", ["", "native"])
def test_complex_parameters_stay_complex(
    comm: str, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, world_size: int
) -> None:
    """Whatever the policy says of the others. torch's own reduce-scatter gets real numbers: NCCL knows no others."""
    with mock.patch.dict("os.environ", FSDP2_COMM=comm), AS_REAL.counted() as reals:
        _complex_parameters_stay_complex(param_dtype, reduce_dtype, world_size)
    assert reals.call_count == (2 if comm else 0)


@multi_rank(2)
@pytest.mark.parametrize("then", ["reduced", "laid out again"])
def test_complex_gradients_that_wait_stay_complex(then: str, world_size: int) -> None:
    """Unsharded ones, without gradient synchronization, beside others that add up in the reduce dtype."""
    _complex_parameters_stay_complex(None, torch.float32, world_size, first=then)


def _complex_parameters_stay_complex(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, world_size: int, *, first: str | None = None
) -> None:
    """``first``: a backward before is not reduced, and with "laid out again" a parameter is frozen between them."""

    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.turn).abs().square().mean() + self.linear(x).float().mean()

    torch.manual_seed(0)
    plain = Rotating()
    model = copy.deepcopy(plain)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    x = torch.randn(world_size, 4, 5)
    if first is not None:
        model.set_requires_gradient_sync(False)
        model(x[dist.get_rank()]).backward()
        model.set_requires_gradient_sync(True)
        model.linear.bias.requires_grad_(first != "laid out again")
    model(x[dist.get_rank()]).backward()
    for rows in x if first is None else [*x, *x]:
        if param_dtype is not None:
            rows = rows.to(param_dtype).float()
        (plain(rows) / world_size).backward()
    assert model.turn.dtype == torch.complex64
    expected = {"turn": plain.turn.grad}
    found = {"turn": model.turn.grad}
    assert_sharded_same("gradients", found, expected, tolerance=SUM_ORDER)


class Gated(nn.Module):
    """``how``: the gate is computed by an operator of DTensor's, or of plain tensors."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Parameter(torch.linspace(-1, 1, 7))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "dtensor" or not isinstance(self.gate, DTensor):
            return x * torch.sigmoid(self.gate)
        placements = {"summed": [Partial()], "own": None}[self.how]
        gate = self.gate.to_local(grad_placements=placements)
        return DTensor.from_local(x.to_local() * torch.sigmoid(gate), x.device_mesh, x.placements)


@multi_rank(2)
@pytest.mark.parametrize("how", ["dtensor", "summed", "own"])
def test_gradients_that_dtensor_may_have_summed(how: str, world_size: int) -> None:
    """With ``dp_mesh_dims``: Replicate() can mean both, so it is said."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    plain, model = Gated(how), distribute_module(Gated(how), mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    x = torch.randn(world_size, 3, 7, generator=torch.Generator().manual_seed(0))
    inputs = DTensor.from_local(x[dist.get_rank()], mesh, [Shard(0)], run_check=False)
    loss = model(inputs).to_local().square().mean()
    warned = pytest.warns(UserWarning, match=r"'gate'.*over 2 data-parallel ranks.*2 times too large.*grad_placements")
    with contextlib.nullcontext() if how == "summed" else warned:
        loss.backward()
    plain(x).square().mean().backward()
    expected = {"gate": plain.gate.grad * (world_size if how == "dtensor" else 1)}  # as with torch's fully_shard
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)
