"""A DDP program's calls, with its ``DistributedDataParallel`` sharded: as under torch's own, on the same ranks."""

from __future__ import annotations

import io
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPModule, FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError, ShardingConfig
from fsdp2.compat import auto_sharding
from tests.harness import multi_rank

pytestmark = pytest.mark.filterwarnings("ignore:--auto-shard comes too late:UserWarning")

SMALL = ShardingConfig(min_bytes=0, max_bytes=600)


class Net(nn.Module):
    """Linear layers, and batch norm, whose buffers every training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


@contextmanager
def sharded(config: ShardingConfig | None) -> Iterator[auto_sharding.AutoSharding]:
    """DDP is replaced inside."""
    replaced = auto_sharding.install(config)
    try:
        yield replaced
    finally:
        replaced.uninstall()


def program() -> tuple[Any, dict[str, torch.Tensor], list[float]]:
    """What a DDP program does: ranks begin differently, accumulate, step, evaluate."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        with model.no_sync():
            model(torch.randn(6, 8)).square().mean().backward()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(2, 8)).sum().item())
    state = {name: each for name, each in model.state_dict().items()}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in state.items()}
    return model, whole, losses


@multi_rank(2)
@pytest.mark.parametrize("config", [None, SMALL, ShardingConfig(strategy="replicate")], ids=["none", "small", "whole"])
def test_a_ddp_program_trains_as_before(config: ShardingConfig | None) -> None:
    _, expected, losses = program()
    with sharded(config) as replaced:
        assert torch.nn.parallel.DistributedDataParallel is auto_sharding.ShardedDataParallel and not replaced.was_used
        model, found, ours = program()
        assert replaced.was_used and isinstance(model, torch.nn.parallel.DistributedDataParallel)
    assert type(model).__name__ == "DistributedDataParallel" and isinstance(model.module, FSDPModule)
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)  # another order of summation
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    assert torch.nn.parallel.DistributedDataParallel is not auto_sharding.ShardedDataParallel


@multi_rank(2)
def test_files_of_ddp_are_loaded_and_shards_are_not_saved_by_one_rank() -> None:
    model, expected, _ = program()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    save = torch.save
    with sharded(SMALL):
        ours = torch.nn.parallel.DistributedDataParallel(Net())
        ours.load_state_dict(torch.load(file))
        for name, each in ours.named_parameters():
            assert isinstance(each, DTensor) and torch.equal(each.full_tensor(), expected[name])
        whole_dict = ours.state_dict()
        for value in (whole_dict, {"model": [ours.module]}, ours, UserDict(whole_dict), {*whole_dict.values()}):
            with pytest.raises(
                FSDPRuntimeError, match=r"torch\.save was called with a sharded tensor.*full_parameters"
            ):
                torch.save(value, io.BytesIO())
        with fsdp2.full_parameters(ours.module):
            kept = io.BytesIO()
            torch.save(ours.state_dict(), kept)
        kept.seek(0)
        assert all(torch.equal(each, expected[name]) for name, each in torch.load(kept).items())
        torch.save({"step": 3, "loss": torch.ones(2)}, io.BytesIO())
    assert torch.save is save


@multi_rank(2)
def test_a_file_as_ddps_can_be_written_as_the_error_says() -> None:
    """The model's and the optimizer's state; the error names which tensor is sharded."""
    with sharded(SMALL):
        ours = torch.nn.parallel.DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(ours.parameters())
        sum(p.square().sum() for p in ours.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        with fsdp2.full_parameters(ours.module):
            model = {name: value.clone() for name, value in ours.module.state_dict().items()}
        with pytest.raises(FSDPRuntimeError, match=r"sharded tensor, 'optimizer\.state\.\d\.exp_avg'"):
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, io.BytesIO())
        whole = get_optimizer_state_dict(ours.module, optimizer, options=StateDictOptions(full_state_dict=True))
        kept = io.BytesIO()
        torch.save({"model": model, "optimizer": whole}, kept)
        kept.seek(0)
        assert torch.load(kept)["model"].keys() == model.keys()


class Pair(NamedTuple):
    first: Any
    second: Any


