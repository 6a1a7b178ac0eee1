"""Trains a sharded model beside the reference, step by step: what most multi-rank tests do.

Owns the training loop of these tests; the comparison is `compare`'s, the expectation `reference`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.compare import (
    EXACT,
    Tolerance,
    assert_same,
    assert_sharded_same,
    full_parameters,
    gather,
    gradients_of,
    parameters_of,
)
from tests.harness.reference import Reference, StepRecord


def assert_trains_like(
    reference: Reference,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    tolerance: Tolerance | None = EXACT,
    before_forward: Callable[[int], None] | None = None,
    clip: Callable[[list[nn.Parameter], float], Tensor] = nn.utils.clip_grad_norm_,
) -> list[StepRecord]:
    """Trains `model` beside `reference` and compares losses, gradients and parameters in every step.

    Collective: all ranks, each with its own reference of the same arguments. Each step compares this rank's
    shards; after the last one the gathered parameters are compared too.

    Args:
        reference: A fresh reference: its `case`, `microbatches` and `max_norm` also train `model`.
        model: Sharded; starts from the reference's parameters.
        optimizer: Of `model`'s parameters.
        steps: Number of steps.
        tolerance: For all comparisons.
        before_forward: Called with the number of each microbatch before its forward: the place for
            `set_requires_gradient_sync`, which `Accumulation.REDUCE_LAST` needs.
        clip: What clips `model` where the reference has a `max_norm`.

    Returns:
        The reference's records.
    """
    assert_sharded_same("initial parameters", parameters_of(model), parameters_of(reference.model))
    records = []
    for _ in range(steps):
        record = reference.step()
        records.append(record)
        losses = _forward_backward(reference, model, record.step, before_forward)
        at = f"in step {record.step}"
        assert_sharded_same(f"gradients {at}", gradients_of(model), record.gradients, tolerance=tolerance)
        norm = None
        if reference.max_norm is not None:
            norm = gather(clip(list(model.parameters()), reference.max_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        expected_losses = record.losses[dist.get_rank()]
        assert_same(f"losses {at}", _by_number(losses), _by_number(expected_losses), tolerance=tolerance)
        assert_same(f"norms {at}", {"total": norm}, {"total": record.gradient_norm}, tolerance=tolerance)
        after = f"parameters after step {record.step}"
        assert_sharded_same(after, parameters_of(model), record.parameters, tolerance=tolerance)
    if records:
        gathered = full_parameters(model)
        assert_same("gathered parameters", gathered, records[-1].parameters, tolerance=tolerance)
    return records


def _forward_backward(
    reference: Reference, model: nn.Module, step: int, before: Callable[[int], None] | None
) -> list[Tensor]:
    """This rank's microbatches of one step; returns their losses."""
    losses = []
    for micro in range(reference.microbatches):
        if before is not None:
            before(micro)
        batch = reference.case.batch(reference.seed, step, dist.get_rank(), micro).to(None, reference.device)
        loss = reference.case.loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def _by_number(tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"microbatch {number}": tensor for number, tensor in enumerate(tensors)}
