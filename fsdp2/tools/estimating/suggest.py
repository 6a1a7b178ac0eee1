"""`suggest`: which settings to train with, found by estimating many, and why.

[Note: what is not tried]
What another estimate has answered already is not asked again. Of one mesh and strategy, more checkpointing takes more
time and less memory: from the least on, the first that fits is the only one of interest. An optimizer that can be fused
is: it takes less of both; the fastest is estimated without, too, to say how much. What one forward keeps without
checkpointing is part of every estimate, so that one that cannot fit is not tried.

More microbatches of a step cost time (each gathers again, or keeps whole gradients) and save activations. So they are
tried where activations have to be checkpointed, or do not fit: as few as let less be checkpointed, and gradients
kept sharded where whole ones do not fit, for the few fastest meshes and strategies. Offloading is tried where nothing
fits without.

Of a deep model, settings are compared by estimates that are scaled up from fewer blocks (`scaling`); what turns out to
be the fastest is then estimated whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch
from fsdp2.api.policies import CPUOffloadPolicy
from fsdp2.arguments import ANYTHING, checked
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.errors import FSDPTypeError, FSDPValueError
from fsdp2.tools.estimating.estimate import DEFAULT_HARDWARE, FUSED, answer, microbatches_of, names_of
from fsdp2.tools.estimating.hardware import Hardware, hardware_of
from fsdp2.tools.estimating.memory import Phase, Use
from fsdp2.tools.estimating.program import program
from fsdp2.tools.estimating.request import MakeModel, MakeOptimizer, Request
from fsdp2.tools.estimating.result import Estimate, shown_seconds
from fsdp2.tools.estimating.scaling import scaled
from fsdp2.tools.estimating.simulation import simulated_world
from fsdp2.tools.estimating.subject import depth_of, made
from fsdp2.tools.quantities import shown_bytes

_STRATEGIES = ("zero3", "zero2", "zero1")
_LESS_MEMORY = ("none", "selective", "blocks")
_MOST_BASES = 4
"""Meshes and strategies that microbatches are tried with."""
_MOST_CONFIRMED = 3
_DEPTHS = (3, 5)
"""Blocks of the models that estimates are scaled up from: more than are gathered ahead."""

_CALLER = "fsdp2.suggest"
_LOGGER = logging.getLogger("fsdp2")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Settings, and what they were estimated to need.

    Attributes:
        arguments: of `fsdp2.estimate`, as they are written; with a fused optimizer, if that was tried.
        estimate: with them.
        why: in words, what speaks for it; or why it does not fit.
        program: how a training program says it, as Python.
        is_scaled: the estimate is scaled up from models with fewer blocks.
    """

    arguments: str
    estimate: Estimate
    why: str
    program: str = ""
    is_scaled: bool = False


@dataclass(frozen=True, slots=True)
class Tried:
    """A request, and what was estimated for it, whole or scaled up."""

    request: Request
    estimate: Estimate
    is_scaled: bool


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
                {
                    "arguments": each.arguments,
                    "why": each.why,
                    "program": each.program,
                    "is_scaled": each.is_scaled,
                    "estimate": json.loads(each.estimate.to_json()),
                }
                for each in getattr(self, name)
            ]
            for name in ("best", "others", "unfit")
        }
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        some = next(iter((*self.best, *self.unfit))).estimate
        tried = len(self.best) + len(self.others) + len(self.unfit)
        lines = [f"{some.model} on {some.hardware.name}: of {tried} settings {len(self.unfit)} do not fit"]
        lines.append(f"loss: {some.settings.get('loss', 'unknown')}")
        for number, each in enumerate(self.best, 1):
            about = " (scaled up from fewer blocks)" if each.is_scaled else ""
            lines += [f"{number}. {each.arguments}{about}", f"   {_numbers(each.estimate)}", f"   {each.why}"]
        if self.best:
            lines += ["to train with the first:", *(f"   {line}" for line in self.best[0].program.splitlines())]
        if not self.best:
            lines.append("nothing that was tried fits: use more ranks, shorter samples, or another machine")
        if self.unfit:
            lines += ["does not fit:", *(f"   {line}" for line in _unfit_lines(self.unfit))]
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
    found = _Search(replace(request, fused=request.can_fuse()), progress).found()
    return _ranked(found, best)


