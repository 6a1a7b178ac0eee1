"""An explanation as plain text: a paragraph, a table of groups, and advice; and the details of one group."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fsdp2.api.shown import dtype_name
from fsdp2.tools.explaining.advice import Advice
from fsdp2.tools.explaining.similar import SimilarGroups, similar_groups
from fsdp2.tools.facts.data import ExchangeFacts, GroupFacts, ModelFacts, ParamFacts
from fsdp2.tools.quantities import shown_bytes, shown_count, shown_names, table

WIDTH = 110

GROUP_RIGHT = (3, 4, 8, 9)
"""The columns of the table of groups that hold numbers."""


def wrapped(text: str, *, first: str = "", then: str = "") -> list[str]:
    """``text``, wrapped to lines of `WIDTH`."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


# -- the summary


def summary(facts: ModelFacts) -> str:
    """How the model is sharded, in one paragraph, for somebody who has not seen it before."""
    size = f"{facts.class_name} has {shown_count(facts.numel)} parameters, {shown_bytes(facts.nbytes)}."
    if not facts.groups:
        ranks = "this rank" if facts.world_size == 1 else f"each of {facts.world_size} ranks"
        return f"{size} Nothing of it is sharded: fully_shard was called on no module, and {ranks} keeps it whole."
    return " ".join([size, _where(facts), _at_rest(facts), _unsharded(facts), _sent(facts), _ordered(facts)])


def _where(facts: ModelFacts) -> str:
    count = len(facts.groups)
    meshes = dict.fromkeys(_over(group) for group in facts.groups)
    many = "They are one group" if count == 1 else f"They are cut into {count} groups"
    return f"{many}, {' or '.join(meshes)}."


def _over(group: GroupFacts) -> str:
    copies = f"{group.replicate_size} copies"
    if group.shard_size == 1:
        return f"kept whole in {copies}" if group.replicate_size > 1 else "on one rank"
    over = f"sharded over {group.shard_size} ranks"
    return over if group.replicate_size == 1 else f"{over} in {copies}"


def _at_rest(facts: ModelFacts) -> str:
    kept = sum(group.local_bytes for group in facts.groups)
    gradients = sum(group.gradient_bytes for group in facts.groups)
    place = " in host memory" if all("parameters" in group.offloads for group in facts.groups) else ""
    text = f"Rank {facts.rank} keeps {shown_bytes(kept)} of them at rest{place}"
    plain = sum(each.nbytes for each in (*facts.ignored, *facts.unsharded))
    text += f", {shown_bytes(plain)} more that are in no group" if plain else ""
    return f"{text}, and {shown_bytes(gradients)} of gradients after a backward." if gradients else f"{text}."


def peak_unsharded_bytes(facts: ModelFacts) -> int:
    """The most bytes that are unsharded at a time, without staging buffers.

    These are the groups that stay unsharded from forward to backward, and of the others one, those that contain it,
    and what is gathered ahead.
    """
    stays = sum(group.unsharded_bytes for group in facts.groups if group.reshard_after_forward is False)
    passing = [group for group in facts.groups if group.reshard_after_forward is not False]
    if not passing:
        return stays
    chains = [[other for other in passing if _contains(other, group)] for group in passing]
    chain = max(chains, key=lambda each: sum(group.unsharded_bytes for group in each))
    others = [group.unsharded_bytes for group in passing if group not in chain]
    budget = facts.order.prefetch_bytes
    ahead = max(others, default=0) if budget is None else min(budget, sum(others))
    return stays + sum(group.unsharded_bytes for group in chain) + ahead


def _contains(outer: GroupFacts, inner: GroupFacts) -> bool:
    return outer.name in ("", inner.name) or inner.name.startswith(f"{outer.name}.")


def _unsharded(facts: ModelFacts) -> str:
    if all(group.shard_size == 1 for group in facts.groups):
        return "Nothing has to be gathered."
    largest = max(facts.groups, key=lambda group: group.unsharded_bytes)
    return (
        "A group is gathered whole just before its module computes, and freed after that: the largest, "
        f"'{largest.title}', then takes {shown_bytes(largest.unsharded_bytes)}, and all that are there at a time "
        f"{shown_bytes(peak_unsharded_bytes(facts))} at most."
    )


def _sent(facts: ModelFacts) -> str:
    inside = sum(each.inside_bytes for each in facts.exchanges)
    between = sum(each.between_bytes for each in facts.exchanges)
    if not inside + between:
        return "A step exchanges nothing."
    text = f"In one step a rank sends {shown_bytes(inside + between)} to others"
    if facts.nodes == 1:
        return f"{text}, all on one node."
    return f"{text}: {shown_bytes(inside)} inside its node, {shown_bytes(between)} between {facts.nodes} nodes."


def _ordered(facts: ModelFacts) -> str:
    if facts.order.is_learned:
        return "Groups are gathered ahead in the order that the last step has shown."
    return "No step has run yet, so groups are taken to be needed in the order of the modules."


# -- the table


