"""`suggest`: which strategy, checkpointing and offloading make a model fit, with the memory of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp2.api.policies import CPUOffloadPolicy
from fsdp2.arguments import ANYTHING, checked
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.model.accumulation import Kept
from fsdp2.tools.estimating.estimate import DEFAULT_HARDWARE, answer, request_of
from fsdp2.tools.estimating.hardware import Hardware
from fsdp2.tools.estimating.request import CHECKPOINTING, MakeModel, MakeOptimizer, Request
from fsdp2.tools.estimating.result import Estimate
from fsdp2.tools.quantities import shown_bytes, table

_STRATEGIES = ("zero2", "zero3")
"""zero1 is left out: it gathers less often than zero2, but has the same peak."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Settings, and an estimate of what they need.

    Attributes:
        arguments: the arguments of `fsdp2.estimate`, as code.
        estimate: the estimate with these arguments.
    """

    arguments: str
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What `suggest` found. ``str()`` shows it; `to_json` writes it.

    Attributes:
        tried: all settings that were tried, first those that compute, send and move least.
    """

    tried: tuple[Suggestion, ...]

    @property
    def best(self) -> Suggestion | None:
        """The first settings that fit; None if none do."""
        return next((each for each in self.tried if each.estimate.fits), None)

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        tried = [{"arguments": each.arguments, **json.loads(each.estimate.to_json())} for each in self.tried]
        return json.dumps({"best": None if self.best is None else self.best.arguments, "tried": tried}, indent=2)

    def __str__(self) -> str:
        some = self.tried[0].estimate
        rows = []
        for each in self.tried:
            found = each.estimate
            sizes = (found.peak_bytes, found.host_bytes, found.sent_inside, found.sent_between)
            rows.append(["fits" if found.fits else "does not fit", *map(shown_bytes, sizes), each.arguments])
        room = f"{some.model} on {some.hardware.name}, which has {shown_bytes(some.hardware.usable_bytes)} for a rank"
        headers = ("", "peak", "on the host", "sent inside", "sent between", "settings")
        lines = [f"{room}; loss: {some.settings['loss']}", *table(headers, rows, right=range(1, 5))]
        if self.best is None:
            lines.append("nothing that was tried fits: use more ranks, smaller microbatches, or another machine")
        return "\n".join(lines)


@checked(
    make_model=ANYTHING, mesh_shape=ANYTHING, batch=ANYTHING, optimizer=ANYTHING, hardware=ANYTHING, blocks=ANYTHING
)
def suggest(
    make_model: MakeModel | nn.Module,
    mesh_shape: int | tuple[int, ...],
    *,
    batch: Any,
    hardware: Hardware | str = DEFAULT_HARDWARE,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    blocks: Any = None,
    accumulation: int = 1,
    kept: Kept = "unsharded",
    loss: Callable[..., torch.Tensor] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Suggestions:
    """Find which strategy, checkpointing and offloading make a model fit, with the memory of each.

        >>> print(fsdp2.suggest(lambda: Llama(config), 64, batch=batch, hardware="h100-8x"))

    Each pair of a strategy and a way of checkpointing is estimated; if none fits, offloading with zero3 is tried.
    Each estimate takes as long as `estimate`: up to tens of seconds for a large model.

    Args:
        make_model: as in `estimate`.
        mesh_shape: as in `estimate`: a number of ranks, or (replicate, shard).
        batch: as in `estimate`.
        hardware: as in `estimate`.
        optimizer: as in `estimate`.
        mp_policy: as in `estimate`.
        blocks: as in `estimate`.
        accumulation: as in `estimate`.
        kept: as in `estimate`.
        loss: as in `estimate`.
        progress: called with the arguments of each estimate before it is made.

    Returns:
        All settings that were tried, with their estimates.

    Raises:
        FSDPTypeError: see `estimate`.
        FSDPValueError: see `estimate`.
        FSDPRuntimeError: see `estimate`.
    """
    base = request_of(
        make_model=make_model,
        mesh_shape=mesh_shape,
        batch=batch,
        optimizer=optimizer,
        hardware=hardware,
        mp_policy=mp_policy,
        blocks=blocks,
        accumulation=accumulation,
        kept=kept,
        loss=loss,
    )
    tried: list[Suggestion] = []
    for offloads in (False, True):
        for request in _requests(base, offloads=offloads):
            arguments = _written(request)
            if progress is not None:
                progress(arguments)
            tried.append(Suggestion(arguments, answer(request, "fsdp2.suggest")))
        if any(each.estimate.fits for each in tried):
            break
    return Suggestions(tuple(tried))


def _requests(base: Request, *, offloads: bool) -> Iterator[Request]:
    policy = CPUOffloadPolicy() if offloads else None
    for how in CHECKPOINTING:
        for strategy in _STRATEGIES[-1:] if offloads else _STRATEGIES:
            yield replace(base, checkpointing=how, strategy=strategy, offload_policy=policy)  # type: ignore[arg-type]


def _written(request: Request) -> str:
    """The settings that ``request`` tries, as arguments of `estimate`."""
    offload = ", offload_policy=CPUOffloadPolicy()" if request.offload_policy is not None else ""
    return f"strategy={request.strategy!r}, checkpointing={request.checkpointing!r}{offload}"
