"""The wrapper beside what programs use with it: checkpointing of activations, compile, tensor parallelism, DCP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import FSDPValueError
from fsdp2.compat.fsdp1 import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, StateDictType
from tests.fsdp1.helpers.models import Block, blocks
from tests.harness import Reference, adamw, assert_trains_like, multi_rank
from tests.harness.models import UNEVEN_MLP


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int, ranks: int | None = None) -> list[float]:
    """Losses of ``count`` steps; of a plain model, on the data of all ``ranks``."""
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        data = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(8)]
        mine = [dist.get_rank()] if ranks is None else range(ranks)
        total = sum(model(data[rank]).square().mean() for rank in mine) / len(mine)  # type: ignore[union-attr]
        total.backward()  # type: ignore[union-attr]
        losses.append(total.item())  # type: ignore[union-attr]
        optimizer.step()
    return losses


def assert_same_weights(model: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, expected, msg=name)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of what it looks at
@multi_rank(2)
def test_compiled_as_one_graph(world_size: int) -> None:
    plain = blocks()
    model = FullyShardedDataParallel(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Block}))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    steps(compiled, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3, world_size)
    assert_same_weights(model, plain)


@multi_rank(4)
@pytest.mark.full
def test_tensor_parallel(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = blocks()
    model: Any = copy.deepcopy(plain)
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}))
    data = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    model(data[mesh["dp"].get_local_rank()]).square().mean().backward()
    (sum(plain(each).square().mean() for each in data) / 2).backward()  # type: ignore[union-attr]
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)
    saved = model.state_dict()
    for name, value in plain.state_dict().items():
        assert type(saved[name]) is torch.Tensor and torch.equal(saved[name], value), name
    model.load_state_dict({name: value + 1 for name, value in saved.items()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), saved[name] + 1, msg=name)


@multi_rank(2)
@pytest.mark.parametrize("full", [False, True])
def test_dcp_knows_the_plain_names(full: bool, world_size: int, tmp_path: Path) -> None:
    models = [FullyShardedDataParallel(blocks(seed), auto_wrap_policy=ModuleWrapPolicy({Block})) for seed in (0, 1)]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    steps(models[0], optimizers[0], 2)
    options = StateDictOptions(full_state_dict=full)
    weights, state = get_state_dict(models[0], optimizers[0], options=options)
    assert list(weights) == list(blocks().state_dict())
    assert set(state["state"]) == set(weights)
    if not full:
        path = [str(tmp_path)]
        dist.broadcast_object_list(path)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path[0])
        weights, state = get_state_dict(models[1], optimizers[1], options=options)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path[0])
    weights, state = copy.deepcopy((weights, state))  # or both optimizers would have one counter of steps
    set_state_dict(models[1], optimizers[1], model_state_dict=weights, optim_state_dict=state, options=options)
    assert steps(models[0], optimizers[0], 2) == steps(models[1], optimizers[1], 2)


@multi_rank(2)
@pytest.mark.full
def test_sharded_state_dicts_by_dcp(world_size: int, tmp_path: Path) -> None:
    path = [str(tmp_path)]
    dist.broadcast_object_list(path)
    models = [FullyShardedDataParallel(blocks(seed), auto_wrap_policy=ModuleWrapPolicy({Block})) for seed in (0, 1)]
    saved: list[Any] = []
    for model in models:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved.append({"model": model.state_dict()})
    dcp.save(saved[0], checkpoint_id=path[0])
    dcp.load(saved[1], checkpoint_id=path[0])
    with FullyShardedDataParallel.state_dict_type(models[1], StateDictType.SHARDED_STATE_DICT):
        models[1].load_state_dict(saved[1]["model"])
    assert_same_weights(models[1], blocks(0))


@multi_rank(2)
@pytest.mark.full
def test_after_an_exception(world_size: int) -> None:
    """In the middle of a forward, and inside of ``no_sync``: what follows trains as if nothing had been."""
    model: Any = FullyShardedDataParallel(UNEVEN_MLP.build(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with pytest.raises(RuntimeError, match=r"mat1|shape"):
        model(torch.randn(2, 1))
    with pytest.raises(ZeroDivisionError), model.no_sync():
        UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 9, dist.get_rank())).backward()
        raise ZeroDivisionError
    model.zero_grad()
    assert_trains_like(Reference(UNEVEN_MLP, world_size=world_size), model, adamw(list(model.parameters())), steps=2)


@multi_rank(2)
def test_experts_of_one_rank_each(world_size: int) -> None:
    """What `ignored_states` is used for: parameters that differ between the ranks."""
    model: Any = blocks()
    with torch.no_grad():
        model[1].up.weight.add_(dist.get_rank())
    expert = model[1]
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_states=[expert])
    assert model[1] is expert and not isinstance(expert.up.weight, DTensor)
    model(torch.randn(2, 6)).sum().backward()
    norm = model.clip_grad_norm_(1e9)
    assert torch.isfinite(norm)
    assert expert.up.weight.grad is not None


@multi_rank(2)
@pytest.mark.full
def test_mixed_requires_grad_dtypes_and_forwards(world_size: int) -> None:
    """Refused by torch's FSDP1; here as of the plain module."""
    plain = blocks()
    plain[0].up.weight.requires_grad_(False)
    plain[1].down.bias.data = plain[1].down.bias.data.double()
    plain[1].down.forward = lambda x: torch.nn.functional.linear(  # type: ignore[method-assign]
        x, plain[1].down.weight, plain[1].down.bias.float()
    )
    model = blocks()
    model[0].up.weight.requires_grad_(False)
    wrapped: Any = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    (wrapped(data).sum() + wrapped(data * 2).square().sum()).backward()
    (plain(data).sum() + plain(data * 2).square().sum()).backward()
    for (name, found), expected in zip(wrapped.named_parameters(), plain.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad, check_dtype=False, msg=name)


@multi_rank(2)
def test_units_differ_in_their_arguments(world_size: int) -> None:
    plain = blocks()
    model: Any = copy.deepcopy(plain)
    for index, strategy in enumerate((ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP)):
        model[index] = FullyShardedDataParallel(model[index], sharding_strategy=strategy)
    model = FullyShardedDataParallel(model)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3, world_size)
    assert_same_weights(model, plain)
    with pytest.raises(FSDPValueError, match="to not already have FSDP applied but found 0 in Sequential"):
        FullyShardedDataParallel(nn.Sequential(model), auto_wrap_policy=ModuleWrapPolicy({Block}))
