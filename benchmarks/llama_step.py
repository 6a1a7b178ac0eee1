"""Steps of a Llama-like model on one GPU: unsharded, torch's fully_shard, fsdp2, each in a process of its own.

    PYTHONPATH=. python3 llama_step.py --shape 8B --world 8 --seq 8192 --ac           what one of 8 GPUs does
    PYTHONPATH=. python3 llama_step.py --shape 1B --world 1 --batch 4 --impl unsharded,torch,fsdp2,fsdp2-native
    PYTHONPATH=. python3 llama_step.py --shape 1B --world 1 --offload                 all rests on the host
    ... --device cpu --shape tiny --seq 32                                            the rehearsal

World 1 is NCCL with one rank. A world of 2 and more is a fake group, with copies and a sleep (--gbps) in the place of
the collectives (benchmarks.gpu_step). One JSON line for each process; a table of medians and ratios at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SHAPES = {  # width, hidden, layers, heads, key heads, vocabulary
    "tiny": (64, 172, 3, 4, 2, 256),
    "1B": (2048, 8192, 16, 16, 8, 32000),
    "3B": (3072, 8192, 28, 24, 8, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
}
PEAK_FLOPS = 989e12  # of an H100 or H200 (SXM) in bf16, dense, by its data sheet
LIBRARIES = {"torch": "torch.distributed.fsdp", "fsdp2": "fsdp2"}
WARM = 3


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, size = heads, keys, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = nn.Linear(width, keys * size, bias=False), nn.Linear(width, keys * size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for w, n in ((self.wq, self.heads), (self.wk, self.keys), (self.wv, self.keys))
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = k.repeat_interleave(self.heads // self.keys, 1), v.repeat_interleave(self.heads // self.keys, 1)
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return (x * cos + torch.cat((-other, one), -1) * sin).type_as(x)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, keys: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(width), nn.RMSNorm(width), Attention(width, heads, keys)
        self.w1, self.w3, self.w2 = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, shape: str, ac: bool) -> None:
        super().__init__()
        width, hidden, layers, heads, keys, vocabulary = SHAPES[shape]
        self.size, self.ac = width // heads, ac
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, keys) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] / 500000 ** (
            torch.arange(0, self.size, 2, device=x.device) / self.size
        )
        cos, sin = (f(torch.cat((angles, angles), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.ac else block(x, cos, sin)
        return self.head(self.norm(x))


def flops_of(model: nn.Module, shape: str, tokens: int, seq: int) -> float:
    """Of a step, as torchtitan counts: 6 for each parameter but the embedding's, and attention (causal: half)."""
    width, _, layers, _, _, vocabulary = SHAPES[shape]
    numel = sum(p.numel() for p in model.parameters()) - vocabulary * width
    return tokens * (6.0 * numel + 6.0 * layers * width * seq)


def shard(name: str, model: Any, given: Any, mesh: Any) -> None:
    base = name.split("-")[0]
    if base == "unsharded":
        return
    library = importlib.import_module(LIBRARIES[base])
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if given.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=given.device != "cpu")
    for unit in (model.embed, *model.blocks, model.head):  # units as torchtitan has them
        library.fully_shard(unit, **options)
    library.fully_shard(model, **options)


