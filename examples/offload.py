"""CPU offload: shards, gradients and the optimizer live in the CPU's memory, and visit the GPU to compute.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/offload.py

A GPU then holds the gathered parameters of two blocks and the activations, nothing else; the optimizer runs on the
CPU. A shard is copied over just before it is gathered, from pinned memory, while the block before computes.
Without a GPU everything is on the CPU anyway, and the program runs all the same.

Prints on which devices parameters are found at each place, and the loss, which falls.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, fully_shard


class Layer(nn.Linear):
    """A linear layer that notes where its weight was when it computed."""

    def forward(self, x: Tensor) -> Tensor:
        self.computed_on = self.weight.device
        return super().forward(x)


def main() -> None:
    has_gpu = torch.cuda.is_available()
    device_type = "cuda" if has_gpu else "cpu"
    mesh = init_device_mesh(device_type, (4,))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Layer(32, 32), nn.Tanh()) for _ in range(3)), Layer(32, 8))
    offload = CPUOffloadPolicy(pin_memory=has_gpu)  # only where there is a GPU to copy to
    for block in model[:3]:
        fully_shard(block, mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(64, 32, device=device_type)
    targets = inputs[:, :8].sin()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the sum of norms over ranks uses gloo
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())

    layer = model[1][0]
    assert layer.computed_on.type == device_type
    assert layer.weight.device.type == layer.weight.grad.device.type == "cpu"
    assert optimizer.state[layer.weight]["exp_avg"].device.type == "cpu"
    assert losses[-1] < losses[0] / 2
    say(f"a block computes on {layer.computed_on}; its shards are on {layer.weight.device}")
    say(f"gradients are on {layer.weight.grad.device}, so is the optimizer's state")
    say(f"mean loss over all ranks: {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps")
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