class _Search:
    """Which requests are made. See [Note: what is not tried]."""

    def __init__(self, request: Request, progress: Callable[[str], object] | None) -> None:
        self._base = request
        self._progress = progress
        self._depth = _depth_of(request)
        self.known: dict[str, Tried] = {}

    def found(self) -> list[Tried]:
        """All that was estimated."""
        bases: list[Request] = []
        least: list[Tried | None] = []
        for base in self._bases():
            if not self._never_fits(base, bases):
                bases.append(base)
                least.append(self._first_that_fits(base))
        if self._base.activation_bytes is None:
            for base, found in self._worth_microbatches(bases, least):
                self._with_microbatches(base, found)
        if not any(each.estimate.fits for each in self.known.values()):
            offloaded = replace(self._base, offload_policy=CPUOffloadPolicy())
            if self._first_that_fits(offloaded) is None and self._base.activation_bytes is None:
                self._with_microbatches(offloaded, None)
        self._confirm_the_fastest()
        return list(self.known.values())

    def _bases(self) -> Iterator[Request]:
        """Meshes and strategies."""
        for strategy in _STRATEGIES:
            yield replace(self._base, strategy=strategy)  # type: ignore[arg-type]
        for size in shard_sizes(self._base.ranks, self._base.hardware.ranks_per_node):
            shape = (self._base.ranks // size, size)
            for strategy in _STRATEGIES[:2]:
                yield replace(self._base, mesh_shape=shape, mesh_dim_names=names_of(shape), strategy=strategy)  # type: ignore[arg-type]

    def _never_fits(self, base: Request, bases: list[Request]) -> bool:
        """Whether one that shards more of it is too large without any activations."""
        for each in bases:
            if each.strategy == base.strategy and each.mesh_shape[-1] > base.mesh_shape[-1]:
                tried = self.known.get(written(replace(each, checkpointing="blocks")))
                if tried is not None and _without_activations(tried.estimate) > base.hardware.usable_bytes:
                    return True
        return False

    def _first_that_fits(self, request: Request) -> Tried | None:
        """With one microbatch, and as little checkpointing as fits. (Of one microbatch, zero1 is zero2.)"""
        if request.strategy == "zero1":
            return self._known(replace(request, strategy="zero2"))
        if request.activation_bytes is not None:
            tried = self._estimate(request)
            return tried if tried.estimate.fits else None
        found = self._estimate(replace(request, checkpointing="blocks"))
        if not found.estimate.fits:
            return None
        spare = request.hardware.usable_bytes - found.estimate.resting_bytes
        for how in _LESS_MEMORY[:-1]:
            if self._activations(found.estimate, how) > spare:
                continue
            tried = self._estimate(replace(request, checkpointing=how))  # type: ignore[arg-type]
            if tried.estimate.fits:
                return tried
        return found

    def _activations(self, estimate: Estimate, how: str) -> int:
        """What one forward keeps: the same with every mesh and strategy, as every rank has as many samples."""
        every = [estimate, *(each.estimate for each in self.known.values() if each.request.accumulation == 1)]
        return next((each.activations[how] for each in every if how in each.activations), 0)

    def _known(self, request: Request) -> Tried | None:
        """The first that fits, of what was estimated already."""
        every = (self.known.get(written(replace(request, checkpointing=how))) for how in _LESS_MEMORY)  # type: ignore[arg-type]
        return next((each for each in every if each is not None and each.estimate.fits), None)

    def _worth_microbatches(
        self, bases: list[Request], least: list[Tried | None]
    ) -> list[tuple[Request, Tried | None]]:
        """Those that have to checkpoint, or do not fit: the fastest of them first, no more than a few."""
        pairs = [
            (base, found)
            for base, found in zip(bases, least, strict=True)
            if found is None or found.request.checkpointing != "none"
        ]
        never = (float("inf"), 0.0)
        pairs.sort(key=lambda pair: never if pair[1] is None else _speed(pair[1].estimate))
        return pairs[:_MOST_BASES]

    def _with_microbatches(self, base: Request, found: Tried | None) -> None:
        """As few microbatches as let less be checkpointed."""
        wanted = _LESS_MEMORY if found is None else _LESS_MEMORY[: _LESS_MEMORY.index(found.request.checkpointing)]
        for count in microbatches_of(base):
            for how in wanted:
                if self._fits(replace(base, checkpointing=how, accumulation=count)):  # type: ignore[arg-type]
                    wanted = _LESS_MEMORY[: _LESS_MEMORY.index(how)]  # with more microbatches, only less of it
                    break

    def _fits(self, request: Request) -> bool:
        """In one of the ways of keeping gradients, of which the second takes more time and less memory."""
        strategy = "zero2" if request.strategy == "zero1" else request.strategy
        alone = replace(request, strategy=strategy, accumulation=1, kept=self._base.kept)
        before = [self.known.get(written(replace(alone, checkpointing=how))) for how in _LESS_MEMORY]  # type: ignore[arg-type]
        for kept in ("unsharded", "sharded"):
            tried = replace(request, kept=kept)  # type: ignore[arg-type]
            if _may_fit(tried, [each.estimate for each in before if each]) and self._estimate(tried).estimate.fits:
                return True
        return False

    def _confirm_the_fastest(self) -> None:
        """What is to be first is estimated whole, until the first one is."""
        for _ in range(_MOST_CONFIRMED):
            fit = [each for each in self.known.values() if each.estimate.fits]
            first = min(fit, key=lambda each: _speed(each.estimate), default=None)
            if first is not None and first.request.fused and not first.is_scaled:
                self._estimate(replace(first.request, fused=False))  # which says what temporaries of foreach take
            if first is None or not first.is_scaled:
                return
            self._tell(f"{written(first.request)}, whole")
            self.known[written(first.request)] = Tried(first.request, answer(first.request, _CALLER), False)

    def _estimate(self, request: Request) -> Tried:
        arguments = written(request)
        if arguments not in self.known:
            self._tell(arguments)
            scaled_up = self._scaled(request)
            estimate = scaled_up or answer(request, _CALLER)
            self.known[arguments] = Tried(request, estimate, scaled_up is not None)
        return self.known[arguments]

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what)

    def _scaled(self, request: Request) -> Estimate | None:
        """From models with fewer blocks; None if that cannot be done."""
        if self._depth is None:
            return None
        low, high = _DEPTHS
        try:
            few, more = (answer(replace(request, depth=depth), _CALLER) for depth in _DEPTHS)
        except Exception as error:  # whatever the model raises when blocks are missing; whole, it raises it again
            _LOGGER.info("fsdp2.suggest estimates whole models, as fewer blocks do not run: %s", error)
            self._depth = None
            return None
        return scaled(few, more, (low, high, self._depth))


