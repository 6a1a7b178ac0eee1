"""`set_gradient_reduction`: the mean, the sum, or a denominator that changes from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPMeshInfo,
    FSDPRuntimeError,
    FSDPValueError,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance, assert_sharded_same, gradients_of

WIDTH = 8
HALF = Tolerance(0.05, 0.02, "half precision, whose rounding differs with the order of sums")


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(3)))


def tokens(step: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Another number of tokens on every rank, in every step and microbatch; none on some."""
    generator = torch.Generator().manual_seed(step * 100 + rank * 10 + micro)
    count = (0, 3, 8, 1, 5)[(step + 2 * rank + micro) % 5]
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    """The sum over the tokens of a rank."""
    x, y = tokens(step, rank, micro)
    return F.mse_loss(model(x).float(), y, reduction="sum") / WIDTH


def global_batch_gradients(model: nn.Module, step: int, ranks: int, micros: int = 1) -> dict[str, Tensor | None]:
    """Of the mean over all tokens of all ranks: what one process computes from the global batch."""
    batches = [tokens(step, rank, micro) for rank in range(ranks) for micro in range(micros)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def count_of(step: int, ranks: int, micros: int = 1) -> int:
    return sum(len(tokens(step, rank, micro)[0]) for rank in range(ranks) for micro in range(micros))


def shard(model: nn.Module, **options: Any) -> Any:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def meshes(kind: str) -> dict[str, Any]:
    if kind == "replicas":
        return {"mesh": init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))}
    return {"offload_policy": CPUOffloadPolicy()} if kind == "offloaded" else {}


GIVEN: dict[str, Callable[[int], Any]] = {
    "int": int,
    "float": float,
    "tensor": torch.tensor,
    "1-D tensor": lambda count: torch.tensor([count]),
}


@multi_rank(2, 4)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", ["1d", "offloaded", "replicas"])
def test_every_token_counts_the_same(kind: str, given: str, world_size: int) -> None:
    model, plain = shard(build(), **meshes(kind)), build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(4):
        model.set_gradient_reduction(GIVEN[given](count_of(step, world_size)))
        loss_of(model, step, dist.get_rank()).backward()
        expected = global_batch_gradients(plain, step, world_size)
        assert_sharded_same(f"gradients in step {step}", gradients_of(model), expected, tolerance=SUM_ORDER)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("how", ["reduced each", "reduced last", "all-reduced last"])
def test_over_microbatches(how: str, world_size: int) -> None:
    model, plain = shard(build(), **meshes("replicas")), build()
    for step in range(3):
        model.set_gradient_reduction(count_of(step, world_size, micros=3))
        for micro in range(3):
            if how == "reduced last":
                model.set_requires_gradient_sync(micro == 2)
            elif how == "all-reduced last":
                model.set_requires_all_reduce(micro == 2)
            loss_of(model, step, dist.get_rank(), micro).backward()
        expected = global_batch_gradients(plain, step, world_size, micros=3)
        assert_sharded_same(f"gradients in step {step}", gradients_of(model), expected, tolerance=SUM_ORDER)
        model.zero_grad()


@pytest.mark.full
@multi_rank(4)
def test_the_number_may_be_known_after_the_first_microbatch(world_size: int) -> None:
    """It is used where gradients arrive; those that wait for replicas have not."""
    model, plain = shard(build(), **meshes("replicas")), build()
    model.set_gradient_reduction(1.0)
    model.set_requires_all_reduce(False)
    loss_of(model, 0, dist.get_rank(), 0).backward()
    model.set_gradient_reduction(count_of(0, world_size, micros=2))
    model.set_requires_all_reduce(True)
    loss_of(model, 0, dist.get_rank(), 1).backward()
    expected = global_batch_gradients(plain, 0, world_size, micros=2)
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(2, 4)
def test_the_sum_and_back_to_the_mean(world_size: int) -> None:
    model, plain = shard(build()), build()
    for step, reduction in enumerate(["sum", "mean", "sum", 3.0, "mean"]):
        model.set_gradient_reduction(reduction)
        loss_of(model, step, dist.get_rank()).backward()
        factor = {"sum": count_of(step, world_size), "mean": count_of(step, world_size) / world_size}
        scale = factor[reduction] if isinstance(reduction, str) else count_of(step, world_size) / reduction
        expected = {
            name: None if gradient is None else gradient * scale
            for name, gradient in global_batch_gradients(plain, step, world_size).items()
        }
        assert_sharded_same(f"the {reduction}", gradients_of(model), expected, tolerance=SUM_ORDER)
        model.zero_grad()


