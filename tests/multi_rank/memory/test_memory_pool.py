"""Training with memory that moves from buffer to buffer equals the reference, as it does without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, MixedPrecisionPolicy, _torch, fully_shard
from fsdp2.core import transport
from fsdp2.features.memory_pool import MemoryPool
from tests.harness import Accumulation, Reference, adamw, multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance, assert_same, tolerance_for
from tests.harness.internals import groups_of
from tests.harness.models import MODEL_CASES, TRANSFORMER, Batch, ModelCase
from tests.harness.pooling import needs_pool
from tests.harness.training import assert_trains_like

POOLED = pytest.mark.parametrize(
    "pooled",
    [
        False,
        pytest.param(True, marks=needs_pool),
    ],
    ids=["off", "pooled"],
)
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


def sharded(case: ModelCase, pooled: bool, **options: object) -> FSDPModule:
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit, **options)  # type: ignore[arg-type]
    assert isinstance(model, FSDPModule)
    if pooled:
        model.set_communication_memory_pool(True)
    return model


def assert_nothing_is_allocated(model: FSDPModule, step: Callable[[], None]) -> None:
    comm = groups_of(model)[0].comm  # type: ignore[arg-type]
    assert comm is not None and isinstance(comm.gather_arena, MemoryPool)
    before = comm.gather_arena.allocations
    step()
    assert comm.gather_arena.allocations == before


def assert_trains_and_then_allocates_nothing(case: ModelCase, pooled: bool, world_size: int) -> None:
    model = sharded(case, pooled)
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])  # type: ignore[attr-defined]
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=5, tolerance=tolerance_for(world_size))  # type: ignore[arg-type]
    if pooled:

        def step() -> None:
            case.loss(model, case.batch(0, 9, dist.get_rank())).backward()  # type: ignore[arg-type]
            optimizer.zero_grad()

        assert_nothing_is_allocated(model, step)


@multi_rank(2, full=[4])
@POOLED
@pytest.mark.parametrize("case", [*MODEL_CASES, WIDE], ids=str)
def test_training_equals_the_reference(case: ModelCase, pooled: bool, world_size: int) -> None:
    assert_trains_and_then_allocates_nothing(case, pooled, world_size)


@multi_rank(2)
@POOLED
@pytest.mark.parametrize("case", [TRANSFORMER, WIDE], ids=str)
def test_with_collectives_of_the_backend(case: ModelCase, pooled: bool, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(transport.VARIABLE, "native")
        assert_trains_and_then_allocates_nothing(case, pooled, world_size)


@multi_rank(4)
@POOLED
def test_on_replicas_in_half_precision(pooled: bool, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(WIDE, pooled, mesh=mesh, mp_policy=policy)
    assert_trains_like(
        Reference(WIDE, world_size=world_size, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        model,  # type: ignore[arg-type]
        adamw(list(model.parameters())),  # type: ignore[attr-defined]
        steps=3,
        tolerance=ROUNDED,
    )


@multi_rank(2)
@POOLED
@pytest.mark.parametrize("case", [TRANSFORMER, WIDE], ids=str)
@pytest.mark.parametrize("accumulation", Accumulation, ids=lambda each: each.name.lower())
def test_microbatches(case: ModelCase, accumulation: Accumulation, pooled: bool, world_size: int) -> None:
    model = sharded(case, pooled)

    def before_forward(micro: int) -> None:
        if accumulation is Accumulation.REDUCE_LAST:
            model.set_requires_gradient_sync(micro == 2)

    assert_trains_like(
        Reference(case, world_size=world_size, microbatches=3, accumulation=accumulation),
        model,  # type: ignore[arg-type]
        adamw(list(model.parameters())),  # type: ignore[attr-defined]
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
@POOLED
@pytest.mark.parametrize("case", [TRANSFORMER, WIDE], ids=str)
def test_several_forwards_before_a_backward_and_groups_unsharded_by_hand(
    case: ModelCase, pooled: bool, world_size: int
) -> None:
    model, plain = sharded(case, pooled), case.build()
    expected = gradients(case, plain, 3)
    for gradient in expected.values():
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient.div_(world_size)
    reference = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    units = [model.get_submodule(name) for name in case.unit_names]  # type: ignore[attr-defined]
    for _ in range(3):
        for unit in units:
            unit.unshard()  # type: ignore[operator]
        seen = {
            f"{prefix}.{name}": parameter.detach().clone()
            for unit, prefix in zip(units, case.unit_names, strict=True)
            for name, parameter in unit.named_parameters()
        }
        assert_same("unsharded by hand", seen, {name: reference[name] for name in seen})
        for unit in units[1:]:
            unit.reshard()  # type: ignore[operator]
        found = {name: each.full_tensor() for name, each in gradients(case, model, 3).items()}  # type: ignore[arg-type, union-attr]
        assert_same("gradients", found, expected, tolerance=SUM_ORDER)
        model.zero_grad()  # type: ignore[attr-defined]


@multi_rank(2)
@POOLED
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_it_trains_like_the_reference(where: str, pooled: bool, world_size: int) -> None:
    model = sharded(WIDE, pooled)
    optimizer = adamw(list(model.parameters()))  # type: ignore[attr-defined]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for index in (0, 2, 1):
        block = model.get_submodule(str(index))  # type: ignore[attr-defined]
        if where == "forward":
            handle = block.register_forward_hook(fail)
        else:
            handle = block.down.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            WIDE.loss(model, WIDE.batch(0, 9, dist.get_rank())).backward()  # type: ignore[arg-type]
        handle.remove()
        optimizer.zero_grad()
    assert_trains_like(Reference(WIDE, world_size=world_size), model, optimizer, steps=3)  # type: ignore[arg-type]


@multi_rank(2)
@POOLED
def test_turned_on_and_off_between_steps(pooled: bool, world_size: int) -> None:
    model = sharded(WIDE, pooled)
    steps = iter([not pooled and _torch.can_swap_memory, pooled, not pooled and _torch.can_swap_memory, pooled])
    assert_trains_like(
        Reference(WIDE, world_size=world_size),
        model,  # type: ignore[arg-type]
        adamw(list(model.parameters())),  # type: ignore[attr-defined]
        steps=4,
        before_forward=lambda _: model.set_communication_memory_pool(next(steps)),
    )
