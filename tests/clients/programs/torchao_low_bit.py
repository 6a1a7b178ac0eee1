"""torchao's optimizers with states of 8 and 4 bits, and in float8.

Usage:
    torchrun --nproc-per-node 2 torchao_low_bit.py
"""

from __future__ import annotations

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from trial import Report, finish, gradient_norm, implementation, mean_over_ranks, part

STEPS, WIDTH, ROWS = 3, 64, 8
# A cached graph of one of these optimizers is taken for another's, with torch's implementation too: their states are
# tensor subclasses within DTensors, and the cache's keys do not tell them apart.
torch._functorch.config.enable_autograd_cache = False


class Model(nn.Sequential):
    """Weights whose shards are large enough for quantized states (4096 numbers, in blocks), and biases that are not."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Of a reconstruction."""
    return nn.functional.mse_loss(model(inputs), inputs)


def main() -> None:
    """Train with each, and report."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    report = Report()
    saved = {}
    for kind in (AdamW8bit, AdamW4bit, AdamWFp8):
        model, reference = Model(), Model()
        fully_shard(model[0])
        fully_shard(model)
        report.implementation = implementation(model)
        optimizer, expected_optimizer = kind(model.parameters(), lr=1e-2), kind(reference.parameters(), lr=1e-2)
        for step in range(STEPS):
            inputs = torch.randn(ROWS * size, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = loss_of(model, part(inputs, rank, size))
            loss.backward()
            expected = loss_of(reference, inputs)
            expected.backward()
            report.add("loss", mean_over_ranks(loss), expected.item())
            report.add("gradient norm", gradient_norm(model), gradient_norm(reference))
            for each in (optimizer, expected_optimizer):
                each.step()
                each.zero_grad()
        report.add_parameters(model, reference)
        saved |= {f"{kind.__name__} {name}": value.full_tensor() for name, value in model.state_dict().items()}
    report.save(saved)
    finish(report)


if __name__ == "__main__":
    main()
