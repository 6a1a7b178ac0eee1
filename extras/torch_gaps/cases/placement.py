"""Where parameters lie: meshes, strategies, owners, blocks, host memory."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from extras.torch_gaps.checks import (
    WIDTH,
    Wrong,
    batch,
    expect_same,
    expect_same_gradients,
    expect_same_parameters,
    expect_trains_alike,
    mean_backward,
    squared_output,
)
from extras.torch_gaps.registry import Trial, case

AREA = "Placement and strategies"


def two_layers() -> nn.Sequential:
    """Two linear layers that tensor parallelism can cut."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Cuts the first layer by columns and the last by rows."""
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _expect_int_reshard(trial: Trial, tensor_parallel_size: int) -> None:
    mesh = init_device_mesh("cpu", (4, tensor_parallel_size), mesh_dim_names=("dp", "tp"))
    model = two_layers()
    plain = copy.deepcopy(model)
    tensor_parallel(model, mesh["tp"])
    trial.api.fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
    data_rank = trial.rank // tensor_parallel_size
    squared_output(model, batch(data_rank)).backward()
    mean_backward(Trial(trial.api, data_rank, 4), plain, 0)
    expect_same_gradients(model, plain)


@case(
    AREA,
    "an int for `reshard_after_forward` with tensor parallelism over 2 ranks",
    world_size=8,
)
def int_reshard_with_tensor_parallelism(trial: Trial) -> None:
    _expect_int_reshard(trial, 2)


@case(AREA, "the same over 1 rank", world_size=4)
def int_reshard_with_tensor_parallelism_of_one(trial: Trial) -> None:
    _expect_int_reshard(trial, 1)


@case(AREA, "an int for `reshard_after_forward` with `Shard(1)`", world_size=4)
def int_reshard_of_second_dim(trial: Trial) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model, reshard_after_forward=2, shard_placement_fn=lambda parameter: Shard(1))
    expect_trains_alike(trial, model, plain)


