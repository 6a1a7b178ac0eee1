"""Shows tools the collectives that are made of messages between peers, which they would not see otherwise.

Dispatch modes (``CommDebugMode``) and a program's own functions in place of ``torch.distributed``'s see one all-gather,
reduce-scatter or all-reduce, whatever messages it is made of, just as with torch's own collectives. The call that they
see has buffers of the right size and a group of the same ranks, over which nothing travels; its result is not used.
Whether a tool looks may differ by rank, so nothing is communicated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.gather import Transfer

_SHOWN: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def all_gather(members: Sequence[Transfer], group: dist.ProcessGroup) -> None:
    """Show dispatch modes and replaced functions one all-gather of ``members``."""
    sent, received = _buffers(members)
    _torch.all_gather_batched(received, sent, _shown(group))


def reduce_scatter(members: Sequence[Transfer], op: Any, group: dist.ProcessGroup) -> None:
    """Show dispatch modes and replaced functions one reduce-scatter of ``members``."""
    sent, received = _buffers(members)
    _torch.reduce_scatter_batched(received, sent, op, _shown(group))


def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """Show dispatch modes and replaced functions one all-reduce of ``tensor``."""
    with _torch.unobserved(), torch.no_grad():
        shown = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    dist.all_reduce(shown, op=op, group=_shown(group))


def _buffers(members: Sequence[Transfer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers as large as what is sent and what arrives: in the dtype of the members, as bytes if they have several."""
    dtypes = {input.dtype for _, input in members}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    nbytes = [sum(pair[side].numel() * pair[1].dtype.itemsize for pair in members) for side in (0, 1)]
    with _torch.unobserved(), torch.no_grad():
        received, sent = (torch.zeros(each // dtype.itemsize, dtype=dtype, device="cpu") for each in nbytes)
    return sent, received


def _shown(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if group not in _SHOWN:
        _SHOWN[group] = _torch.silent_group_like(group)
    return _SHOWN[group]
