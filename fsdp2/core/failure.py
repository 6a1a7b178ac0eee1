"""What becomes of an iteration that an exception has left.

===================================  ==================================================================================
what was left                        the next forward, or whatever else comes first, finds
===================================  ==================================================================================
a forward                            parameters where they rest after a forward, as on ranks where none came; gradients
                                     of earlier microbatches stay, or go (`set_recovery`)
a backward, or a wait for exchanges  all sharded, nothing in flight, no gradient of this iteration; with a warning, if
                                     earlier microbatches had added gradients up without communication
a step that all ranks leave          as after a backward, in all roots; the learned orders are forgotten too, as other
together                             ranks were elsewhere
===================================  ==================================================================================

`recover_if_failed` is called before anything that needs a clean start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from fsdp2 import _torch
from fsdp2.core.places import PLACE
from fsdp2.core.ports import Port, missing

if TYPE_CHECKING:
    from fsdp2.core.group import FSDPParamGroup
    from fsdp2.core.root import FSDPRoot


class Abandon(NamedTuple):
    """How ranks leave a step together that an exception has left on one of them.

    Attributes:
        refuse_if_alone: raises if ranks that exchange for these groups cannot tell each other.
        tell: tells the others, unless they know.
    """

    refuse_if_alone: Callable[[Iterable[FSDPParamGroup]], None] = missing("watchdog")
    tell: Callable[[], None] = missing("watchdog")


ABANDON: Port[Abandon] = Port(Abandon())


def is_to_restart(root: FSDPRoot) -> bool:
    """Whether all ranks were told to leave the step that this one is in, by this one or by another."""
    iteration = root.iteration
    has_failed = iteration.failed or (iteration.in_backward and not _torch.backward_is_running())
    return root.restarts != PLACE.restarts or (root.settings.aborts_together and has_failed)


def recover_if_failed(root: FSDPRoot) -> None:
    """Start clean if an exception left the last iteration's forward or backward.

    A backward has failed if it began, and neither ended nor is running now.
    """
    in_backward = root.iteration.in_backward and not _torch.backward_is_running()
    has_failed = in_backward or root.comm.was_interrupted or root.iteration.failed
    keeps = root.settings.on_error == "keep_accumulated"
    if has_failed and root.settings.aborts_together and root.restarts == PLACE.restarts:
        ABANDON.filling.tell()
    if root.restarts != PLACE.restarts:
        # Ranks raised at different places of the step: all that it has begun may differ between them, so all goes.
        root.restarts = PLACE.restarts
        has_failed = True
        reset(root, warns=keeps, of_all_roots=True)
        root.learned.forget()
    elif in_backward or root.comm.was_interrupted:
        PLACE.failure = f"an exception had left its step {PLACE.step}, {PLACE.phase}"
        reset(root, warns=keeps)
    elif root.iteration.failed:
        PLACE.failure = f"an exception had left its step {PLACE.step}, {PLACE.phase}"
        _leave_failed_forward(root)
    if has_failed and not keeps:
        # Reductions still in flight would set `.grad` later, after the gradients were dropped here.
        root.comm.drop_reduces({group.reducer for group in root.groups})
        for group in root.groups:
            group.drop_gradients()


def _leave_failed_forward(root: FSDPRoot) -> None:
    """End a forward that an exception has left, as it ends on ranks where none came.

    All ranks may agree to skip the batch: then they must gather the same in the next forward. So what rests
    unsharded after a forward does so here, and gradients of earlier microbatches stay.
    """
    ahead = root.iteration.ahead
    root.schedule.forward_failed()
    for group in root.groups:
        group.users.clear()
        if group in ahead or group.was_interrupted:
            group.reshard()
    root.end_rounds()
    ended = root.next_iteration()
    root.iteration.unfinalized, root.iteration.reduced = ended.unfinalized, ended.reduced


def reset(root: FSDPRoot, *, warns: bool = False, of_all_roots: bool = False) -> None:
    """Wait for what is in flight, drop it, and forget the iteration.

    ``warns``: warn if gradients of earlier microbatches are lost with it. ``of_all_roots``: drop the reductions of all
    roots that share the communication context.
    """
    root.comm.invalidate_handle(root)
    root.comm.drop_reduces(None if of_all_roots else {group.reducer for group in root.groups})
    root.comm.let_host_write_shards()
    root.watched.hold_graph(False, root.groups, in_forward=root.iteration.in_forward)
    for group in root.shared:
        group.users.clear()
        group.took_part = False
    lost = [group.name for group in root.groups if group.abandon()]
    for state in root.states:
        state.drop_iteration()
    for schedule in {root.learned, root.schedule}:  # ranks that join others follow another than the learned one
        schedule.abandon()
    root.next_iteration()
    if lost and warns:
        warnings.warn(
            f"An iteration of {root.name} failed; gradients that earlier microbatches had accumulated without "
            "communication were dropped with it. Run the whole accumulation again.",
            stacklevel=2,
        )
