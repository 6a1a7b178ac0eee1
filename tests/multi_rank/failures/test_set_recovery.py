"""`set_recovery`: what a failed step keeps, and ranks that leave it together."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError, set_watchdog
from fsdp2.plugs.transports import gloo_p2p
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.reference import Reference, adamw
from tests.harness.shared.ways import WAYS
from tests.harness.training import assert_trains_like
from tests.multi_rank.failures.helpers import CASE, Boom, assert_gradients, loss_of, raising, sharded


def recovering(options: dict[str, Any] | None = None, **settings: Any) -> Any:
    model = sharded(**(options or {}))
    model.set_recovery(**settings)
    return model


@pytest.mark.parametrize(
    ("on_error", "where", "kept"),
    [("drop_step", "after", (3,)), ("drop_step", "backward", (3,)), ("keep_accumulated", "after", (1, 3))],
)
@pytest.mark.parametrize("synchronizes", [True, False])
@multi_rank(2)
def test_a_dropped_step_leaves_no_gradients(
    on_error: str, where: str, kept: tuple[int, ...], synchronizes: bool
) -> None:
    """The second of two microbatches fails, nobody clears anything, and the program goes on."""
    model = recovering(on_error=on_error)
    model.set_requires_gradient_sync(synchronizes)
    loss_of(model, 1).backward()
    model.set_requires_gradient_sync(True)
    with raising(model.blocks[1], where), pytest.raises(Boom):
        loss_of(model, 2).backward()
    loss_of(model, 3).backward()
    assert_gradients(model, kept)


@pytest.mark.parametrize("way", ["default", "hybrid"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("place", ["blocks.0", pytest.param("blocks.2", marks=pytest.mark.full), ""])
@multi_rank(4, full=(2,))
def test_the_others_leave_the_step_too(place: str, where: str, way: str, world_size: int) -> None:
    model = recovering(WAYS[way](), on_error="drop_step", abort_together=True)
    optimizer = adamw(list(model.parameters()))
    reference = Reference(CASE, world_size=world_size)
    last = world_size - 1
    loss_of(model, 1).backward()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    loss_of(model, 1).backward()
    model.set_requires_gradient_sync(True)
    begun = time.monotonic()
    error: BaseException | None = None
    with raising(model.get_submodule(place), where, ranks=(last,)):
        try:
            loss_of(model, 2).backward()
            loss_of(model, 3).backward()  # whoever was through: its next exchange
        except (Boom, FSDPRuntimeError) as raised:
            error = raised
    assert time.monotonic() - begun < 5, "the watchdog would ask after 10 s"
    if dist.get_rank() == last:
        assert isinstance(error, Boom)
    else:
        assert re.search(f"on rank {last}, (after the )?{where} of", str(error)) and "all ranks leave that step" in str(
            error
        )
    for _ in range(2):
        loss_of(model, 4).backward()
        assert_gradients(model, (4,))
        optimizer.zero_grad()
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=SUM_ORDER)


@pytest.mark.parametrize("where", ["forward", "backward"])
@multi_rank(4)
def test_several_ranks_fail_at_once(where: str) -> None:
    model = recovering(abort_together=True)
    for ranks in ((0, 1, 2, 3), (1, 3), (0, 1, 2)):
        # A rank may be told by another before it fails itself.
        with raising(model.blocks[1], where, ranks=ranks), pytest.raises((Boom, FSDPRuntimeError)):
            loss_of(model, 2).backward()
        model.zero_grad()
        loss_of(model, 3).backward()
        assert_gradients(model, (3,))
        model.zero_grad()


@multi_rank(2)
def test_a_rank_that_does_something_else_meanwhile_is_told_of_all_the_same() -> None:
    """The rank that failed does not run a forward again: its thread sees that the backward is over."""
    model = recovering(abort_together=True)
    loss_of(model).backward()
    begun = time.monotonic()
    with raising(model.blocks[0], "backward", ranks=(1,)), pytest.raises((Boom, FSDPRuntimeError)):
        loss_of(model).backward()
    assert time.monotonic() - begun < 5
    dist.barrier()  # it comes here first
    model.zero_grad()
    loss_of(model, 3).backward()
    assert_gradients(model, (3,))


@pytest.mark.full
@multi_rank(2)
def test_a_backward_in_another_thread_than_its_forward_is_no_step_that_was_left() -> None:
    model = recovering(abort_together=True)
    loss_of(model).backward()
    model.zero_grad()

    def takes_long(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: time.sleep(1.5))  # the watchdog looks every half a second

    model.blocks[0].register_forward_hook(takes_long)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss_of, model, 3).result().backward()
    assert_gradients(model, (3,))


@multi_rank(2)
def test_who_is_in_the_next_step_already_leaves_that() -> None:
    """The root's forward fails on one rank after its last exchange; the other has ended it, and begins the next."""
    model = recovering(abort_together=True)
    loss_of(model).backward()

    def fail(*args: object) -> None:
        dist.barrier()
        raise Boom

    with torch.no_grad():
        if dist.get_rank() == 1:
            handle = model.register_forward_hook(fail)
            with pytest.raises(Boom):
                loss_of(model)
            handle.remove()
        else:
            loss_of(model)
            dist.barrier()
            with pytest.raises(FSDPRuntimeError, match="If this rank had ended that step, and its optimizer has"):
                loss_of(model)
        loss_of(model)


@multi_rank(2)
def test_what_is_refused() -> None:
    model = recovering()
    with pytest.raises(FSDPValueError, match="on_error='keep_accumulated' or 'drop_step', got 'drop'"):
        model.set_recovery("drop")
    with pytest.raises(FSDPRuntimeError, match="must be called on the root"):
        loss_of(model)
        model.blocks[0].set_recovery("drop_step")
    with (
        mock.patch.object(gloo_p2p, "MAX_PEERS", 1),
        pytest.raises(FSDPNotImplementedError, match="by gloo, 64 at most"),
    ):
        model.set_recovery(abort_together=True)  # the exchanges of more ranks carry no name
    set_watchdog(0)
    try:
        with pytest.raises(FSDPNotImplementedError, match="needs the watchdog"):
            model.set_recovery(abort_together=True)
    finally:
        set_watchdog(10.0)
