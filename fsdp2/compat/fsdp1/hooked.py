"""A communication hook of FSDP1 as a custom reduce-scatter: it is called in the place of the collective.

Units have gradients of zeros where no rank has any (`set_reduce_scatter_unused_params`), and are not divided. So what a
hook is given holds gradients, in the reduce dtype, and zeros where there is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fsdp2


class HookedReduceScatter(fsdp2.ReduceScatter):
    """Calls ``hook(state, flat, output)``: ``flat`` (W * n,) of W ranks, chunk r for rank r; ``output`` (n,).

    On one rank ``hook(state, flat)``, with the result in ``flat``. The hook averages, may write to ``flat`` and may set
    the ``.data`` of the tensor that holds the result to other memory, of another dtype too, as torch's own hooks do.
    """

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        self.state, self.hook = state, hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """From torch's allocator."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Let the hook reduce ``input_tensor``, with collectives of its own."""
        self.call(output_tensor, input_tensor)

    def call(self, target: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Call the hook with ``inputs``, and with a tensor on ``target`` that holds the result afterwards."""
        given = target.detach()
        self.hook(self.state, *inputs, given)
        if given.data_ptr() != target.data_ptr():
            target.copy_(given)
