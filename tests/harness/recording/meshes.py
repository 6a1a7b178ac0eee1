"""Scenarios on other meshes: replicas, several meshes, fewer ranks after forward, tensor parallelism, other dims.

A part of `scenarios`.
"""

from __future__ import annotations

import gc
import warnings
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
from fsdp2.core.gradients import GradientBucket
from tests.harness.recording.recorder import Recorder
from tests.harness.recording.training import STEPS, Expected, Stack, Training, step_in_backward

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


def replicated_accumulating_late(recorder: Recorder) -> None:
    """The same, with reductions in flight between the microbatches, several at a time, in another dtype."""
    training = _replicated(recorder, mp_policy=HALF)
    training.model.set_reduce_scatter_max_input_buffers(3)
    for _ in range(STEPS):
        for last in (False, False, True):
            training.model.set_requires_all_reduce(last)
            training.model.set_is_last_backward(last)
            training.loss().backward()
        training.update()


def replicated_accumulated_reduced(recorder: Recorder) -> None:
    """Two microbatches that both go all the way: the second is added to `.grad`."""
    training = _replicated(recorder)
    for _ in range(STEPS):
        training.loss().backward()
        training.loss().backward()
        training.update()


def replicated_stepped_in_backward(recorder: Recorder) -> None:
    """What an all-reduce brings is read as soon as the reduction after the next one begins."""
    step_in_backward(_replicated(recorder))


def replicated_partly_frozen(recorder: Recorder) -> None:
    """Parameters change `requires_grad` while reductions are in flight, some of which stop early."""
    training = _replicated(recorder)
    for trainable in (False, True, False):
        training.steps(2)
        training.model.set_is_last_backward(False)
        training.loss().backward()
        training.model.set_is_last_backward(True)
        training.model.blocks[1].up.bias.requires_grad_(trainable)
        training.steps(1)


def replicated_fails(recorder: Recorder) -> None:
    """A backward raises in a block while reductions are in flight, some of which wait for their all-reduce."""
    training = _replicated(recorder)

    def fail(gradient: Tensor) -> None:
        raise Expected

    for last in (True, False):
        training.steps(2)
        training.model.set_requires_all_reduce(last)
        block = training.model.blocks[0]
        handle = block.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with suppress(Expected):
            training.loss().backward()
        handle.remove()
        training.model.set_requires_all_reduce(True)
        with warnings.catch_warnings():  # of the gradients that are lost
            warnings.simplefilter("ignore")
            training.start_over()
    training.steps(2)


def _replicated_reduce_fails(recorder: Recorder, owner: Any, function: str, **options: Any) -> None:
    training = _replicated(recorder, **options)
    training.steps(2)
    for successes in (0, 2):
        issue = getattr(owner, function)
        calls: list[object] = []

        def fails(*args: Any, issue: Any = issue, calls: list[object] = calls, successes: int = successes) -> None:
            issue(*args)
            calls.append(None)
            if len(calls) > successes:
                raise Expected

        with mock.patch.object(owner, function, fails), suppress(Expected):
            training.loss().backward()
        training.start_over()
        training.steps(1)
    training.steps(1)


def all_reduce_fails(recorder: Recorder) -> None:
    """An exception (Ctrl-C, say) comes right after an all-reduce was issued, the first and the third of a backward."""
    _replicated_reduce_fails(recorder, transport, "all_reduce")


def arrival_fails(recorder: Recorder) -> None:
    """The same, after what follows the all-reduce."""
    _replicated_reduce_fails(recorder, GradientBucket, "finish", mp_policy=HALF)


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


def resharded_to_neighbours_direct(recorder: Recorder) -> None:
    """The same with parameters that are gathered in place, cast, and not."""
    _resharded(recorder, Stack(512, 514)).steps(3)
    _resharded(recorder, Stack(512, 514), mp_policy=HALF).steps(3)


def resharded_to_neighbours_on_replicas(recorder: Recorder) -> None:
    """HSDP, of which two ranks share the halves of a shard's neighbourhood; and checkpointed blocks."""
    _resharded(recorder, Stack(outside=True), mesh=replicate_and_shard()).steps()


def resharded_to_neighbours_out_of_order(recorder: Recorder) -> None:
    """Several forwards before a backward, an evaluation, another order, a forward in vain, a write between."""
    training = _resharded(recorder)
    for order in ([0, 1, 2], [2, 1, 0], [0, 1, 2]):
        training.model.order = order
        (training.loss() + training.loss()).backward()
        training.update()
        with torch.no_grad():
            training.loss()
        training.loss()
        with torch.no_grad():
            for parameter in training.optimizer.param_groups[0]["params"]:
                parameter.mul_(0.5)
        training.steps(1)


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
        replicated, replicated_direct, replicated_in_half, replicated_accumulating, replicated_accumulating_late,
        replicated_accumulated_reduced, replicated_partly_frozen, replicated_fails, all_reduce_fails, arrival_fails,
        replicated_deleted_in_flight, replicated_stepped_in_backward, only_replicated, two_meshes,
        two_meshes_of_shards, resharded_to_neighbours,
        resharded_to_neighbours_direct, resharded_to_neighbours_on_replicas, resharded_to_neighbours_out_of_order,
        resharded_to_neighbours_by_hand, tensor_parallel, other_dims,
    )
} | {
    "neighbours_fail": partial(neighbours_fail, launched=False),
    "neighbours_interrupted": partial(neighbours_fail, launched=True),
    "tensor_parallel_in_half": partial(tensor_parallel, policy=HALF),
}  # fmt: skip
