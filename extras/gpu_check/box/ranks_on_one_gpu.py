"""Several ranks on one GPU, torch's fully_shard beside fsdp2. From the repository's root:

    PYTHONPATH=. python3 ranks_on_one_gpu.py fake --device cuda              rank 0 of 8, copies in the place of NCCL
    PYTHONPATH=. python3 ranks_on_one_gpu.py gloo --device cuda --ranks 2    real exchanges of CUDA tensors
    ... --device cpu                                                         the rehearsal

Every case trains the same model by both, and prints one JSON line: equal bit by bit, the largest difference, seconds.
`fake` also repeats fsdp2's training with jitter and garbage in memory (CUDA), which must change no bit, and with each
wait left out, which must.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from benchmarks.gpu_step import Wire, delayed_collectives
from benchmarks.implementations import fake_process_group

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIBRARIES: dict[str, Any] = {"torch": theirs, "fsdp2": fsdp2}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16/fp32": {"mp": (BF16, FP32)},
    "bf16": {"mp": (BF16, BF16)},
    "fp16/fp32": {"mp": (FP16, FP32)},
    "zero2": {"reshard": False},
    "accumulate without sync": {"micro": 3, "sync": False},
    "accumulate with sync": {"micro": 3, "mp": (BF16, FP32)},
    "offload": {"offload": True},
    "offload bf16/fp32": {"offload": True, "mp": (BF16, FP32)},
    "checkpointed bf16/fp32": {"checkpointed": True, "mp": (BF16, FP32)},
    "hsdp bf16/fp32": {"replicas": 2, "mp": (BF16, FP32)},
    "hsdp, all-reduce last": {"replicas": 2, "micro": 2, "all_reduce": False},
    "reshard to 2": {"reshard": 2, "ranks": 4},
    "a layer without gradient": {"skips": True},
    "bf16 originals": {"dtype": BF16},
}
STEPS = 4


class Block(nn.Module):
    """Small and large parameters, even and uneven: packed, and (1 MiB and more) each alone."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.extra = nn.Linear(width, 3, bias=False)  # fewer rows than ranks
        self.is_checkpointed = self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.is_checkpointed else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        found = x + self.down(torch.tanh(self.up(self.norm(x))))
        return found if self.skips else found + self.extra(x).sum(-1, keepdim=True)