@multi_rank(2)
def test_whole_tensors_are_saved_as_plain_ones() -> None:
    """What is replicated, wherever it is; the program's own objects stay as they are."""
    with sharded(ShardingConfig(strategy="replicate")):
        ours = torch.nn.parallel.DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(ours.parameters())
        sum(p.square().sum() for p in ours.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        cycle: list[Any] = [1]
        cycle.append(cycle)
        state = {"model": ours.state_dict(), "of": Pair([optimizer.state_dict()], ()), "cycle": cycle}
        kept = io.BytesIO()
        torch.save(state, kept)
        assert sum(isinstance(each, DTensor) for each in state["model"].values()) == 6
    kept.seek(0)
    found = torch.load(kept, weights_only=False)
    assert type(found["of"]) is Pair and type(found["model"]) is type(state["model"])
    assert all(type(each) is torch.Tensor for each in found["model"].values())
    (saved,) = found["of"].first
    assert type(saved["state"][0]["exp_avg"]) is torch.Tensor
    for name, value in state["model"].items():
        assert torch.equal(found["model"][name], value.to_local() if isinstance(value, DTensor) else value)


@multi_rank(2)
def test_torchs_state_dict_functions_know_the_wrapper() -> None:
    torchs = torch.nn.parallel.DistributedDataParallel
    with sharded(SMALL):
        model = torch.nn.parallel.DistributedDataParallel(Net())
        names = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
        assert list(names) == list(Net().state_dict())
    assert vars(torch.distributed.checkpoint.state_dict)["DDP"] is torchs


@multi_rank(2)
def test_what_has_no_counterpart_is_refused() -> None:
    with sharded(None):
        wrap = torch.nn.parallel.DistributedDataParallel
        group = dist.new_group([0, 1])
        for arguments, error, says in (
            ({"process_group": group}, FSDPNotImplementedError, "only the default process group"),
            ({"device_ids": [0, 1]}, FSDPValueError, "several devices"),
            ({"mixed_precision": object()}, FSDPNotImplementedError, "mixed_precision=.* mp_policy in the config"),
        ):
            with pytest.raises(error, match=says):
                wrap(Net(), **arguments)
        with pytest.raises(FSDPValueError, match="no parameter that needs a gradient"):
            wrap(Net().requires_grad_(False))
        with pytest.raises(FSDPValueError, match="sharded already"):
            wrap(fsdp2.fully_shard(Net()))
        model = wrap(Net(), process_group=dist.group.WORLD, device_ids=None, static_graph=True)
        with pytest.raises(FSDPNotImplementedError, match=r"register_comm_hook\(\) has no counterpart"):
            model.register_comm_hook(None, print)
        with pytest.raises(FSDPNotImplementedError, match=r"join\(\) has no counterpart"):
            model.join()


@multi_rank(4)
def test_the_mesh_of_the_config_and_parameters_that_ddp_ignores() -> None:
    with sharded(ShardingConfig(mesh_shape=(2, 2), min_bytes=0)):
        net = Net()
        net._ddp_params_and_buffers_to_ignore = ["last.bias"]  # type: ignore[assignment]
        model = torch.nn.parallel.DistributedDataParallel(net)
        assert not isinstance(model.module.last.bias, DTensor)
        weight = model.module.last.weight
        assert isinstance(weight, DTensor) and weight.device_mesh.shape == (2, 2)
        model(torch.randn(4, 8)).sum().backward()


@multi_rank(2)
@pytest.mark.parametrize("kind", ["torch", "fsdp2"])
def test_what_ddp_ignores_stays(kind: str) -> None:
    """Parameters and buffers, at the beginning and before a forward; the others are rank 0's."""
    rank, names = dist.get_rank(), ["last.bias", "norm.running_mean"]
    with sharded(SMALL) if kind == "fsdp2" else nullcontext():
        net = Net()
        with torch.no_grad():
            for each in (net.first.bias, net.last.bias, net.norm.running_mean, net.norm.running_var):
                each.fill_(rank + 1.0)
        ddp = torch.nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(net, names)
        model = ddp(net)
    with torch.no_grad():
        model.eval()(torch.ones(2, 8))
        for name, each in (*model.module.named_parameters(), *model.module.named_buffers()):
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            if name in names:
                assert (whole == rank + 1).all(), name
            elif name in ("first.bias", "norm.running_var"):
                assert (whole == 1).all(), name
