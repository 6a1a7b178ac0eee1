"""What stands in the place of which object of torch (and of one of Lightning's), in which module. Pure data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, cast

from fsdp2.compat import bridges
from fsdp2.compat.fsdp1.names import without_wrappers
from fsdp2.compat.names import (
    CLIPPING,
    FLAT_PARAM,
    HOME,
    IMPLEMENTATION,
    PUBLIC,
    STATES,
    Counterpart,
    counterparts_of_clipping,
)


class Substitutes:
    """The tables that a swap goes by: objects are looked up by identity, whatever a module calls them.

    Almost everywhere the counterpart of fsdp2 stands for torch's object; `bridges` says where something else must.

    Args:
        pairs: the counterparts; empty, if nothing is to be replaced.
    """

    def __init__(self, pairs: Iterable[Counterpart]) -> None:
        everywhere = {pair.name: pair for pair in pairs}
        self._everywhere = _by_identity(everywhere.values())
        self._in: dict[str, dict[int, Counterpart]] = {}
        self._inside_fsdp1: dict[int, Counterpart] = {}
        self._torchs = {id(pair.ours): (pair.ours, pair.torchs) for pair in everywhere.values()}
        self._wrapper = everywhere.get("FullyShardedDataParallel")
        self._module = everywhere.get("FSDPModule")
        self._has_fully_shard = "fully_shard" in everywhere  # else it is of FSDP1 alone, or of nothing
        if self._has_fully_shard:
            self._serve_replicated(everywhere)
            self._bridge_fully_shard(everywhere)
        if "FullyShardedDataParallel" in everywhere:
            self._bridge_fsdp1(everywhere)

    def _serve_replicated(self, everywhere: dict[str, Counterpart]) -> None:
        """What programs ask of any module, and call of it, is answered for those of torch's `replicate` too."""
        module = everywhere["FSDPModule"]
        torchs = cast(type, module.torchs)
        pairs = [Counterpart(module.name, torchs, bridges.either(torchs, cast(type, module.ours)))]
        for name in ("share_comm_ctx", "register_fsdp_forward_method"):
            if name in everywhere:
                function: Any = everywhere[name]
                bridged = bridges.of_sharded(function.ours, function.torchs, torchs)
                pairs.append(Counterpart(name, function.torchs, bridged))
        self._torchs |= {id(pair.ours): (pair.ours, pair.torchs) for pair in pairs}
        self._everywhere |= _by_identity(pairs)

    def _bridge_fully_shard(self, everywhere: dict[str, Counterpart]) -> None:
        module, function = everywhere["FSDPModule"], everywhere["fully_shard"]
        ours = cast(type, module.ours)
        bridged: dict[str, Callable[..., object]] = {
            "get_cls_to_fsdp_cls": bridges.both_mappings,
            "disable_fsdp_module_new_init": bridges.both_contexts,
        }
        pairs_and_bridges = [(everywhere[name], bridge) for name, bridge in bridged.items() if name in everywhere]
        offloading = [
            Counterpart(pair.name, pair.torchs, bridge(pair.ours, pair.torchs)) for pair, bridge in pairs_and_bridges
        ]
        look_up = vars(importlib.import_module(STATES))["_get_module_fsdp_state"]
        state = Counterpart(look_up.__name__, look_up, bridges.both_states(function.ours, look_up, ours, STATES))
        pipelining = Counterpart(
            "fully_shard", function.torchs, bridges.pipelined(function.ours, function.torchs, ours)
        )
        self._put(offloading, HOME)
        self._put([state], STATES)
        for clipping in CLIPPING:
            self._put(list(counterparts_of_clipping()), clipping)
        self._put_instead([pipelining], everywhere, bridges.PIPELINING)

    def _bridge_fsdp1(self, everywhere: dict[str, Counterpart]) -> None:
        wrapper = everywhere["FullyShardedDataParallel"]
        either = bridges.either(cast(type, wrapper.torchs), cast(type, wrapper.ours))
        self._put_instead([Counterpart(wrapper.name, wrapper.torchs, either)], everywhere, bridges.STATE_DICTS)
        flat = [
            Counterpart(pair.name, pair.torchs, bridges.beneath(pair.torchs, cast(type, pair.ours)))
            for pair in (everywhere["FlatParameter"], everywhere["FlatParamHandle"])
        ]
        records = [everywhere[name] for name in ("FlatParamShardMetadata", "ParamInfo", "SharedParamInfo")]
        self._put([*flat, *records], FLAT_PARAM)
        # Models that torch's own has wrapped go on: of its private modules nothing changes but what serves both.
        serve_both = [pair for name, pair in everywhere.items() if name.startswith("_")]
        self._inside_fsdp1 = _by_identity(serve_both)

    def _put(self, pairs: list[Counterpart], module: str) -> None:
        """These alone in that module."""
        self._torchs |= {id(pair.ours): (pair.ours, pair.torchs) for pair in pairs}
        self._in[module] = _by_identity(pairs)

    def _put_instead(
        self, pairs: list[Counterpart], everywhere: dict[str, Counterpart], modules: Iterable[str]
    ) -> None:
        """These in the place of others of their names in those modules, beside what stands everywhere."""
        self._torchs |= {id(pair.ours): (pair.ours, pair.torchs) for pair in pairs}
        # Imported after the swap, the modules hold ours already.
        late = [Counterpart(pair.name, everywhere[pair.name].ours, pair.ours) for pair in pairs]
        table = self._everywhere | _by_identity([*pairs, *late])
        self._in |= dict.fromkeys(modules, table)

    def learn(self, module: ModuleType) -> None:
        """What ``module``, which not every program loads, defines: what Lightning and transformers ask of a model.

        And how pipelining splits a backward.
        """
        if module.__name__ in bridges.PIPELINING and self._module is not None:
            ours = self._module.ours
            for name in bridges.SPLIT_BACKWARDS:
                self._learn(module, name, lambda theirs: bridges.gathering(theirs, ours))
        if self._wrapper is None:
            return
        if module.__name__ in bridges.LIGHTNING:
            wrapper = cast(type, self._wrapper.ours)
            self._learn(module, bridges.OF_DTENSORS, lambda theirs: bridges.of_fully_shard(theirs, wrapper))
        elif module.__name__ in bridges.TRANSFORMERS:
            self._learn(module, bridges.PARAMETER_NAMES, lambda theirs: bridges.plain_names(theirs, without_wrappers))

    def _learn(self, module: ModuleType, name: str, make: Callable[[Any], object]) -> None:
        theirs = vars(module).get(name)
        if theirs is None or id(theirs) in self._torchs:
            return
        pair = Counterpart(name, theirs, make(theirs))
        self._in.get(module.__name__, self._everywhere)[id(theirs)] = pair
        self._torchs[id(pair.ours)] = (pair.ours, theirs)

    def of_fully_shard(self, value: object) -> object:
        """What stands for ``value`` almost everywhere; itself, if nothing does, or `fully_shard` is left to torch."""
        pair = self._everywhere.get(id(value)) if self._has_fully_shard else None
        return value if pair is None else pair.ours

    def to_replace(self, module: ModuleType) -> list[tuple[str, Counterpart]]:
        """The names in ``module`` that refer to one of torch's objects, with what should stand there."""
        is_inside = module.__name__.startswith(f"{PUBLIC}._") and not module.__name__.startswith(IMPLEMENTATION)
        table = self._in.get(module.__name__, self._inside_fsdp1 if is_inside else self._everywhere)
        return [(name, table[id(value)]) for name, value in list(vars(module).items()) if id(value) in table]

    def to_put_back(self, module: ModuleType) -> list[tuple[str, Any]]:
        """The names in ``module`` that refer to a replacement, with torch's object."""
        torchs = self._torchs
        return [(name, torchs[id(value)][1]) for name, value in list(vars(module).items()) if id(value) in torchs]


def _by_identity(pairs: Iterable[Counterpart]) -> dict[int, Counterpart]:
    # The objects are kept beside their ids, so that an id stays theirs.
    return {id(pair.torchs): pair for pair in pairs}
