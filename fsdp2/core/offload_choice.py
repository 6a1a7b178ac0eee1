"""Which parameters are offloaded, and how: one policy for all of a `fully_shard` call, or one for each, by name.

Parameters of one call that rest in different places are different groups of its unit, as those on different meshes are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp2.core.buffers import Offloading
from fsdp2.core.options import CPUOffloadPolicy, OffloadPolicy, offload
from fsdp2.errors import FSDPTypeError, FSDPValueError

OffloadFunction = Callable[[str, nn.Parameter], OffloadPolicy | None]
OffloadChoice = OffloadPolicy | Mapping[str, OffloadPolicy] | OffloadFunction
"""A policy for all; policies by the names of parameters below the module; or a function of name and parameter."""


def offload_choice(given: Any) -> OffloadChoice:
    """``given`` with policies of ours in the place of torch's own.

    Raises:
        FSDPTypeError: it is none, or an entry of a mapping is none.
    """
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str):
                raise FSDPTypeError(f"offload_policy takes policies by the names of parameters, got a key {name!r}.")
        return {name: offload(policy, f"offload_policy['{name}']") for name, policy in given.items()}
    if callable(given) and not isinstance(given, type):
        return given  # type: ignore[no-any-return]
    return offload(given)


def offload_policies(
    choice: OffloadChoice, params: Sequence[tuple[Sequence[str], nn.Parameter]], module: str
) -> list[OffloadPolicy]:
    """The policy of each of ``params``, which come with all their names below ``module``.

    Raises:
        FSDPTypeError: a function has answered something else.
        FSDPValueError: a name that no parameter of the call has; two names of one parameter with different policies.
    """
    if isinstance(choice, OffloadPolicy):
        return [choice] * len(params)
    if not isinstance(choice, Mapping):
        return [
            offload(choice(names[0], parameter), f"offload_policy('{names[0]}', ...)") for names, parameter in params
        ]
    known = {name for names, _ in params for name in names}
    for name in choice:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise FSDPValueError(
                f"offload_policy names '{name}', and the fully_shard call on {module} shards no such parameter: names "
                f"are those below the module, of parameters that no other call has sharded.{hint}"
            )
    return [_of_names(choice, names) for names, _ in params]


def _of_names(choice: Mapping[str, OffloadPolicy], names: Sequence[str]) -> OffloadPolicy:
    given = [name for name in names if name in choice]
    for name in given:
        if choice[name] != choice[given[0]]:
            raise FSDPValueError(
                f"offload_policy says {choice[given[0]]} of '{given[0]}' and {choice[name]} of '{name}', which are one "
                "parameter; say it once."
            )
    return choice[given[0]] if given else OffloadPolicy()


def offloading_of(policy: OffloadPolicy, device: torch.device) -> Offloading:
    """Where shards live by ``policy``, of parameters that are computed with on ``device``."""
    if not isinstance(policy, CPUOffloadPolicy):
        return Offloading(device)
    return Offloading(
        device,
        offloaded=policy.parameters,
        pinned=policy.pin_memory,
        sums_on_host=bool(policy.gradients),
        state_on_host=bool(policy.optimizer_state),
    )
