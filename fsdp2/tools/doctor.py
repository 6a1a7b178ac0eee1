"""``fsdp2 doctor``: versions, devices, variables of process groups, and one exchange between ranks that it starts.

Each of these ranks runs ``python -m fsdp2.tools.doctor``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import _torch
from fsdp2._versions import FIRST, LAST
from fsdp2.tools import environment
from fsdp2.tools.quantities import shown_bytes

Level = Literal["ok", "note", "warning", "problem"]
"""A problem stops or spoils runs, a warning slows them, a note is good to know."""

MIB = 2**20
LIMIT_SECONDS = 180
_ENDS_SECONDS = 45  # the launcher waits 30 s for its ranks


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: "torch", "variables", ...
        level: how bad it is.
        what: what was found, in a sentence.
        remedy: what to do; "" if nothing is to be done.
        values: what was measured or read, by name, with units in the names.
    """

    topic: str
    level: Level
    what: str
    remedy: str = ""
    values: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings. ``str()`` shows them.

    Attributes:
        findings: the findings, in the order in which they were made.
    """

    findings: Sequence[Finding]

    @property
    def is_well(self) -> bool:
        """Whether there is no problem."""
        return not any(each.level == "problem" for each in self.findings)

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps({"well": self.is_well, "findings": [asdict(each) for each in self.findings]}, indent=2)

    def __str__(self) -> str:
        width = max((len(each.topic) for each in self.findings), default=0)
        lines = [line for each in self.findings for line in _lines(each, width)]
        counts = {level: sum(each.level == level for each in self.findings) for level in ("problem", "warning")}
        said = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count]
        return "\n".join([*lines, "", f"found: {', '.join(said)}" if said else "nothing is wrong"])


_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "problem": "PROBLEM"}


def _lines(finding: Finding, width: int) -> list[str]:
    head = f"{_MARKS[finding.level]}  {finding.topic:<{width}}  "
    body = textwrap.wrap(finding.what, 100) or [""]
    indent = " " * len(head)
    remedy = (f"{indent}> {line}" for line in textwrap.wrap(finding.remedy, 98))
    return [head + body[0], *(indent + line for line in body[1:]), *remedy]


# -- versions


def versions() -> Iterator[Finding]:
    """The versions of Python, fsdp2 and torch, and the backends of this torch."""
    values = {"fsdp2": fsdp2.__version__, "python": platform.python_version()}
    where = f"{platform.system()} {platform.machine()}"
    yield Finding("fsdp2", "ok", f"fsdp2 {values['fsdp2']}, Python {values['python']} on {where}.", values=values)
    yield about_torch(str(torch.__version__))
    if not dist.is_available():
        yield Finding("backend", "problem", "This torch was built without torch.distributed.", "Install another build.")
        return
    known = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    there = [name for name, is_there in known.items() if is_there]
    what = f"Backends of this torch: {', '.join(there)}."
    if torch.cuda.is_available() and torch.version.hip is None and not known["nccl"]:
        remedy = "Install a torch with NCCL; gloo moves everything through the host."
        yield Finding("backend", "problem", what + " NCCL is not among them.", remedy, {"backends": there})
        return
    if torch.cuda.is_available() and known["nccl"]:
        what += f" NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}."  # type: ignore[no-untyped-call]
    yield Finding("backend", "ok", what, values={"backends": there})


def about_torch(version: str) -> Finding:
    """Whether fsdp2 is tested on this version of torch."""
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    tested = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
    values = {"torch": version, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if release < FIRST:
        what = f"torch {version} is too old: fsdp2 needs {tested}."
        return Finding("torch", "problem", what, "Update torch.", values)
    if release > LAST:
        what = f"torch {version} is newer than what fsdp2 is tested on ({tested})."
        return Finding("torch", "warning", what, "Update fsdp2, or use a torch of this range.", values)
    return Finding("torch", "ok", f"torch {version} is in the tested range ({tested}).", values=values)


# -- devices


def devices() -> Iterator[Finding]:
    """The devices that ranks would compute on, and how much of their memory is in use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield Finding("device", "note", f"There is no accelerator: ranks compute on {os.cpu_count()} cores.")
        return
    module = torch.get_device_module(accelerator)
    for index in range(torch.accelerator.device_count()):
        free, total = module.mem_get_info(index)
        yield memory_of(f"{accelerator.type}:{index} ({module.get_device_name(index)})", free, total)


def memory_of(name: str, free: int, total: int) -> Finding:
    """The finding for a device with so many free bytes of memory, and so many in total."""
    values = {"free_bytes": free, "total_bytes": total}
    used = total - free
    if used > 0.05 * total + 1024 * MIB:
        what = f"{shown_bytes(used)} of {name}'s {shown_bytes(total)} are in use already."
        return Finding("device", "warning", what, "Another process runs there: nvidia-smi lists it.", values)
    return Finding("device", "ok", f"{name}: {shown_bytes(total)}.", values=values)


# -- variables of process groups

Environment = Mapping[str, str]
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


def _on(value: str) -> bool:
    return value.strip() not in ("", "0")


