"""torchao's weights that bring their own all-gather: NF4 under LoRA, INT8, INT8 mixed precision.

Usage:
    torchrun --nproc-per-node 2 torchao_quantized.py nf4|int8|int8-mixed [--reshard-after-forward]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchao.prototype.quantized_training import (
    Int8MixedPrecisionTrainingConfig,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
)
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4
from trial import Report, finish, gradient_norm, implementation, mean_over_ranks, part

STEPS, WIDTH, ROWS, RATE = 4, 256, 8, 0.2


class LoRALinear(nn.Module):
    """A frozen NF4 weight and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        weight = to_nf4(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Parameter(torch.randn(4, WIDTH) / WIDTH**0.5)
        self.b = nn.Parameter(torch.randn(WIDTH, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (rows, WIDTH) to the same."""
        out: Tensor = linear_nf4(x, self.weight) + x @ self.a.T @ self.b.T
        return out


class Block(nn.Module):
    """A residual block around one linear layer."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (rows, WIDTH) to the same."""
        out: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return out


def make(kind: str) -> nn.Sequential:
    """Two blocks, quantized."""
    torch.manual_seed(0)
    layers = [LoRALinear() if kind == "nf4" else nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    model = nn.Sequential(*(Block(layer) for layer in layers))
    if kind == "int8":
        quantize_(model, int8_weight_only_quantized_training())
    elif kind == "int8-mixed":
        # The INT8 products themselves have kernels on GPUs only.
        config = Int8MixedPrecisionTrainingConfig(output=False, grad_input=False, grad_weight=False)
        quantize_(model, int8_mixed_precision_training(config))
    return model


def main() -> None:
    """Train both, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["nf4", "int8", "int8-mixed"])
    parser.add_argument("--reshard-after-forward", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = make(options.kind)
    reference = make(options.kind)
    # The INT8 weights read `param_dtype`, and cannot do with None.
    policy = MixedPrecisionPolicy(param_dtype=torch.float32) if options.kind != "nf4" else MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    fully_shard(model, mp_policy=policy)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    # INT8 weights are rounded at random when they are updated, so that only their gradients can be compared.
    rates = {name: 0.0 if options.kind == "int8" and "linear" in name else RATE for name, _ in model.named_parameters()}
    report = Report(implementation(model))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(part(inputs, rank, size)).square().mean()
        loss.backward()
        expected = reference(inputs).square().mean()
        expected.backward()
        report.add("loss", mean_over_ranks(loss), expected.item())
        report.add("gradient norm", gradient_norm(model), gradient_norm(reference))
        for each in (model, reference):
            update(each, rates)
    finish(report)


def update(model: nn.Module, rates: dict[str, float]) -> None:
    """One step of plain gradient descent."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and rates[name]:
                parameter.add_(parameter.grad, alpha=-rates[name])
            parameter.grad = None


if __name__ == "__main__":
    main()
