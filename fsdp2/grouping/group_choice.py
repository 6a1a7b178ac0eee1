"""`GroupChoice`: which modules are to be groups, how large each is, and why; and how that is printed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """One call of `fully_shard`.

    Attributes:
        name: the module's fully qualified name; empty for the model itself.
        class_name: of its class.
        nbytes: of its unsharded parameters, without those of groups inside it.
        reason: why it is a group.
    """

    name: str
    class_name: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """What `choose_groups` chose. ``str()`` shows it, groups that differ in numbers of their names only on one line.

    Attributes:
        model: the name of the model's class.
        groups: in the order to call `fully_shard` in, bottom-up; the last is the model itself. Empty if that is sharded
            already.
        sharded_before: names of modules that were sharded already.
        max_bytes: as it was passed.
        min_bytes: the same.
        param_dtype: of floating-point parameters where bytes are counted; None: their own dtypes.
    """

    model: str
    groups: tuple[ModuleGroup, ...]
    sharded_before: tuple[str, ...]
    max_bytes: int
    min_bytes: int
    param_dtype: torch.dtype | None

    def __str__(self) -> str:
        if not self.groups:
            return f"{self.model} is sharded already: no groups were chosen"
        dtype = "own dtypes" if self.param_dtype is None else f"{self.param_dtype}"
        total = shown(sum(group.nbytes for group in self.groups))
        plural = "" if len(self.groups) == 1 else "s"
        head = (
            f"{self.model}: {len(self.groups)} group{plural}, {total} of parameters in {dtype} "
            f"(max_bytes {shown(self.max_bytes)}, min_bytes {shown(self.min_bytes)})"
        )
        similar: dict[tuple[str, str, int, str], list[str]] = {}
        for group in self.groups:
            key = (re.sub(r"\b\d+\b", "*", group.name), group.class_name, group.nbytes, group.reason)
            similar.setdefault(key, []).append(group.name)
        rows = [
            (common_name(names) or "(model)", kind, f"{len(names)} x " * (len(names) > 1) + shown(nbytes), reason)
            for (_, kind, nbytes, reason), names in similar.items()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"  {name:<{widths[0]}}  {class_name:<{widths[1]}}  {size:>{widths[2]}}  {reason}"
            for name, class_name, size, reason in rows
        ]
        if self.sharded_before:
            lines.append(f"  sharded before, left as they are: {', '.join(self.sharded_before)}")
        return "\n".join([head, *lines])


def shown(nbytes: int) -> str:
    """A number of bytes, in the largest unit that keeps it at 1 or above."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def common_name(names: Sequence[str]) -> str:
    """One name for several that differ in numbers: ``layers.0-31.mlp``, or ``*`` where that would not do.

    Where they are not of the same depth, some of them.
    """
    parts = []
    if len({name.count(".") for name in names}) > 1:
        return f"{names[0]}, ..., {names[-1]}"
    for each in zip(*(name.split(".") for name in names), strict=True):
        distinct = list(dict.fromkeys(each))
        if len(distinct) == 1:
            parts.append(distinct[0])
            continue
        numbers = sorted(int(part) for part in distinct if part.isdecimal())
        is_range = len(numbers) == len(names) == numbers[-1] - numbers[0] + 1
        parts.append(f"{numbers[0]}-{numbers[-1]}" if is_range else "*")
    return ".".join(parts)
