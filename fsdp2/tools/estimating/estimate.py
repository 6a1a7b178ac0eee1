"""`estimate`: what one rank of a training run needs, before there is a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from fsdp2.api.policies import CPUOffloadPolicy, OffloadChoice
from fsdp2.arguments import ANYTHING, checked
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.state import Strategy
from fsdp2.errors import FSDPTypeError
from fsdp2.features.accumulation import Kept
from fsdp2.tools.estimating.hardware import Hardware, hardware_of
from fsdp2.tools.estimating.memory import Peak, Phase, Use
from fsdp2.tools.estimating.rank import Observation, observe
from fsdp2.tools.estimating.request import CHECKPOINTING, Checkpointing, MakeModel, MakeOptimizer, Request, Shard
from fsdp2.tools.estimating.result import CollectiveSum, Estimate, PhasePeak, Remedy, StepTime

DEFAULT_HARDWARE = "h100-8x"
FUSED = "an optimizer with fused=True"


@checked(
    make_model=ANYTHING,
    mesh_shape=ANYTHING,
    batch=ANYTHING,
    optimizer=ANYTHING,
    hardware=ANYTHING,
    strategy=ANYTHING,
    offload_policy=ANYTHING,
    blocks=ANYTHING,
    checkpointing=ANYTHING,
)
def estimate(
    make_model: MakeModel | nn.Module,
    mesh_shape: int | tuple[int, ...],
    *,
    batch: Any,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    strategy: Strategy | None = None,
    hardware: Hardware | str = DEFAULT_HARDWARE,
    mesh_dim_names: tuple[str, ...] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008, frozen
    offload_policy: OffloadChoice | None = None,
    blocks: Any = None,
    shard: Shard | None = None,
    checkpointing: Checkpointing = "none",
    accumulation: int = 1,
    kept: Kept = "unsharded",
    loss: Callable[..., torch.Tensor] | None = None,
    activation_bytes: int | None = None,
    matmul_dtype: torch.dtype | None = None,
    compiled: bool = False,
    remedies: bool = True,
) -> Estimate:
    """What one rank of a training run needs: memory, traffic, time. On a laptop: no device, no peers, no memory.

        >>> batch = torch.empty(1024, 8192, dtype=torch.int64, device="meta")
        >>> print(fsdp2.estimate(lambda: Llama(config), 1024, batch=batch, hardware="h100-8x"))

    The engine itself runs two steps of rank 0, on tensors without memory and a process group without peers, and
    everything that is allocated, exchanged and computed is counted. The process group is made and destroyed inside. One
    process calls it, by itself. See 'Know before a run whether it fits, and how fast it is' in the documentation.

    Args:
        make_model: makes the model, on whatever device; it is called inside of the simulation, so that a model of any
            size takes no memory. A model that exists is copied, and left as it is.
        mesh_shape: how many ranks, or the sizes of a mesh: (shard,) or (replicate, shard); others with ``shard``.
        batch: what all ranks together train on in one step: a tensor, a tuple of positional arguments or a dict of
            keyword arguments of ``model(...)``. Tensors may be on meta. Dim 0 of the first are samples, which are
            divided among the data-parallel ranks and microbatches, of every tensor that has as many.
        optimizer: called with the list of parameters: a class, or ``lambda parameters: AdamW(parameters,
            foreach=True)``. None: no optimizer.
        strategy: as in `fully_shard`.
        hardware: the name of a machine, or a `Hardware` of numbers.
        mesh_dim_names: ("shard",) or ("replicate", "shard") by default. Ranks along "tp", "cp" and "pp" have the same
            samples.
        mp_policy: as in `fully_shard`.
        offload_policy: the same; names are those below the model.
        blocks: as in `auto_shard`, which shards the model; with ``shard``, what is checkpointed.
        shard: shards the model in the place of `auto_shard`: called with the model and the mesh.
        checkpointing: of activations of the modules that are groups: "none", "blocks" (all of it is computed once
            more), "selective" (but for matrix products and attention).
        accumulation: microbatches of a step.
        kept: as in `accumulate`: what waits between them.
        loss: called with the output and what the model was called with; returns what is differentiated. By default
            ``output.loss``, or the sum of the output.
        activation_bytes: what one forward keeps for backward, for models that cannot run without values; nothing is
            then computed, and no time estimated.
        matmul_dtype: in which matrices are multiplied if not in their own dtype (``torch.float8_e4m3fn``): changes time
            only.
        compiled: as if ``torch.compile`` made one kernel of all between two matrix products: changes time only.
        remedies: if it does not fit, whether to try what would make it fit.

    Returns:
        The estimate. ``print`` shows it.

    Raises:
        FSDPTypeError: an argument of another type; a batch without tensors.
        FSDPValueError: unknown hardware, a mesh that is larger than it, samples that cannot be divided, a model that is
            sharded already, arguments that contradict each other.
        FSDPRuntimeError: a process group exists; the forward depends on values.
    """
    if not isinstance(mesh_shape, (int, tuple)):
        raise FSDPTypeError(f"estimate takes an int, or a tuple of ints, as 'mesh_shape', got {mesh_shape!r}.")
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    request = Request(
        make_model=make_model,
        mesh_shape=shape,
        batch=batch,
        optimizer=optimizer,
        strategy=strategy,
        hardware=hardware_of(hardware),
        mesh_dim_names=tuple(mesh_dim_names) if mesh_dim_names is not None else names_of(shape),
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        blocks=blocks,
        shard=shard,
        checkpointing=checkpointing,
        accumulation=accumulation,
        kept=kept,
        loss=loss,
        activation_bytes=activation_bytes,
        matmul_dtype=matmul_dtype,
        compiled=compiled,
    )
    found = answer(request)
    if found.fits or not remedies:
        return found
    return replace(found, remedies=tuple(_tried(request)))


def names_of(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Of the dims of a mesh, if the user gives none."""
    return {1: ("shard",), 2: ("replicate", "shard")}.get(len(shape), tuple(f"dim{i}" for i in range(len(shape))))