def _depth_of(request: Request) -> int | None:
    """How many blocks the model has, if it is one of which fewer can stand for all."""
    with simulated_world(request.ranks, _CALLER), _torch.fake_tensors():
        return depth_of(made(request.make_model))


def _may_fit(request: Request, alone: list[Estimate]) -> bool:
    """Whether that is possible: by what all but activations takes, and a microbatch's part of these.

    Args:
        request: with several microbatches.
        alone: estimates of the same with one, checkpointed in whatever ways were estimated.
    """
    if not alone:
        return True
    last = alone[-1]
    rest = _without_activations(last)
    if request.kept == "unsharded":
        dtype = request.mp_policy.reduce_dtype or torch.float32
        rest = max(rest, last.resting_bytes + last.parameters * dtype.itemsize)
    known = {how: nbytes for each in alone for how, nbytes in each.activations.items()}
    activations = known.get(request.checkpointing, known.get("blocks", 0))
    return rest + activations / request.accumulation <= request.hardware.usable_bytes


def _without_activations(estimate: Estimate) -> int:
    """What else is there at the peak."""
    peak = max(estimate.phases.values(), key=lambda each: each.nbytes)
    return peak.nbytes - peak.by_use.get(Use.ACTIVATIONS.value, 0)


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
        said += [f"checkpointing={request.checkpointing!r}", f"accumulation={request.accumulation}"]
    if request.accumulation > 1:
        said.append(f"kept={request.kept!r}")
    if isinstance(request.offload_policy, CPUOffloadPolicy):
        said.append("offload_policy=CPUOffloadPolicy()")
    if request.fused:
        said.append(FUSED)
    return ", ".join(said)