@case(AREA, "`dp_mesh_dims` where only some parameters are DTensors", asked="pytorch#173509", world_size=4)
def spmd_mesh_with_plain_parameters(trial: Trial) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    plain = copy.deepcopy(model)
    distribute_module(model[0], mesh)
    dims = trial.api.options("DataParallelMeshDims", shard="dp")
    trial.api.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    # The layer's weight is a DTensor on the whole mesh, and so must be its input.
    model[0].register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh["tp"], [Replicate()]),))
    model[0].register_forward_hook(lambda _, args, output: output.to_local())
    squared_output(model, batch(trial.rank // 2)).backward()
    mean_backward(Trial(trial.api, trial.rank // 2, 2), plain, 0)
    expect_same_gradients(model, plain)


@case(
    AREA,
    "replicate, ZeRO-1, ZeRO-2, ZeRO-3 as one argument, changed between iterations",
    asked="pytorch#165933 torchtune#2402",
)
def strategy(trial: Trial) -> None:
    trial.api.require("fully_shard", "strategy")
    model = two_layers()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model[0], strategy="replicate")
    trial.api.fully_shard(model, strategy="zero3")
    change = trial.api.method(model, "set_strategy", "recurse")
    for name in ("zero2", "zero1", "zero3"):
        change(name, recurse=False)
        squared_output(model, batch(trial.rank)).backward()
        mean_backward(trial, plain, 0)
        expect_same_gradients(model, plain)


@case(AREA, "ZeRO-2 and ZeRO-3 in turn, by `set_reshard_after_forward`")
def strategy_by_setter(trial: Trial) -> None:
    model = two_layers()
    plain = copy.deepcopy(model)
    for layer in (model[0], model[2], model):
        trial.api.fully_shard(layer)
    for step in range(4):
        model.set_reshard_after_forward(step % 2 == 0)
        squared_output(model, batch(trial.rank, step)).backward()
        mean_backward(trial, plain, step)
        expect_same_gradients(model, plain)


@case(AREA, "a matrix and its gradient whole on one rank (Muon, Shampoo)", asked="torchtitan#2494 lerobot#4658")
def owned_matrix(trial: Trial) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    plain = copy.deepcopy(model)
    owner = trial.api.find("Owned", otherwise="`shard_placement_fn` returns a `Shard`, on every rank")
    trial.api.fully_shard(model, shard_placement_fn=lambda parameter: owner(1))
    squared_output(model, batch(trial.rank)).backward()
    mean_backward(trial, plain, 0)
    local = model.weight.grad.to_local()
    if len(local) != (WIDTH if trial.rank == 1 else 0):
        raise Wrong(f"rank {trial.rank} holds {len(local)} rows")
    if len(local):
        expect_same(local, plain.weight.grad, "the gradient on its owner")


@case(AREA, "shards never cut a block of 4 rows (fp8, NF4 scales)", asked="pytorch#169320 torchtitan#4371")
def whole_blocks(trial: Trial) -> None:
    model = nn.Linear(WIDTH, 12, bias=False)
    plain = copy.deepcopy(model)
    blocks = trial.api.find("RowBlocks", otherwise="`Shard(0)` cuts after `ceil(rows / ranks)` rows")
    trial.api.fully_shard(model, shard_placement_fn=lambda parameter: blocks(4))
    if model.weight.to_local().shape[0] % 4:
        raise Wrong(f"rank {trial.rank} holds {model.weight.to_local().shape[0]} rows")
    expect_trains_alike(trial, model, plain)


@case(
    AREA,
    "optimizer state offloaded, parameters and gradients not (or any other choice)",
    asked="pytorch#74588 torchtitan#1168",
)
def offload_separately(trial: Trial) -> None:
    policy = trial.api.options("CPUOffloadPolicy", parameters=False, gradients=False, optimizer_state=True)
    model = two_layers()
    plain = copy.deepcopy(model)
    trial.api.fully_shard(model, offload_policy=policy)
    expect_trains_alike(trial, model, plain)


@case(
    AREA,
    "uneven experts: sharded over their own mesh, along `Shard(1)`",
    asked="pytorch#137342 torchtitan#2281",
    world_size=4,
)
def uneven_experts(trial: Trial) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    weight = torch.randn(4, 5, 3)
    module = nn.Module()
    module.experts = nn.Parameter(distribute_tensor(weight, mesh["ep"], [Shard(0)]))
    trial.api.fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda parameter: Shard(1))
    expect_same(module.experts.full_tensor().detach(), weight, "`experts`", tolerance=0)


@case(AREA, "two experts on four ranks, none without a part, and no copy to put them in order", world_size=4)
def few_experts(trial: Trial) -> None:
    placement = trial.api.find("BlockShard", otherwise="`Shard(0)` leaves two ranks empty, `Shard(1)` copies")
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
    model.forward = lambda x: torch.einsum("bi,eoi->beo", x, model.experts)
    plain = copy.deepcopy(model)
    plain.forward = lambda x: torch.einsum("bi,eoi->beo", x, plain.experts)
    trial.api.fully_shard(model, shard_placement_fn=lambda parameter: placement.split_leading(parameter.shape, 2))
    if not model.experts.to_local().numel():
        raise Wrong(f"rank {trial.rank} holds nothing")
    expect_trains_alike(trial, model, plain)


@case(AREA, "ranks that initialized differently start from rank 0's values", asked="pytorch#132721 open_lm#165")
def synchronized_start(trial: Trial) -> None:
    torch.manual_seed(trial.rank)
    model = two_layers()
    trial.api.shard_the_first_rank_s_values(model)
    torch.manual_seed(0)
    plain = two_layers()
    expect_same_parameters(model, plain)


@case(AREA, "the same by `set_model_state_dict` with `broadcast_from_rank0=True`")
def synchronized_start_by_loading(trial: Trial) -> None:
    plain = two_layers()
    torch.manual_seed(1 + trial.rank)
    model = two_layers() if trial.rank else copy.deepcopy(plain)
    state = model.state_dict() if trial.rank == 0 else {}
    state = {name: value.clone() for name, value in state.items()}
    trial.api.fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    expect_same_parameters(model, plain)
