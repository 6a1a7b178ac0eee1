"""`HalfwayGathers`: what is to be gathered ahead in backward, but not before a reduction has made room for it.

[Note: half a backward each]
While the backward of a unit runs, the gradients of the unit before are reduced, and the parameters of the next are
gathered. Were both in flight from its beginning to its end, four units' memory would be live at its end: the parameters
of two and the gradients of two. Where the host waits for communication anyway (there are no streams), each has a half:
when half of the bytes of the unit's gradients are there, the reduction is waited for, which frees the gradients that it
sent, and only then the next unit is gathered. Three units' memory is live, and both still run beside compute.

Which gradients a rank has must not change the order of its collectives. So a postponed gather is issued before any
other collective of the root, and before the backward ends, if half of the gradients have not arrived until then.
Where that is not enough, because only their order tells messages apart (`GradientReducer.is_ordered`), the
next unit is gathered before compute, and only the reduction is waited for halfway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.root import POSTPONED


class HalfwayGathers:
    """Gathers of the units ``upcoming`` that wait for gradients of the groups ``during``.

    Attributes:
        during: the unit whose backward runs.
        upcoming: what is to be gathered.
    """

    __slots__ = ("_handles", "_is_waiting", "_on_half", "_rest_bytes", "during", "upcoming")

    def __init__(
        self,
        during: tuple[FSDPParamGroup, ...],
        upcoming: Sequence[tuple[FSDPParamGroup, ...]],
        on_half: Callable[[], None],
    ) -> None:
        """``on_half`` is called when half of the bytes of the large gradients have been accumulated: after `watch`."""
        self.during = during
        self.upcoming = upcoming
        self._on_half = on_half
        self._rest_bytes = 0.0
        self._is_waiting = True
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Begin to wait. Whoever is to `cancel` knows this object already: Ctrl-C may come in the middle."""
        watched = list(watched_of(self.during))
        self._rest_bytes = sum(parameter.nbytes for parameter in watched) / 2
        for each in watched:
            self._handles.append(each.register_post_accumulate_grad_hook(self._arrived))

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._rest_bytes -= parameter.nbytes
        if self._rest_bytes <= 0 and self._is_waiting:
            self.cancel()
            self._on_half()

    def cancel(self) -> None:
        """Wait for no gradient any more."""
        self._is_waiting = False
        for handle in self._handles:
            handle.remove()
        self._handles = []


def watched_of(groups: Iterable[FSDPParamGroup]) -> Iterable[torch.Tensor]:
    """The unsharded parameters whose gradients are most of what ``groups`` reduce: large ones, and so few."""
    for group in groups:
        for param in group.reducer.large:
            if param.unsharded is not None and param.unsharded.requires_grad:
                yield param.unsharded


POSTPONED.fill(HalfwayGathers)