SLOW: dict[str, tuple[Callable[[str], bool], str]] = {
    "NCCL_P2P_DISABLE": (_on, "GPUs of one machine exchange through the host's memory, several times slower"),
    "NCCL_SHM_DISABLE": (_on, "ranks of one machine exchange over the network"),
    "NCCL_IB_DISABLE": (_on, "nodes exchange over sockets, whatever adapters there are"),
    "NCCL_ALGO": (bool, "NCCL uses this algorithm for all sizes"),
    "NCCL_PROTO": (bool, "NCCL uses this protocol for all sizes"),
    "TORCH_NCCL_BLOCKING_WAIT": (_on, "the host waits for every collective, so nothing overlaps"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (lambda value: value == "0", "a rank that waits for a dead one waits for ever"),
    "CUDA_LAUNCH_BLOCKING": (_on, "every kernel is waited for, so nothing overlaps"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (lambda value: value == "1", "collectives queue behind kernels, and do not overlap"),
    "TORCH_DISTRIBUTED_DEBUG": (
        lambda value: value.upper() == "DETAIL",
        "ranks compare every collective before it runs",
    ),
}
"""Variables that make runs slow or hang: which of their values do so, and how."""


def variables(environ: Environment | None = None) -> Iterator[Finding]:
    """The variables of fsdp2, the launcher, NCCL, gloo and CUDA that are set."""
    environ = os.environ if environ is None else environ
    known = {variable.name: variable for variable in environment.VARIABLES}
    for sentence in environment.unknown(environ).values():
        yield Finding("variables", "warning", sentence, "Correct the name, or unset it.")
    for name, value in environment.of_ours(environ).items():
        if name in known and not known[name].accepts(value):
            yield Finding("variables", "problem", f"{name}={value}: it takes {known[name].takes}.", "Correct it.")
        elif name in known:
            yield Finding("variables", "note", f"{name}={value}. {known[name].means}")
    there = [name for name in LAUNCHER if environ.get(name)]
    if there and len(there) < len(LAUNCHER):
        missing = ", ".join(name for name in LAUNCHER if name not in there)
        what = f"{', '.join(there)} set, and {missing} not: init_process_group() cannot read them."
        yield Finding("launcher", "problem", what, "Start the program with torchrun, or set all four.")
    for name, (is_meant, does) in SLOW.items():
        if name in environ and is_meant(environ[name]):
            yield Finding("variables", "warning", f"{name}={environ[name]}: {does}.", "Unset it.")
    values = {name: environ[name] for name in sorted(environ) if name.startswith(PREFIXES)}
    what = f"Set: {', '.join(values)}." if values else "No variables of NCCL or gloo are set."
    yield Finding("variables", "note" if values else "ok", what, values=values)


# -- one exchange

_NUMBERS = 251
"""Ranks put a byte of their own, below this number, into what is gathered: neighbours differ, and all of a node."""


def exchange(ranks: int | None = None) -> Iterator[Finding]:
    """Start ranks on this machine and judge what they have measured. Under a launcher, be one of its ranks.

    Collective under a launcher: all ranks must call it.
    """
    if all(name in os.environ for name in LAUNCHER):
        yield judge(_as_rank())
        return
    count = ranks or torch.cuda.device_count() or 2
    done = _start(count)
    if isinstance(done, str):
        what = f"{count} ranks on this machine did not exchange: {done}"
        yield Finding("exchange", "problem", what, "NCCL_DEBUG=INFO (or TORCH_CPP_LOG_LEVEL=INFO) says more.")
    else:
        yield judge(done)


def measure(nbytes: int, repeats: int = 5) -> dict[str, Any]:
    """Measure an all-gather on this rank. Collective: all ranks call it, with a process group.

    Args:
        nbytes: bytes that are gathered on each rank; a multiple of the number of ranks.
        repeats: how often it runs. The fastest run counts: on a busy machine the others show how busy the cores are.

    Returns:
        A dict with sizes in bytes and times in seconds; ``bytes_per_second`` is what one rank receives.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_nccl = dist.get_backend().startswith("nccl")
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
    group = dist.distributed_c10d.GroupMember.WORLD
    assert group is not None, "the caller has made it"
    mesh = init_device_mesh(device.type, (ranks,))
    output = torch.empty(nbytes, dtype=torch.uint8, device=device)
    shard = torch.full((nbytes // ranks,), rank % _NUMBERS, dtype=torch.uint8, device=device)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        _torch.all_gather_single(output, shard, group, False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    are_right = [int(output[index * shard.numel()]) == index % _NUMBERS for index in range(ranks)]
    return {
        "ranks": ranks,
        "backend": "nccl" if is_nccl else dist.get_backend(),
        "is_right": mesh.get_local_rank() == rank and all(are_right),
        "gathered_bytes": nbytes,
        "first_seconds": times[0],
        "seconds": min(times[1:]),
        "bytes_per_second": (nbytes - shard.numel()) / min(times[1:]),
    }


def judge(found: Mapping[str, Any]) -> Finding:
    """The finding for what a rank has measured."""
    values = dict(found)
    if not found["is_right"]:
        what = f"{found['ranks']} ranks exchanged by {found['backend']}, and received wrong values."
        return Finding("exchange", "problem", what, "The links or their driver are broken. Do not train.", values)
    if found["ranks"] == 1:
        return Finding("exchange", "note", "There is one rank: nothing was exchanged.", values=values)
    size, rate = shown_bytes(found["gathered_bytes"]), found["bytes_per_second"] / 1e9
    what = f"{found['ranks']} ranks made a mesh, and gathered {size} by {found['backend']} at {rate:.2f} GB/s each."
    return Finding("exchange", "ok", what, values=values)


def _as_rank() -> dict[str, Any]:
    """Make the process group, measure, and destroy it."""
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if has_gpus else "gloo")
    ranks = dist.get_world_size()
    try:
        return measure((256 if has_gpus else 16) * MIB // ranks * ranks)
    finally:
        dist.destroy_process_group()


def _start(ranks: int) -> dict[str, Any] | str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    launcher = subprocess.Popen(
        [*command, "-m", "fsdp2.tools.doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
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
    """End the launcher. Its ranks are in sessions of their own, and it ends them if it is asked to end itself."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.communicate(timeout=_ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.communicate()


if __name__ == "__main__":
    measured = _as_rank()
    if os.environ["RANK"] == "0":
        print(json.dumps(measured))
