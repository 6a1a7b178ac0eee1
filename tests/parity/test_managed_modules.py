"""What surrounds the engine: classes, slices, other forward methods, and which parameters a call manages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.harness import Reference, assert_same, full_parameters, multi_rank
from tests.harness.models import MLP, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API, IS_TORCH, beyond_torch
from tests.harness.parity.programs import TOWER, WIDTH, Layer, is_sharded, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, traced

# ---- the class -----------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
def test_the_module_itself_is_returned_with_a_class_derived_from_both() -> None:
    module = nn.Linear(3, 5)
    assert API.fully_shard(module) is module
    cls = type(module)
    assert isinstance(module, API.FSDPModule) and isinstance(module, nn.Linear)
    assert cls.__name__ == "FSDPLinear" and cls.__mro__[:3] == (cls, API.FSDPModule, nn.Linear)
    other = API.fully_shard(nn.Linear(2, 2))
    assert type(other) is cls
    assert type(nn.Linear(2, 2)) is nn.Linear


@multi_rank(2)
def test_the_class_of_a_sharded_module_can_be_looked_up() -> None:
    module = API.fully_shard(nn.Linear(3, 5))
    classes = API.get_cls_to_fsdp_cls()
    assert classes[nn.Linear] is type(module)
    assert API.get_cls_to_fsdp_cls() is classes


@multi_rank(2)
def test_the_state_of_a_sharded_module_can_be_looked_up() -> None:
    model = UNEVEN_MLP.build()
    API.fully_shard([model[0], model[2]])
    API.fully_shard(model)
    state = API.fully_shard.state
    assert state(model) is not None and state(model[0]) is not None
    assert state(model[0]) is state(model[2]) and state(model[0]) is not state(model)
    assert state(model[4]) is None and state(nn.Linear(2, 2)) is None


@multi_rank(2)
def test_the_state_of_a_sharded_module_can_be_asked_of_itself() -> None:
    """`_get_fsdp_state`: private in torch, but what its own pipelining calls."""
    model = shard(UNEVEN_MLP)
    for unit in UNEVEN_MLP.units(model):
        assert unit._get_fsdp_state() is API.fully_shard.state(unit)


@pytest.mark.full
@multi_rank(2)
def test_names_and_structure_are_those_of_the_plain_model() -> None:
    model, plain = shard(TRANSFORMER), TRANSFORMER.build()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]


@multi_rank(2)
def test_a_slice_of_a_container_is_a_plain_container_of_the_same_modules() -> None:
    model = shard(UNEVEN_MLP)
    part = model[:2]
    assert type(part) is nn.Sequential and not isinstance(part, API.FSDPModule)
    assert len(part) == 2 and part[0] is model[0] and isinstance(part[0], API.FSDPModule)
    assert model[-1] is model[4]
    loss_on(UNEVEN_MLP, model)  # the model becomes the root
    assert torch.equal(part(torch.ones(1, 13)), UNEVEN_MLP.build()[:2](torch.ones(1, 13)))


@multi_rank(2)
def test_calling_the_class_of_a_sharded_module_makes_a_plain_one() -> None:
    module = API.fully_shard(nn.Linear(3, 5))
    made = type(module)(4, 6)
    assert type(made) is nn.Linear and made.weight.shape == (6, 4)


@multi_rank(2)
def test_without_new_init_that_leaves_the_new_one_uninitialized() -> None:
    module = API.fully_shard(nn.Linear(3, 5))
    with API.disable_fsdp_module_new_init():
        made = type(module)(4, 6)
        with API.disable_fsdp_module_new_init():
            pass
        again = type(module)(4, 6)
    assert "in_features" not in vars(made) and "in_features" not in vars(again)
    assert type(module)(4, 6).in_features == 4


# ---- other forward methods -----------------------------------------------------------------------


class Coder(nn.Module):
    """Two methods beside forward that use its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 13)
        self.outer = nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x), gain=1.0)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def decode(self, x: Tensor, *, gain: float) -> Tensor:
        return self.outer(x) * gain


CODER = ModelCase("coder", Coder, TOWER.make_batch, (), F.mse_loss)


@pytest.mark.full
@multi_rank(2, 4)
def test_a_registered_method_gathers_and_trains_like_forward(world_size: int) -> None:
    model = shard(CODER)
    for method in ("encode", "decode"):
        assert API.register_fsdp_forward_method(model, method) is None
    train(CODER, model, loss=lambda m, b: F.mse_loss(m.decode(m.encode(b.inputs), gain=1.0), b.targets))
    train_on = CODER.batch(0, 0, 0).inputs
    with torch.no_grad(), traced() as trace:
        model.encode(train_on)
    assert trace.of(GATHER) or not is_sharded(model.inner.weight)


@multi_rank(2)
def test_a_registered_method_casts_and_reshards_like_forward() -> None:
    model = CODER.build()
    policy = API.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    API.fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    API.register_fsdp_forward_method(model, "encode")
    seen: list[Any] = []
    model.inner.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, is_sharded(module.weight))))
    assert model.encode(torch.randn(2, WIDTH)).dtype == torch.float64
    assert seen == [(torch.bfloat16, False)] and is_sharded(model.inner.weight)
    assert model.encode.__name__ == "encode"


@multi_rank(2)
def test_a_registered_method_of_another_object_stays_that_objects() -> None:
    model, other = shard(CODER), CODER.build()
    model.encode = other.encode
    API.register_fsdp_forward_method(model, "encode")
    x = torch.randn(2, WIDTH)
    other.inner = nn.Identity()
    assert torch.equal(model.encode(x), other.encode(x))


@multi_rank(2)
def test_registering_a_method_of_a_plain_module_does_nothing() -> None:
    module = Layer("a", 4)
    before = module.also
    API.register_fsdp_forward_method(module, "also")
    API.register_fsdp_forward_method(module, "missing")
    assert module.also == before


