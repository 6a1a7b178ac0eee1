"""`suggest`: which settings to train with, found by estimating many, and why.

[Note: what is not tried]
An estimate takes seconds, so that what another one has answered already is not asked again. Of one mesh and strategy,
more checkpointing takes more time and less memory: from the least on, the first that fits is the only one of interest.
What one forward keeps without checkpointing is part of every estimate, so that one that cannot fit is not tried. More
microbatches and offloading take more time, too: they are tried where nothing fits without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp2.arguments import ANYTHING, checked
from fsdp2.core.options import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2.errors import FSDPTypeError, FSDPValueError
from fsdp2.tools.estimating.estimate import DEFAULT_HARDWARE, answer, microbatches_of, names_of
from fsdp2.tools.estimating.hardware import Hardware, hardware_of
from fsdp2.tools.estimating.request import MakeModel, MakeOptimizer, Request
from fsdp2.tools.estimating.result import Estimate, shown_seconds
from fsdp2.tools.quantities import shown_bytes

_STRATEGIES = ("zero3", "zero2", "zero1")
_LESS_MEMORY = ("none", "selective", "blocks")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Settings, and what they were estimated to need.

    Attributes:
        arguments: of `fsdp2.estimate`, as they are written.
        estimate: with them.
        why: in words, what speaks for it; or why it does not fit.
    """

    arguments: str
    estimate: Estimate
    why: str


@dataclass(frozen=True, slots=True)
class Suggestions:
    """What `suggest` found. ``str()`` shows it; `to_json` writes it.

    Attributes:
        best: the fastest that fit, the fastest first.
        others: those that fit and are slower.
        unfit: those that do not fit, the smallest first.
    """

    best: tuple[Suggestion, ...]
    others: tuple[Suggestion, ...]
    unfit: tuple[Suggestion, ...]

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        found = {
            name: [
                {"arguments": each.arguments, "why": each.why, "estimate": json.loads(each.estimate.to_json())}
                for each in getattr(self, name)
            ]
            for name in ("best", "others", "unfit")
        }
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        some = next(iter((*self.best, *self.unfit))).estimate
        tried = len(self.best) + len(self.others) + len(self.unfit)
        lines = [f"{some.model} on {some.hardware.name}: of {tried} settings {len(self.unfit)} do not fit"]
        for number, each in enumerate(self.best, 1):
            lines += [f"{number}. {each.arguments}", f"   {_numbers(each.estimate)}", f"   {each.why}"]
        if not self.best:
            lines.append("nothing that was tried fits: use more ranks, shorter samples, or another machine")
        if self.unfit:
            lines.append("does not fit:")
            lines += [f"   {each.arguments}: {each.why}" for each in self.unfit]
        return "\n".join(lines)


