"""Muon without a gather of its own: each hidden matrix lives whole on one rank, which orthogonalizes it.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/muon.py

`balanced_owners` deals out the matrices of the blocks; gradients arrive whole at their owners with the group's
reduce-scatter, and its next all-gather brings the stepped matrices to all ranks. AdamW steps the rest, sharded as ever.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import balanced_owners, fully_shard


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly U Vᵀ of ``matrix``, (..., m, n), by Newton-Schulz (Jordan et al., 2024)."""
    x = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if matrix.size(-2) > matrix.size(-1) else x


class Muon(torch.optim.Optimizer):
    """Steps the matrices that this rank owns, without communication. Its state lies as they do, also in checkpoints."""

    def __init__(self, params: list[nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                whole = (p, p.grad, self.state[p]["momentum"])
                weight, gradient, average = (t.to_local() if isinstance(t, DTensor) else t for t in whole)
                if weight.numel():  # it is mine
                    average.lerp_(gradient, 1 - group["momentum"])
                    update = orthogonalized(gradient.lerp(average, group["momentum"]))
                    weight.add_(update, alpha=-group["lr"] * max(1, weight.size(-2) / weight.size(-1)) ** 0.5)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))
    owners = balanced_owners(nn.ModuleList(blocks), mesh, units=blocks)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=owners)
    matrices, others = [[p for p in model.parameters() if bool(owners(p)) is owned] for owned in (True, False)]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, lr=3e-3)]
    print(f"rank {dist.get_rank()} owns {sum(p.to_local().numel() for p in matrices)} elements", flush=True)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(10):
        tokens = torch.randint(16, (8, 9), device=device).cumsum(1) % 64
        loss = F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
