"""What torch's `fully_shard` refuses, in one training program: docs/how-to explains each.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/beyond.py

The output projection is the embedding's weight, although both are groups of their own; norms compute in fp32 beside
bf16 matrices; ranks see different numbers of tokens, and every token counts the same; one `clip_grad_norm_` for
everything. After half of the steps the parameters stay unsharded between forward and backward. At the end the model is
unwrapped: a plain module again, with whole parameters on every rank.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, unwrap


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(32) for _ in range(3))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x.float()).to(x.dtype))
        return self.head(x)


def policy(fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy | None:
    return None if "norms" in fqn else MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Model()
    for module in (model.embedding, *model.blocks, model.head, model):
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(10):
        if step == 5:
            model.set_strategy("zero2")
        tokens = torch.randint(16, (4 + dist.get_rank(), 9), device=device).cumsum(1) % 64
        count = torch.tensor(tokens[:, 1:].numel(), device=device)
        dist.all_reduce(count)
        model.set_gradient_reduction(count)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().mT, tokens[:, 1:], reduction="sum")
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        say(f"step {step}: loss {loss / count:.3f}, gradient norm {norm:.3f}")
    unwrap(model, optimizers=[optimizer])
    assert model.head.weight is model.embedding.weight and type(model) is Model
    say(f"a plain {type(model).__name__} with a weight of shape {tuple(model.head.weight.shape)} on every rank")
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
