"""`estimate`: what one rank of a training run needs, before the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2.api.policies import CPUOffloadPolicy, OffloadChoice
from fsdp2.arguments import ANYTHING, checked
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.state import Strategy
from fsdp2.errors import FSDPTypeError
from fsdp2.model.accumulation import Kept
from fsdp2.tools.estimating.hardware import Hardware, fitting, hardware_of
from fsdp2.tools.estimating.memory import Peak, Phase, Use
from fsdp2.tools.estimating.rank import Observation, observe
from fsdp2.tools.estimating.request import Checkpointing, MakeModel, MakeOptimizer, Request, Shard
from fsdp2.tools.estimating.result import CollectiveSum, Estimate, PhasePeak

DEFAULT_HARDWARE = "h100-8x"


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
) -> Estimate:
    """What one rank of a training run needs: memory and traffic. It runs on a laptop: no device, no peers, no memory.

        >>> batch = torch.empty(1024, 8192, dtype=torch.int64, device="meta")
        >>> print(fsdp2.estimate(lambda: Llama(config), 1024, batch=batch, hardware="h100-8x"))

    The engine itself runs two steps of rank 0, on tensors without memory and a process group without peers, and counts
    everything that is allocated and exchanged. The process group is made and destroyed inside. One process calls it,
    without a launcher. See 'Know before a run whether it fits' in the documentation.

    Args:
        make_model: a function that makes the model, on any device. It is called inside of the simulation, so that a
            model of any size takes no memory. A model that exists is copied, and left as it is.
        mesh_shape: how many ranks, or the sizes of a mesh: (shard,) or (replicate, shard); others with ``shard``.
        batch: what all ranks together train on in one step: a tensor, a tuple of positional arguments or a dict of
            keyword arguments of ``model(...)``. Tensors may be on meta. Dim 0 of the first tensor are samples, which
            are divided among the data-parallel ranks and microbatches, as in every tensor of that size in dim 0.
        optimizer: called with the list of parameters: a class, or ``lambda parameters: AdamW(parameters,
            foreach=True)``. None: no optimizer.
        strategy: as in `fully_shard`.
        hardware: the name of a machine, or a `Hardware` with its numbers.
        mesh_dim_names: ("shard",) or ("replicate", "shard") by default. Ranks along "tp", "cp" and "pp" have the same
            samples.
        mp_policy: as in `fully_shard`.
        offload_policy: as in `fully_shard`; names are those below the model.
        blocks: as in `auto_shard`, which shards the model; with ``shard``, the blocks that are checkpointed.
        shard: a function that shards the model instead of `auto_shard`: called with the model and the mesh.
        checkpointing: activation checkpointing of modules that are groups: "none", "blocks" (recompute everything),
            "selective" (recompute all but matrix products and attention).
        accumulation: microbatches of a step.
        kept: as in `accumulate`: what waits between them.
        loss: called with the output and what the model was called with; returns the loss. The default is
            ``output.loss``, or the sum of the output.
        activation_bytes: what one forward keeps for backward, for models that cannot run without values; nothing is
            computed then.

    Returns:
        The estimate; ``print`` it.

    Raises:
        FSDPTypeError: an argument is of another type; the batch has no tensors.
        FSDPValueError: unknown hardware, a mesh that is larger than it, samples that cannot be divided, a model that is
            sharded already, arguments that contradict each other.
        FSDPRuntimeError: a process group exists; the forward depends on values.
    """
    return answer(
        request_of(
            make_model=make_model,
            mesh_shape=mesh_shape,
            batch=batch,
            optimizer=optimizer,
            strategy=strategy,
            hardware=hardware,
            mesh_dim_names=mesh_dim_names,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            blocks=blocks,
            shard=shard,
            checkpointing=checkpointing,
            accumulation=accumulation,
            kept=kept,
            loss=loss,
            activation_bytes=activation_bytes,
        )
    )


def request_of(
    *,
    mesh_shape: int | tuple[int, ...],
    hardware: Hardware | str,
    mesh_dim_names: tuple[str, ...] | None = None,
    **arguments: Any,
) -> Request:
    """The request that these arguments of `estimate` make."""
    if not isinstance(mesh_shape, (int, tuple)):
        raise FSDPTypeError(f"estimate takes an int, or a tuple of ints, as 'mesh_shape', got {mesh_shape!r}.")
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    names = names_of(shape) if mesh_dim_names is None else tuple(mesh_dim_names)
    return Request(mesh_shape=shape, mesh_dim_names=names, hardware=hardware_of(hardware), **arguments)


def names_of(shape: tuple[int, ...]) -> tuple[str, ...]:
    """The default names of the dims of a mesh."""
    return {1: ("shard",), 2: ("replicate", "shard")}.get(len(shape), tuple(f"dim{i}" for i in range(len(shape))))


def answer(request: Request, caller: str = "fsdp2.estimate") -> Estimate:
    """Simulate ``request``, and return what was seen. Raises what `estimate` raises."""
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
        activation_bytes=seen.kept if request.activation_bytes is None else extra,
        collectives=sums,
        sent_inside=sum(each.sent_inside for each in sums),
        sent_between=sum(each.sent_between for each in sums),
        to_host=seen.traffic.to_host,
        fits=peak_bytes <= hardware.usable_bytes and host_bytes <= hardware.host_memory_bytes,
        fits_on=fitting(peak_bytes),
    )


def _with(peak: Peak, activations: int, phase: Phase) -> Peak:
    """``peak``, with the activations that the user has given for a forward, if any."""
    if not activations or phase is Phase.OPTIMIZER:
        return peak
    found = peak.by_use.get(Use.ACTIVATIONS, 0) + activations
    return Peak(peak.nbytes + activations, {**peak.by_use, Use.ACTIVATIONS: found})


def _named(by_use: dict[Use, int]) -> dict[str, int]:
    return {use.value: by_use[use] for use in Use if use in by_use}


def _collectives(seen: Observation) -> tuple[CollectiveSum, ...]:
    return tuple(
        CollectiveSum(kind, ranks, nodes, each.count, each.nbytes, each.sent_inside, each.sent_between)
        for (kind, ranks, nodes), each in seen.traffic.sums.items()
        if ranks > 1
    )


def _settings(request: Request, seen: Observation) -> dict[str, str]:
    """The settings of the estimate, in words, without those that are defaults."""
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
    said["optimizer"] = "none" if request.optimizer is None else getattr(request.optimizer, "__name__", "given")
    return said


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
