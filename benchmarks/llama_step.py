"""`python -m benchmarks.llama_step`: steps of a Llama-like model, unsharded, by torch's fully_shard, and by fsdp2.

    --shape 8B --world 8 --seq 8192 --ac             what rank 0 of 8 does, on one GPU
    --shape 8B --world 8 --seq 8192 --ac --gbps 150  ... over a wire that takes its time
    --shape 1B --batch 4 --impl unsharded,torch,fsdp2,fsdp2-native,torch-again --world 1
    --shape 1B --batch 4 --world 1 --offload         all rests on the host
    --shape 8B --gpus 8 --seq 8192 --ac              NCCL between eight GPUs
    --shape tiny --seq 32 --device cpu               the rehearsal, whose figures are of no worth

World 1 is NCCL with one rank. A larger world on one GPU is a fake group, with copies in the place of the collectives
(`benchmarks.wire`). Each implementation has processes of its own, and so an allocator of its own. One JSON line for
each; then one with what is complained of, and a table of medians and ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import math
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SHAPES = {  # width, hidden, layers, heads, key heads, vocabulary
    "tiny": (64, 172, 3, 4, 2, 256),
    "1B": (2048, 8192, 16, 16, 8, 32000),
    "3B": (3072, 8192, 28, 24, 8, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
}
PEAK_FLOPS = 989e12
"""An H100's or H200's (SXM) in bf16, dense, by its data sheet."""

LIBRARIES = {"torch": "torch.distributed.fsdp", "fsdp2": "fsdp2"}
UNSHARDED = "unsharded"
WARM = 3
FIGURES = ("ms", "host_ms", "tokens_per_s", "mfu", "allocated_gib", "reserved_gib", "device_allocs", "retries")
WHAT, COMPLAINTS = "what", "complaints"

SAME_TIME = 1.03
"""What torch's own step may differ by between processes, and hence ours from the slower of torch's."""

SAME_MEMORY = {"allocated_gib": 1.01, "reserved_gib": 1.03}
"""Reserved memory comes in segments: one more is a few hundred MiB of tens of GiB."""

SAME_LOSS = 2e-2
"""Of the first step, in bf16. Later ones vary between torch's own processes: attention's backward adds in any order."""


class Attention(nn.Module):
    """Grouped queries, turned by their positions."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, size = heads, keys, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = nn.Linear(width, keys * size, bias=False), nn.Linear(width, keys * size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for w, n in ((self.wq, self.heads), (self.wk, self.keys), (self.wv, self.keys))
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = k.repeat_interleave(self.heads // self.keys, 1), v.repeat_interleave(self.heads // self.keys, 1)
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x: (..., seq, size)``, each half of a head as the parts of complex numbers, turned."""
    one, other = x.chunk(2, -1)
    return (x * cos + torch.cat((-other, one), -1) * sin).type_as(x)


class Block(nn.Module):
    """Attention and a gated layer, each after a norm."""

    def __init__(self, width: int, hidden: int, heads: int, keys: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(width), nn.RMSNorm(width), Attention(width, heads, keys)
        self.w1, self.w3, self.w2 = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """``shape`` of `SHAPES`; ``ac``: activations of blocks are computed again in backward."""

    def __init__(self, shape: str, ac: bool) -> None:
        super().__init__()
        width, hidden, layers, heads, keys, vocabulary = SHAPES[shape]
        self.size, self.ac = width // heads, ac
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, keys) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] / 500000 ** (
            torch.arange(0, self.size, 2, device=x.device) / self.size
        )
        cos, sin = (f(torch.cat((angles, angles), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.ac else block(x, cos, sin)
        return self.head(self.norm(x))


def flops_of(model: nn.Module, shape: str, tokens: int, seq: int) -> float:
    """Count a step's as torchtitan does: 6 for each parameter but the embedding's, and attention (causal: half)."""
    width, _, layers, _, _, vocabulary = SHAPES[shape]
    numel = sum(p.numel() for p in model.parameters()) - vocabulary * width
    return tokens * (6.0 * numel + 6.0 * layers * width * seq)


def shard(name: str, model: Any, given: Any, mesh: DeviceMesh) -> None:
    """In units as torchtitan has them."""
    base = name.split("-")[0]
    if base == UNSHARDED:
        return
    library = importlib.import_module(LIBRARIES[base])
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if given.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=given.device != "cpu")
    for unit in (model.embed, *model.blocks, model.head):
        library.fully_shard(unit, **options)
    library.fully_shard(model, **options)


@contextlib.contextmanager
def ranks(given: Any, rank: int, store: str) -> Iterator[DeviceMesh]:
    """The mesh of this process: real ranks, or rank 0 of a world of copies."""
    importlib.import_module("fsdp2")  # before collectives are replaced: it remembers torch's own
    device = torch.device(given.device)
    if given.gpus == 1 and given.world > 1:
        from benchmarks.implementations import fake_process_group
        from benchmarks.wire import Wire, delayed_collectives

        with (
            fake_process_group(given.world, device.type) as mesh,
            delayed_collectives(Wire(device, 1e9 * given.gbps)),
        ):
            yield mesh
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=given.gpus)
    yield init_device_mesh(device.type, (given.gpus,))
    dist.destroy_process_group()  # not after an exception: peers may be in a collective for ever


def build(name: str, given: Any, mesh: DeviceMesh) -> Any:
    """The model, sharded, with values; made on no device, so that it fits."""
    with torch.device("meta"):
        model: Any = Llama(given.shape, given.ac)
    shard(name, model, given, mesh)
    model.to_empty(device="cpu" if given.offload and name != UNSHARDED else given.device)
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
    return model


def stepper(name: str, model: Any, given: Any, rank: int) -> Callable[[], Tensor]:
    """A step: forward, loss, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(SHAPES[given.shape][-1], (given.batch, given.seq + 1), generator=generator).to(given.device)
    casts: Any = contextlib.nullcontext
    if name == UNSHARDED:
        casts = functools.partial(torch.autocast, given.device, torch.bfloat16)

    def step() -> Tensor:
        with casts():
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measured(name: str, given: Any, rank: int, store: str) -> dict[str, Any]:
    """What this rank's steps take: medians, peaks since the steps began, and all losses."""
    is_cuda = given.device == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    if name.endswith("-native"):
        os.environ["FSDP2_COMM"] = "native"
    synchronize = torch.cuda.synchronize if is_cuda else lambda: None
    with ranks(given, rank, store) as mesh:
        began = time.perf_counter()
        model = build(name, given, mesh)
        step = stepper(name, model, given, rank)
        losses = [step() for _ in range(WARM)]
        synchronize()
        ready = time.perf_counter() - began
        gc.collect()
        gc.disable()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        allocations = torch.cuda.memory_stats()["num_device_alloc"] if is_cuda else 0
        walls, hosts = [], []
        for _ in range(given.steps):
            synchronize()
            start = time.perf_counter()
            losses.append(step())
            hosts.append(time.perf_counter() - start)
            synchronize()
            walls.append(time.perf_counter() - start)
        gc.enable()
        found = {
            "losses": [float(each) for each in losses],
            "ready_s": round(ready, 1),
            **_of_times(given, model, walls, hosts),
        }
        if is_cuda:
            stats = torch.cuda.memory_stats()
            found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            found["device_allocs"] = stats["num_device_alloc"] - allocations
            found["retries"] = stats["num_alloc_retries"]
        if given.trace is not None:
            found["kernels"] = _traced(step, synchronize, given.trace / f"{name}-{rank}.json.gz")
        if given.gpus > 1:
            dist.barrier()  # gloo's threads must hold no tensor when the interpreter ends
    return found


def _of_times(given: Any, model: Llama, walls: Sequence[float], hosts: Sequence[float]) -> dict[str, Any]:
    wall, tokens = statistics.median(walls), given.batch * given.seq
    flops = flops_of(model, given.shape, tokens, given.seq)
    return {
        "ms": 1e3 * wall,
        "ms_all": [round(1e3 * each, 2) for each in walls],
        "host_ms": 1e3 * statistics.median(hosts),
        "tokens_per_s": tokens / wall,
        "mfu": flops / wall / PEAK_FLOPS,
        "tflops": flops / wall / 1e12,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _traced(step: Callable[[], Tensor], synchronize: Callable[[], None], file: Path) -> list[Any]:
    """A Chrome trace of one more step; the kernels that took longest."""
    with torch.profiler.profile() as profile:
        step()
        synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(file))
    kernels = [(r.key[:70], r.count, r.self_device_time_total / 1e3) for r in profile.key_averages()]
    return sorted((each for each in kernels if each[2] > 0), key=lambda each: -each[2])[:25]


def _in_process(name: str, given: Any, rank: int, store: str, results: Any) -> None:
    try:
        results.put((rank, measured(name, given, rank, store)))
    except BaseException as error:
        traceback.print_exc()
        results.put((-1, {"error": f"{type(error).__name__}: {error}"[:800]}))
    results.close()
    results.join_thread()
    os._exit(0)  # an exit may wait for what other ranks will not do


def measured_apart(name: str, given: Any) -> dict[str, Any]:
    """What rank 0 measured, in processes of its own; "error" if any rank failed or the time was over."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the server must not touch CUDA, as it forks users
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fsdp2", "torch.distributed.fsdp", "benchmarks.implementations"])
    results = context.Queue()
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(name, given, rank, f"{folder}/store", results) for rank in range(given.gpus)]
        processes = [context.Process(target=_in_process, args=each) for each in arguments]
        for process in processes:
            process.start()
        end = time.monotonic() + given.limit
        while len(found) < given.gpus and -1 not in found:
            try:
                rank, its = results.get(timeout=1)
            except queue.Empty:
                if time.monotonic() < end and any(process.is_alive() for process in processes):
                    continue
                rank, its = -1, {"error": f"nothing after {given.limit} s, or a process died"}
            found[rank] = its
        for process in processes:
            process.join(timeout=0 if -1 in found else 10)
            process.kill()
            process.join()
    return {"name": name, **found.get(-1, found.get(0, {}))}


def complaints(found: Mapping[str, Mapping[str, Any]], *, is_rehearsal: bool) -> list[str]:
    """What is wrong with what was measured, by name: fsdp2 is slower than each of torch, takes more memory, differs."""
    said = [f"{name}: {each['error']}" for name, each in found.items() if "error" in each]
    for name, each in found.items():
        if not all(map(math.isfinite, each.get("losses", ()))):
            said.append(f"{name}: losses are {each['losses']}")
    ours = {name: each for name, each in found.items() if name.startswith("fsdp2") and "ms" in each}
    torchs = [each for name, each in found.items() if name.startswith("torch") and "ms" in each]
    for name, each in ours.items() if torchs else ():
        first, expected = each["losses"][0], torchs[0]["losses"][0]
        if abs(first - expected) > SAME_LOSS * abs(expected):
            said.append(f"{name}: the first loss is {first:.4f}, torch's {expected:.4f}")
        slowest = max(other["ms"] for other in torchs)
        if not is_rehearsal and each["ms"] > SAME_TIME * slowest:
            said.append(f"{name}: {each['ms']:.1f} ms a step, torch's {torchs[0]['ms']:.1f} and {slowest:.1f}")
        for figure, ratio in SAME_MEMORY.items():
            most = max(other.get(figure, math.inf) for other in torchs)
            if each.get(figure, 0.0) > ratio * most:
                said.append(f"{name}: {figure} {each[figure]:.2f}, torch's {most:.2f}")
    return said


def _print_table(given: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    for figure in FIGURES:
        row = {name: each[figure] for name, each in found.items() if figure in each}
        base = row.get("torch") or next(iter(row.values()), None)
        if base:
            print(figure, {name: f"{value:.4g} ({value / base:.3f})" for name, value in row.items()})


def parsed(arguments: Sequence[str] | None) -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_step", description=__doc__.splitlines()[0])
    parser.add_argument("--impl", type=lambda text: text.split(","), default=["torch", "fsdp2", "torch-again"])
    parser.add_argument("--shape", choices=list(SHAPES), default="1B")
    for flag, value, words in (
        ("world", 8, "ranks of the fake group on one GPU; 1: NCCL with one rank"),
        ("gpus", 1, "real ranks, one on each"),
        ("batch", 1, "sequences of a rank"),
        ("seq", 4096, "tokens of a sequence"),
        ("steps", 5, f"timed, after {WARM} to warm up"),
        ("limit", 90, "seconds for each implementation"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=value, help=f"{words} (default: {value})")
    parser.add_argument("--gbps", type=float, default=0.0, help="gigabytes per second of the wire; 0: it takes no time")
    parser.add_argument("--ac", action="store_true", help="checkpoint the activations of blocks")
    parser.add_argument("--compile", action="store_true", help="compile block by block")
    parser.add_argument("--offload", action="store_true", help="by a CPUOffloadPolicy")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a Chrome trace of one step of each there")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is available to torch; --device cpu rehearses without figures of worth")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own).

    Raises:
        SystemExit: there is no such device; or an implementation failed, or is complained of.
    """
    given = parsed(arguments)
    world = f"{given.gpus} GPUs" if given.gpus > 1 else f"rank 0 of {given.world}"
    title = f"{given.shape}, {world}, {given.batch} x {given.seq} tokens"
    title += "".join(f", {flag}" for flag in ("ac", "compile", "offload") if getattr(given, flag))
    title += f", {given.gbps:g} GB/s" * bool(given.gbps)
    found = {}
    for name in given.impl:
        found[name] = measured_apart(name, given)
        print(json.dumps({WHAT: f"{title}: {name}", COMPLAINTS: [], **found[name]}), flush=True)
    said = complaints(found, is_rehearsal=given.device == "cpu")
    print(json.dumps({WHAT: title, COMPLAINTS: said}), flush=True)
    print(f"# {title}; torch {torch.__version__}")
    _print_table(given, found)
    if said:
        raise SystemExit("\n".join(said))


if __name__ == "__main__":
    main()
