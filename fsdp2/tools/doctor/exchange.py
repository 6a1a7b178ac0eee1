"""Ranks that are started for it: whether they meet, whether a mesh over them is right, and how fast they gather.

``python -m fsdp2.tools.doctor.exchange`` is one of the ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import _torch
from fsdp2.tools.doctor import gpus
from fsdp2.tools.doctor.finding import Finding

MIB = 2**20
LIMIT_SECONDS = 180
_ENDS_SECONDS = 45  # the launcher gives its ranks 30
ENOUGH = {"nccl": 0.5, "gloo": 0.05}
"""Which part of what the link should give is expected of an all-gather. NCCL reaches 70 to 90 % with 256 MiB. Gloo's of
one machine goes through sockets, and is compared with copies in memory, of which 5 to 30 % are usual: as cores that
others use make it slower, less is a note and no warning."""


_NUMBERS = 251
"""By which ranks are told apart in what is gathered, a byte each: neighbours differ, and all of a node."""


def measure(nbytes: int, repeats: int = 5) -> dict[str, Any]:
    """What a rank finds. Collective: all ranks call it, with a process group.

    Args:
        nbytes: of what is gathered, on each rank; a multiple of the ranks.
        repeats: of which the fastest counts.

    Returns:
        Sizes in bytes, times in seconds; ``bytes_per_second`` is what one rank receives.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_nccl = dist.get_backend().startswith("nccl")
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
    group = dist.distributed_c10d.GroupMember.WORLD
    assert group is not None, "the caller has made it"
    mesh = init_device_mesh(device.type, (ranks,))
    total = torch.tensor([float(rank)], device=device)
    dist.all_reduce(total)
    output = torch.empty(nbytes, dtype=torch.uint8, device=device)
    shard = torch.full((nbytes // ranks,), rank % _NUMBERS, dtype=torch.uint8, device=device)
    times = [
        _seconds(lambda: _torch.all_gather_single(output, shard, group, False), device) for _ in range(repeats + 1)
    ]
    seconds = min(times[1:])  # what the link can do: on a busy machine the others say what the cores could not
    copies = [_seconds(lambda: output.copy_(output.clone()), device) for _ in range(3)]
    return {
        "ranks": ranks,
        "backend": "nccl" if is_nccl else dist.get_backend(),
        "mesh_is_right": mesh.get_local_rank() == rank and int(total.item()) == ranks * (ranks - 1) // 2,
        "gathered_is_right": all(int(output[index * shard.numel()]) == index % _NUMBERS for index in range(ranks)),
        "gathered_bytes": output.numel(),
        "seconds": seconds,
        "first_seconds": times[0],
        "bytes_per_second": (output.numel() - shard.numel()) / seconds,
        "copy_bytes_per_second": 2 * output.numel() / min(copies),
    }


def _seconds(run: Any, device: torch.device) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def findings(ranks: int | None = None, nbytes: int | None = None) -> Iterator[Finding]:
    """Start ranks on this machine and judge what they found; under a launcher, be one of those that it started.

    Under a launcher all ranks must call it.
    """
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        yield from judge(_as_rank(nbytes))
        return
    count = ranks or torch.cuda.device_count() or 2
    done = _start(count, nbytes)
    if isinstance(done, str):
        yield Finding("exchange", "problem", f"{count} ranks on this machine did not exchange: {done}", _HINT)
    else:
        yield from judge(done)


_HINT = "NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO) says more; see 'name' and 'variables' above."


def _as_rank(nbytes: int | None) -> dict[str, Any]:
    """Meet the others, measure, part."""
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if has_gpus else "gloo")
    size = nbytes or (256 * MIB if has_gpus else 16 * MIB)
    ranks = dist.get_world_size()
    try:
        return measure(max(size // ranks, 1) * ranks)
    finally:
        dist.destroy_process_group()


def _start(ranks: int, nbytes: int | None) -> dict[str, Any] | str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "fsdp2.tools.doctor.exchange", str(nbytes or 0)]
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        printed, errors = launcher.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"nothing came back within {LIMIT_SECONDS} s."
    finally:
        _end(launcher)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if launcher.returncode or not lines:
        said = [line for line in errors.splitlines() if "Error" in line]
        return f"status {launcher.returncode}; {said[0] if said else errors.strip()[-300:]}"
    return dict(json.loads(lines[-1]))


def _end(launcher: subprocess.Popen[str]) -> None:
    """Its ranks too: they are in sessions of their own, and the launcher ends them if it is asked to end."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.communicate(timeout=_ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.communicate()


def judge(found: Mapping[str, Any]) -> Iterator[Finding]:
    """What is to be said of what a rank has measured."""
    if not (found["mesh_is_right"] and found["gathered_is_right"]):
        what = f"{found['ranks']} ranks exchanged by {found['backend']}, and received wrong values."
        yield Finding("exchange", "problem", what, "The links or their driver are broken. Do not train.", dict(found))
        return
    yield Finding("mesh", "ok", f"A mesh over {found['ranks']} ranks was made, and each rank is where it should be.")
    if found["ranks"] == 1:
        yield Finding("exchange", "note", "There is one rank: nothing was exchanged.", values=dict(found))
        return
    yield speed(found, _expected(found))


def _expected(found: Mapping[str, Any]) -> tuple[float, str] | None:
    if found["backend"] != "nccl":
        return float(found["copy_bytes_per_second"]), "copies in memory"
    table = gpus.printed(
        "nvidia-smi", "--query-gpu=name,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"
    )
    if not table or found["ranks"] > torch.cuda.device_count():
        return None  # between nodes: the network's rate is not known here
    name, generation, lanes = (each.strip() for each in table.splitlines()[0].split(","))
    kinds = set(gpus.links(gpus.printed("nvidia-smi", "topo", "-m") or "").values())
    slowest = next((kind for kind in sorted(kinds) if not kind.startswith("NV")), next(iter(kinds), "PHB"))
    return gpus.nominal_bandwidth(name, slowest, int(gpus.number(generation)), int(gpus.number(lanes)))


def speed(found: Mapping[str, Any], expected: tuple[float, str] | None) -> Finding:
    """The measured all-gather beside what the link should give: bytes per second, and its name."""
    size, rate = found["gathered_bytes"] / MIB, found["bytes_per_second"] / 1e9
    what = f"{found['ranks']} ranks gather {size:.0f} MiB by {found['backend']} at {rate:.2f} GB/s each"
    values = {**found, "expected_bytes_per_second": expected and expected[0]}
    if expected is None:
        return Finding("exchange", "note", f"{what}; what their links should give is not known here.", values=values)
    part = found["bytes_per_second"] / expected[0]
    what = f"{what}, {100 * part:.0f} % of what {expected[1]} should give ({expected[0] / 1e9:.1f} GB/s)."
    is_nccl = found["backend"] == "nccl"
    least = ENOUGH["nccl" if is_nccl else "gloo"]
    if part < least and not is_nccl:
        remedy = "Usual is 5 % and more; while others use the cores this says little."
        return Finding("exchange", "note", what, remedy, values)
    if part < least:
        remedy = f"At least {100 * least:.0f} % is to be expected: look at 'topology' and 'variables'."
        return Finding("exchange", "warning", what, remedy, values)
    return Finding("exchange", "ok", what, values=values)


def main() -> None:
    """One rank; the first prints what it found."""
    found = _as_rank(int(sys.argv[1]) or None)
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
