"""The host: cores, memory, shared memory, limits of processes, the network, and whether its own name is found."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fsdp2.tools.doctor.finding import Finding
from fsdp2.tools.quantities import shown_bytes

LEAST_FILES = 4096
LEAST_SHARED_BYTES = 2**30
SLOW_NAME_SECONDS = 1.0


def findings() -> Iterator[Finding]:
    """Look at all of it."""
    yield _cores_and_memory()
    yield shared_memory(Path("/dev/shm"))
    yield from limits(resource.getrlimit, has_adapters=bool(_adapters()))
    yield host_name()
    yield _network()


def _cores_and_memory() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _limit_of_container()
    nbytes = min(pages, limit) if limit else pages
    values = {"cores": cores, "memory_bytes": nbytes}
    within = " (of this container)" if limit and limit < pages else ""
    return Finding("host", "ok", f"{cores} cores, {shown_bytes(nbytes)} of memory{within}.", values=values)


def _limit_of_container() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def shared_memory(folder: Path) -> Finding:
    """The memory that processes of this machine share: data loaders, NCCL, gloo."""
    if not folder.is_dir():
        return Finding("shared memory", "note", f"There is no {folder}.")
    total, _, free = shutil.disk_usage(folder)
    values = {"total_bytes": total, "free_bytes": free}
    what = f"{folder} has {shown_bytes(free)} free of {shown_bytes(total)}."
    if free < LEAST_SHARED_BYTES:
        remedy = "In a container: --shm-size=16g, or --ipc=host. Workers of data loaders and NCCL need it."
        return Finding("shared memory", "warning", what, remedy, values)
    return Finding("shared memory", "ok", what, values=values)


def limits(get: Callable[[int], tuple[int, int]], *, has_adapters: bool) -> Iterator[Finding]:
    """Limits of a process; ``get`` is `resource.getrlimit`."""
    files, _ = get(resource.RLIMIT_NOFILE)
    locked, _ = get(resource.RLIMIT_MEMLOCK)
    values = {"files": files, "locked_bytes": locked}
    good = True
    if 0 <= files < LEAST_FILES:
        good = False
        what = f"A process may have {files} files open; many ranks, data loaders and checkpoints need more."
        yield Finding("ulimit", "warning", what, "ulimit -n 65536", values)
    if has_adapters and locked not in (-1, resource.RLIM_INFINITY):
        good = False
        what = f"A process may lock {shown_bytes(locked)} of memory, and adapters of InfiniBand need it locked."
        yield Finding("ulimit", "problem", what, "ulimit -l unlimited, or the container's --ulimit memlock=-1", values)
    if good:
        yield Finding("ulimit", "ok", "A process may have enough files open, and lock enough memory.", values=values)


def host_name(look_up: Callable[[str], object] = socket.gethostbyname) -> Finding:
    """Whether this machine finds its own name, and how soon: process groups look it up."""
    name = socket.gethostname()
    begin = time.perf_counter()
    try:
        look_up(name)
    except OSError as error:
        took = time.perf_counter() - begin
        what = f"This machine does not find its own name '{name}' ({error}), after {took:.1f} s."
        return Finding("name", "warning", what, f"Write it into /etc/hosts: 127.0.0.1 {name}", {"seconds": took})
    took = time.perf_counter() - begin
    if took > SLOW_NAME_SECONDS:
        what = f"This machine takes {took:.1f} s to find its own name '{name}'; every process group does so."
        return Finding("name", "warning", what, f"Write it into /etc/hosts: 127.0.0.1 {name}", {"seconds": took})
    return Finding("name", "ok", f"This machine finds its own name '{name}'.", values={"seconds": took})


def _adapters(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    return sorted(each.name for each in root.iterdir()) if root.is_dir() else []


def _network(root: Path = Path("/sys/class/infiniband")) -> Finding:
    """Adapters of InfiniBand or RoCE, with their states and rates."""
    ports, bad = {}, []
    for adapter in _adapters(root):
        for port in sorted((root / adapter / "ports").glob("*")):
            state, rate = _text(port / "state"), _text(port / "rate")
            ports[f"{adapter}:{port.name}"] = f"{state}, {rate}"
            if "ACTIVE" not in state:
                bad.append(f"{adapter}:{port.name}")
    if not ports:
        return Finding("network", "note", "There are no adapters of InfiniBand or RoCE: nodes exchange over sockets.")
    what = "; ".join(f"{name} {said}" for name, said in ports.items())
    if bad:
        return Finding("network", "warning", f"{what}. Not active: {', '.join(bad)}.", "Look at the cable.", ports)
    return Finding("network", "ok", f"{what}.", values=ports)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