def groups_table(facts: ModelFacts) -> list[str]:
    """The table of all groups, with similar ones on one line."""
    rows = [row_of(each, facts) for each in similar_groups(facts)]
    return table(group_headers(facts), rows, right=GROUP_RIGHT)


def group_headers(facts: ModelFacts) -> list[str]:
    """The headers of the table of groups."""
    headers = ["group", "class", "parameters", "at rest", "unsharded", "dtypes", "over", "after forward"]
    return [*headers, "sent in a step"] if facts.nodes == 1 else [*headers, "sent inside node", "to other nodes"]


def row_of(alike: SimilarGroups, facts: ModelFacts) -> list[str]:
    """One line of the table of groups, as cells."""
    group = alike.first
    times = f"{len(alike.groups)} x " if len(alike.groups) > 1 else ""
    sent = [shown_bytes(alike.sent_inside)] + ([] if facts.nodes == 1 else [shown_bytes(alike.sent_between)])
    return [
        alike.name,
        group.class_name,
        f"{times}{shown_count(group.numel)}",
        f"{times}{shown_bytes(group.shard_bytes)}",
        f"{times}{shown_bytes(group.unsharded_bytes)}",
        dtypes_of(group),
        ranks_of(group),
        resharding_of(group),
        *sent,
    ]


def dtypes_of(group: GroupFacts) -> str:
    """The dtypes in which a group is kept, computes, and is reduced: ``fp32 > bf16 > fp32``; one if they are equal."""
    stages = [
        [param.rests for param in group.params],
        [param.computes for param in group.params],
        [param.reduces for param in group.params if param.reduces is not None],
    ]
    names = ["+".join(dict.fromkeys(map(dtype_name, stage))) for stage in stages if stage]
    if not stages[2]:
        names.append("frozen")
    return names[0] if len(set(names)) == 1 else " > ".join(names)


def ranks_of(group: GroupFacts) -> str:
    """The number of ranks that shard it, and of copies: ``8``, or ``8 x 2 copies``."""
    copies = f" x {group.replicate_size} copies" if group.replicate_size > 1 else ""
    return f"{group.shard_size}{copies}"


def resharding_of(group: GroupFacts) -> str:
    """What becomes of the unsharded parameters of ``group`` at the end of forward."""
    if group.shard_size == 1:
        return "whole"
    if group.rests is not None:
        return f"to {group.reshard_after_forward} ranks"
    return "freed" if group.reshard_after_forward else "kept"


# -- what a step exchanges, by process group


TRAFFIC_HEADERS = ("collective", "among ranks", "in forward", "in backward", "sent inside node", "to other nodes")
TRAFFIC_RIGHT = (2, 3, 4, 5)


def traffic_rows(facts: ModelFacts) -> list[list[str]]:
    """A line for each kind of collective and process group: how often it runs in a step, and what one rank sends."""
    found: dict[tuple[str, tuple[int, ...]], list[ExchangeFacts]] = {}
    for each in facts.exchanges:
        found.setdefault((each.kind, each.ranks), []).append(each)
    rows = []
    for (kind, ranks), exchanges in found.items():
        times = [sum(each.times for each in exchanges if each.during == during) for during in ("forward", "backward")]
        sent = [sum(each.inside_bytes for each in exchanges), sum(each.between_bytes for each in exchanges)]
        rows.append([kind, _ranks(ranks), *map(str, times), *map(shown_bytes, sent)])
    return rows


# -- advice


def advice_lines(advice: Sequence[Advice]) -> list[str]:
    """The advice, numbered, each with the call to make."""
    lines = []
    for number, each in enumerate(advice, 1):
        lines += wrapped(f"{number}. [{each.level}] {each.what}", then="   ")
        if each.change:
            lines.append(f"     {each.change}")
    return lines


def plain_lines(facts: ModelFacts) -> list[str]:
    """Lines about parameters in no group."""
    lines = []
    for kept, what in ((facts.ignored, "ignored"), (facts.unsharded, "in no group")):
        if kept:
            names = shown_names([each.name for each in kept], 6)
            lines += wrapped(f"{what}: {names} ({shown_bytes(sum(each.nbytes for each in kept))} on every rank)")
    return lines


def _named(facts: ModelFacts) -> str:
    """The argument of `details` for a named group, as code; "" if the model is the only group."""
    name = next((group.name for group in facts.groups if group.name), "")
    return f'"{name}"' if name else ""


def overview(facts: ModelFacts, advice: Sequence[Advice]) -> str:
    """Everything but the details of groups."""
    parts = ["\n".join(wrapped(summary(facts)))]
    if facts.groups:
        parts.append("\n".join(groups_table(facts)))
    if facts.exchanges:
        parts.append("\n".join(table(TRAFFIC_HEADERS, traffic_rows(facts), right=TRAFFIC_RIGHT)))
    if plain := plain_lines(facts):
        parts.append("\n".join(plain))
    if advice:
        parts.append("\n".join(["What could be better:", *advice_lines(advice)]))
    if facts.groups:
        which = "one group" if len(facts.groups) > 1 else "the group"
        parts.append(f"More on {which}: explain(model).details({_named(facts)})")
    return "\n\n".join(parts)


