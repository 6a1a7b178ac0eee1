"""Manual finalization of backward (2.15): the caller says when a logical backward has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import Accumulation, Reference, assert_same, assert_sharded_same, multi_rank, tolerance_for
from tests.harness.compare import SUM_ORDER, gradients_of
from tests.harness.models import FROZEN, PARTLY_USED, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API, torch_from
from tests.harness.parity.programs import ROOTED, TOWER, is_sharded, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import SCATTER, trace_of

pytestmark = [
    torch_from((2, 15), "manual finalization is new"),
    # An implementation may say that accumulated gradients go with a reset.
    pytest.mark.filterwarnings("ignore:.*gradients.*dropped:UserWarning"),
]


def manual(case: ModelCase = ROOTED, **options: Any) -> Any:
    """A sharded model whose caller finalizes."""
    model = shard(case, **options)
    model.set_manual_backward_finalization(True)
    return model


def finalized(model: Any, case: ModelCase = ROOTED) -> None:
    """One whole step of gradients."""
    loss_on(case, model).backward()
    model.finalize_backward()


# ---- what it does --------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, FROZEN, PARTLY_USED], ids=str)
@pytest.mark.parametrize("async_op", [False, True])
def test_one_backward_and_one_finalization(case: ModelCase, async_op: bool, world_size: int) -> None:
    model = manual(case)

    def finalize(micro: int) -> None:
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is None) != async_op
        if handle is not None:
            assert isinstance(handle, API.GradientReductionHandle)
            assert handle.wait() is None
            handle.wait()  # again: nothing

    train(case, model, after_backward=finalize)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, FROZEN], ids=str)
def test_several_backward_passes_and_one_finalization(case: ModelCase, world_size: int) -> None:
    """Without synchronization in the passes; the finalization reduces what they have accumulated."""
    model = manual(case)

    def before_forward(micro: int) -> None:
        model.set_requires_gradient_sync(False)

    def after_backward(micro: int) -> None:
        assert all(parameter.grad is None for parameter in model.parameters())
        if micro == 2:
            model.set_requires_gradient_sync(True)
            model.finalize_backward()

    reference = Reference(case, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST)
    train(case, model, reference=reference, before_forward=before_forward, after_backward=after_backward)


@pytest.mark.full
@multi_rank(2)
def test_the_reductions_are_issued_by_the_finalization_then() -> None:
    model = manual(TOWER)
    model.set_requires_gradient_sync(False)
    for micro in range(2):
        trace = trace_of(lambda micro=micro: loss_on(TOWER, model, 0, None, micro).backward())
        assert trace.of(SCATTER) == []
    model.set_requires_gradient_sync(True)
    assert len(trace_of(model.finalize_backward).of(SCATTER)) == 4
    assert all(parameter.grad is not None and is_sharded(parameter) for parameter in model.parameters())


@pytest.mark.full
@multi_rank(2)
def test_several_losses_of_one_forward_before_one_finalization() -> None:
    """Two backward passes through one graph: one logical backward."""
    model, plain = manual(UNEVEN_MLP), UNEVEN_MLP.build()
    model.set_requires_gradient_sync(False)

    def both(each: nn.Module, rank: int) -> None:
        output = each(UNEVEN_MLP.batch(0, 0, rank).inputs)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()

    both(model, dist.get_rank())
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    for rank in range(2):
        both(plain, rank)
    expected = {name: parameter.grad / 2 for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(2)
def test_finalizing_supersedes_is_last_backward() -> None:
    model = manual(UNEVEN_MLP)
    model.set_is_last_backward(False)
    train(UNEVEN_MLP, model, after_backward=lambda micro: model.finalize_backward())


@pytest.mark.full
@multi_rank(2)
def test_finalizing_reshards_according_to_the_settings() -> None:
    model = manual(ROOTED)
    finalized(model)
    assert all(is_sharded(parameter) for parameter in model.parameters())
    model.set_reshard_after_backward(False)
    finalized(model)
    assert not any(is_sharded(parameter) for parameter in model.parameters())


@multi_rank(2)
def test_before_the_first_forward_it_does_nothing() -> None:
    model = manual(UNEVEN_MLP)
    assert model.finalize_backward() is None
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, API.GradientReductionHandle)
    handle.wait()
    train(UNEVEN_MLP, model, steps=2, after_backward=lambda micro: model.finalize_backward())


@pytest.mark.full
@multi_rank(2)
def test_after_a_backward_that_reached_no_parameter_it_is_safe() -> None:
    model = manual(UNEVEN_MLP)
    model(UNEVEN_MLP.batch(0, 0, 0).inputs)  # the output goes nowhere
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    model.finalize_backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    train(UNEVEN_MLP, model, steps=2, after_backward=lambda micro: model.finalize_backward())


# ---- the handle ----------------------------------------------------------------------------------


@multi_rank(2)
def test_the_gradients_are_there_after_the_wait() -> None:
    model = manual(UNEVEN_MLP)
    loss_on(UNEVEN_MLP, model).backward()
    model.finalize_backward(async_op=True).wait()
    record = Reference(UNEVEN_MLP, world_size=2).step()
    assert_sharded_same("gradients", gradients_of(model), record.gradients, tolerance=tolerance_for(2))


@multi_rank(2)
@pytest.mark.parametrize("then", ["forward", "finalize", "finalize_async"])
def test_more_work_before_the_wait_is_an_error(then: str) -> None:
    model = manual(UNEVEN_MLP)
    loss_on(UNEVEN_MLP, model).backward()
    handle = model.finalize_backward(async_op=True)
    actions: dict[str, Callable[[], object]] = {
        "forward": lambda: loss_on(UNEVEN_MLP, model),
        "finalize": model.finalize_backward,
        "finalize_async": lambda: model.finalize_backward(async_op=True),
    }
    with pytest.raises(RuntimeError, match="wait"):
        actions[then]()
    handle.wait()
    model.zero_grad()
    train(UNEVEN_MLP, model, steps=2, after_backward=lambda micro: model.finalize_backward())


@multi_rank(2)
def test_reset_invalidates_the_handle() -> None:
    model = manual(UNEVEN_MLP)
    loss_on(UNEVEN_MLP, model).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="invalid"):
        handle.wait()
    model.zero_grad()
    train(UNEVEN_MLP, model, steps=2, after_backward=lambda micro: model.finalize_backward())


def two_roots() -> tuple[Any, Any]:
    """Two models with one communication context."""
    first, second = manual(UNEVEN_MLP), manual(UNEVEN_MLP)
    API.share_comm_ctx([first, second])
    return first, second


@multi_rank(2)
def test_an_outstanding_handle_blocks_every_root_that_shares_its_context() -> None:
    first, second = two_roots()
    finalized(second, UNEVEN_MLP)
    loss_on(UNEVEN_MLP, first).backward()
    handle = first.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="wait"):
        loss_on(UNEVEN_MLP, second)
    with pytest.raises(RuntimeError, match="wait"):
        second.finalize_backward()
    with pytest.raises(RuntimeError, match="another"):
        second.reset_iter_state()
    handle.wait()
    finalized(second, UNEVEN_MLP)


@multi_rank(2)
def test_roots_with_contexts_of_their_own_do_not_block_each_other() -> None:
    first, second = manual(UNEVEN_MLP), manual(UNEVEN_MLP)
    loss_on(UNEVEN_MLP, first).backward()
    handle = first.finalize_backward(async_op=True)
    finalized(second, UNEVEN_MLP)
    handle.wait()
    for name, gradient in gradients_of(first).items():
        assert_same("gradients", {name: gradient.full_tensor()}, {name: gradients_of(second)[name].full_tensor()})


# ---- mistakes ------------------------------------------------------------------------------------


@multi_rank(2)
def test_finalizing_without_having_said_so() -> None:
    model = shard(ROOTED)
    loss_on(ROOTED, model).backward()
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward(async_op=True)


@multi_rank(2)
def test_the_root_is_what_finalizes() -> None:
    model = manual()
    loss_on(ROOTED, model).backward()
    with pytest.raises(RuntimeError, match="root"):
        model[0].finalize_backward()
    with pytest.raises(RuntimeError, match="root"):
        model[0].set_manual_backward_finalization(True)
    model.finalize_backward()


@multi_rank(2)
def test_a_submodule_told_before_the_root_is_known_shows_in_the_first_forward() -> None:
    model = shard(ROOTED)
    model[0].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="root"):
        loss_on(ROOTED, model)


@multi_rank(2)
def test_the_mode_may_not_change_until_the_backward_is_finalized() -> None:
    model = manual()
    loss_on(ROOTED, model).backward()
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.set_manual_backward_finalization(False)
    model.set_manual_backward_finalization(True)  # no change
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    train(ROOTED, model, steps=1)


@multi_rank(2)
def test_neither_mode_nor_end_may_come_during_backward() -> None:
    model = manual()
    errors: list[str] = []

    def meddle(gradient: Tensor) -> None:
        for action in (lambda: model.set_manual_backward_finalization(False), model.finalize_backward):
            try:
                action()
            except RuntimeError as error:
                errors.append(str(error))

    model[2].register_forward_hook(lambda module, args, output: output.register_hook(meddle) and None)
    loss_on(ROOTED, model).backward()
    model.finalize_backward()
    assert len(errors) == 2, errors


@multi_rank(4)
@pytest.mark.parametrize("partial_before", [True, False])
def test_partial_reductions_cannot_be_finalized(partial_before: bool) -> None:
    """All-reduce must be on: as accumulated in earlier passes, or as set for this one."""
    model = manual(TOWER, mesh=mesh_of(2, 2))
    if partial_before:
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    loss_on(TOWER, model).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    with pytest.raises(RuntimeError, match=r"[Pp]artial|all-reduce"):
        model.finalize_backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    train(TOWER, model, steps=2, after_backward=lambda micro: model.finalize_backward())


@pytest.mark.full
@multi_rank(2)
def test_reset_drops_what_was_not_finalized() -> None:
    model = manual(UNEVEN_MLP)
    model.set_requires_gradient_sync(False)
    loss_on(UNEVEN_MLP, model).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    train(UNEVEN_MLP, model, steps=2, after_backward=lambda micro: model.finalize_backward())
