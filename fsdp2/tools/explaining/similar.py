"""Groups that differ only in the numbers of their names, as a model's blocks do: they are shown once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp2.grouping.group_choice import common_name
from fsdp2.tools.facts.data import GroupFacts, ModelFacts, ParamFacts


@dataclass(frozen=True, slots=True)
class SimilarGroups:
    """Groups of equal parameters, in the order of the model.

    Attributes:
        name: one name for all of them, such as ``blocks.0-11``.
        groups: the groups, at least one.
        sent_inside: how many bytes a rank sends for all of them in a step, inside its node.
        sent_between: how many bytes it sends for them to other nodes.
    """

    name: str
    groups: tuple[GroupFacts, ...]
    sent_inside: int
    sent_between: int

    @property
    def first(self) -> GroupFacts:
        """The first group, which stands for all."""
        return self.groups[0]


def similar_groups(facts: ModelFacts) -> tuple[SimilarGroups, ...]:
    """All groups of ``facts``, with similar ones together."""
    found: dict[object, list[GroupFacts]] = {}
    for group in facts.groups:
        found.setdefault(_key(facts, group), []).append(group)
    return tuple(_together(facts, groups) for groups in found.values())


def _together(facts: ModelFacts, groups: Sequence[GroupFacts]) -> SimilarGroups:
    exchanges = [each for group in groups for each in facts.exchanges_of(group.index)]
    return SimilarGroups(
        common_name([group.name for group in groups]) or f"({groups[0].class_name})",
        tuple(groups),
        sum(each.inside_bytes for each in exchanges),
        sum(each.between_bytes for each in exchanges),
    )


def _key(facts: ModelFacts, group: GroupFacts) -> object:
    pattern = re.sub(r"\b\d+\b", "*", group.name)
    params = tuple(_without_name(param, group) for param in group.params)
    exchanges = tuple(replace(each, group=0) for each in facts.exchanges_of(group.index))
    blank = replace(group, index=0, name=pattern, modules=(), params=(), prefetches=None)
    return blank, params, exchanges


def _without_name(param: ParamFacts, group: GroupFacts) -> ParamFacts:
    own = param.name.removeprefix(f"{group.name}.") if group.name else param.name
    return replace(param, name=own, other_names=())
