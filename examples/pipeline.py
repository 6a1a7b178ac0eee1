"""Pipeline parallelism outside, sharding inside: each stage of the model is sharded over its own ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/pipeline.py

4 ranks are 2 stages of 2. A stage sees a batch as 4 microbatches, one forward and one backward in turn (1F1B), and
reduces gradients once, after the last:

    rank         0  1     2  3
    stage          0        1
    shard        0  1     0  1     a batch of its own

`torch.distributed.pipelining` asks whether a stage is torch's FSDPModule; `fsdp2.compat.install` answers for ours.
Prints the loss beside the loss of the same training in one process.
"""

import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fsdp2.compat
from fsdp2 import fully_shard

MICROBATCHES = 4


def main() -> None:
    fsdp2.compat.install()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("stage", "shard"))
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))).to(device_type)
    index = mesh.get_local_rank("stage")
    part = copy.deepcopy(whole[2 * index : 2 * index + 2])
    for block in part:
        # Gathered once for all microbatches: a stage is small, and its blocks would be gathered 8 times otherwise.
        fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
    fully_shard(part, mesh=mesh["shard"], reshard_after_forward=False)
    stage = PipelineStage(part, index, 2, part[0][0].weight.to_local().device, group=mesh.get_group("stage"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)

    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (part, whole)]
    whole_batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(device_type)
    mine = whole_batch.chunk(2)[mesh.get_local_rank("shard")]
    for step in range(10):
        losses: list[torch.Tensor] = []
        if stage.is_first:
            schedule.step(mine)
        else:
            schedule.step(target=mine.sin() / 2, losses=losses)
        reference_loss = F.mse_loss(whole(whole_batch), whole_batch.sin() / 2)
        reference_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if stage.is_last:
            loss = torch.stack(losses).mean().detach()
            dist.all_reduce(loss, group=mesh.get_group("shard"))
            torch.testing.assert_close(loss / 2, reference_loss, rtol=1e-4, atol=1e-6)  # sums in another order, Adam
            if step % 3 == 0 and mesh.get_local_rank("shard") == 0:
                print(f"step {step}: loss {loss / 2:.6f}, in one process {reference_loss:.6f}", flush=True)
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
