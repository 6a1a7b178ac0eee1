"""`Hardware`: the numbers of a machine that an estimate is computed with, and a few machines by name.

Peaks are those of the vendors' data sheets, without sparsity. What programs reach of them are fractions, which are
written here too; 'Know before a run whether it fits, and how fast it is' in the documentation says where each of
them comes from, and how far estimates are off with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from fsdp2.arguments import ANYTHING, checked_class
from fsdp2.errors import FSDPTypeError, FSDPValueError

GIB = 2**30


_FIELDS = (
    "name",
    "ranks_per_node",
    "memory_bytes",
    "peak_flops",
    "memory_bandwidth",
    "bandwidth_inside",
    "bandwidth_between",
    "nodes",
    "reserved_bytes",
    "achieved_flops",
    "achieved_attention",
    "achieved_memory",
    "achieved_links",
    "kernel_seconds",
    "latency_inside",
    "latency_between",
    "launch_seconds",
    "host_memory_bytes",
    "host_bandwidth",
    "host_memory_bandwidth",
    "has_streams",
)


@checked_class(**dict.fromkeys(_FIELDS, ANYTHING))
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The numbers of nodes that are all alike. Bandwidths are those of one rank, in one direction.

        >>> mine = fsdp2.Hardware(
        ...     name="mine", ranks_per_node=4, memory_bytes=48 * 2**30, peak_flops={"bfloat16": 362e12},
        ...     memory_bandwidth=864e9, bandwidth_inside=32e9, bandwidth_between=12.5e9,
        ... )
        >>> print(fsdp2.estimate(make_model, 8, batch=batch, hardware=mine))

    Attributes:
        name: for what is printed.
        ranks_per_node: how many ranks share a node. Ranks are numbered node by node.
        memory_bytes: of the device of one rank.
        peak_flops: operations per second by the name of the dtype that matrices are multiplied in. A dtype that is not
            there counts as the widest one that is.
        memory_bandwidth: bytes per second.
        bandwidth_inside: bytes per second to other ranks of the node.
        bandwidth_between: bytes per second to other nodes. Ranks of one node have a network card each.
        nodes: how many there are; None: as many as are asked for.
        reserved_bytes: of ``memory_bytes``, what is not for tensors: the driver's context, NCCL, kernels, and what the
            allocator cannot use because it lies in pieces.
        achieved_flops: which part of ``peak_flops`` large matrix products reach.
        achieved_attention: the same, for fused attention.
        achieved_memory: which part of ``memory_bandwidth`` operations on elements reach.
        achieved_links: which part of both bandwidths collectives reach.
        kernel_seconds: what an operation takes at the least.
        latency_inside: seconds of one hop of a collective inside a node.
        latency_between: seconds of one hop to another node.
        launch_seconds: what a collective takes at the least.
        host_memory_bytes: of the host, for each rank; what is offloaded must fit there.
        host_bandwidth: bytes per second between a device and its host.
        host_memory_bandwidth: bytes per second of one rank's share of the host's memory, where an offloaded optimizer
            steps.
        has_streams: whether communication runs beside computation, on streams; False for CPUs.

    Raises:
        FSDPTypeError: a field is of another type.
        FSDPValueError: a number is negative, or a fraction not above 0 and at most 1.
    """

    name: str
    ranks_per_node: int
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float
    bandwidth_inside: float
    bandwidth_between: float
    nodes: int | None = None
    reserved_bytes: int = 0
    achieved_flops: float = 0.7
    achieved_attention: float = 0.35
    achieved_memory: float = 0.85
    achieved_links: float = 0.8
    kernel_seconds: float = 2e-6
    latency_inside: float = 1e-6
    latency_between: float = 5e-6
    launch_seconds: float = 1e-5
    host_memory_bytes: int = 256 * GIB
    host_bandwidth: float = 25e9
    host_memory_bandwidth: float = 20e9
    has_streams: bool = True

    def __post_init__(self) -> None:
        """Check every number; ``peak_flops`` cannot be changed from here on."""
        for each in fields(self):
            _check(each.name, getattr(self, each.name))
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))

    def flops_of(self, dtype: torch.dtype) -> float:
        """Peak operations per second of matrix products in ``dtype``."""
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        widest = next((each for each in ("float32", "bfloat16", "float16") if each in self.peak_flops), None)
        return self.peak_flops.get(name, 0.0 if widest is None else self.peak_flops[widest])

    @property
    def usable_bytes(self) -> int:
        """What is for tensors of the memory of one rank's device."""
        return self.memory_bytes - self.reserved_bytes

    def refuse_more_ranks(self, ranks: int) -> None:
        """Refuse a mesh that is larger than the machine.

        Raises:
            FSDPValueError: it is.
        """
        if self.nodes is not None and ranks > self.nodes * self.ranks_per_node:
            raise FSDPValueError(
                f"the mesh has {ranks} ranks, and {self.name} has {self.nodes * self.ranks_per_node}: {self.nodes} "
                f"nodes of {self.ranks_per_node}. Choose a smaller mesh, or hardware with more nodes."
            )


_FRACTIONS = ("achieved_flops", "achieved_attention", "achieved_memory", "achieved_links")
_WHOLE = ("ranks_per_node", "memory_bytes", "nodes", "reserved_bytes", "host_memory_bytes")
_POSITIVE = ("ranks_per_node", "memory_bytes", "memory_bandwidth", "bandwidth_inside", "bandwidth_between", "nodes")