def model_of(device: str, sizes: tuple[int, int], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    width, hidden = sizes
    model = nn.Sequential(nn.Linear(width, width), *(Block(width, hidden) for _ in range(3)), nn.Linear(width, 7))
    return model.to(device, dtype)


def trained(name: str, case: dict[str, Any], device: str, sizes: tuple[int, int], rank: int, ranks: int) -> list[Any]:
    """Losses of all steps, and this rank's gradients and parameters at the end."""
    library, dtype = LIBRARIES[name], case.get("dtype", FP32)
    model: Any = model_of(device, sizes, dtype)
    for block in model[1:-1]:
        block.is_checkpointed = case.get("checkpointed", False)
    replicas = case.get("replicas", 1)
    shape, names = ((replicas, ranks // replicas), ("replicate", "shard")) if replicas > 1 else ((ranks,), ("shard",))
    options: dict[str, Any] = {"mesh": init_device_mesh(device, shape, mesh_dim_names=names)}
    if "mp" in case:
        options["mp_policy"] = library.MixedPrecisionPolicy(*case["mp"])
    if case.get("offload"):
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=device != "cpu")
        model.cpu()
    if "reshard" in case:
        options["reshard_after_forward"] = case["reshard"]
    for block in model[1:-1]:
        library.fully_shard(block, **options)
    library.fully_shard(model, **{**options, "reshard_after_forward": bool(options.get("reshard_after_forward", True))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    losses, micros = [], case.get("micro", 1)
    for step in range(STEPS):
        for micro in range(micros):
            is_last = micro == micros - 1
            if case.get("sync") is False:
                model.set_requires_gradient_sync(is_last)
            if case.get("all_reduce") is False:
                model.set_requires_all_reduce(is_last)
            model[2].skips = bool(case.get("skips")) and step % 2 == 1
            seed = (step * 10 + micro) * 100 + rank
            x = torch.randn(16, sizes[0], generator=torch.Generator().manual_seed(seed)).to(device, dtype)
            loss = model(x).float().square().mean().log1p()
            loss.backward()
            losses.append(loss.detach())
        gradients = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if device != "cpu":
        torch.cuda.synchronize()
    parameters = [p.to_local().detach().clone() for p in model.parameters()]
    return [each.cpu() for each in (*losses, *gradients, *parameters)]


def difference(some: list[Any], others: list[Any]) -> float:
    """The largest of any element, relative to the largest of its tensor; inf if they do not fit; nan counts as inf."""
    if [each.shape for each in some] != [each.shape for each in others]:
        return float("inf")
    found = 0.0
    for one, other in zip(some, others, strict=True):
        if one.numel():
            gap = (one.double() - other.double()).abs().max() / (other.double().abs().max() + 1e-12)
            found = max(found, float(gap) if bool(gap == gap) else float("inf"))
    return found


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def fake(device: str, only: list[str], wire: float) -> None:
    from fsdp2.core.streams import Wait
    from tests.harness.jitter import jittering

    sizes = ((512, 1000), (100, 130)) if device == "cuda" else ((48, 100),)
    if device == "cuda":
        torch.cuda.set_device(0)
    line = Wire(torch.device(device), wire)
    for name, case in CASES.items():
        if only and name not in only:
            continue
        for each in sizes:
            began, ranks = time.perf_counter(), case.get("ranks", 8)
            if case.get("reshard") == 2 and each[0] % 8:
                continue  # where uneven parts of a half lie is each library's own, and here all parts are rank 0's
            try:
                with fake_process_group(ranks, device), delayed_collectives(line):
                    torchs, ours = (trained(library, case, device, each, 0, ranks) for library in LIBRARIES)
                    found = {
                        "of_torch": difference(ours, torchs),
                        "finite": all(bool(t.isfinite().all()) for t in ours),
                    }
                    if device == "cuda":
                        jittered = []
                        for seed in range(3):
                            with jittering(seed):
                                jittered.append(difference(trained("fsdp2", case, device, each, 0, ranks), ours))
                        found["jittered"] = max(jittered)
                        if name == "bf16/fp32":
                            for why in (
                                Wait
                            ):  # those that are needed in a plain step must show: the others are told apart by hand
                                gaps = []
                                for seed in range(4):
                                    with jittering(seed, frozenset({why})):
                                        gaps.append(difference(trained("fsdp2", case, device, each, 0, ranks), ours))
                                found[f"without {why.name}"] = max(gaps)
                say(case=name, sizes=each, ranks=ranks, seconds=round(time.perf_counter() - began, 2), **found)
            except Exception as error:
                traceback.print_exc()
                say(case=name, sizes=each, ranks=ranks, error=f"{type(error).__name__}: {error}"[:500])
                if dist.is_initialized():
                    dist.destroy_process_group()


def gloo_rank(rank: int, ranks: int, device: str, store: str, only: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    sizes = (512, 1000) if device == "cuda" else (48, 100)
    for name, case in CASES.items():
        if (only and name not in only) or case.get("ranks", ranks) > ranks:
            continue
        began = time.perf_counter()
        torchs, ours = (trained(library, case, device, sizes, rank, ranks) for library in LIBRARIES)
        gap = torch.tensor([difference(ours, torchs)], dtype=torch.float64)
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
        if rank == 0:
            say(case=name, gloo=ranks, of_torch=float(gap), seconds=round(time.perf_counter() - began, 2))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["fake", "gloo"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[])
    parser.add_argument("--gigabytes-per-second", type=float, default=0.0)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if given.way == "fake":
        fake(given.device, given.cases, 1e9 * given.gigabytes_per_second)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        arguments = (given.ranks, given.device, f"{folder}/store", given.cases)
        processes = [context.Process(target=gloo_rank, args=(rank, *arguments)) for rank in range(given.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
