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


def table(what: str, differences: Sequence[Difference], of_names: str = "") -> str:
    """The message of a `CheckpointMismatch` of ``what``; ``of_names``: what else helps where names differ."""
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
    if of_names and any(each.kind in ("missing", "unexpected") for each in differences):
        remedies.append(f"    {of_names}")
    return "\n".join([*lines, "  Remedies:", *remedies])


def of_all_ranks(found: Iterable[Iterable[Difference]]) -> list[Difference]:
    """The differences of all ranks, each once, in the order in which the first rank has them."""
    return list(dict.fromkeys(each for of_rank in found for each in of_rank))
