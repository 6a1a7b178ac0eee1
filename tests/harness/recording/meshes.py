"""Scenarios on other meshes: replicas, several meshes, fewer ranks after forward, tensor parallelism, other dims.

A part of `scenarios`.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)
from fsdp2.core import transport
from tests.harness.recording.recorder import Recorder
from tests.harness.recording.training import STEPS, Expected, Stack, Training

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
"""Gradients are reduced in another dtype than they are delivered in. (Left to itself, torch 2.15 reduces in fp32.)"""
train = Training.of_stack


def replicate_and_shard(*names: str) -> DeviceMesh:
    """Two dims, the first of size 2."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names or ("replicate", "shard"))


# ---- replicas ----------------------------------------------------------------------------------------------


def _replicated(recorder: Recorder, model: Stack | None = None, **options: Any) -> Training:
    return train(recorder, model, mesh=replicate_and_shard(), **options)


def replicated(recorder: Recorder) -> None:
    """HSDP: gradients go on from the reduce-scatter to the all-reduce."""
    _replicated(recorder).steps()


def replicated_direct(recorder: Recorder) -> None:
    """HSDP with parameters that are gathered and reduced in place, and a root that is resharded too."""
    _replicated(recorder, Stack(512, 514), reshard_after_forward=True).steps()


def replicated_in_half(recorder: Recorder) -> None:
    """HSDP, reduced in another dtype than gradients are delivered in."""
    _replicated(recorder, mp_policy=HALF).steps()


def replicated_accumulating(recorder: Recorder) -> None:
    """`set_requires_all_reduce(False)`: two microbatches stop after the reduce-scatter, the third goes on."""
    training = _replicated(recorder)
    for _ in range(STEPS):
        for last in (False, False, True):
            training.model.set_requires_all_reduce(last)
            training.loss().backward()
        training.update()


def replicated_stepped_in_backward(recorder: Recorder) -> None:
    """What an all-reduce brings is read as soon as the reduction after the next one begins."""
    training = _replicated(recorder)
    for parameter in training.model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=True)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        training.loss().backward()


def all_reduce_fails(recorder: Recorder) -> None:
    """An exception (Ctrl-C, say) comes right after an all-reduce was issued, the first and the third of a backward."""
    training = _replicated(recorder)
    training.steps(2)
    for successes in (0, 2):
        issue, calls = transport.all_reduce, list[object]()

        def fails(*args: Any, issue: Any = issue, calls: list[object] = calls, successes: int = successes) -> None:
            issue(*args)
            calls.append(None)
            if len(calls) > successes:
                raise Expected

        with mock.patch.object(transport, "all_reduce", fails), suppress(Expected):
            training.loss().backward()
        training.start_over()
        training.steps(1)
    training.steps(1)


def replicated_deleted_in_flight(recorder: Recorder) -> None:
    """A model is dropped while gradients are all-reduced; another is trained on the same streams, as from a pool."""
    for deleted in (True, False):
        recorder.new_streams = count(10)
        training = _replicated(recorder, mp_policy=HALF)
        training.steps(2)
        if deleted:
            training.model.set_is_last_backward(False)
            training.loss().backward()
        del training
        gc.collect()


# ---- no shards: parameters are only replicated -----------------------------------------------------------


