"""`FSDPRoot`: what the outermost sharded module owns: the communication context, the learned orders, the iteration.

Decides when groups are gathered ahead and when a pass begins, ends or has failed. Talks to groups, not to modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from fsdp2 import _torch
from fsdp2.comm_context import FSDPCommContext
from fsdp2.param_group import FSDPParamGroup
from fsdp2.schedule import ExecutionOrder

PREFETCH_DEPTH = 1
"""How many groups are gathered ahead of the one that computes."""


class Iteration:
    """All state of one iteration, replaced as a whole when it has ended or failed.

    Attributes:
        in_forward: the root's forward is running.
        in_backward: a backward has begun and has not come to its end.
        failed: an exception left a forward.
        order: the order that the root's forward follows.
        reduced: gradients were reduced, which takes all ranks.
        ahead: groups that were gathered ahead and have not been used yet.
        recomputed: the group that a recompute in backward has left unsharded for its own backward, see `keep`.
    """

    __slots__ = ("ahead", "failed", "in_backward", "in_forward", "order", "recomputed", "reduced")

    def __init__(self) -> None:
        self.order: ExecutionOrder[FSDPParamGroup] | None = None
        self.reduced = False
        self.in_forward = False
        self.in_backward = False
        self.failed = False
        self.ahead: set[FSDPParamGroup] = set()
        self.recomputed: FSDPParamGroup | None = None


class FSDPRoot:
    """Shared by the states of all sharded modules below one root.

    Attributes:
        name: class name of the root module, for messages.
        groups: all groups, in the order of the modules.
        has_run: there was a forward, not just an `unshard`; another module can no longer become the root silently.
        is_last_backward: whether the end of the next backward waits for all reductions.
        on_backward_end: called when a backward ends, before the last reductions are waited for.
        on_failure: called when an iteration that failed is dropped.
    """

    def __init__(self, name: str, comm: FSDPCommContext, groups: Sequence[FSDPParamGroup]) -> None:
        self.name = name
        self.comm = comm
        self.groups = tuple(groups)
        self.is_last_backward = True
        self.has_run = False
        self.on_backward_end: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self.iteration = Iteration()
        self._forward_order: ExecutionOrder[FSDPParamGroup] = ExecutionOrder()
        self._evaluation_order: ExecutionOrder[FSDPParamGroup] = ExecutionOrder()
        self._backward_order: ExecutionOrder[FSDPParamGroup] = ExecutionOrder()

    # -- forward

    def begin_forward(self) -> None:
        """The root's forward begins, outside of any backward."""
        self.has_run = True
        self.iteration.in_forward = True
        self.iteration.order = self._forward_order if torch.is_grad_enabled() else self._evaluation_order
        for group in self.groups:
            group.refuse_lost_gradients()
            group.release_gradients()
        self.comm.gathers_follow_compute()

    def join(self) -> None:
        """A grouped module is used outside the root's forward: its gathers must see what compute has written."""
        self.comm.gathers_follow_compute()

    def gather_for_forward(self, group: FSDPParamGroup) -> None:
        """Gather ``group``, and ahead of its compute the groups that are expected next. Collective."""
        iteration = self.iteration
        group.unshard()
        iteration.ahead.discard(group)
        # Its staging buffer is gone before the next one is allocated.
        group.wait_for_unshard()
        if iteration.in_forward and iteration.order is not None:
            self._gather_ahead(iteration.order.advance(group, depth=PREFETCH_DEPTH))

    def _gather_ahead(self, upcoming: Sequence[FSDPParamGroup], *, for_backward: bool = False) -> None:
        for group in upcoming:
            if not for_backward or group.can_gather_ahead:
                group.unshard(for_backward=for_backward)
                self.iteration.ahead.add(group)

    def end_forward(self) -> None:
        """The root's forward has ended: drop what was gathered in vain.

        Its order is learned at the end of a backward that reduced gradients. Before, another rank may yet fail, not
        learn it, and predict something else; after an evaluation, nothing later would tell.
        """
        self.iteration.in_forward = False
        self._forward_order.end()
        self._evaluation_order.end()
        self._evaluation_order.commit()
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        for group in self.groups:
            if group in self.iteration.ahead:
                group.reshard()
        self.iteration.ahead.clear()

    # -- backward

    def begin_backward(self) -> None:
        """Some backward hook runs: arrange for the end of this backward, once."""
        if not self.iteration.in_backward:
            self.iteration.in_backward = True
            self._backward_order.expect(self._forward_order.learned[::-1])
            _torch.queue_backward_callback(self._end_backward)

    def gather_for_backward(self, group: FSDPParamGroup) -> None:
        """Gather ``group`` and, ahead of its backward, the groups that are expected next. Collective."""
        iteration = self.iteration
        if iteration.recomputed is group:
            iteration.recomputed = None
        group.unshard(for_backward=True)
        iteration.ahead.discard(group)
        group.wait_for_unshard()
        self._gather_ahead(self._backward_order.advance(group, depth=PREFETCH_DEPTH), for_backward=True)

    def gather_for_recompute(self, group: FSDPParamGroup) -> None:
        """Gather ``group`` for a recompute in backward, which is no part of the learned orders. Collective."""
        self.iteration.ahead.discard(group)
        if self.iteration.recomputed is group:
            self.iteration.recomputed = None
        else:
            self.keep(None)
        group.unshard(for_backward=True)
        group.wait_for_unshard()

    def keep(self, group: FSDPParamGroup | None) -> None:
        """Leave ``group`` unsharded after its recompute, instead of the one before.

        The last group that is recomputed is the first whose backward follows; the others are resharded.
        """
        kept = self.iteration.recomputed
        if kept is not None and kept is not group:
            kept.reshard()
        self.iteration.recomputed = group

    def reduce(self, group: FSDPParamGroup) -> None:
        """Issue the reduction of ``group``'s gradients. Collective."""
        group.reduce()
        self.iteration.reduced = True

    def _end_backward(self) -> None:
        self.on_backward_end()
        if self.is_last_backward:
            self.comm.retire_reduces(0)
        self.keep(None)
        self._drop_ahead()
        self._backward_order.end()
        if self.iteration.reduced:
            self._forward_order.commit()
            self._backward_order.commit()
        ended, self.iteration = self.iteration, Iteration()
        # A backward inside the root's forward does not end that.
        self.iteration.in_forward, self.iteration.order = ended.in_forward, ended.order

    # -- failure

    def recover_if_failed(self) -> None:
        """Start clean if an exception left the last iteration's forward or backward.

        A backward has failed if it began, and neither ended nor is running now.
        """
        if self.iteration.failed or (self.iteration.in_backward and not _torch.backward_is_running()):
            self.reset()

    def reset(self) -> None:
        """Wait for what is in flight, drop it, and forget the iteration."""
        self.comm.drop_reduces()
        lost = [group.name for group in self.groups if group.abandon()]
        self.on_failure()
        for order in (self._forward_order, self._evaluation_order, self._backward_order):
            order.abandon()
        self.iteration = Iteration()
        if lost:
            warnings.warn(
                f"An iteration of {self.name} failed; gradients that earlier microbatches had accumulated without "
                "communication were dropped with it. Run the whole accumulation again.",
                stacklevel=2,
            )
