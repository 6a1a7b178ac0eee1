"""``FSDP2_LOG=plan,order,comm,memory``: logs what the engine does, on the logger ``fsdp2`` and its children.

The variable is read when a module is sharded. Without it nothing is tapped, and a step runs as always. The words:

======  ====================================================================================================
plan    at the first step, on the first rank: how the model is sharded, a line for each group
order   when it is learned, and when it changes: the order in which groups are gathered
comm    each exchange: what it carries, bytes, ranks
memory  after each backward: the most memory of unsharded parameters, and of the process
======  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp2.api.logger import logger_of as _logger
from fsdp2.api.logger import words_asked
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.places import PLACE
from fsdp2.core.root import ON_ROOT, FSDPRoot
from fsdp2.core.streams import Device
from fsdp2.tools.observing.memory import peak_bytes
from fsdp2.tools.observing.observation import Exchange, Listener, Observation, observations_of

MIB = 2**20


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class _Logged(Listener):
    """Logs what it is told about one root."""

    def __init__(self, words: Sequence[str], model: nn.Module) -> None:
        self._words, self._model = frozenset(words), model
        self._order: dict[int, tuple[str, ...]] = {}
        self._held: dict[str, int] = {}
        self._most = 0
        self._has_planned = False

    def begin_step(self, root: FSDPRoot) -> None:
        """Log the plan, once."""
        if "plan" in self._words and not self._has_planned:
            self._has_planned = True
            if not dist.is_initialized() or dist.get_rank() == 0:
                # Imported late: importing fsdp2 must stay light.
                from fsdp2.tools.explaining.text import groups_table
                from fsdp2.tools.facts import facts_of

                _logger("plan").info("%s:\n%s", root.name, "\n".join(groups_table(facts_of(self._model))))

    def begin_exchange(self, exchange: Exchange, device: Device) -> None:
        """Log the exchange, if ``comm`` is asked for."""
        if "comm" in self._words:
            ahead = ", ahead" if exchange.ahead else ""
            _logger("comm").info(
                "forward %d, %s: %s of '%s'%s, %d bytes (%d sent) in %s over %d ranks",
                PLACE.step,
                PLACE.phase,
                exchange.kind.value,
                exchange.group,
                ahead,
                exchange.nbytes,
                exchange.sent_bytes,
                _counted(exchange.collectives, "buffer"),
                exchange.ranks,
            )

    def hold(self, group: str, unsharded_bytes: int, staged_bytes: int, device: Device) -> None:
        """Remember the most memory that was held at one time."""
        self._held[group] = unsharded_bytes + staged_bytes
        self._most = max(self._most, sum(self._held.values()))

    def end_iteration(self, root: FSDPRoot, *, reduced: bool) -> None:
        """Log what ``order`` and ``memory`` ask for."""
        order = tuple(group.name for unit in root.learned.forward for group in unit)
        if "order" in self._words and reduced and order != self._order.get(id(root)):
            self._order[id(root)] = order
            _logger("order").info("%s: groups are gathered in this order: %s", root.name, ", ".join(order))
        if "memory" in self._words:
            _logger("memory").info(
                "forward %d: %.3f MiB unsharded and staged at most, %.1f MiB of the process at most so far",
                PLACE.step,
                self._most / MIB,
                peak_bytes(root.groups[0].mesh.device) / MIB if root.groups else 0.0,
            )
            self._most = sum(self._held.values())


def observe_root(states: Sequence[Any], groups: Sequence[FSDPParamGroup]) -> None:
    """Log what happens to the root that is formed, if that is asked for, as long as the root lives."""
    words = words_asked()
    if not words or not states:
        return
    models = list(states[0].modules[:1])
    below = {id(each) for each in models[0].modules()}
    # An earlier log of one of these groups ends, and the new one observes its models instead.
    for seen in {id(each): each for group in groups for each in observations_of(group)}.values():
        if isinstance(seen.listener, _Logged):  # otherwise groups that both hold would be logged twice
            seen.end()
            models += [model for model in seen.models if id(model) not in below]
    Observation(models, _Logged(words, models[0]), "fully_shard()").begin(sees_optimizers=False)


ON_ROOT.append(observe_root)