def _ranked(found: list[Tried], best: int) -> Suggestions:
    fit = sorted((each for each in found if each.estimate.fits), key=lambda each: _speed(each.estimate))
    unfit = sorted((each for each in found if not each.estimate.fits), key=lambda each: each.estimate.peak_bytes)
    fastest = fit[0].estimate if fit else None
    steps = [each.estimate.phases.get(Phase.OPTIMIZER.value) for each in found if not each.request.fused]
    foreach = max((step.by_use.get(Use.OPTIMIZER.value, 0) for step in steps if step), default=0)
    shown = [_suggestion(each, _why(each, fastest, foreach)) for each in fit]
    return Suggestions(
        tuple(shown[:best]),
        tuple(shown[best:]),
        tuple(_suggestion(each, _why_not(each.estimate)) for each in unfit),
    )


def _unfit_lines(unfit: Sequence[Suggestion]) -> Iterator[str]:
    """One for each that is different in more than zero1 and zero2, if these need the same."""
    shared: dict[tuple[str, str], list[str]] = {}
    for each in unfit:
        alike = each.arguments.replace("'zero1'", "'zero2'")
        shared.setdefault((alike, each.why), []).append(each.arguments)
    for (alike, why), arguments in shared.items():
        also = " (and with zero1, which gathers less often and has the same peak)" if len(arguments) > 1 else ""
        yield f"{alike if also else arguments[0]}{also}: {why}"


def _suggestion(tried: Tried, why: str) -> Suggestion:
    return Suggestion(written(tried.request), tried.estimate, why, program(tried.request), tried.is_scaled)


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


def _why(tried: Tried, fastest: Estimate | None, foreach: int) -> str:
    """What decides about its speed, and what it leaves; ``foreach``: bytes of an optimizer that is not fused."""
    estimate, request = tried.estimate, tried.request
    said = [_HOW_ACTIVATIONS[request.checkpointing]] if request.activation_bytes is None else []
    if request.accumulation > 1:
        said.append(f"{request.accumulation} microbatches a step, their gradients kept {request.kept}")
    if request.fused and foreach:
        said.append(f"fused=True saves {shown_bytes(foreach)} of the optimizer's temporaries (foreach)")
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


_HOW_ACTIVATIONS = {
    "none": "keeps all activations",
    "selective": "keeps products and attention, computes the rest once more",
    "blocks": "computes blocks once more in backward",
}


def _why_not(estimate: Estimate) -> str:
    room = estimate.hardware.usable_bytes
    if estimate.peak_bytes <= room:
        return f"{shown_bytes(estimate.host_bytes)} of the host's memory, of which it has less"
    name, phase = max(estimate.phases.items(), key=lambda item: item[1].nbytes)
    use, nbytes = max(phase.by_use.items(), key=lambda item: item[1])
    return f"{shown_bytes(estimate.peak_bytes)} in {name}, most of it {use} ({shown_bytes(nbytes)})"