def only_replicated(recorder: Recorder) -> None:
    """DDP: the one shard is the whole, gathers are copies. Parameters are DTensors on the mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("copies",))
    model = Stack()
    _distribute(model, mesh)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="copies"), reshard_after_forward=True)
    batch = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)], run_check=False)
    Training.of(recorder, model, lambda: model(batch).square().sum().full_tensor()).steps()


def _distribute(module: nn.Module, mesh: DeviceMesh) -> None:
    for each in module.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None:
                whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
                each.register_parameter(name, nn.Parameter(whole))


# ---- two meshes ----------------------------------------------------------------------------------------------


def two_meshes(recorder: Recorder) -> None:
    """Blocks whose second layer is sharded over fewer ranks than the first, and replicated: two groups each."""
    inner = HSDPMeshInfo(replicate_and_shard("a", "b"), shard_mesh_dim=1, replicate_mesh_dim=0)
    _on_two_meshes(recorder, inner)


def two_meshes_of_shards(recorder: Recorder) -> None:
    """The second group is on a mesh of one dim; it is not the innermost one."""
    _on_two_meshes(recorder, FSDPMeshInfo(replicate_and_shard("a", "b")["a"], shard_mesh_dim=0))


def _on_two_meshes(recorder: Recorder, info: FSDPMeshInfo) -> None:
    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), info) if parameter.shape == (8, 11) else None

    training = train(recorder, shard_placement_fn=place)
    training.clips = False
    training.steps()


# ---- fewer ranks after forward -------------------------------------------------------------------------------


def _resharded(recorder: Recorder, model: Stack | None = None, **options: Any) -> Training:
    return train(recorder, model, reshard_after_forward=2, **options)


def resharded_to_neighbours(recorder: Recorder) -> None:
    """Between forward and backward every rank keeps half of the parameters."""
    _resharded(recorder).steps()


def resharded_to_neighbours_on_replicas(recorder: Recorder) -> None:
    """HSDP, of which two ranks share the halves of a shard's neighbourhood; and checkpointed blocks."""
    _resharded(recorder, Stack(outside=True), mesh=replicate_and_shard()).steps()


def resharded_to_neighbours_by_hand(recorder: Recorder) -> None:
    """`unshard` and `reshard` while the parameters rest on the neighbours, then at last on all ranks."""
    training = _resharded(recorder)
    for _ in range(STEPS):
        loss = training.loss()
        training.model.blocks[0].reshard()
        handle = training.model.blocks[1].unshard(async_op=True)
        training.model.blocks[2].unshard(async_op=True)
        handle.wait()
        loss.backward()
        training.update()
    training.model.set_reshard_after_forward(True)
    training.steps(2)


def neighbours_fail(recorder: Recorder, *, launched: bool) -> None:
    """A gather among neighbours raises, before its collective was launched or right after; blocks are laid out anew."""
    training = _resharded(recorder)
    training.steps(2)
    for successes in (0, 1):
        loss, issue, calls = training.loss(), transport.Native.all_gather, list[object]()

        def fails(*args: Any, issue: Any = issue, calls: list[object] = calls, successes: int = successes) -> None:
            calls.append(None)
            if len(calls) <= successes or launched:
                issue(*args)
            if len(calls) > successes:
                raise Expected

        with mock.patch.object(transport.Native, "all_gather", fails), suppress(Expected):
            loss.backward()
        del loss
        training.start_over()
        for unit in (training.model, *training.model.blocks):
            unit.unshard(async_op=True)
        torch.ones(100)
        training.steps(1)
    training.steps(1)


# ---- tensor parallelism, other dims -------------------------------------------------------------------------


def tensor_parallel(recorder: Recorder, *, policy: MixedPrecisionPolicy | None = None) -> None:
    """Blocks whose layers are cut by tensor parallelism, and then sharded."""
    mesh = replicate_and_shard("dp", "tp")
    model = Stack(hidden=12)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    training = train(recorder, model, mesh=mesh["dp"], mp_policy=policy or MixedPrecisionPolicy())
    training.clips = False
    training.steps()


def other_dims(recorder: Recorder) -> None:
    """Matrices are cut by columns, some of them large."""
    for model in (Stack(hidden=12), Stack(512, 516, blocks=2)):
        train(recorder, model, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1)).steps(3)


MESHES = {
    function.__name__: function
    for function in (
        replicated, replicated_direct, replicated_in_half, replicated_accumulating, all_reduce_fails,
        replicated_deleted_in_flight, replicated_stepped_in_backward, only_replicated, two_meshes,
        two_meshes_of_shards, resharded_to_neighbours, resharded_to_neighbours_on_replicas,
        resharded_to_neighbours_by_hand, tensor_parallel, other_dims,
    )
} | {
    "neighbours_fail": partial(neighbours_fail, launched=False),
    "neighbours_interrupted": partial(neighbours_fail, launched=True),
    "tensor_parallel_in_half": partial(tensor_parallel, policy=HALF),
}  # fmt: skip
