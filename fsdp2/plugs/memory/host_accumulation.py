"""`HostSum`: reduced gradients of one dtype that add up in host memory until the last backward brings them back.

The host never computes with them: the waiting sum is copied to the device, added to what was reduced, and copied back,
all on the stream that reduced last. So nothing blocks, and the device holds the sum of one group at a time. The host
memory, pinned or not, is kept from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.buffers import Offloading
from fsdp2.core.gradients import ACCUMULATION, Accumulation


class HostSum(Accumulation):
    """The sum of what several backwards have reduced, in the flat layout in which it was reduced.

    Attributes:
        dtype: the dtype that gradients add up in.
        waits: whether the sum holds anything.
        missing: indices of parameters that had no gradient on this rank in any of these backwards.
    """

    def __init__(self, offloading: Offloading, dtype: torch.dtype) -> None:
        self.dtype: torch.dtype = dtype
        self.waits = False
        self.missing: frozenset[int] = frozenset()
        self._home = offloading
        self._host: torch.Tensor | None = None

    @property
    def waiting(self) -> torch.Tensor | None:
        """The sum itself, in host memory; None if nothing waits."""
        return self._host if self.waits else None

    def added_to(self, reduced: torch.Tensor) -> torch.Tensor:
        """``reduced`` in this dtype, plus what waits; in place if ``reduced`` is of this dtype already."""
        total = reduced.to(self.dtype)
        if self.waits:
            assert self._host is not None, "what waits lies there"
            # Both copies of this class run on the stream of the caller, so this one follows the copy in `keep`.
            waiting = torch.empty_like(total)
            waiting.copy_(self._host, non_blocking=True)
            total.add_(waiting)
        return total

    def keep(self, total: torch.Tensor, missing: Sequence[int]) -> None:
        """Let ``total``, a sum that `added_to` returned, wait in host memory."""
        if self._host is None or self._host.numel() != total.numel():
            self._host = self._home.empty_on_host(total.numel(), self.dtype)
        self._host.copy_(total, non_blocking=True)
        self.missing, self.waits = self.still_missing(missing), True

    def still_missing(self, missing: Sequence[int]) -> frozenset[int]:
        """The indices of ``missing`` that had no gradient in the backwards before either."""
        return self.missing.intersection(missing) if self.waits else frozenset(missing)

    def drop(self) -> None:
        """Forget the sum; its memory stays for the next one."""
        self.waits = False


ACCUMULATION.fill(HostSum)