@pytest.mark.full
@multi_rank(4)
def test_parameters_on_another_mesh_need_no_other_number(world_size: int) -> None:
    """Experts: a mean over their own, smaller mesh would be wrong by the ratio of the sizes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    flat = FSDPMeshInfo(init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), shard_mesh_dim=0)

    def placement(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(None, both if parameter.dim() == 2 else flat)

    model, plain = shard(build(), mesh=flat.mesh, shard_placement_fn=placement), build()
    for step in range(2):
        model.set_gradient_reduction(torch.tensor(float(count_of(step, world_size))))
        loss_of(model, step, dist.get_rank()).backward()
        expected = global_batch_gradients(plain, step, world_size)
        assert_sharded_same(f"gradients in step {step}", gradients_of(model), expected, tolerance=SUM_ORDER)
        model.zero_grad()


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_nothing_overflows_or_vanishes(dtype: torch.dtype, world_size: int) -> None:
    """Also the mark that says which parameters had a gradient at all: a million tokens do not erase it."""
    model, plain = shard(build(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)), build()
    model.set_gradient_reduction(1e6)
    rank = dist.get_rank()
    if rank == 1:  # of which only this rank has gradients
        (model[1](torch.ones(1, WIDTH)).sum() * 3e4).backward()
    else:
        (model[1](torch.ones(1, WIDTH)).sum() * 0).backward()
    (plain[1](torch.ones(1, WIDTH)).sum() * 0.03).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=HALF)


@multi_rank(2, 4)
def test_a_parameter_that_one_rank_alone_uses_has_a_gradient_everywhere(world_size: int) -> None:
    model = build()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    model.set_gradient_reduction(1e6)
    x = torch.ones(1, WIDTH)
    (model(x).sum() * 0 + (model(x).sum() * 3e4 if dist.get_rank() == world_size - 1 else 0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@multi_rank(2)
@pytest.mark.parametrize(
    "reduction", ["average", "", 0, -1.0, float("nan"), float("inf"), True, None, torch.tensor(0), torch.ones(2)]
)
def test_what_is_no_reduction_is_refused(reduction: Any) -> None:
    model = shard(build())
    with pytest.raises((FSDPValueError, ValueError), match=r"'mean', 'sum'|one positive number"):
        model.set_gradient_reduction(reduction)


@multi_rank(4)
def test_another_scaling_is_refused_while_gradients_wait_for_replicas() -> None:
    model = shard(build(), **meshes("replicas"))
    model.set_requires_all_reduce(False)
    loss_of(model, 1, dist.get_rank()).backward()
    for reduction in ("sum", 7.0):
        with pytest.raises(FSDPRuntimeError, match="wait for their all-reduce"):
            model.set_gradient_reduction(reduction)
    model.set_gradient_reduction("mean")  # nothing changes


@pytest.mark.full
@multi_rank(2)
def test_a_reduction_reaches_the_modules_below_unless_it_is_told_not_to(world_size: int) -> None:
    scales = []
    for recurse in (True, False):
        model = shard(build())
        model.set_gradient_reduction("sum", recurse=recurse)
        loss_of(model, 0, dist.get_rank()).backward()
        summed = gradients_of(model)["0.0.weight"]
        reference = global_batch_gradients(build(), 0, world_size)["0.0.weight"]
        assert summed is not None and reference is not None
        scales.append((summed.full_tensor() / (reference * count_of(0, world_size))).mean().item())
    assert scales == pytest.approx([1.0, 0.5])


@pytest.mark.full
@multi_rank(2)
def test_the_last_of_it_and_the_divide_factor_counts(world_size: int) -> None:
    model: Any = build()
    fully_shard(model)
    reference = global_batch_gradients(build(), 0, world_size)
    for setter, scale in (
        (("gradient_reduction", 5.0), 5),
        (("gradient_divide_factor", 2.0), 2),
        (("gradient_reduction", "sum"), 1),
    ):
        getattr(model, f"set_{setter[0]}")(setter[1])
        loss_of(model, 0, dist.get_rank()).backward()
        expected = {n: None if g is None else g * count_of(0, world_size) / scale for n, g in reference.items()}
        assert_sharded_same(str(setter), gradients_of(model), expected, tolerance=SUM_ORDER)
        model.zero_grad()


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("keep", ["gradients", "local tensors", "views of these"])
def test_gradients_that_are_kept_never_change(keep: str) -> None:
    """Of the next steps' gradients none is written where they lie."""
    model = build()
    for block in (*model, model):
        fully_shard(block)
    kept: list[Any] = []
    values: list[Any] = []
    for step in range(4):
        model.zero_grad()
        loss_of(model, 1 + step, dist.get_rank()).backward()
        now: list[Any] = [parameter.grad for parameter in model.parameters()]
        values += [each.to_local().clone() for each in now]
        kept += now if keep == "gradients" else [each.to_local() for each in now]
        if keep == "views of these":
            kept[-len(now) :] = [each.view(-1) for each in kept[-len(now) :]]
        del now
        for value, each in zip(values, kept, strict=True):
            assert torch.equal(value.view(-1), (each.to_local() if keep == "gradients" else each).view(-1))