@multi_rank(2)
def test_registering_a_method_that_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="missing"):
        API.register_fsdp_forward_method(shard(CODER), "missing")


# ---- which parameters ----------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    "kind",
    [set, pytest.param(list, marks=beyond_torch("compares parameters elementwise"))],
    ids=lambda each: each.__name__,
)
def test_ignored_parameters_are_left_alone(kind: Callable[[Any], Any], world_size: int) -> None:
    model, plain = UNEVEN_MLP.build(), UNEVEN_MLP.build()
    ignored = list(model[2].parameters())
    for unit in UNEVEN_MLP.units(model):
        API.fully_shard(unit, ignored_params=kind(ignored))
    assert all(mine is given for mine, given in zip(model[2].parameters(), ignored, strict=True))
    assert not any(is_sharded(parameter) for parameter in ignored)
    loss_on(UNEVEN_MLP, model).backward()
    record = Reference(UNEVEN_MLP, world_size=world_size).step()
    loss_on(UNEVEN_MLP, plain).backward()
    assert torch.equal(model[2].weight.grad, plain[2].weight.grad)  # this rank's, not reduced
    reduced = model[0].weight.grad.full_tensor()
    assert torch.allclose(reduced, record.gradients["0.weight"], rtol=1e-5, atol=1e-6)


@pytest.mark.full
@multi_rank(2)
def test_parameters_shared_within_a_call_stay_shared() -> None:
    model = shard(TIED)
    assert model.head.weight is model.embedding.weight
    model.unshard()
    assert model.head.weight is model.embedding.weight and not is_sharded(model.head.weight)
    model.reshard()
    assert model.head.weight is model.embedding.weight


@pytest.mark.full
@multi_rank(2)
def test_a_parameter_shared_by_two_calls_is_an_error() -> None:
    """With torch's; ours trains it (tests/multi_rank/parameters/test_tied_across_groups.py)."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="shared") if IS_TORCH else nullcontext():
        for unit in (model[0], model[1], model):
            API.fully_shard(unit)
        model(torch.randn(2, 4))


@pytest.mark.full
@multi_rank(2)
def test_a_module_registered_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    case = ModelCase("twice", Twice, TOWER.make_batch, (), F.mse_loss)
    for units in ((), ("first",)):
        model = shard(ModelCase("twice", Twice, TOWER.make_batch, units, F.mse_loss))
        assert model.first is model.second and list(dict(model.named_parameters())) == ["first.weight", "first.bias"]
        train(case, model)


@pytest.mark.full
@multi_rank(2)
def test_a_frozen_parameter_gets_no_gradient_and_may_be_thawed_and_frozen_again() -> None:
    model = MLP.build()
    model[0].requires_grad_(False)
    shard(MLP, model)
    loss_on(MLP, model).backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    model.zero_grad()
    model[0].requires_grad_(True)
    train(MLP, model)
    model[0].requires_grad_(False)
    loss_on(MLP, model).backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None


@pytest.mark.full
@multi_rank(2)
def test_buffers_stay_as_they_are_and_are_of_each_rank() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5))

    model, plain = build(), build()
    buffer = model[1].running_mean
    for unit in (model[0], model):
        API.fully_shard(unit)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for each in (model, plain):
        each(x).sum().backward()
    assert model[1].running_mean is buffer and type(buffer) is Tensor
    assert torch.equal(buffer, plain[1].running_mean)
    assert model[1].num_batches_tracked == 1


@pytest.mark.full
@multi_rank(2)
def test_modules_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.GELU(), nn.Identity())
    for unit in (*model, model):
        API.fully_shard(unit)
    model(torch.randn(2, WIDTH)).sum().backward()
    model[1].unshard()
    model[1].reshard()
    assert model[0].weight.grad is not None


@pytest.mark.full
@multi_rank(2)
def test_containers_with_a_forward_may_be_sharded_and_others_not() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = module(x)
            return x

    model = API.fully_shard(Chain([nn.Linear(4, 4), nn.Linear(4, 4)]))
    model(torch.randn(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="forward"):
            API.fully_shard(container)


@pytest.mark.full
@multi_rank(2, 4)
def test_a_mesh_of_one_rank_trains_each_rank_alone(world_size: int) -> None:
    mesh = mesh_of(world_size, 1, names=("outer", "inner"))["inner"]
    model = shard(UNEVEN_MLP, mesh=mesh)
    plain = UNEVEN_MLP.build()
    assert model[0].weight.placements == (Shard(0),)
    for each in (model, plain):
        loss_on(UNEVEN_MLP, each).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad)


@pytest.mark.full
@multi_rank(2, 4)
def test_more_ranks_than_rows(world_size: int) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    case = ModelCase("narrow", Narrow, TOWER.make_batch, ("one",), F.mse_loss)
    model = shard(case)
    local = model.one.weight.to_local()
    assert local.shape == ((1, WIDTH) if dist.get_rank() == 0 else (0, WIDTH))
    train(case, model)


@pytest.mark.full
@multi_rank(2)
def test_sharded_parameters_keep_their_attributes_of_dtensor() -> None:
    parameter = shard(UNEVEN_MLP)[0].weight
    assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
    assert parameter.is_leaf and parameter.requires_grad and parameter.grad is None
    assert parameter.shape == (97, 13) and parameter.dtype == torch.float32


@pytest.mark.full
@multi_rank(2)
def test_full_parameters_are_those_of_the_plain_model() -> None:
    for case in (MLP, UNEVEN_MLP, TRANSFORMER):
        expected = {name: parameter.detach() for name, parameter in case.build().named_parameters()}
        assert_same("parameters", full_parameters(shard(case)), expected)
