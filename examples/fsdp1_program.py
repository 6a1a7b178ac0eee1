"""A program written for FSDP1, unchanged: it runs on torch's and on fsdp2, and goes on from either's checkpoints.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/fsdp1_program.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m fsdp2.compat examples/fsdp1_program.py

Wrapping by policy, mixed precision, gradient accumulation without synchronization, clipping, and checkpoints: a whole
state dict on rank 0, and sharded ones in a folder, from which the program goes on. The second command prints the same
losses. docs/fsdp1.md says how to move on to `fully_shard`.
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS, ACCUMULATE = 6, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


class Model(nn.Module):
    def __init__(self, width: int = 31, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def build(options: argparse.Namespace, device: torch.device) -> FSDP:
    torch.manual_seed(0)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if options.bf16 else None
    return FSDP(
        Model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[options.strategy],
        mixed_precision=half,
        device_id=device,
        use_orig_params=True,
    )


def batch(step: int, part: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    inputs = torch.randn(8, 31, generator=generator).to(device)
    return inputs, inputs[:, :7].argmax(1)


def train(model: FSDP, optimizer: torch.optim.Optimizer, steps: range, device: torch.device) -> None:
    for step in steps:
        total = torch.zeros((), device=device)
        for part in range(ACCUMULATE):
            inputs, labels = batch(step, part, dist.get_rank(), device)
            with model.no_sync() if part < ACCUMULATE - 1 else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(inputs).float(), labels) / ACCUMULATE
                loss.backward()
            total += loss.detach()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item() / dist.get_world_size():.4f}, gradient norm {norm.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="FULL_SHARD", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, reduce in fp32")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to after the first half")
    parser.add_argument("--resume", type=Path, help="folder to go on from, with the second half")
    options = parser.parse_args()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = build(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options.resume is None:
        train(model, optimizer, range(STEPS // 2), device)
    else:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(options.resume / "sharded"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if options.checkpoint is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(options.checkpoint / "sharded"))
        whole = FullStateDictConfig(offload_to_cpu=device.type != "cpu", rank0_only=True)  # torch's needs a GPU for it
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
            found = model.state_dict()
        if dist.get_rank() == 0:
            torch.save(found, options.checkpoint / "whole.pt")
    train(model, optimizer, range(STEPS // 2, STEPS), device)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
