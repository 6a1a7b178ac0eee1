"""A sharded training that any launcher can start, and start again: it goes on from its last complete checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 50 examples/recipes/train.py --run-dir runs/recipe

torchrun, Kubernetes' PyTorchJob and Slurm's `srun` start it as it is: see docs/recipes. A batch depends on its step
alone, and each rank takes its rows of it. So a run that was killed ends with the numbers of one that was not, and a run
may go on with another number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from slurm import from_slurm
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp2 import clip_grad_norm_, fully_shard
from fsdp2.checkpoint import Checkpoints

CONTEXT = 32
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


class Block(nn.Module):
    """Causal attention of four heads, and a multilayer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (rows, CONTEXT, width) to the same."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A language model on bytes."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes: (rows, CONTEXT) to (rows, CONTEXT, 256)."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train to the last step; rank 0 prints the loss of that step."""
    options = parse(arguments)
    os.environ.update(from_slurm(os.environ))
    if "RANK" not in os.environ:
        raise SystemExit("This program is started by torchrun, srun or a PyTorchJob: see docs/recipes.")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = {"loss": float("nan")}
    options.run_dir.mkdir(parents=True, exist_ok=True)
    with Checkpoints(options.run_dir, model, optimizer, shared={"progress": progress}, keep_last=2) as checkpoints:
        first = checkpoints.restore()  # 0 if there is none
        say(f"step {first} is where {dist.get_world_size()} ranks go on")
        for step in range(first, options.steps):
            progress["loss"] = update(model, optimizer, *rows_of_this_rank(step, options.batch))
            note(options.run_dir, step + 1, progress["loss"])
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                checkpoints.save(step + 1, asynchronous=options.asynchronous)
    say(f"the loss of step {options.steps} is {progress['loss']!r}")
    time.sleep(0.1)  # gloo's thread lets go of the last tensor; while Python ends it would abort (torch 2.13)
    dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run-dir", type=Path, required=True, help="checkpoints and losses; all ranks see this folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--asynchronous", action="store_true", help="train on while a checkpoint is written")
    parser.add_argument("--batch", type=int, default=12, help="rows of all ranks together, a multiple of their number")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--float64", action="store_true", help="double precision, to compare runs")
    return parser.parse_args(arguments)


def make_model(options: argparse.Namespace) -> nn.Module:
    """The model, sharded over all ranks; on every rank from the same random numbers."""
    torch.manual_seed(0)
    model = Model(options.width).to(torch.float64 if options.float64 else torch.float32)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)  # makes the process group, where there is none
    if options.batch % dist.get_world_size():
        raise SystemExit(f"--batch {options.batch} is not a multiple of {dist.get_world_size()} ranks.")
    return model


def rows_of_this_rank(step: int, batch: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes after them, (rows, CONTEXT) each."""
    starts = torch.randint(len(TEXT) - CONTEXT, (batch, 1), generator=torch.Generator().manual_seed(step))
    windows = TEXT[starts + torch.arange(CONTEXT + 1)].chunk(dist.get_world_size())[dist.get_rank()]
    return windows[:, :-1], windows[:, 1:]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    """One step; the loss before it, over all ranks."""
    device = next(model.parameters()).device
    loss = F.cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def note(run_dir: Path, step: int, loss: float) -> None:
    """Add a line to the run's losses, on rank 0. Steps that are done again stand there again."""
    if dist.get_rank() == 0:
        with (run_dir / "losses.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def say(text: str) -> None:
    """Print, on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
