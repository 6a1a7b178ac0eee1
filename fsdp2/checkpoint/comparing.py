"""What speaks against loading a checkpoint: all differences, in one table. Pure: no file, no rank, no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHOWN = 20
"""Lines of each kind."""


class Difference(NamedTuple):
    """One line of the table.

    Attributes:
        kind: of `KINDS`.
        name: of the tensor or value.
        text: what is different about it.
    """

    kind: str
    name: str
    text: str


KINDS = {
    "missing": (
        "the model has, and there is not",
        "strict=False leaves what is missing as it is",
    ),
    "unexpected": ("there is, and the model has not", "strict=False leaves them out"),
    "shape": ("of another shape", "build the model that was saved"),
    "dtype": ("of another dtype", "cast=True converts"),
    "group": (
        "of the optimizer that does not fit",
        "build the optimizer with the groups that were saved, or load the model alone",
    ),
    "unwritten": (
        "on meta, which nothing would write",
        "give them values before the load (buffers: make the module that computes them anew on the device)",
    ),
    "ranks": ("of another number of ranks", 'per_rank_missing="keep" leaves each rank what it has'),
    "value": ("of the program, which the checkpoint has not", "leave them out, or strict=False"),
}
"""Of each kind the headline, and the remedy."""


def table(what: str, differences: Sequence[Difference]) -> str:
    """The message of a `CheckpointMismatch` of ``what``."""
    lines = [f"{what} does not fit the model; nothing was loaded."]
    remedies = []
    for kind, (headline, remedy) in KINDS.items():
        found = [each for each in differences if each.kind == kind]
        if not found:
            continue
        lines.append(f"  {kind} ({len(found)}), {headline}:")
        lines += [f"    {each.name}{': ' if each.text else ''}{each.text}" for each in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"    and {len(found) - SHOWN} more")
        remedies.append(f"    {kind}: {remedy}")
    missing, unexpected = ([each.name for each in differences if each.kind == kind] for kind in _OF_NAMES)
    if missing or unexpected:
        remedies.append(f"    {RENAME}")
    if hint := hint_of_names(missing, unexpected):
        remedies.append(f"    {hint}")
    return "\n".join([*lines, "  Remedies:", *remedies])


_OF_NAMES = ("missing", "unexpected")
RENAME = "rename= finds what has another name"
"""What helps where names differ: an argument of every load."""

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What DistributedDataParallel, torch.compile, activation checkpointing and FSDP1 add to names, wherever they are."""


def hint_of_names(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """How names that there are become names that are missing, if one prefix does that to most; else "".

    >>> hint_of_names(["up.weight", "up.bias"], ["module.up.weight", "module.up.bias"])
    "2 names fit without their 'module.': rename=lambda name: name.removeprefix('module.')"
    >>> hint_of_names(["model.up.weight"], ["up.weight"])
    "1 name fits with 'model.' before it: rename=lambda name: 'model.' + name"
    """
    wanted, there = frozenset(missing), frozenset(unexpected)
    removed, added = _fronts(unexpected, wanted), _fronts(missing, there)
    within = {each: sum(name.replace(each, "") in wanted for name in unexpected) for each in _WRAPPERS}
    ways = [(count, each, "removeprefix") for each, count in removed.items()]
    ways += [(count, each, "replace") for each, count in within.items()]
    ways += [(count, each, "add") for each, count in added.items()]
    count, part, way = max(ways, key=lambda each: each[0], default=(0, "", ""))
    if 2 * count <= min(len(missing), len(unexpected)) or not count:
        return ""
    names = "1 name fits" if count == 1 else f"{count} names fit"
    if way == "add":
        return f"{names} with '{part}' before {'it' if count == 1 else 'them'}: rename=lambda name: '{part}' + name"
    function = f"name.removeprefix('{part}')" if way == "removeprefix" else f"name.replace('{part}', '')"
    return f"{names} without {'its' if count == 1 else 'their'} '{part}': rename=lambda name: {function}"


def _fronts(names: Sequence[str], without: frozenset[str]) -> dict[str, int]:
    """Of the prefixes that end in a dot, of how many of ``names`` the rest is one of ``without``."""
    counts: dict[str, int] = {}
    for name in names:
        at = name.find(".") + 1
        while at:
            if name[at:] in without:
                counts[name[:at]] = counts.get(name[:at], 0) + 1
            at = name.find(".", at) + 1
    return counts


def of_all_ranks(found: Iterable[Iterable[Difference]]) -> list[Difference]:
    """The differences of all ranks, each once, in the order in which the first rank has them."""
    return list(dict.fromkeys(each for of_rank in found for each in of_rank))
