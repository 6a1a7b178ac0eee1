"""`Hardware`: the memory of a machine's devices, and how they lie on nodes; and a few machines by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from fsdp2.arguments import ANYTHING, checked_class
from fsdp2.errors import FSDPTypeError, FSDPValueError

GIB = 2**30

_FIELDS = (
    "name",
    "ranks_per_node",
    "memory_bytes",
    "nodes",
    "reserved_bytes",
    "host_memory_bytes",
    "has_streams",
)


@checked_class(**dict.fromkeys(_FIELDS, ANYTHING))
@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine of equal nodes.

        >>> mine = fsdp2.Hardware(name="mine", ranks_per_node=4, memory_bytes=48 * 2**30)
        >>> print(fsdp2.estimate(make_model, 8, batch=batch, hardware=mine))

    Attributes:
        name: its name, for printing.
        ranks_per_node: how many ranks share a node. Ranks are numbered node by node.
        memory_bytes: memory of the device of one rank.
        nodes: how many nodes there are; None: as many as are asked for.
        reserved_bytes: the part of ``memory_bytes`` that is not for tensors: the driver's context, NCCL, kernels, and
            what the allocator cannot use because of fragmentation.
        host_memory_bytes: memory of the host for each rank; what is offloaded must fit there.
        has_streams: whether communication overlaps with computation, on streams; False for CPUs.

    Raises:
        FSDPTypeError: a field is of another type.
        FSDPValueError: a number is negative, or 0 where it must be more.
    """

    name: str
    ranks_per_node: int
    memory_bytes: int
    nodes: int | None = None
    reserved_bytes: int = 0
    host_memory_bytes: int = 256 * GIB
    has_streams: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        for each in fields(self):
            _check(each.name, getattr(self, each.name))

    @property
    def usable_bytes(self) -> int:
        """The part of one rank's device memory that is for tensors."""
        return self.memory_bytes - self.reserved_bytes

    def refuse_more_ranks(self, ranks: int) -> None:
        """Refuse a mesh that is larger than the machine.

        Raises:
            FSDPValueError: the machine does not have ``ranks`` ranks.
        """
        if self.nodes is not None and ranks > self.nodes * self.ranks_per_node:
            raise FSDPValueError(
                f"the mesh has {ranks} ranks, and {self.name} has {self.nodes * self.ranks_per_node}: {self.nodes} "
                f"nodes of {self.ranks_per_node}. Choose a smaller mesh, or hardware with more nodes."
            )


def _check(name: str, value: Any) -> None:
    kinds: dict[str, type] = {"name": str, "has_streams": bool}
    kind = kinds.get(name, int)
    if name == "nodes" and value is None:
        return
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        article = "an" if kind is int else "a"
        raise FSDPTypeError(f"Hardware takes {article} {kind.__name__} as '{name}', got {value!r}.")
    least = 1 if name in ("ranks_per_node", "memory_bytes", "nodes") else 0
    if isinstance(value, int) and value < least:
        raise FSDPValueError(f"Hardware takes a number >= {least} as '{name}', got {value!r}.")


_H100 = Hardware(name="h100-8x", ranks_per_node=8, memory_bytes=80 * GIB, reserved_bytes=4 * GIB)

KNOWN: Mapping[str, Hardware] = MappingProxyType(
    {
        "a100": replace(_H100, name="a100-8x"),
        "h100": _H100,
        "h200": replace(_H100, name="h200-8x", memory_bytes=141 * 10**9),
        "b200": replace(_H100, name="b200-8x", memory_bytes=180 * 10**9),
        "mi300x": replace(_H100, name="mi300x-8x", memory_bytes=192 * 10**9),
        "cpu": Hardware(name="cpu", ranks_per_node=8, memory_bytes=16 * GIB, has_streams=False),
    }
)
"""Machines by name, with 8 ranks per node. The CPU stands for programs on gloo."""

_NAME = re.compile(r"(?P<kind>.+)-(?P<ranks>\d+)x(?P<nodes>\d+)?")


def hardware_of(hardware: Hardware | str) -> Hardware:
    """``hardware`` itself, or the machine of this name: ``"h100-8x"``, ``"h100-8x16"`` (16 nodes of 8), ``"cpu"``.

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


def fitting(nbytes: int) -> tuple[str, ...]:
    """The names of the known devices on which ``nbytes`` fit."""
    return tuple(name for name, each in KNOWN.items() if each.has_streams and nbytes <= each.usable_bytes)
