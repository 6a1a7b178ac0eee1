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
from tests.harness.models import Batch
from tests.harness.reference import Reference, StepRecord


def assert_trains_like(
    reference: Reference,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    tolerance: Tolerance | None = EXACT,
    before_forward: Callable[[int], None] | None = None,
    after_backward: Callable[[int], None] | None = None,
    clip: Callable[[list[nn.Parameter], float], Tensor] = nn.utils.clip_grad_norm_,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    compares_losses: bool = True,
    rank: int | None = None,
) -> list[StepRecord]:
    """Trains `model` beside `reference` and compares losses, gradients and parameters in every step.

    Collective: all ranks, each with its own reference of the same arguments. Each step compares this rank's
    shards; after the last one the gathered parameters are compared too.

    Args:
        reference: Its `case`, `microbatches` and `max_norm` also train `model`.
        model: Sharded; of a fresh reference it starts from the same parameters.
        optimizer: Of `model`'s parameters.
        steps: Number of steps.
        tolerance: For all comparisons.
        before_forward: Called with the number of each microbatch before its forward: the place for
            `set_requires_gradient_sync`, which `Accumulation.REDUCE_LAST` needs.
        after_backward: Called with the number of each microbatch after its backward.
        clip: What clips `model` where the reference has a `max_norm`.
        loss: In place of the case's, for `model` only.
        compares_losses: Not of those that the two compute in other dtypes.
        rank: Which of the reference's ranks this one is; fewer than there are under tensor parallelism.

    Returns:
        The reference's records.
    """
    rank = dist.get_rank() if rank is None else rank
    if reference.steps_done == 0:
        assert_sharded_same("initial parameters", parameters_of(model), parameters_of(reference.model))
    records = []
    for _ in range(steps):
        record = reference.step()
        records.append(record)
        losses = []
        for micro in range(reference.microbatches):
            if before_forward is not None:
                before_forward(micro)
            batch = reference.case.batch(reference.seed, record.step, rank, micro).to(None, reference.device)
            value = (loss or reference.case.loss)(model, batch)
            value.backward()
            losses.append(gather(value.detach()))
            if after_backward is not None:
                after_backward(micro)
        at = f"in step {record.step}"
        assert_sharded_same(f"gradients {at}", gradients_of(model), record.gradients, tolerance=tolerance)
        norm = None
        if reference.max_norm is not None:
            norm = gather(clip(list(model.parameters()), reference.max_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if compares_losses:
            assert_same(f"losses {at}", _by_number(losses), _by_number(record.losses[rank]), tolerance=tolerance)
        assert_same(f"norms {at}", {"total": norm}, {"total": record.gradient_norm}, tolerance=tolerance)
        after = f"parameters after step {record.step}"
        assert_sharded_same(after, parameters_of(model), record.parameters, tolerance=tolerance)
    if records:
        gathered = full_parameters(model)
        assert_same("gathered parameters", gathered, records[-1].parameters, tolerance=tolerance)
    return records


def _by_number(tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"microbatch {number}": tensor for number, tensor in enumerate(tensors)}
