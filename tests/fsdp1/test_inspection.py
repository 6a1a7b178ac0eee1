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
        (lambda: flat.unheard_of, "docs/fsdp1.md"),
    ):
        with pytest.raises(AttributeError, match=says):
            read()
    with pytest.raises(FSDPValueError, match="12 elements on this rank, got a tensor of 3"):
        flat.data = torch.ones(3)
    flat.data = torch.ones(12)
    assert (model[0].weight.to_local() == 1).all() and (model[0].bias.to_local() == 1).all()


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
