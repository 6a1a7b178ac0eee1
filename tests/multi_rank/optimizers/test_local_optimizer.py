"""`fsdp2.optim.local`: steps on local shards, against the unsharded reference and, bit by bit, the plain optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import FSDPNotImplementedError, FSDPValueError, fully_shard
from tests.harness import Reference, multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same, parameters_of
from tests.harness.models import MLP
from tests.harness.shared.optimizers import (
    EVERY_KIND,
    FUSED,
    MakeOptimizer,
    Parameters,
    adamw_foreach,
    local_like,
    loss_of,
    number_of_runs,
)
from tests.harness.shared.training import CASE, shard, trainable

FORMS = pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])


# ---- other meshes, and what is not sharded -------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
@FORMS
def test_replicas_and_tensor_parallelism(flat: bool) -> None:
    """HSDP below, tensor parallelism above, a plain parameter beside: plain DTensor optimizers refuse the mixture."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = MLP.build(), MLP.build()
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    styles = {linears[0]: ColwiseParallel(), linears[1]: RowwiseParallel()}
    parallelize_module(model, mesh["tp"], styles)
    others = [module for name, module in model.named_modules() if name in linears[2:]]
    for module in others:
        fully_shard(module, mesh=replicas)
    for name in linears[:2]:
        fully_shard(model.get_submodule(name), mesh=mesh["dp"])
    extra = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = []
    for each, more in ((model, extra[0]), (plain, extra[1])):
        optimizers.append(torch.optim.AdamW([*each.parameters(), more], lr=1e-2, eps=1e-3, foreach=True))
    optimizers[0] = local_like(optimizers[0], flat=flat)
    for step in range(3):
        for each, more, optimizer in zip((model, plain), extra, optimizers, strict=True):
            loss = MLP.loss(each, MLP.batch(0, step, 0)) + (more * torch.arange(3.0)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(extra[0], extra[1])
        expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        assert_sharded_same("parameters", parameters_of(model), expected, tolerance=tolerance_for(4))


# ---- runs ----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Between two trainable parameters a frozen one so small that it fits in the alignment of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(64, 4))
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * self.frozen) @ self.weight.t().tanh() + self.shift.sum()