def answer(request: Request, caller: str = "fsdp2.estimate") -> Estimate:
    """Simulate ``request`` and say what was seen. Raises what `estimate` does."""
    seen = observe(request, caller)
    extra = request.activation_bytes or 0
    peaks = {phase: _with(peak, extra, phase) for phase, peak in seen.log.peaks().items()}
    host_bytes = max((peak.nbytes for peak in seen.log.peaks(on_host=True).values()), default=0)
    last = list(peaks)[-1]
    resting = seen.log.at_end_of(last, lambda use: use is not Use.GRADIENTS)
    hardware, peak_bytes = request.hardware, max(peak.nbytes for peak in peaks.values())
    sums = _collectives(seen)
    return Estimate(
        model=seen.model,
        parameters=seen.parameters,
        groups=seen.groups,
        mesh=dict(zip(request.mesh_dim_names, request.mesh_shape, strict=True)),
        settings={**_settings(request, seen), "loss": seen.loss},
        hardware=hardware,
        phases={phase.value: PhasePeak(peak.nbytes, _named(peak.by_use)) for phase, peak in peaks.items()},
        peak_bytes=peak_bytes,
        resting_bytes=sum(resting.values()),
        host_bytes=host_bytes,
        activations=seen.saved if request.activation_bytes is None else {"as given": extra},
        collectives=sums,
        sent_inside=sum(each.sent_inside for each in sums),
        sent_between=sum(each.sent_between for each in sums),
        to_host=seen.traffic.to_host,
        fits=peak_bytes <= hardware.usable_bytes and host_bytes <= hardware.host_memory_bytes,
        remedies=(),
        time=_time(request, seen, sums),
    )


def _with(peak: Peak, activations: int, phase: Phase) -> Peak:
    """``peak`` and what a forward keeps, if that was given."""
    if not activations or phase is Phase.OPTIMIZER:
        return peak
    found = peak.by_use.get(Use.ACTIVATIONS, 0) + activations
    return Peak(peak.nbytes + activations, {**peak.by_use, Use.ACTIVATIONS: found})


def _named(by_use: dict[Use, int]) -> dict[str, int]:
    return {use.value: by_use[use] for use in Use if use in by_use}


def _collectives(seen: Observation) -> tuple[CollectiveSum, ...]:
    return tuple(
        CollectiveSum(
            kind=kind.value,
            ranks=shape.ranks,
            nodes=shape.nodes,
            count=each.count,
            nbytes=each.nbytes,
            sent_inside=round(each.sent_inside),
            sent_between=round(each.sent_between),
            seconds=each.seconds,
        )
        for (kind, shape), each in seen.traffic.sums.items()
        if shape.ranks > 1
    )


