"""Training with memory that moves from buffer to buffer equals the reference, as it does without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.core import transport
from fsdp2.plugs.memory.memory_pool import MemoryPool
from tests.harness import Accumulation, Reference, adamw, multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance, assert_same, tolerance_for
from tests.harness.internals import groups_of
from tests.harness.models import CONV, FROZEN, PARTLY_USED, TIED, TRANSFORMER, Batch, ModelCase
from tests.harness.pooling import needs_pool
from tests.harness.training import assert_trains_like

pytestmark = [needs_pool, pytest.mark.full]

IN_ANY_ORDER = Tolerance(rtol=1e-5, atol=1e-5, reason="the backend adds up four ranks in an order of its own")
ROUNDED = Tolerance(rtol=2e-2, atol=2e-3, reason="bf16, whose rounding differs with the order of sums")


class Wide(nn.Module):
    """A block with matrices that travel by themselves, one of uneven rows, and vectors that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 515), nn.Linear(515, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Recomputed(Wide):
    """It computes its forward again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def wide() -> nn.Module:
    return nn.Sequential(Wide(), Recomputed(), Wide(), nn.Linear(512, 5))


def vectors(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(3, 512, generator=generator), torch.randn(3, 5, generator=generator))


WIDE = ModelCase("wide", wide, vectors, ("0", "1", "2"), F.mse_loss)


def sharded(case: ModelCase, **options: Any) -> Any:
    model: Any = case.build()
    for unit in case.units(model):
        fully_shard(unit, **options)
    model.set_communication_memory_pool(True)
    return model


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [CONV, FROZEN, PARTLY_USED, TIED, TRANSFORMER, WIDE], ids=str)
@pytest.mark.parametrize("transport_of", ["", "native"])
def test_training_equals_the_reference(transport_of: str, case: ModelCase, world_size: int) -> None:
    """And allocates nothing after its first steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(transport.VARIABLE, transport_of)
        model: Any = sharded(case)
        optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
        reference = Reference(case, world_size=world_size)
        tolerance = IN_ANY_ORDER if transport_of and world_size > 2 else tolerance_for(world_size)
        assert_trains_like(reference, model, optimizer, steps=5, tolerance=tolerance)
        comm = groups_of(model)[0].comm
        assert comm is not None and isinstance(comm.gather_arena, MemoryPool)
        before = comm.gather_arena.allocations
        case.loss(model, case.batch(0, 9, dist.get_rank())).backward()
        assert comm.gather_arena.allocations == before


@multi_rank(4)
def test_on_replicas_in_half_precision(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(WIDE, mesh=mesh, mp_policy=policy)
    assert_trains_like(
        Reference(WIDE, world_size=world_size, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        model,
        adamw(list(model.parameters())),
        steps=3,
        tolerance=ROUNDED,
    )


@multi_rank(2)
@pytest.mark.parametrize("case", [TRANSFORMER, WIDE], ids=str)
@pytest.mark.parametrize("accumulation", Accumulation, ids=lambda each: each.name.lower())
def test_microbatches(case: ModelCase, accumulation: Accumulation, world_size: int) -> None:
    model = sharded(case)

    def before_forward(micro: int) -> None:
        if accumulation is Accumulation.REDUCE_LAST:
            model.set_requires_gradient_sync(micro == 2)

    assert_trains_like(
        Reference(case, world_size=world_size, microbatches=3, accumulation=accumulation),
        model,
        adamw(list(model.parameters())),
        steps=3,
        tolerance=SUM_ORDER,  # microbatches add up in another order
        before_forward=before_forward,
    )


def gradients(case: ModelCase, model: nn.Module, forwards: int) -> dict[str, Tensor | None]:
    """Of several forwards, and one backward of their sum, on this rank."""
    losses = [case.loss(model, case.batch(0, 7, dist.get_rank(), micro)) for micro in range(forwards)]
    torch.stack(losses).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@multi_rank(2)
@pytest.mark.parametrize("case", [TRANSFORMER, WIDE], ids=str)
def test_several_forwards_before_a_backward_and_groups_unsharded_by_hand(case: ModelCase, world_size: int) -> None:
    model, plain = sharded(case), case.build()
    expected = gradients(case, plain, 3)
    for gradient in expected.values():
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient.div_(world_size)
    reference = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    units = [model.get_submodule(name) for name in case.unit_names]
    for _ in range(3):
        for unit in units:
            unit.unshard()
        seen = {
            f"{prefix}.{name}": parameter.detach().clone()
            for unit, prefix in zip(units, case.unit_names, strict=True)
            for name, parameter in unit.named_parameters()
        }
        assert_same("unsharded by hand", seen, {name: reference[name] for name in seen})
        for unit in units[1:]:
            unit.reshard()
        found = {name: each.full_tensor() for name, each in gradients(case, model, 3).items()}
        assert_same("gradients", found, expected, tolerance=SUM_ORDER)
        model.zero_grad()


@multi_rank(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_it_trains_like_the_reference(where: str, world_size: int) -> None:
    model = sharded(WIDE)
    optimizer = adamw(list(model.parameters()))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for index in (0, 2, 1):
        block = model.get_submodule(str(index))
        if where == "forward":
            handle = block.register_forward_hook(fail)
        else:
            handle = block.down.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            WIDE.loss(model, WIDE.batch(0, 9, dist.get_rank())).backward()
        handle.remove()
        optimizer.zero_grad()
    assert_trains_like(Reference(WIDE, world_size=world_size), model, optimizer, steps=3)


@multi_rank(2)
def test_turned_on_and_off_between_steps(world_size: int) -> None:
    model = sharded(WIDE)
    turns = iter([False, True, False, True])
    assert_trains_like(
        Reference(WIDE, world_size=world_size),
        model,
        adamw(list(model.parameters())),
        steps=4,
        before_forward=lambda _: model.set_communication_memory_pool(next(turns)),
    )
