"""One group whose parameters are gathered in bf16 and in fp32 from fp32 originals: one copy casts into both.

Beside the same on the CPU, computed without sharding.
"""

from __future__ import annotations

import torch
from torch import nn

from extras.gpu_check.programs.stacks import batch
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting
from fsdp2 import MixedPrecisionPolicy, fully_shard

WIDTH = 64


class Net(nn.Module):
    """Many parameters that are small, so that all are packed together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x.float()).to(layer.weight.dtype))
        return x.float().square().mean()


def _dtype_of(name: str, parameter: nn.Parameter) -> torch.dtype:
    return torch.float32 if name.startswith("norms") else torch.bfloat16


def run(setting: Setting) -> Found:
    """What was gathered is what was sharded, cast; and gradients are those of the plain model, in bf16's precision."""
    torch.manual_seed(0)
    plain = Net()
    complaints = []
    with setting.group():
        model = Net()
        model.load_state_dict(plain.state_dict())
        model.to(setting.device)
        kept = {id(parameter) for norm in model.norms for parameter in norm.parameters()}
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            param_dtype_override_fn=lambda parameter: torch.float32 if id(parameter) in kept else None,
        )
        fully_shard(model, mp_policy=policy)
        model.unshard()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            dtype = _dtype_of(name, expected)
            if found.dtype != dtype or not torch.equal(found.detach().cpu(), expected.detach().to(dtype)):
                complaints.append(f"{name}: gathered as {found.dtype}, and differs from the original as {dtype}")
        model.reshard()
        model(batch(setting, WIDTH, 0)).backward()
        for rank in range(setting.ranks):
            (plain(batch(setting, WIDTH, 0, rank).cpu()) / setting.ranks).backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            gradient = found.grad.full_tensor().cpu()
            error = (gradient - expected.grad).norm() / expected.grad.norm()
            if not error < 0.05:
                complaints.append(f"{name}: its gradient is off by {error:.1%} of its norm")
    return {"torch": torch.__version__, COMPLAINTS: complaints}
