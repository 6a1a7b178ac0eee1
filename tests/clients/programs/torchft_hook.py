"""torchft's fault tolerant HSDP: replicas are reduced by a hook, over a process group of its own that can be rebuilt.

Usage:
    torchrun --nproc-per-node 4 torchft_hook.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._composable.fsdp import FSDPModule, fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torchft.process_group import ProcessGroupGloo
from trial import (
    Report,
    batch,
    build,
    finish,
    gradient_norm,
    implementation,
    mean_over_ranks,
    mean_squared_error,
    part,
    train_unsharded,
)

STEPS, RATE = 4, 0.2


def main() -> None:
    """Train both, the sharded model with a quorum that is lost and found again, and report."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    replicas = ProcessGroupGloo()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [f"localhost:{store.port}" if store is not None else ""]
    dist.broadcast_object_list(address, src=0)

    def average(gradients: torch.Tensor) -> None:
        replicas.allreduce([gradients], dist.AllreduceOptions()).wait()
        gradients /= 2

    reference, model = build(), build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)
    report = Report(implementation(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = [batch(step) for step in range(STEPS)]
    losses, norms = train_unsharded(
        reference, torch.optim.SGD(reference.parameters(), lr=RATE), batches, mean_squared_error
    )
    shard, replica = mesh["shard"].get_local_rank(), mesh["replicate"].get_local_rank()
    for step, ((inputs, targets), expected, norm) in enumerate(zip(batches, losses, norms, strict=True)):
        if step % 2 == 0:  # another quorum
            replicas.configure(f"{address[0]}/quorum{step}/{shard}", f"replica{replica}", replica, 2)
        loss = mean_squared_error(model, part(inputs, rank, size), part(targets, rank, size))
        loss.backward()
        report.add("loss", mean_over_ranks(loss), expected)
        report.add("gradient norm", gradient_norm(model), norm)
        optimizer.step()
        optimizer.zero_grad()
    report.add_parameters(model, reference)
    report.save({name: value.full_tensor() for name, value in model.state_dict().items()})
    finish(report)


if __name__ == "__main__":
    main()
