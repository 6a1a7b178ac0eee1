"""Hybrid sharding (HSDP): parameters sharded within a group of ranks, replicated over the groups.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/hsdp.py

On a cluster the groups are machines: all-gathers and reduce-scatters stay inside one, and only the gradient of a
rank's shard is summed over machines. Here 4 ranks are 2 x 2, and every rank trains on a batch of its own:

    rank         0  1     2  3
    replicate      0        1
    shard        0  1     0  1

Prints how a parameter is placed and the loss, which falls; checks that both copies of each shard stay equal.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import fully_shard


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 8))
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weight = model[0][0].weight
    assert weight.placements == (Replicate(), Shard(0))
    say(f"a weight of shape {tuple(weight.shape)} is {weight.placements}, local shape {tuple(weight.to_local().shape)}")

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(64, 32, device=device_type)
    targets = inputs[:, :8].sin()
    losses = []
    for _ in range(20):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        losses.append(loss.item() / dist.get_world_size())
    say(f"mean loss over all ranks: {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps")
    assert losses[-1] < losses[0] / 2
    assert all(copies_are_equal(parameter, mesh) for parameter in model.parameters())
    say("both copies of every shard are equal")
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


def copies_are_equal(parameter: DTensor, mesh: DeviceMesh) -> bool:
    """Compare this rank's shard with its copy in the other group. A collective."""
    shard = parameter.to_local().detach()
    copies = [torch.empty_like(shard) for _ in range(2)]
    dist.all_gather(copies, shard, group=mesh.get_group("replicate"))
    return torch.equal(*copies)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
