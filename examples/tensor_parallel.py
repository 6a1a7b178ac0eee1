"""Tensor parallelism inside, sharding outside (FSDP x TP): each matrix split over a pair, the halves sharded.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/tensor_parallel.py

4 ranks are 2 x 2. `parallelize_module` first splits the matrices over the inner axis, whose ranks see the same
batch; `fully_shard` then shards what each has of them over the outer one:

    rank         0  1     2  3
    shard          0        1      a batch of its own
    tp           0  1     0  1     half of the hidden layer

Prints how parameters are placed, and the loss beside the loss of the same training in one process.
"""

import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import fully_shard


class Block(nn.Module):
    """A residual block of two matrices: the first is split by rows, the second by columns, one sum after both."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("shard", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(device_type)
    reference = copy.deepcopy(model)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for name, weight in model[0].named_parameters():
        assert weight.to_local().numel() == weight.numel() // 4
        say(f"{name} {tuple(weight.shape)} is {weight.placements}, local shape {tuple(weight.to_local().shape)}")

    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, reference)]
    whole_batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(device_type)
    mine = whole_batch.chunk(2)[mesh.get_local_rank("shard")]  # the same for both ranks along tp
    for step in range(10):
        loss = F.mse_loss(model(mine), mine.sin())
        reference_loss = F.mse_loss(reference(whole_batch), whole_batch.sin())
        for each, optimizer in zip((loss, reference_loss), optimizers, strict=True):
            each.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), group=mesh.get_group("shard"))
        torch.testing.assert_close(loss / 2, reference_loss, rtol=1e-4, atol=1e-6)  # sums in another order, Adam
        if step % 3 == 0:
            say(f"step {step}: loss {loss / 2:.6f}, in one process {reference_loss:.6f}")
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
