"""Which form of a collective each backend gets: one table, from measurements (``python -m benchmarks.primitives``).

``FSDP2_COMM=native`` in the environment of every rank selects torch.distributed's own collectives everywhere.
"""

from __future__ import annotations

import enum
import os

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.common import FSDPValueError


class Form(enum.Enum):
    """How an all-gather and a reduce-scatter travel, and in which order terms are summed."""

    ALONE = "alone"
    """There is nobody to communicate with: values are copied."""

    NATIVE = "native"
    """torch.distributed's own; the order of summation is the backend's."""

    PEERS = "peers"
    """Sends and receives between all pairs of ranks; terms are added in rank order, in the dtype that travels."""


FORMS = {
    # 2, 4 and 8 ranks, 16 KiB to 64 MiB: 0.3 to 0.9 of the CPU time of gloo's own all-gather, 0.4 to 0.75 of its
    # reduce-scatter, and no clone of the gradients.
    "gloo": Form.PEERS,
}
"""By backend; all others: `Form.NATIVE`."""

MAX_PEERS = 8
"""Beyond, nothing was measured: a rank sends a message to every other, more of them and smaller ones."""

VARIABLE = "FSDP2_COMM"
_HOST = torch.device("cpu")


def _is_native_chosen() -> bool:
    text = os.environ.get(VARIABLE, "")
    if text not in ("", Form.NATIVE.value):
        raise FSDPValueError(f"{VARIABLE} must be '{Form.NATIVE.value}' or unset, got '{text}'.")
    return bool(text)


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is nobody to communicate with."""
    return group is None or group.size() == 1


def form_of(group: dist.ProcessGroup | None) -> Form:
    """The form of collectives over ``group``; on devices other than the CPU `Form.PEERS` counts as `Form.NATIVE`.

    Raises:
        FSDPValueError: the environment asks for a form that there is not.
    """
    if group is None or is_alone(group):
        return Form.ALONE
    if _is_native_chosen() or group.size() > MAX_PEERS:
        return Form.NATIVE
    return FORMS.get(_torch.backend_name(group, _HOST), Form.NATIVE)


def must_be_ordered(group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks of ``group`` must issue what they communicate in the same order, a program's own included.

    Messages between peers are told apart by their tags. A fake group is taken for the gloo group that it stands for.
    """
    form = form_of(group)
    if form is Form.NATIVE and group is not None and _torch.backend_name(group, _HOST) == "fake":
        return group.size() > MAX_PEERS or _is_native_chosen()
    return form is Form.NATIVE
