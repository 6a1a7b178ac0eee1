"""What programs read of handles and flat parameters, and the conversions that they make through them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import FSDPValueError
from fsdp2.compat.fsdp1 import FullyShardedDataParallel, HandleShardingStrategy, MixedPrecision, ModuleWrapPolicy
from tests.harness import FakeWorlds, Reference, adamw, assert_trains_like, multi_rank
from tests.harness.models import UNEVEN_MLP


def test_handles(simulate: FakeWorlds) -> None:
    simulate(2)
    model: Any = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(3, 5), nn.ReLU()), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    assert not model._has_params and model._handle is None and model._is_root
    (handle,) = model._all_handles
    flat = handle.flat_param
    assert model[0]._flat_param._fqns == ("weight", "bias") and flat.dtype is torch.float32
    assert flat.requires_grad and flat.device == torch.device("cpu") and flat.numel() == 3 * 3 + 3
    assert torch.equal(flat.data, torch.cat([each.to_local().reshape(-1) for each in model.parameters()]))
    assert handle.uses_sharded_strategy and handle._sharding_strategy is HandleShardingStrategy.FULL_SHARD
    assert all(parameter._fsdp_flattened for parameter in model.parameters())
    for read, says in (
        (lambda: handle.unshard, r"module.unshard\(\)"),
        (lambda: flat._full_param_padded, r"full_parameters\(wrapper\)"),
        (lambda: flat.unheard_of, "'Programs written for FSDP1' in the documentation"),
    ):
        with pytest.raises(AttributeError, match=says):
            read()
    with pytest.raises(FSDPValueError, match="12 elements on this rank, got a tensor of 3"):
        flat.data = torch.ones(3)
    flat.data = torch.ones(12)
    assert (model[0].weight.to_local() == 1).all() and (model[0].bias.to_local() == 1).all()
    # verl: where they lie, and that they are two objects, although nothing holds the one that `data` returns.
    assert flat.data.data_ptr() == flat._local_shard.data_ptr() and id(flat.data) != id(flat._local_shard)
    flat._local_shard = flat.data * 2
    assert (flat.data == 2).all() and (model[0].weight.to_local() == 2).all()
    model[0]._is_root = True  # so does verl before it summons a unit
    assert not model[0]._is_root


@multi_rank(2)
@pytest.mark.full
def test_a_unit_is_converted_under_its_optimizer(world_size: int) -> None:
    """Moved to the host and back between iterations, as verl does, its parameters are still those that are stepped.

    (Converted here: there is one device. Both replace what is in the parameters.)
    """
    model: Any = FullyShardedDataParallel(UNEVEN_MLP.build(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = adamw(list(model.parameters()))
    before = list(model.parameters())
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    for _ in range(2):
        assert_trains_like(reference, model, optimizer, steps=1)
        gradients = [None if each.grad is None else each.grad.to_local() for each in before]
        for dtype in (torch.float64, torch.float32):
            for handle in model._all_handles:
                handle.flat_param.data = handle.flat_param.data.to(dtype)
        assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
        for parameter, gradient in zip(before, gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(parameter.grad.to_local(), gradient)


@multi_rank(2)
def test_upcasting_as_accelerate_does(world_size: int) -> None:
    """A model in bf16 that is to be trained in mixed precision: its shards become float32, before the optimizer is."""
    plain = UNEVEN_MLP.build().bfloat16()
    model = FullyShardedDataParallel(
        plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=MixedPrecision(torch.float32)
    )
    for each in FullyShardedDataParallel.fsdp_modules(model):
        if each._has_params and each._flat_param.dtype != torch.float32:  # type: ignore[union-attr]
            each._flat_param.data = each._flat_param.data.to(torch.float32)  # type: ignore[union-attr]
            each._handle._orig_param_dtype = torch.float32  # type: ignore[union-attr]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    reference = Reference(UNEVEN_MLP, world_size=world_size, model=UNEVEN_MLP.build().bfloat16().float())
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=2)
    handle = model._all_handles[0]
    model._unshard()
    handle.reshard(True)
    handle.flat_param_to("cpu")
    assert dist.get_world_size() == world_size