def _check(name: str, value: Any) -> None:
    if name in ("name", "has_streams"):
        kind: type = str if name == "name" else bool
        if not isinstance(value, kind):
            raise FSDPTypeError(f"Hardware takes {kind.__name__} as '{name}', got {value!r}.")
        return
    if name == "peak_flops":
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise FSDPTypeError(f"Hardware takes a dict of numbers by names of dtypes as 'peak_flops', got {value!r}.")
        for dtype, flops in value.items():
            _check_number(f"peak_flops['{dtype}']", flops, positive=True)
    elif value is not None or name != "nodes":
        if name in _WHOLE and not isinstance(value, int):
            raise FSDPTypeError(f"Hardware takes an int as '{name}', got {value!r}.")
        _check_number(name, value, positive=name in _POSITIVE)
        if name in _FRACTIONS and not 0 < value <= 1:
            raise FSDPValueError(f"Hardware takes a fraction, above 0 and at most 1, as '{name}', got {value!r}.")


def _check_number(name: str, value: Any, *, positive: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FSDPTypeError(f"Hardware takes a number as '{name}', got {value!r}.")
    if not (value > 0 if positive else value >= 0):
        raise FSDPValueError(f"Hardware takes a number {'> 0' if positive else '>= 0'} as '{name}', got {value!r}.")


def _clock_at(watts: float, full_watts: float) -> float:
    """Which part of its clock a chip keeps at a power limit.

    Power goes with clock times voltage squared, and voltage with the clock: the clock with the cube root of power.
    """
    return (watts / full_watts) ** (1 / 3)


_H100 = Hardware(
    name="h100-8x",
    ranks_per_node=8,
    memory_bytes=80 * GIB,
    reserved_bytes=4 * GIB,
    peak_flops={"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 67e12},
    memory_bandwidth=3.35e12,
    bandwidth_inside=450e9,
    bandwidth_between=50e9,
    host_bandwidth=50e9,
)

KNOWN: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": replace(
            _H100,
            name="a100-8x",
            peak_flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
            memory_bandwidth=2.04e12,
            bandwidth_inside=300e9,
            bandwidth_between=25e9,
            achieved_attention=0.6,
            host_bandwidth=25e9,
        ),
        "h100": _H100,
        # torchtitan's published runs: HBM2e, and a power limit of 500 W, of which vendors give no peak.
        "h100-hbm2e": replace(
            _H100,
            name="h100-hbm2e-8x",
            memory_bytes=96 * GIB,
            memory_bandwidth=2.4e12,
            achieved_flops=0.7 * _clock_at(500, 700),
            achieved_attention=0.35 * _clock_at(500, 700),
        ),
        "h200": replace(_H100, name="h200-8x", memory_bytes=141 * 10**9, memory_bandwidth=4.8e12),
        "b200": replace(
            _H100,
            name="b200-8x",
            memory_bytes=180 * 10**9,
            peak_flops={"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "float32": 75e12},
            memory_bandwidth=8e12,
            bandwidth_inside=900e9,
        ),
        "mi300x": replace(
            _H100,
            name="mi300x-8x",
            memory_bytes=192 * 10**9,
            peak_flops={"bfloat16": 1307e12, "float16": 1307e12, "float8": 2615e12, "float32": 163e12},
            memory_bandwidth=5.3e12,
            bandwidth_inside=448e9,
        ),
        "cpu": Hardware(
            name="cpu",
            ranks_per_node=8,
            memory_bytes=16 * GIB,
            peak_flops={"float32": 1e12},
            memory_bandwidth=20e9,
            bandwidth_inside=5e9,
            bandwidth_between=1e9,
            has_streams=False,
        ),
    }
)
"""By name, nodes of 8 ranks. The CPU stands for programs on gloo; its speed is a guess."""

_NAME = re.compile(r"(?P<kind>.+)-(?P<ranks>\d+)x(?P<nodes>\d+)?")


def hardware_of(hardware: Hardware | str) -> Hardware:
    """``hardware`` itself, or the one of a name: ``"h100-8x"``, ``"h100-8x16"`` (16 nodes of 8), ``"cpu"``.

    Raises:
        FSDPTypeError: it is neither.
        FSDPValueError: the name is not known.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        raise FSDPTypeError(f"hardware is a fsdp2.Hardware or the name of one, got {type(hardware).__name__}.")
    parts = _NAME.fullmatch(hardware)
    kind = parts["kind"] if parts else hardware
    if kind not in KNOWN or (parts and int(parts["ranks"]) == 0) or (parts and parts["nodes"] == "0"):
        names = ", ".join(f"'{each}-8x'" if each != "cpu" else "'cpu'" for each in KNOWN)
        raise FSDPValueError(
            f"hardware '{hardware}' is not known. Known are {names}; '-4x' makes nodes of 4 ranks, '-8x16' 16 nodes of "
            "8. For another machine, pass its numbers: fsdp2.Hardware(...)."
        )
    found = KNOWN[kind]
    if parts:
        nodes = int(parts["nodes"]) if parts["nodes"] else None
        found = replace(found, name=hardware, ranks_per_node=int(parts["ranks"]), nodes=nodes)
    return found
