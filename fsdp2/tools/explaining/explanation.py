"""`explain`, and the `Explanation` that it returns: facts and advice, and how they are shown."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import nn

from fsdp2.arguments import ANYTHING, checked
from fsdp2.core.state import state_of
from fsdp2.errors import FSDPValueError
from fsdp2.tools.explaining.advice import Advice, advice_for
from fsdp2.tools.explaining.similar import similar_groups
from fsdp2.tools.explaining.text import GROUP_RIGHT, details, group_headers, overview, row_of, summary
from fsdp2.tools.facts import GroupFacts, ModelFacts, ParamFacts, facts_of
from fsdp2.tools.quantities import shown_names


@checked(ranks_per_node=ANYTHING)
def explain(model: nn.Module, *, ranks_per_node: int | None = None) -> Explanation:
    """Say how ``model`` is sharded, what a step exchanges, and what could be better about it.

        >>> print(fsdp2.explain(model))
        >>> print(fsdp2.explain(model).details("blocks.3"))

    Call it before the first step or after it (then groups come in the order that was learned), on meta or not. Every
    rank may call it at any time outside of forward and backward: it communicates nothing, and changes nothing.

    Args:
        model: a sharded module, or one that contains sharded modules. If it is part of a larger model whose first
            forward is still to come, it is described as if it were the outermost. A model that is not sharded is
            explained as such.
        ranks_per_node: how many ranks share a node, which tells bytes inside nodes from bytes between nodes.
            Default: the environment's ``LOCAL_WORLD_SIZE``, as torchrun sets it; else all ranks.

    Returns:
        An `Explanation`: ``str()`` of it is text.

    Raises:
        FSDPTypeError: ``model`` is not a module, or ``ranks_per_node`` is no int.
        FSDPValueError: ``ranks_per_node`` is below 1.
        FSDPRuntimeError: the process groups that the model was sharded over have been destroyed.
    """
    facts = facts_of(model, ranks_per_node=ranks_per_node)
    state = state_of(model)
    config = "" if state is None else str(dict(state.arguments.grouping).get("config", ""))
    return Explanation(facts, advice_for(facts), config)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` returns. ``print`` it; ``show()`` prints it in colours where `rich` is installed.

    Attributes:
        facts: everything that is known, as data.
        advice: what is wrong, slow or wasteful, and what to call.
        config: the `ShardingConfig` that `auto_shard` was called with, as text; "" if there was none.
    """

    facts: ModelFacts
    advice: tuple[Advice, ...]
    config: str = ""

    @property
    def summary(self) -> str:
        """A summary in one paragraph."""
        return summary(self.facts)

    def __str__(self) -> str:
        return overview(self.facts, self.advice) + self._said

    @property
    def _said(self) -> str:
        """The config, as lines to append to a text."""
        lines = [f"  {line}" for line in self.config.splitlines()]
        return "\n".join(["\n\nThe settings of its ShardingConfig:", *lines]) if lines else ""

    def details(self, name: str = "") -> str:
        """Describe one group in full, as text.

        Args:
            name: the name of a group, of a parameter, or of a module inside of a group; "": the model's own group.

        Raises:
            FSDPValueError: no group has this name, nor anything with this name.
        """
        found = self._groups_of(name)
        if not found:
            known = shown_names([f"'{group.name}'" for group in self.facts.groups], 12) or "no groups at all"
            raise FSDPValueError(
                f"details() takes the name of a group, of a sharded parameter, or of a module that holds some, got "
                f"'{name}'. There are: {known}."
            )
        return "\n\n".join(details(self.facts, group, params) for group, params in found)

    def _groups_of(self, name: str) -> list[tuple[GroupFacts, tuple[ParamFacts, ...]]]:
        groups = self.facts.groups
        named = [(group, group.params) for group in groups if name in (group.name, group.title, *group.modules)]
        if named:
            return named
        within = [(group, tuple(param for param in group.params if _is_within(param, name))) for group in groups]
        return [(group, params) for group, params in within if params]

    def to_json(self, *, indent: int | None = None) -> str:
        """The facts and the advice as JSON; sizes in bytes, dtypes and devices by name."""
        made = {"summary": self.summary, **_plain(self.facts), "advice": _plain(self.advice), "config": self.config}
        return json.dumps(made, indent=indent)

    def show(self, file: TextIO | None = None) -> None:
        """Print it: in colours and with rules if `rich` is installed and ``file`` is a terminal, else as plain text."""
        out = sys.stdout if file is None else file
        if not (out.isatty() and _show_in_colours(self, out)):
            print(self, file=out)


def _is_within(param: ParamFacts, name: str) -> bool:
    names = (param.name, *param.other_names)
    return any(each == name or each.startswith(f"{name}.") for each in names) if name else False


def _plain(value: Any) -> Any:
    """``value``, a nested dataclass, in types that JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, torch.device) else value


def _show_in_colours(explanation: Explanation, file: TextIO) -> bool:
    """Print with `rich`; False if it is not installed."""
    try:
        from rich.console import Console  # type: ignore[import-not-found]
        from rich.table import Table  # type: ignore[import-not-found]
    except ImportError:
        return False
    console, facts = Console(file=file), explanation.facts
    console.print(explanation.summary, highlight=True)
    if facts.groups:
        table = Table(header_style="bold")
        for index, header in enumerate(group_headers(facts)):
            table.add_column(header, justify="right" if index in GROUP_RIGHT else "left", no_wrap=index == 0)
        for alike in similar_groups(facts):
            table.add_row(*row_of(alike, facts))
        console.print(table)
    colours = {"wrong": "red", "memory": "yellow", "slow": "yellow", "note": "cyan"}
    for number, each in enumerate(explanation.advice, 1):
        console.print(f"{number}. [bold {colours[each.level]}]{each.level}[/]", end=" ")
        console.print(each.what, markup=False)
        if each.change:
            console.print(f"   {each.change}", style="green", markup=False, highlight=False)
    if explanation.config:
        console.print(explanation._said.strip("\n"), markup=False)
    return True
