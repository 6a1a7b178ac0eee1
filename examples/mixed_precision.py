"""Mixed precision: shards and sums of gradients are float32, what is gathered and computed with is bfloat16.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/mixed_precision.py

The optimizer sees float32 alone, so small updates are not lost and no gradient scaler is needed. A shard is cast
before it is gathered: half the bytes to send, half the memory for gathered parameters. The last layer stays in
float32 by a policy of its own, which also casts its inputs.

Prints the dtypes found at each place, and the loss, which falls.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = MixedPrecisionPolicy(param_dtype=torch.float32)


class Layer(nn.Linear):
    """A linear layer that notes in which dtypes it was computed."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.computed_in = {x.dtype, self.weight.dtype, output.dtype}
        return output


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (4,))
    torch.manual_seed(0)
    blocks = [nn.Sequential(Layer(32, 32), nn.Tanh()) for _ in range(3)]
    head = Layer(32, 8)
    model = nn.Sequential(*blocks, head)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=HALF)
    fully_shard(head, mesh=mesh, mp_policy=FULL)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(64, 32, device=device_type)
    targets = inputs[:, :8].sin()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())

    weight = blocks[1][0].weight
    assert blocks[1][0].computed_in == {torch.bfloat16}
    assert head.computed_in == {torch.float32}
    assert weight.dtype == weight.grad.dtype == optimizer.state[weight]["exp_avg"].dtype == torch.float32
    assert losses[-1] < losses[0] / 2
    say(f"a block computes in {blocks[1][0].computed_in}, the head in {head.computed_in}")
    say(f"shards are {weight.dtype}, their gradients {weight.grad.dtype}, so is the optimizer's state")
    say(f"mean loss over all ranks: {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps")
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
