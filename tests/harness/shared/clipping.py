"""What the tests of clipping share: DTensors with gradients on any mesh, the same unsharded, and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, distribute_tensor

from fsdp2 import clip_grad_norm_
from tests.harness import Tolerance, assert_same, assert_sharded_same

NORMS = Tolerance(rtol=1e-5, atol=1e-7, reason="a norm over shards is summed in another order than over the whole")
ROUNDED = Tolerance(rtol=1e-2, atol=1e-6, reason="one rounding to bfloat16")
TRAINED = Tolerance(rtol=1e-5, atol=1e-6, reason="norms are summed in another order, and momentum keeps the difference")
MAX_NORM = 0.0625


def named_mesh(**axes: int) -> DeviceMesh:
    """A mesh of all ranks with these axes, in this order."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@dataclass(frozen=True, slots=True)
class Kind:
    """One parameter: plain without a mesh; without gradient if ``has_gradient`` is False."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    dtype: torch.dtype = torch.float32
    has_gradient: bool = True


def make(kinds: Sequence[Kind]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters as ``kinds`` say, and the same unsharded; gradients are random, equal on every rank."""
    generator = torch.Generator().manual_seed(3)
    sharded, whole = [], []
    for kind in kinds:
        value, gradient = (torch.randn(kind.shape, generator=generator).to(kind.dtype) for _ in range(2))
        whole.append(nn.Parameter(value))
        sharded.append(nn.Parameter(distribute(value, kind)))
        if kind.has_gradient:
            whole[-1].grad, sharded[-1].grad = gradient.clone(), distribute(gradient, kind)
    return sharded, whole


def distribute(value: Tensor, kind: Kind) -> Tensor:
    """A copy of ``value``, lying as ``kind`` says."""
    if kind.mesh is None:
        return value.clone()
    return distribute_tensor(value.clone(), kind.mesh, kind.placements, src_data_rank=None)


def named(gradients: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """By position, for comparisons."""
    return {str(index): gradient for index, gradient in enumerate(gradients)}


def expected_norm(gradients: Sequence[Tensor | None], norm_type: float) -> Tensor:
    """Of all elements as one vector, in float32 at least."""
    wide = torch.float64 if any(g is not None and g.dtype == torch.float64 for g in gradients) else torch.float32
    return torch.linalg.vector_norm(torch.cat([g.flatten().to(wide) for g in gradients if g is not None]), norm_type)


def assert_plain_and_the_same_everywhere(norm: Tensor) -> None:
    """A plain tensor () with the same bits on every rank. Collective."""
    assert type(norm) is Tensor and norm.shape == () and not norm.requires_grad
    of_ranks: list[Tensor] = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, norm)
    assert len({each.view(torch.uint8 if norm.dim() else norm.dtype).item().hex() for each in of_ranks}) == 1, of_ranks


@contextmanager
def all_reduces() -> Iterator[list[int]]:
    """Collects how many numbers every `dist.all_reduce` inside carries."""
    carried: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: object, **kwargs: object) -> object:
        carried.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        yield carried


def assert_clips(
    kinds: Sequence[Kind],
    *,
    norm_type: float = 2.0,
    foreach: bool | None = None,
    carried: list[int] | None = None,
    tolerance: Tolerance = NORMS,
) -> None:
    """Clips parameters of ``kinds`` beside the unsharded ones, which torch clips in float32. Collective.

    ``carried`` are the numbers that each all-reduce carries.
    """
    sharded, whole = make(kinds)
    norm = expected_norm([each.grad for each in whole], norm_type)
    with all_reduces() as found:
        total = clip_grad_norm_(sharded, MAX_NORM, norm_type, foreach=foreach)
    if carried is not None:
        assert found == carried
    assert_plain_and_the_same_everywhere(total)
    assert_same("norm", {"total": total}, {"total": norm}, tolerance=NORMS)
    nn.utils.clip_grads_with_norm_(whole, MAX_NORM, norm)
    for index, (mine, yours) in enumerate(zip(sharded, whole, strict=True)):
        (
            assert_sharded_same("clipped gradients", named([mine.grad]), named([yours.grad]), tolerance=tolerance),
            kinds[index],
        )