@checked(make_model=ANYTHING, ranks=ANYTHING, batch=ANYTHING, optimizer=ANYTHING, hardware=ANYTHING, blocks=ANYTHING)
def suggest(
    make_model: MakeModel | nn.Module,
    ranks: int,
    *,
    batch: Any,
    hardware: Hardware | str = DEFAULT_HARDWARE,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    blocks: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    activation_bytes: int | None = None,
    matmul_dtype: torch.dtype | None = None,
    compiled: bool = False,
    best: int = 3,
    progress: Callable[[str], object] | None = None,
) -> Suggestions:
    """Which settings to train with: strategies, sizes of meshes, checkpointing, microbatches and offloading.

        >>> print(fsdp2.suggest(lambda: Llama(config), 64, batch=batch, hardware="h100-8x"))

    Each is estimated as by `estimate`, which takes seconds to tens of seconds for a large model; a dozen or two are.

    Args:
        make_model: as in `estimate`.
        ranks: of all.
        batch: as in `estimate`.
        hardware: the same.
        optimizer: the same.
        mp_policy: the same.
        blocks: the same.
        loss: the same.
        activation_bytes: the same; then checkpointing and microbatches are not tried.
        matmul_dtype: the same.
        compiled: the same.
        best: how many are shown with all their numbers.
        progress: called with the arguments of each estimate before it is made.

    Returns:
        What was found.

    Raises:
        FSDPTypeError: what `estimate` raises; ``ranks`` or ``best`` is no int.
        FSDPValueError: the same; ``ranks`` or ``best`` is below 1.
        FSDPRuntimeError: what `estimate` raises.
    """
    for name, value in (("ranks", ranks), ("best", best)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise FSDPTypeError(f"suggest takes an int as '{name}', got {value!r}.")
        if value < 1:
            raise FSDPValueError(f"suggest takes an int >= 1 as '{name}', got {value}.")
    request = Request(
        make_model=make_model,
        mesh_shape=(ranks,),
        batch=batch,
        optimizer=optimizer,
        strategy="zero3",
        hardware=hardware_of(hardware),
        mesh_dim_names=("shard",),
        mp_policy=mp_policy,
        offload_policy=None,
        blocks=blocks,
        shard=None,
        checkpointing="none",
        accumulation=1,
        kept="sharded",
        loss=loss,
        activation_bytes=activation_bytes,
        matmul_dtype=matmul_dtype,
        compiled=compiled,
    )
    found = _Search(request, progress).found()
    return _ranked(found, best)


class _Search:
    """Which requests are made. See [Note: what is not tried]."""

    def __init__(self, request: Request, progress: Callable[[str], object] | None) -> None:
        self._base = request
        self._progress = progress
        self._known: dict[str, Estimate] = {}

    def found(self) -> dict[str, Estimate]:
        """All that was estimated, by its arguments."""
        bases = list(self._bases())
        fits = [self._first_that_fits(each) for each in bases]
        if not any(fits) and self._base.activation_bytes is None:
            for count in microbatches_of(self._base):
                fits = [self._first_that_fits(replace(each, accumulation=count)) for each in bases]
                if any(fits):
                    break
        if not any(fits):
            offloaded = replace(self._base, offload_policy=CPUOffloadPolicy())
            self._first_that_fits(offloaded)
        return self._known

    def _bases(self) -> Iterator[Request]:
        """Meshes and strategies."""
        for strategy in _STRATEGIES:
            yield replace(self._base, strategy=strategy)  # type: ignore[arg-type]
        for size in shard_sizes(self._base.ranks, self._base.hardware.ranks_per_node):
            shape = (self._base.ranks // size, size)
            for strategy in _STRATEGIES[:2]:
                yield replace(self._base, mesh_shape=shape, mesh_dim_names=names_of(shape), strategy=strategy)  # type: ignore[arg-type]

    def _first_that_fits(self, request: Request) -> bool:
        """With as little checkpointing as fits. (Of one microbatch, zero1 is zero2.)"""
        if request.strategy == "zero1" and request.accumulation == 1:
            return False
        if request.activation_bytes is not None:
            return self._estimate(request).fits
        most = self._estimate(replace(request, checkpointing="blocks"))
        if not most.fits:
            return False
        spare = request.hardware.usable_bytes - most.resting_bytes
        for how in _LESS_MEMORY[:-1]:
            if how == "none" and most.activations.get("none", 0) > spare:
                continue
            if self._estimate(replace(request, checkpointing=how)).fits:  # type: ignore[arg-type]
                break
        return True

    def _estimate(self, request: Request) -> Estimate:
        arguments = written(request)
        if arguments not in self._known:
            if self._progress is not None:
                self._progress(arguments)
            self._known[arguments] = answer(request, "fsdp2.suggest")
        return self._known[arguments]


def shard_sizes(ranks: int, ranks_per_node: int) -> list[int]:
    """Over how many ranks of ``ranks`` hybrid sharding may shard: whole nodes, one, four, sixteen, ... of them."""
    sizes, size = [], ranks_per_node
    while size < ranks:
        if ranks % size == 0:
            sizes.append(size)
        size *= 4
    return sizes


def written(request: Request) -> str:
    """What is particular about ``request``, as arguments of `estimate`."""
    shape = request.mesh_shape
    said = [f"mesh_shape={shape[0] if len(shape) == 1 else shape}", f"strategy={request.strategy!r}"]
    if request.activation_bytes is None:
        said.append(f"checkpointing={request.checkpointing!r}")
    if request.accumulation > 1:
        said.append(f"accumulation={request.accumulation}, kept={request.kept!r}")
    if isinstance(request.offload_policy, CPUOffloadPolicy):
        said.append("offload_policy=CPUOffloadPolicy()")
    return ", ".join(said)


def _ranked(found: dict[str, Estimate], best: int) -> Suggestions:
    fit = sorted((item for item in found.items() if item[1].fits), key=lambda item: _speed(item[1]))
    unfit = sorted((item for item in found.items() if not item[1].fits), key=lambda item: item[1].peak_bytes)
    fastest = fit[0][1] if fit else None
    shown = [Suggestion(arguments, each, _why(each, fastest)) for arguments, each in fit]
    return Suggestions(
        tuple(shown[:best]), tuple(shown[best:]), tuple(Suggestion(name, each, _why_not(each)) for name, each in unfit)
    )


def _speed(estimate: Estimate) -> tuple[float, float]:
    """What is less is better: seconds, or bytes between and inside nodes where time is not estimated; then memory."""
    if estimate.time is not None:
        return float(f"{estimate.time.seconds:.3g}"), estimate.peak_bytes
    return 8.0 * estimate.sent_between + estimate.sent_inside, estimate.peak_bytes


def _numbers(estimate: Estimate) -> str:
    room = shown_bytes(estimate.hardware.usable_bytes)
    said = f"peak {shown_bytes(estimate.peak_bytes)} of {room}"
    if estimate.time is not None:
        said += f", step {shown_seconds(estimate.time.seconds)}, MFU {estimate.time.mfu:.1%}"
    return f"{said}, sent between nodes {shown_bytes(estimate.sent_between)} a step"


def _why(estimate: Estimate, fastest: Estimate | None) -> str:
    """What decides about its speed, and what it leaves."""
    said = []
    time = estimate.time
    if time is not None and fastest is not None and fastest.time is not None:
        if estimate is not fastest:
            slower = time.seconds / fastest.time.seconds - 1
            said.append(f"{slower:.1%} slower than the first" if slower > 0.004 else "as fast as the first")
        waits = time.exposed_seconds / time.seconds if time.seconds else 0.0
        said.append(f"computation waits for communication {waits:.1%} of the time")
        again = time.flops - fastest.time.flops
        if again > 0.01 * fastest.time.flops:
            said.append(f"computes {again / fastest.time.flops:.0%} more, once more in backward")
    if fastest is not None and estimate.sent_between < 0.9 * fastest.sent_between:
        said.append(f"sends {1 - estimate.sent_between / fastest.sent_between:.0%} less between nodes")
    spare = estimate.hardware.usable_bytes - estimate.peak_bytes
    said.append(f"{shown_bytes(spare)} stay free")
    return "; ".join(said)


def _why_not(estimate: Estimate) -> str:
    room = estimate.hardware.usable_bytes
    if estimate.peak_bytes <= room:
        return f"{shown_bytes(estimate.host_bytes)} of the host's memory, of which it has less"
    name, phase = max(estimate.phases.items(), key=lambda item: item[1].nbytes)
    use, nbytes = max(phase.by_use.items(), key=lambda item: item[1])
    return f"{shown_bytes(estimate.peak_bytes)} in {name}, most of it {use} ({shown_bytes(nbytes)})"
