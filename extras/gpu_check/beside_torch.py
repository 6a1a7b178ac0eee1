"""``python -m extras.gpu_check.beside_torch WAY``: the same training by torch's `fully_shard` and by fsdp2, bit by bit.

    copies                    rank 0 of 8 in this process, copies in the place of NCCL (`benchmarks.wire`)
    gloo --ranks 2            real exchanges, all ranks on one GPU
    nccl --ranks 1            NCCL's collectives of a rank with itself; or between as many GPUs

Every case trains one model by both, and compares losses, gradients and parameters. On CUDA (not over gloo, whose
exchanges the host waits for) the training is repeated with delays and garbage in memory at every collective, which must
change no bit; among copies also with each wait left out, of which those in `SHOW` must.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from benchmarks.implementations import fake_process_group
from benchmarks.wire import Wire, delayed_collectives
from extras.gpu_check import ranks as processes
from extras.gpu_check.faults import planted
from extras.gpu_check.says import COMPLAINTS, say
from fsdp2.core.streams import Wait
from tests.harness.jitter import jittering

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIBRARIES: dict[str, Any] = {"torch": theirs, "fsdp2": fsdp2}
STEPS = 4
SEEDS = 3
SEEDS_OF_FAULTS = 4
SHOW = (Wait.GATHERED, Wait.GRADIENTS_READY, Wait.PACKED, Wait.REDUCED)
"""Waits whose removal must show in `PLAIN`. The others need memory to be handed on just then, or an optimizer that is
slower than the host: whether they showed is said, and not judged."""

TOLERANCES = {FP32: 1e-5, BF16: 1e-2, FP16: 1e-2}
"""Of the largest element of a tensor. Equal bits are expected, and are what an H100 has shown; but cuBLAS may choose
another kernel for a weight at another address, and NCCL sums in an order of its own."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a model is sharded and trained.

    Attributes:
        computes: The dtype of the computation, and of reductions.
        dtype: The parameters'.
        reshard: `reshard_after_forward`, if it is said.
        micro: Microbatches of a step.
        syncs: Whether gradients are reduced before the last of them.
        reduces_over_replicas: Whether they are, over replicas.
        replicas: Of HSDP.
        world_size: Of rank 0 among copies; of other worlds the least.
        skips: Whether a layer has no gradient in every second step.
        factor: A gradient divide factor. (Of NCCL's only: gloo cannot multiply, and copies do not.)
    """

    computes: tuple[torch.dtype, torch.dtype] | None = None
    dtype: torch.dtype = FP32
    reshard: bool | int | None = None
    micro: int = 1
    syncs: bool = True
    reduces_over_replicas: bool = True
    offloads: bool = False
    checkpoints: bool = False
    replicas: int = 1
    world_size: int | None = None
    skips: bool = False
    factor: float | None = None

    @property
    def tolerance(self) -> float:
        """Of the coarsest dtype in it."""
        return max(TOLERANCES[dtype] for dtype in (self.dtype, *(self.computes or ())))

    def fits(self, world_size: int) -> bool:
        """Whether so many ranks can be shared out."""
        return world_size >= (self.world_size or 1) and world_size % self.replicas == 0


MIXED = (BF16, FP32)
PLAIN = "bf16/fp32"
CASES: dict[str, Case] = {
    "fp32": Case(),
    PLAIN: Case(MIXED),
    "bf16": Case((BF16, BF16)),
    "fp16/fp32": Case((FP16, FP32)),
    "zero2": Case(reshard=False),
    "accumulate without sync": Case(micro=3, syncs=False),
    "accumulate with sync": Case(MIXED, micro=3),
    "offload": Case(offloads=True),
    "offload bf16/fp32": Case(MIXED, offloads=True),
    "checkpointed bf16/fp32": Case(MIXED, checkpoints=True),
    "hsdp bf16/fp32": Case(MIXED, replicas=2),
    "hsdp, all-reduce last": Case(replicas=2, micro=2, reduces_over_replicas=False),
    "reshard to 2": Case(reshard=2, world_size=4),
    "a layer without gradient": Case(skips=True),
    "bf16 originals": Case(dtype=BF16),
}
OF_NCCL = {"divided by 3": Case(factor=3.0), "bf16/fp32 divided by 3": Case(MIXED, factor=3.0)}
OF_FOUR = ("fp32", PLAIN, "hsdp bf16/fp32", "reshard to 2")
"""Those of more than two ranks on one GPU: the others would show nothing more."""

Sizes = tuple[int, int]
SIZES: dict[str, list[Sizes]] = {"cuda": [(512, 1000), (100, 130)], "cpu": [(48, 100)]}


class Block(nn.Module):
    """Small and large parameters, even and uneven: packed, and (1 MiB and more) each alone."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.extra = nn.Linear(width, 3, bias=False)  # fewer rows than ranks
        self.is_checkpointed = self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.is_checkpointed else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """What it is, without the checkpoint."""
        found = x + self.down(torch.tanh(self.up(self.norm(x))))
        return found if self.skips else found + self.extra(x).sum(-1, keepdim=True)


def _model(library: Any, case: Case, device: str, sizes: Sizes, world_size: int) -> Any:
    """Made on the CPU, so that all devices have the same values; each block, and the whole, sharded."""
    torch.manual_seed(0)
    width, hidden = sizes
    model: Any = nn.Sequential(
        nn.Linear(width, width), *(Block(width, hidden) for _ in range(3)), nn.Linear(width, 7)
    ).to("cpu" if case.offloads else device, case.dtype)
    shape: tuple[int, ...] = (world_size,)
    names: tuple[str, ...] = ("shard",)
    if case.replicas > 1:
        shape, names = (case.replicas, world_size // case.replicas), ("replicate", "shard")
    options: dict[str, Any] = {"mesh": init_device_mesh(device, shape, mesh_dim_names=names)}
    if case.computes is not None:
        options["mp_policy"] = library.MixedPrecisionPolicy(*case.computes)
    if case.offloads:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=device != "cpu")
    if case.reshard is not None:
        options["reshard_after_forward"] = case.reshard
    for block in model[1:-1]:
        block.is_checkpointed = case.checkpoints
        library.fully_shard(block, **options)
    library.fully_shard(model, **{**options, "reshard_after_forward": bool(options.get("reshard_after_forward", True))})
    for module in (*model[1:-1], model) if case.factor is not None else ():
        module.set_gradient_divide_factor(case.factor)
    return model


def trained(name: str, case: Case, device: str, sizes: Sizes, rank: int, world_size: int) -> list[Tensor]:
    """Losses of all steps, and this rank's gradients and parameters at the end."""
    model = _model(LIBRARIES[name], case, device, sizes, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    losses = []
    for step in range(STEPS):
        for micro in range(case.micro):
            is_last = micro == case.micro - 1
            model.set_requires_gradient_sync(is_last or case.syncs)
            model.set_requires_all_reduce(is_last or case.reduces_over_replicas)
            model[2].skips = case.skips and step % 2 == 1
            seed = (step * 10 + micro) * 100 + rank
            x = torch.randn(16, sizes[0], generator=torch.Generator().manual_seed(seed)).to(device, case.dtype)
            loss = model(x).float().square().mean().log1p()  # the logarithm: fp16 overflows without it
            loss.backward()
            losses.append(loss.detach())
        gradients = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if device != "cpu":
        torch.cuda.synchronize()
    parameters = [p.to_local().detach().clone() for p in model.parameters()]
    return [each.cpu() for each in (*losses, *gradients, *parameters)]


def difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest of any element, relative to the largest of its tensor; inf if they do not fit; nan counts as inf."""
    if [each.shape for each in some] != [each.shape for each in others]:
        return float("inf")
    found = 0.0
    for one, other in zip(some, others, strict=True):
        if one.numel():
            gap = (one.double() - other.double()).abs().max() / (other.double().abs().max() + 1e-12)
            found = max(found, float(gap) if bool(gap == gap) else float("inf"))
    return found


Train = Callable[[str], list[Tensor]]
Largest = Callable[[float], float]


def compared(case: Case, train: Train, seeds: Sequence[int], largest: Largest) -> dict[str, Any]:
    """What of ``case`` differs, over all ranks (``largest``), and what is complained of; ``seeds`` are of delays."""
    torchs, ours = train("torch"), train("fsdp2")
    found: dict[str, Any] = {"of_torch": largest(difference(ours, torchs))}
    complaints = []
    if not found["of_torch"] <= case.tolerance:
        complaints.append(f"it differs from torch by {found['of_torch']:.2g} of the largest element")
    if not all(bool(each.isfinite().all()) for each in torchs):
        complaints.append("it is not finite, and so shows nothing")
    if seeds:
        gaps = []
        for seed in seeds:
            with jittering(seed):
                gaps.append(largest(difference(train("fsdp2"), ours)))
        found["jittered"] = max(gaps)
        if found["jittered"] > 0:
            complaints.append(f"delays and garbage in memory change it by {found['jittered']:.2g}")
    return {**found, COMPLAINTS: complaints}


def without_waits(train: Train) -> dict[str, Any]:
    """What each wait that is left out changes, among some seeds."""
    ours, found = train("fsdp2"), {}
    for why in Wait:
        gaps = []
        for seed in range(SEEDS_OF_FAULTS):
            with jittering(seed, frozenset({why})):
                gaps.append(difference(train("fsdp2"), ours))
        found[why.name] = max(gaps)
    return {
        "changes": found,
        COMPLAINTS: [f"without {why.name} nothing changes" for why in SHOW if not found[why.name]],
    }


@contextmanager
def _told(what: str, *, is_silent: bool = False, ends: bool = False) -> Iterator[dict[str, Any]]:
    """Say what is put in (a rank that ``is_silent``: nothing); say an exception, which ``ends`` the process or not."""
    found: dict[str, Any] = {}
    began = time.perf_counter()
    failed = False
    try:
        yield found
    except Exception as error:
        traceback.print_exc()
        found[COMPLAINTS] = [f"{type(error).__name__}: {error}"[:800]]
        failed = True
    if failed or not is_silent:
        say(what, {**found, "seconds": round(time.perf_counter() - began, 2)})
    if failed and ends:
        os._exit(1)  # the other ranks may be in a collective for ever


def copies(device: str) -> None:
    """Rank 0 of 8."""
    if device == "cuda":
        torch.cuda.set_device(0)
    wire = Wire(torch.device(device), 0.0)
    seeds = range(SEEDS if device == "cuda" else 0)

    @contextmanager
    def copying(world_size: int) -> Iterator[None]:
        with fake_process_group(world_size, device), delayed_collectives(wire):
            yield

    for name, case in CASES.items():
        world_size = case.world_size or 8
        for sizes in SIZES[device]:
            if case.reshard == 2 and sizes[0] % 8:
                continue  # where uneven parts of a half lie is each library's own, and here all parts are rank 0's

            def train(library: str, case: Case = case, sizes: Sizes = sizes, ranks: int = world_size) -> list[Tensor]:
                return trained(library, case, device, sizes, 0, ranks)

            with _told(f"rank 0 of {world_size}: {name}, {sizes[0]} x {sizes[1]}") as found, copying(world_size):
                found |= compared(case, train, seeds, largest=lambda gap: gap)
            if name == PLAIN and device == "cuda":
                with _told(f"waits left out: {sizes[0]} x {sizes[1]}") as found, copying(world_size):
                    found |= without_waits(train)


def exchange(rank: int, backend: str, world_size: int, device: str, store: str, fault: str) -> None:
    """One of ``world_size`` ranks; rank 0 says what came of all. An exception ends it: the others' cannot go on."""
    torch.set_num_threads(1)
    local_rank = rank if backend == "nccl" else 0
    os.environ["LOCAL_RANK"] = str(local_rank)
    if world_size == 1:
        os.environ["FSDP2_COMM"] = "native"  # else a rank copies, and there is nothing to compare
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    backend = backend if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    sizes = SIZES[device][0]
    seeds = [seed * world_size + rank for seed in range(SEEDS if backend == "nccl" else 0)]

    def largest(gap: float) -> float:
        found = torch.tensor([gap], dtype=torch.float64, device=device if backend == "nccl" else "cpu")
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    for name, case in {**CASES, **(OF_NCCL if backend == "nccl" else {})}.items():
        if not case.fits(world_size) or (backend == "gloo" and world_size > 2 and name not in OF_FOUR):
            continue

        def train(library: str, case: Case = case) -> list[Tensor]:
            with planted(fault) if library == "fsdp2" else nullcontext():
                return trained(library, case, device, sizes, rank, world_size)

        of_rank = f" (rank {rank})" if rank else ""
        with _told(
            f"{world_size} x {backend}: {name}, {sizes[0]} x {sizes[1]}{of_rank}", is_silent=rank > 0, ends=True
        ) as found:
            found |= compared(case, train, seeds, largest)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo's that still lets go of a tensor aborts the end of the interpreter


def main() -> None:
    """Runs what the command line says; the exit status is that of a rank that failed."""
    parser = argparse.ArgumentParser(prog="python -m extras.gpu_check.beside_torch", description=__doc__)
    parser.add_argument("way", choices=["copies", "gloo", "nccl"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plants", default="", help="a fault")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if given.way == "copies":
        with planted(given.plants):
            copies(given.device)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.way, given.ranks, given.device, f"{folder}/store", given.plants)
        sys.exit(processes.wait(processes.start(exchange, given.ranks, *arguments)))


if __name__ == "__main__":
    main()