@pytest.mark.full
@multi_rank(2, 4)
def test_small_frozen_parameters_are_not_stepped_on(world_size: int) -> None:
    model, plain = Scaled(), Scaled()
    fully_shard(model)
    optimizers = [
        fsdp2.optim.local(torch.optim.AdamW, trainable(model), lr=1e-2, weight_decay=0.5, flat=True),
        torch.optim.AdamW(trainable(plain), lr=1e-2, weight_decay=0.5),
    ]
    for step in range(3):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))  # alike on all ranks
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert number_of_runs(optimizers[0]) == 1  # the weight and the shift
    assert_sharded_same("parameters", parameters_of(model), parameters_of(plain), tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("make", EVERY_KIND, ids=lambda f: f.__name__)
def test_padding_stays_zero(make: MakeOptimizer) -> None:
    model = shard()
    optimizer = local_like(make(trainable(model)), flat=True)
    for step in range(3):
        loss_of(CASE, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        for buffers in parameter._fsdp_param.target.group.storage.buffers:
            padding = torch.ones(buffers.shard.numel(), dtype=torch.bool)
            for param, slot in zip(buffers.params, buffers.layout.slots, strict=True):
                padding[slot.shard_offset : slot.shard_offset + param.local.numel()] = False
            assert not buffers.shard[padding].any()


@pytest.mark.full
@multi_rank(2)
@FORMS
def test_what_the_model_gives_up_is_freed(flat: bool) -> None:
    """The optimizer holds no shards beyond those of its parameters."""
    model = shard()
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    loss_of(CASE, model).backward()
    optimizer.step()
    optimizer.zero_grad()
    storages = {
        p._fsdp_param.target.group.storage.buffers[0].shard.untyped_storage()._weak_ref() for p in trainable(model)
    }
    model.to(torch.float64)
    model.to(torch.float32)
    alive = [torch.UntypedStorage._new_with_weak_ptr(each) for each in storages]
    assert all(each is None for each in alive)
    loss_of(CASE, model).backward()
    optimizer.step()


@multi_rank(4)
@FORMS
def test_gradients_of_several_meshes_and_plain_ones_are_set_to_zero(flat: bool) -> None:
    """torch's ``zero_grad`` of a foreach or fused optimizer refuses to mix them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh, ignored_params={*model[2].parameters()})
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            assert not (gradient.to_local() if isinstance(gradient, DTensor) else gradient).any()


# ---- refused -------------------------------------------------------------------------------------


@multi_rank(2)
def test_partial_parameters_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(FSDPValueError, match="only a part of a sum"):
        fsdp2.optim.local(torch.optim.SGD, [partial], lr=0.1)
    optimizer = fsdp2.optim.local(torch.optim.SGD, [nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(FSDPValueError, match="only a part of a sum"):
        optimizer.add_param_group({"params": [partial]})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def replicated(gradient: DTensor) -> Tensor:
    return gradient.redistribute(placements=[Replicate()])


def still_partial(gradient: DTensor) -> Tensor:
    return DTensor.from_local(gradient.full_tensor(), gradient.device_mesh, [Partial()])


@multi_rank(2)
@FORMS
@pytest.mark.parametrize("spoil", [replicated, still_partial], ids=lambda f: f.__name__)
def test_gradients_that_are_placed_otherwise_are_refused(spoil: Callable[[DTensor], Tensor], flat: bool) -> None:
    """Before anything is stepped; the step can be repeated once they are right."""
    model = shard()
    optimizer = local_like(adamw_foreach(trainable(model)), flat=flat)
    loss_of(CASE, model).backward()
    last = trainable(model)[-1]
    right = last.grad
    last.grad = spoil(right)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    with pytest.raises(FSDPValueError, match=r"gradient of parameter '4\.bias' is not sharded like it"):
        optimizer.step()
    assert_same("parameters", {name: p.to_local() for name, p in model.named_parameters()}, before)
    assert all(p._local_tensor.grad is None for p in model.parameters())
    last.grad = right
    optimizer.step()
    optimizer.zero_grad()
    reference = Reference(CASE, world_size=2, make_optimizer=adamw_foreach)
    expected = reference.step().parameters
    assert_sharded_same("parameters", parameters_of(model), expected, tolerance=FUSED)


class RowNormalized(torch.optim.Optimizer):
    """Keeps a number for each row."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() > 1:
                    self.state[parameter]["rows"] = parameter.grad.norm(dim=1)


@multi_rank(2)
def test_a_state_that_is_not_elementwise_is_found() -> None:
    model = shard()
    optimizer = fsdp2.optim.local(RowNormalized, trainable(model), elementwise=True)
    loss_of(CASE, model).backward()
    with pytest.raises(FSDPNotImplementedError, match=r"'rows' of shape .*not elementwise"):
        optimizer.step()


@multi_rank(2)
def test_a_sharded_parameter_of_no_dims() -> None:
    """Its momentum is a DTensor, its step counter is not, though both have no dims."""
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.tensor(2.0), torch.arange(3.0)]
    parameters = [
        nn.Parameter(distribute_tensor(values[0], mesh, [Replicate()])),
        nn.Parameter(distribute_tensor(values[1], mesh, [Shard(0)])),
    ]
    optimizer = fsdp2.optim.local(torch.optim.Adam, parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert isinstance(state["exp_avg"], DTensor) and not isinstance(state["step"], DTensor)
    plain = torch.optim.Adam(parameters, lr=0.1)
    plain.load_state_dict(optimizer.state_dict())
    plain.step()
    optimizer.step()
    assert dist.get_world_size() == 2