def measured(name: str, given: Any) -> dict[str, Any]:
    importlib.import_module("fsdp2")  # before collectives are patched: it remembers torch's own
    device = torch.device(given.device)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(0)
    if name.endswith("-native"):
        os.environ["FSDP2_COMM"] = "native"
    if name.endswith("-priority0"):
        from fsdp2.core.streams import StreamDevice

        StreamDevice.new_stream = lambda self: torch.cuda.Stream(device=self._device)
    with contextlib.ExitStack() as stack:
        if given.world > 1:
            from benchmarks.gpu_step import Wire, delayed_collectives
            from benchmarks.implementations import fake_process_group

            mesh = stack.enter_context(fake_process_group(given.world, device.type))
            stack.enter_context(delayed_collectives(Wire(device, 1e9 * given.gbps)))
        else:
            store = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/store"
            dist.init_process_group("nccl" if is_cuda else "gloo", init_method=store, rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
            mesh = init_device_mesh(device.type, (1,))
        began = time.perf_counter()
        with torch.device("meta"):
            model: Any = Llama(given.shape, given.ac)
        flops = flops_of(model, given.shape, given.batch * given.seq, given.seq)
        numel = sum(p.numel() for p in model.parameters())
        shard(name, model, given, mesh)
        model.to_empty(device="cpu" if given.offload and not name.startswith("unsharded") else device)
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                local = p.to_local() if hasattr(p, "to_local") else p
                local.fill_(1.0) if p.dim() == 1 else local.normal_(std=0.02)
        if given.compile:
            if name.startswith("fsdp2") and "hooks" in name:
                importlib.import_module("fsdp2").set_graph_capture(model, False)
            for block in model.blocks:
                block.compile(fullgraph=True)
        fused = {} if given.foreach else {"fused": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
        vocabulary = SHAPES[given.shape][-1]
        tokens = torch.randint(vocabulary, (given.batch, given.seq + 1), generator=torch.Generator().manual_seed(1)).to(
            device
        )
        cast: Any = (
            functools.partial(torch.autocast, device.type, torch.bfloat16)
            if name.startswith("unsharded")
            else contextlib.nullcontext
        )

        def step() -> torch.Tensor:
            with cast():
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        synchronize = torch.cuda.synchronize if is_cuda else lambda: None
        losses = [step() for _ in range(WARM)]
        synchronize()
        ready = time.perf_counter() - began
        gc.collect()
        gc.disable()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
        walls, hosts = [], []
        for _ in range(given.steps):
            synchronize()
            start = time.perf_counter()
            losses.append(step())
            hosts.append(time.perf_counter() - start)
            synchronize()
            walls.append(time.perf_counter() - start)
        wall = statistics.median(walls)
        found: dict[str, Any] = {
            "name": name,
            "ms": 1e3 * wall,
            "ms_all": [round(1e3 * each, 2) for each in walls],
            "host_ms": 1e3 * statistics.median(hosts),
            "tokens_per_s": given.batch * given.seq / wall,
            "mfu": flops / wall / PEAK_FLOPS,
            "tflops": flops / wall / 1e12,
            "parameters": numel,
            "losses": [float(each) for each in losses],
            "ready_s": round(ready, 1),
        }
        if is_cuda:
            after = torch.cuda.memory_stats()
            found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            found["device_allocs"] = after["num_device_alloc"] - before["num_device_alloc"]
            found["retries"] = after["num_alloc_retries"]
            if given.trace:
                with torch.profiler.profile() as profile:
                    step()
                    synchronize()
                rows = profile.key_averages()
                kernels = [
                    (r.key[:70], r.count, r.self_device_time_total / 1e3) for r in rows if r.self_device_time_total > 0
                ]
                found["kernels"] = sorted(kernels, key=lambda each: -each[2])[:25]
                profile.export_chrome_trace(f"{given.trace}/{name}.json.gz")
    return found


def _in_process(name: str, given: Any, results: Any) -> None:
    try:
        results.put(measured(name, given))
    except BaseException as error:
        traceback.print_exc()
        results.put({"name": name, "error": f"{type(error).__name__}: {error}"[:800]})
        sys.stdout.flush()
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--impl", type=lambda text: text.split(","), default=["torch", "fsdp2", "torch-again"])
    parser.add_argument("--shape", choices=list(SHAPES), default="1B")
    for flag, value in (("world", 8), ("batch", 1), ("seq", 4096), ("steps", 5), ("limit", 90)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--gbps", type=float, default=0.0)
    for flag in ("ac", "compile", "offload", "foreach"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trace", default="")
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in given.impl:
        results = context.Queue()
        process = context.Process(target=_in_process, args=(name, given, results))
        process.start()
        try:
            found[name] = results.get(timeout=given.limit)
        except Exception:
            found[name] = {"name": name, "error": f"nothing after {given.limit} s"}
        process.join(timeout=10)
        process.kill()
        print(json.dumps(found[name]), flush=True)
        if given.json:
            with open(given.json, "a") as file:
                file.write(json.dumps({"arguments": vars(given), **found[name]}) + "\n")
    print(
        f"# {given.shape}, world {given.world}, {given.batch} x {given.seq} tokens, ac {given.ac}, compile "
        f"{given.compile}, offload {given.offload}, {given.gbps:g} GB/s, torch {torch.__version__}"
    )
    for figure in ("ms", "host_ms", "tokens_per_s", "mfu", "allocated_gib", "reserved_gib", "device_allocs"):
        row = {name: each[figure] for name, each in found.items() if figure in each}
        if row:
            base = row.get("torch") or next(iter(row.values()))
            print(
                figure,
                {name: f"{value:.4g} ({value / base:.3f})" if base else f"{value:.4g}" for name, value in row.items()},
            )


if __name__ == "__main__":
    main()
