"""GPUs as their driver reports them: memory that others use, clocks, errors, how they are linked; and pinned memory."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator

import torch

from fsdp2.tools.doctor.finding import Finding
from fsdp2.tools.quantities import by_device_name, shown_bytes

FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total",
)
MIB = 2**20

THROTTLED = {
    0x08: "the hardware slows it down",
    0x20: "it is too hot",
    0x40: "it is too hot, the hardware slows it down",
    0x80: "its power supply slows it down",
}
"""Bits of what the driver calls reasons of throttling, those that are faults."""

NVLINK = {
    "V100": 150e9,
    "A100": 300e9,
    "A800": 200e9,
    "H100 NVL": 300e9,
    "H100 PCIe": 300e9,
    "H100": 450e9,
    "H200": 450e9,
    "H800": 200e9,
    "GH200": 450e9,
    "B200": 900e9,
    "GB200": 900e9,
}
"""By words of the GPU's name, the longer first,
bytes per second in one direction over all its NVLinks, by the vendor's data sheets."""

PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""By generation, bytes per second of one lane in one direction."""


def printed(*command: str) -> str | None:
    """What ``command`` prints; None without such a program, or if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def findings() -> Iterator[Finding]:
    """Look at all of it."""
    if not torch.cuda.is_available():
        yield Finding(
            "gpu", "note", "torch sees no CUDA device: clocks, topology and pinned memory were not looked at."
        )
        return
    table = printed("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    if table is None:
        yield Finding("gpu", "note", "nvidia-smi is not there, or fails: clocks and errors were not looked at.")
    else:
        yield from about(table)
    matrix = printed("nvidia-smi", "topo", "-m")
    if matrix is not None and torch.cuda.device_count() > 1:
        yield topology(matrix)
    yield pinned_memory()


def about(table: str) -> Iterator[Finding]:
    """What `nvidia-smi` says of each GPU, one line each."""
    for line in table.strip().splitlines():
        values = dict(zip(FIELDS, (each.strip() for each in line.split(",")), strict=False))
        name = f"GPU {values['index']} ({values['name']})"
        bad = list(_faults(name, values))
        yield from bad
        if not bad:
            memory = shown_bytes(number(values["memory.total"]) * MIB)
            clocks = f"{values['clocks.sm']} of {values['clocks.max.sm']} MHz now"
            what = f"{name}: {memory}, {clocks}, driver {values['driver_version']}."
            yield Finding("gpu", "ok", what, values=values)


def _faults(name: str, values: dict[str, str]) -> Iterator[Finding]:
    errors = number(values["ecc.errors.uncorrected.volatile.total"])
    if errors:
        what = f"{name} has had {errors:.0f} memory errors that could not be corrected."
        yield Finding("gpu", "problem", what, "Restart it, or take it out of use.", values)
    text = values["clocks_throttle_reasons.active"]
    reasons = int(text, 16) if text.startswith("0x") else 0
    said = [text for bit, text in THROTTLED.items() if reasons & bit]
    if said:
        what = f"{name} runs at {values['clocks.sm']} of {values['clocks.max.sm']} MHz: {'; '.join(said)}."
        yield Finding(
            "clocks", "warning", what, "Look at its cooling and power: all ranks wait for the slowest.", values
        )
    used, total = number(values["memory.used"]), number(values["memory.total"])
    if used > 0.05 * total + 1024:
        what = f"{shown_bytes(used * MIB)} of {name}'s {shown_bytes(total * MIB)} are in use already."
        yield Finding("gpu", "warning", what, "Another process runs there: nvidia-smi lists it.", values)
    now, most = number(values["pcie.link.width.current"]), number(values["pcie.link.width.max"])
    if now < most:
        what = f"{name} is linked to its host by {now:.0f} of {most:.0f} PCIe lanes."
        yield Finding("gpu", "warning", what, "Offloading is that much slower; put it into another slot.", values)


def number(text: str) -> float:
    """A number of the driver's; 0 where it says that there is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def links(matrix: str) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is linked, of what ``nvidia-smi topo -m`` prints: NV18, PIX, PXB, PHB, NODE, SYS."""
    found: dict[tuple[int, int], str] = {}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    rows = [cells for line in plain.splitlines() if (cells := line.split()) and re.fullmatch(r"GPU\d+", cells[0])]
    rows = [cells for cells in rows if len(cells) > 1 and not cells[1].startswith("GPU")]  # without the header
    for cells in rows:
        mine = int(cells[0][3:])
        for other, cell in enumerate(cells[1 : len(rows) + 1]):  # beyond are network cards
            if other > mine and re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell):
                found[mine, other] = cell
    return found


def topology(matrix: str) -> Finding:
    """Whether GPUs of this machine reach each other by NVLink, or at least without leaving their socket."""
    found = links(matrix)
    kinds = {kind: sum(each == kind for each in found.values()) for kind in sorted(set(found.values()))}
    said = ", ".join(f"{count} pairs by {kind}" for kind, count in kinds.items())
    nvlinks = [kind for kind in kinds if kind.startswith("NV")]
    if nvlinks and len(nvlinks) < len(kinds):
        what = f"Some GPUs are linked by NVLink and some are not: {said}."
        return Finding("topology", "warning", what, "Collectives run at the speed of the slowest pair.", dict(kinds))
    if "SYS" in kinds:
        what = f"GPUs of different sockets exchange over the processors' link: {said}."
        remedy = "Shard inside a socket and replicate across (HSDP): mesh_shape (sockets, GPUs of one)."
        return Finding("topology", "warning", what, remedy, dict(kinds))
    return Finding("topology", "ok", f"{said or 'one GPU'}.", values=dict(kinds))


def nominal_bandwidth(name: str, kind: str, generation: int, lanes: int) -> tuple[float, str] | None:
    """Bytes per second that GPUs of this name can send to each other by this kind of link, and what that is."""
    if kind.startswith("NV"):
        found = by_device_name(NVLINK, name)
        return None if found is None else (found, "NVLink")
    if generation in PCIE_LANE and lanes:
        return PCIE_LANE[generation] * lanes, f"PCIe {generation} x{lanes}"
    return None


def pinned_memory(nbytes: int = 256 * MIB) -> Finding:
    """How fast the host sends to the device from pinned memory, and from memory that is not; seconds by events."""
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    try:
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        what = f"{shown_bytes(nbytes)} of host memory cannot be pinned: {error}."
        return Finding("pinned memory", "problem", what, "ulimit -l unlimited; CPUOffloadPolicy(pin_memory=False)")
    plain = torch.empty(nbytes, dtype=torch.uint8)
    speeds = {}
    for name, source in (("pinned", pinned), ("not_pinned", plain)):
        device.copy_(source)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            device.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        speeds[f"{name}_bytes_per_second"] = 3 * nbytes / (time.perf_counter() - begin)
    fast, slow = (value / 1e9 for value in speeds.values())
    what = f"The host sends {fast:.1f} GB/s to a GPU from pinned memory, {slow:.1f} GB/s from other memory."
    if fast < slow:
        return Finding("pinned memory", "warning", what, "Pinned memory should be the faster one.", speeds)
    return Finding("pinned memory", "ok", what, values=speeds)