# -- the details of one group


def details(facts: ModelFacts, group: GroupFacts, params: Sequence[ParamFacts]) -> str:
    """Everything that is known of a group, and of ``params`` in it."""
    lines = [f"{group.title} ({group.class_name}), {', '.join(_traits(group))}", ""]
    lines += [f"  {name:<15} {value}" for name, value in properties_of(group)]
    lines += ["", *params_table(params), ""]
    lines += [line for sentence in reasons(params) for line in wrapped(sentence, then="  ")]
    exchanges = facts.exchanges_of(group.index)
    if exchanges:
        lines += ["", *exchanges_table(exchanges)]
    return "\n".join(lines)


def _traits(group: GroupFacts) -> list[str]:
    traits = [_over(group)]
    if group.is_root:
        traits.append("a root")
    if group.strategy:
        traits.append(f'as strategy="{group.strategy}"')
    return traits


def properties_of(group: GroupFacts) -> list[tuple[str, str]]:
    """The properties of a group: names and values, in words."""
    mesh = " x ".join(map(str, group.mesh)) or "-"
    found = [
        ("mesh", f"({mesh}) on {group.device}" + (f", {group.backend}" if group.backend else "")),
        ("shard ranks", _ranks(group.shard_ranks)),
        ("copies on", _ranks(group.replicate_ranks) if group.replicate_size > 1 else ""),
        ("modules", ", ".join(group.modules) if len(group.modules) > 1 else ""),
        ("shared with", ", ".join(group.shares_with)),
        ("at rest", shown_bytes(group.shard_bytes)),
        ("unsharded", shown_bytes(group.unsharded_bytes)),
        ("gradients", shown_bytes(group.gradient_bytes)),
        ("after forward", resharding_of(group)),
        ("in host memory", ", ".join(group.offloads)),
        ("gathers ahead", ", ".join(group.prefetches or ())),
        ("settings", ", ".join(f"{name}={value}" for name, value in group.settings)),
    ]
    return [(name, value) for name, value in found if value]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))}, ..., {ranks[-1]} ({len(ranks)} ranks)"


PARAM_HEADERS = (
    *("parameter", "shape", "on this rank", "bytes", "placement", "rests", "computes", "reduced", "gather", "reduce"),
)


def params_table(params: Sequence[ParamFacts]) -> list[str]:
    """The table of ``params``, a line for each."""
    return table(PARAM_HEADERS, map(param_row, params), right=(3,))


def param_row(param: ParamFacts) -> list[str]:
    """One line of the table of parameters, as cells."""
    return [
        param.name,
        _shape(param.shape),
        _shape(param.local_shape),
        shown_bytes(param.local_bytes),
        placements_of(param),
        dtype_name(param.rests),
        dtype_name(param.computes),
        dtype_name(param.reduces) if param.is_trainable else "frozen",
        param.gather,
        param.reduce,
    ]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def placements_of(param: ParamFacts) -> str:
    """The placements of a parameter, without axes over which it is replicated: ``Shard(0)/dp=4, Shard(1)/tp=2``."""
    pairs = zip(param.placements, param.mesh, strict=True)
    return ", ".join(f"{each}/{axis}" for each, axis in pairs if each != "Replicate()") or "Replicate()"


def reasons(params: Sequence[ParamFacts]) -> list[str]:
    """Sentences on why parameters travel as they do; parameters with one reason share a sentence."""
    sentences = []
    for title, ways in (
        ("Gathered", [(param.gather, param.gather_reason, param) for param in params]),
        ("Reduced", [(param.reduce, param.reduce_reason, param) for param in params]),
    ):
        found: dict[tuple[str, str], list[str]] = {}
        for each, why, param in ways:
            found.setdefault((each, why), []).append(param.name)
        for (way, reason), names in found.items():
            sentences.append(f"{title} {_way_text(way)}: {shown_names(names, 4)}: {reason}.")
    tied = [f"Tied: {param.name} is also {', '.join(param.other_names)}." for param in params if param.other_names]
    return sentences + tied


def _way_text(way: str) -> str:
    return {"direct": "directly", "stays": "not at all"}.get(way, way)


EXCHANGE_HEADERS = (
    *("in a step", "collective", "ranks", "times", "members", "bytes of a rank", "sent inside node", "to other nodes"),
)
EXCHANGE_RIGHT = (2, 3, 4, 5, 6, 7)


def exchanges_table(exchanges: Sequence[ExchangeFacts]) -> list[str]:
    """The table of what one step exchanges."""
    return table(EXCHANGE_HEADERS, map(exchange_row, exchanges), right=EXCHANGE_RIGHT)


def exchange_row(each: ExchangeFacts) -> list[str]:
    """One line of the table of exchanges, as cells."""
    return [
        each.during,
        each.kind,
        str(len(each.ranks)),
        str(each.times),
        str(len(each.members)),
        shown_bytes(each.part_bytes),
        shown_bytes(each.inside_bytes),
        shown_bytes(each.between_bytes),
    ]
