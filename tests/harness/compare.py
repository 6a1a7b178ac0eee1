"""Compares a sharded model with the reference, bit for bit unless a tolerance is stated with its reason.

Owns the gathering of DTensors and the wording of mismatches.

Two ways to compare. `full_parameters`, `full_gradients` gather whole tensors: collectives, a millisecond or
more for each tensor. `assert_sharded_same` cuts the reference instead and compares this rank's shard with its
part, without communication: in every step of a training, that is the one to use. All ranks together have then
compared everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness.device import CPU, DEVICE
from tests.harness.gloo_race import outlive
from tests.harness.reference import Gradients

# Parts of FQNs that wrappers add: activation checkpointing and torch.compile.
_WRAPPER_NAMES = ("_checkpoint_wrapped_module.", "_orig_mod.")
_SHOWN_MISMATCHES = 8


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far results may differ, `|actual - expected| <= atol + rtol * |expected|`, and why they do."""

    rtol: float
    atol: float
    reason: str


EXACT = None
SUM_ORDER = Tolerance(
    rtol=1e-5, atol=1e-6, reason="with more than 2 ranks the collective may sum in another order (fp32)"
)
ON_DEVICE = Tolerance(rtol=1e-5, atol=1e-6, reason="cuBLAS may choose another algorithm for another address (fp32)")
FUSED = Tolerance(rtol=1e-5, atol=1e-7, reason="fused kernels round differently in a vector and in its tail")


def tolerance_for(world_size: int) -> Tolerance | None:
    """Bitwise on up to 2 ranks, `SUM_ORDER` above: see [Note: bitwise]."""
    return EXACT if world_size <= 2 else SUM_ORDER


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Unsharded parameters by FQN. Collective: all ranks."""
    return {name: gather(p) for name, p in parameters_of(model).items()}


def full_gradients(model: nn.Module) -> Gradients:
    """Unsharded gradients by FQN, None where there is none. Collective: all ranks."""
    return {name: None if g is None else gather(g) for name, g in gradients_of(model).items()}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by FQN of the plain model, as they are: sharded where `model` is."""
    return {clean_fqn(name): p.detach() for name, p in model.named_parameters()}


def gradients_of(model: nn.Module) -> Gradients:
    """Gradients by FQN of the plain model, as they are: sharded where `model` is."""
    return {clean_fqn(name): p.grad for name, p in model.named_parameters()}


def gather(tensor: Tensor) -> Tensor:
    """The whole of `tensor`, a copy. Collective where it is a DTensor."""
    if isinstance(tensor, DTensor):
        is_whole = all(placement.is_replicate() for placement in tensor.placements)
        tensor = tensor.full_tensor() if is_whole else outlive(tensor.full_tensor())
    return tensor.clone()


def clean_fqn(name: str) -> str:
    """`name` as the plain model calls it."""
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def assert_same(
    what: str,
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    tolerance: Tolerance | None = EXACT,
) -> None:
    """Compares tensors by name; the message names each that differs, with its largest differences.

    Args:
        what: Begins the message: `"gradients in step 3"`.
        actual, expected: Plain tensors by FQN; None must meet None.
        tolerance: `EXACT` compares bits.
    """
    problems = []
    if set(actual) != set(expected):
        missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
        problems.append(f"names differ: missing {missing}, unexpected {extra}")
    for name in expected:
        if name in actual:
            problem = difference(actual[name], expected[name], tolerance)
            if problem:
                problems.append(f"{name}: {problem}")
    if problems:
        rank = f" (rank {dist.get_rank()} of {dist.get_world_size()})" if dist.is_initialized() else ""
        shown = problems[:_SHOWN_MISMATCHES]
        if len(problems) > len(shown):
            shown.append(f"... and {len(problems) - len(shown)} more")
        raise AssertionError("\n  ".join([f"{what} differ from the reference{rank}:", *shown]))


def assert_sharded_same(
    what: str,
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    tolerance: Tolerance | None = EXACT,
) -> None:
    """`assert_same` for DTensors against plain, whole tensors: compares this rank's shards with its parts.

    Collective only for tensors with other placements than `Shard` and `Replicate`, which it gathers.
    """
    pairs = {name: shard_pair(actual[name], expected[name]) for name in actual if name in expected}
    assert_same(
        what,
        {name: pairs[name][0] if name in pairs else tensor for name, tensor in actual.items()},
        {name: pairs[name][1] if name in pairs else tensor for name, tensor in expected.items()},
        tolerance=tolerance,
    )


def shard_pair(actual: Tensor | None, expected: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """This rank's shard of `actual`, and the same part of `expected`, a plain tensor."""
    if not isinstance(actual, DTensor) or expected is None:
        return actual, expected
    if actual.shape != expected.shape or any(type(p) not in (Shard, Replicate) for p in actual.placements):
        return actual.full_tensor(), expected
    part = distribute_tensor(expected, actual.device_mesh, actual.placements, src_data_rank=None)
    return actual.to_local(), part.to_local()


def difference(actual: Tensor | None, expected: Tensor | None, tolerance: Tolerance | None) -> str | None:
    """What is wrong with `actual`, in one line; None if nothing is."""
    if actual is None or expected is None:
        if actual is expected:
            return None
        return "is None, expected a tensor" if actual is None else "is a tensor, expected None"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        found, wanted = f"{tuple(actual.shape)} {actual.dtype}", f"{tuple(expected.shape)} {expected.dtype}"
        return f"found {found}, expected {wanted}"
    if DEVICE != CPU:
        expected, tolerance = expected.to(actual.device), tolerance or ON_DEVICE
    if torch.equal(actual, expected):
        return None
    if tolerance and torch.allclose(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol):
        return None
    absolute = (actual.double() - expected.double()).abs()
    relative = absolute / expected.double().abs().clamp_min(torch.finfo(torch.float64).tiny)
    allowed = "bitwise" if tolerance is None else f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}"
    return (
        f"{int((actual != expected).sum())} of {actual.numel()} elements differ, "
        f"max abs {absolute.max().item():.3g}, max rel {relative.max().item():.3g} (allowed: {allowed})"
    )
