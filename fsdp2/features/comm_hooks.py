"""Communication hooks: the user's function in the place of all that reduces and averages gradients.

FSDP1's ``register_comm_hook``, on the buffers of groups. The hook sees gradients and padding alone: which parameters
had a gradient is laid out apart (see `GradientLayout`) and reduced here, for a hook may compress, scale or drop what it
is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.buffers import ALLOCATOR, Arena
from fsdp2.core.gather import Transfer
from fsdp2.core.options import CommHook
from fsdp2.core.transport import HOOKED, Alone, Transport, Works, transport_of


class Hooked(Transport):
    """Calls a communication hook with what is packed. Its order among collectives is the hook's, alike on all ranks."""

    is_ordered = True

    def __init__(self, hook: CommHook, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._hook = hook
        self._is_sharded = group is not None
        self._apart = transport_of(group, device)

    def all_gather(self, members: Sequence[Transfer], works: Works, user_waits: bool = False) -> None:
        """As without a hook."""
        self._apart.all_gather(members, works, user_waits)

    def reduce_scatter(self, members: Sequence[Transfer], op: Any, works: Works, arena: Arena = ALLOCATOR) -> None:
        """Of each dtype two members: gradients, which the hook reduces if there are shards, and presence."""
        gradients, presences = members[::2], members[1::2]
        if self._is_sharded:
            for output, input in gradients:
                self._call(output, input)
        else:
            Alone().reduce_scatter(gradients, op, works)
        self._apart.reduce_scatter(presences, op, works, arena)

    def all_reduce(
        self, output: torch.Tensor, presence_offset: int, group: dist.ProcessGroup, op: Any, works: Works
    ) -> None:
        """Of replicated parameters: gradients by the hook, in place."""
        self._call(output[:presence_offset])
        if self.among_replicas is not None:
            self.among_replicas.sum(output[presence_offset:], op, works)

    def _call(self, target: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Call the hook with ``inputs``, and with a tensor on ``target`` that holds the result afterwards."""
        given = target.detach()
        self._hook.hook(self._hook.state, *inputs, given)
        # torch's own compressing hooks set `.data`, to another dtype and back.
        if _torch.storage_of(given) != _torch.storage_of(target):
            target.copy_(given)


HOOKED.fill(Hooked)
