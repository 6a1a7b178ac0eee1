"""The reference against the simplest data parallelism there is, and the comparison helpers themselves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.harness import multi_rank
from tests.harness.compare import (
    EXACT,
    Tolerance,
    assert_same,
    assert_sharded_same,
    clean_fqn,
    tolerance_for,
)
from tests.harness.models import MLP, MODEL_CASES, PARTLY_USED, ModelCase, batch_generator
from tests.harness.reference import Accumulation, Reference, adamw
from tests.harness.training import assert_trains_like
from tests.unit.helpers import for_each

LOOSE = Tolerance(rtol=0.1, atol=0.0, reason="to show that tolerances count")


def average_gradients_by_hand(model: torch.nn.Module) -> None:
    """Data parallelism in three lines: the gradient of every parameter, averaged over ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@multi_rank(2, 4)
@pytest.mark.full
@for_each("case", MODEL_CASES)
def test_reference_is_data_parallelism(case: ModelCase, world_size: int) -> None:
    model = case.build()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    optimizer.register_step_pre_hook(lambda *_: average_gradients_by_hand(model))
    for record in Reference(case, world_size=world_size).run(3):
        batch = case.batch(0, record.step, dist.get_rank())
        case.loss(model, batch).backward()
        optimizer.step()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        parameters = dict(model.named_parameters())
        tolerance = tolerance_for(world_size)
        assert_same(f"gradients in step {record.step}", gradients, record.gradients, tolerance=tolerance)
        assert_same(f"parameters after {record.step}", parameters, record.parameters, tolerance=tolerance)
        optimizer.zero_grad()


@multi_rank(2)
@pytest.mark.full
def test_mismatch_is_found_in_the_right_step() -> None:
    model = MLP.build()
    optimizer = adamw(list(model.parameters()))
    with pytest.raises(AssertionError, match=r"gradients in step 0 differ .*\n  0.weight: \d+ of 2048"):
        assert_trains_like(Reference(MLP, world_size=2), model, optimizer, steps=1)


@multi_rank(2, 4)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_shards_are_compared_with_their_part(rows: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(rows * 3.0).view(rows, 3)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    assert_sharded_same("weights", {"w": sharded}, {"w": whole})
    if sharded.to_local().numel() > 0:
        sharded.to_local().add_(1.0)
        with pytest.raises(AssertionError, match=r"w: .* elements differ, max abs 1,"):
            assert_sharded_same("weights", {"w": sharded}, {"w": whole})


@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_models_learn_and_are_seeded(case: ModelCase) -> None:
    state = torch.get_rng_state()
    assert_same("parameters", dict(case.build().named_parameters()), dict(case.build().named_parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    assert case.units(case.build())[-1] is not None
    records = Reference(case, world_size=2).run(2)
    assert records[0].losses[0][0].dtype == torch.float32
    assert not torch.equal(records[0].losses[0][0], records[0].losses[1][0])
    trained = [name for name, g in records[0].gradients.items() if g is not None and g.abs().sum() > 0]
    assert trained


def test_unused_parameters_have_no_gradient() -> None:
    gradients = Reference(PARTLY_USED, world_size=2).step().gradients
    without = {name for name, gradient in gradients.items() if gradient is None}
    assert without == {f"{module}.{p}" for module in ("first.unused", "skipped") for p in ("weight", "bias")}


def test_accumulation_orders_agree_up_to_rounding() -> None:
    each, last = (
        Reference(MLP, world_size=2, microbatches=3, accumulation=accumulation).step().gradients
        for accumulation in Accumulation
    )
    assert_same("gradients", each, last, tolerance=tolerance_for(4))
    with pytest.raises(AssertionError, match="bitwise"):
        assert_same("gradients", each, last, tolerance=EXACT)


def test_clipping_is_recorded() -> None:
    record = Reference(MLP, world_size=2, max_norm=1e-3).step()
    gradients = [g for g in record.gradients.values() if g is not None]
    assert record.gradient_norm is not None
    torch.testing.assert_close(record.gradient_norm, torch.nn.utils.get_total_norm(gradients))


def test_mixed_precision_rounds_the_gradients() -> None:
    record = Reference(MLP, world_size=1, param_dtype=torch.bfloat16).step()
    for name, gradient in record.gradients.items():
        assert gradient is not None and gradient.dtype == torch.float32, name
        assert torch.equal(gradient, gradient.bfloat16().float()), name


def test_batches_differ_in_every_argument() -> None:
    seen = {
        torch.rand((), generator=batch_generator(*arguments)).item()
        for arguments in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    }
    assert len(seen) == 5


def test_comparison_names_every_problem() -> None:
    one = torch.ones(2)
    with pytest.raises(AssertionError) as failure:
        assert_same(
            "gradients in step 3",
            {"a": one * 1.25, "b": None, "c": one, "d": one.double(), "f": one * 1.05},
            {"a": one, "b": one, "d": one, "e": one, "f": one},
            tolerance=LOOSE,
        )
    assert str(failure.value).splitlines() == [
        "gradients in step 3 differ from the reference:",
        "  names differ: missing ['e'], unexpected ['c']",
        "  a: 2 of 2 elements differ, max abs 0.25, max rel 0.25 (allowed: rtol 0.1, atol 0)",
        "  b: is None, expected a tensor",
        "  d: found (2,) torch.float64, expected (2,) torch.float32",
    ]


def test_names_of_wrappers_are_dropped() -> None:
    assert clean_fqn("_orig_mod.blocks.0._checkpoint_wrapped_module.norm.weight") == "blocks.0.norm.weight"