def _time(request: Request, seen: Observation, sums: tuple[CollectiveSum, ...]) -> StepTime | None:
    hardware = request.hardware
    if not hardware.has_streams or request.activation_bytes is not None:
        return None
    peak = hardware.flops_of(request.matmul_dtype or seen.matmul_dtype)
    return StepTime(
        seconds=seen.seconds,
        compute_seconds=seen.busy_seconds,
        exposed_seconds=sum(seen.waited.values()),
        communication_seconds=sum(each.seconds for each in sums),
        flops=seen.flops,
        model_flops=seen.model_flops,
        mfu=seen.model_flops / (seen.seconds * peak) if peak and seen.seconds else 0.0,
    )


def _settings(request: Request, seen: Observation) -> dict[str, str]:
    """What the estimate is of, in words; what is as by default is left out."""
    default = "as shard= says" if request.shard is not None else "zero3"
    said: dict[str, str] = {"strategy": request.strategy or default}
    policy = request.mp_policy
    if policy.param_dtype is not None:
        said["computes in"] = _dtype(policy.param_dtype)
    if policy.reduce_dtype is not None:
        said["reduces in"] = _dtype(policy.reduce_dtype)
    if seen.offloaded:
        part = f" of {seen.offloaded / seen.parameters:.0%} of the parameters"
        said["offload"] = f"shards, gradients, optimizer{part if seen.offloaded < seen.parameters else ''}"
    elif isinstance(request.offloading, CPUOffloadPolicy):
        said["offload"] = repr(request.offload_policy)
    said["checkpointing"] = request.checkpointing
    if request.accumulation > 1:
        said["microbatches"] = f"{request.accumulation} ({request.kept} gradients)"
    if request.matmul_dtype is not None:
        said["multiplies in"] = _dtype(request.matmul_dtype)
    name = "none" if request.optimizer is None else getattr(request.optimizer, "__name__", "given")
    said["optimizer"] = f"{name}(fused=True)" if request.fused else name
    if request.compiled:
        said["compiled"] = "yes"
    return said


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- what would make it fit


def _tried(request: Request) -> Iterator[Remedy]:
    """What else could be done, each on top of those before; until something fits."""
    said: dict[str, str] = {}
    for change, words in _changes(request):
        request = replace(request, **change)
        if "accumulation" in change:
            said.pop("kept", None)  # it says that, too
        said[next(iter(change))] = words
        found = answer(request)
        seconds = None if found.time is None else found.time.seconds
        yield Remedy(", ".join(said.values()), found.peak_bytes, found.fits, seconds)
        if found.fits:
            return


def _changes(request: Request) -> Iterator[tuple[dict[str, Any], str]]:
    """What is tried, the cheapest first: no change of numbers, less memory, and then more time."""
    assert {each.name for each in fields(Request)} >= {"checkpointing", "accumulation", "strategy", "offload_policy"}
    computes, by_itself = request.activation_bytes is None, request.shard is None
    kept = request.kept
    if request.can_fuse():
        yield {"fused": True}, FUSED
    if request.accumulation > 1 and kept == "unsharded":
        kept = "sharded"
        yield {"kept": kept}, f"kept={kept!r}"
    if computes:
        for how in CHECKPOINTING[CHECKPOINTING.index(request.checkpointing) + 1 :]:
            yield {"checkpointing": how}, f"checkpointing={how!r}"
    if by_itself and request.strategy not in (None, "zero3"):
        yield {"strategy": "zero3"}, "strategy='zero3'"
    if by_itself and len(request.mesh_shape) == 2 and request.mesh_shape[0] > 1:
        yield {"mesh_shape": (request.ranks,), "mesh_dim_names": ("shard",)}, f"mesh_shape={request.ranks}"
    if computes:
        for count in microbatches_of(request):
            if count > request.accumulation:
                yield {"accumulation": count, "kept": "sharded"}, f"accumulation={count}, kept='sharded'"
    if not isinstance(request.offloading, CPUOffloadPolicy) and by_itself:
        yield {"offload_policy": CPUOffloadPolicy()}, "offload_policy=CPUOffloadPolicy()"


def microbatches_of(request: Request) -> list[int]:
    """Numbers of microbatches that are worth a try: powers of two up to 64, of those that divide a rank's samples."""
    samples = request.samples // request.data_parallel
    return [count for count in (2, 4, 8, 16, 32, 64) if samples % count == 0]
