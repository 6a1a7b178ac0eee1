"""The communication hooks that FSDP1 brings, and their states: to be given to ``register_comm_hook``.

A mean over W ranks is a sum between two divisions, by a power of two near the root of W before it and by the rest
after it, so that sums in narrow dtypes neither overflow nor vanish. Results are those of torch's hooks of these names
(``torch.distributed.algorithms._comm_hooks.default_hooks``), bit by bit. Unlike those, the compressing ones run on CPU,
and leave tensors the memory they have.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""From torch 2.13 on the older name warns."""


class DefaultState:
    """Over which ranks a hook averages, and how the division is shared out.

    Attributes:
        process_group: the ranks.
        world_size: how many they are.
        gradient_predivide_factor: divides gradients before the sum: the first power of two that is not below the
            root of ``world_size``, or that ``world_size`` does not divide by.
        gradient_postdivide_factor: divides the sum. The product of both is ``world_size``.

    Raises:
        ValueError: there is no ``process_group``.
    """

    __slots__ = ("gradient_postdivide_factor", "gradient_predivide_factor", "process_group", "world_size")

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ValueError(f"Expected to pass in an explicit ProcessGroup to {self}.")
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = _predivide_factor(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """The same, and the dtype that a compressing hook brings gradients back to.

    Attributes:
        parameter_type: that dtype.
    """

    __slots__ = ("parameter_type",)

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def _predivide_factor(world_size: int) -> float:
    power = 1
    while power * power < world_size and world_size % power == 0:
        power *= 2
    return float(power)


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad`` over the ranks of ``state``, in place. Collective."""
    _divide(grad, state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Average ``grad`` (W * n,) over the W ranks of ``state``; ``output`` (n,) is this rank's chunk. Collective.

    ``grad`` is divided in place.
    """
    _divide(grad, state.gradient_predivide_factor)
    getattr(dist, _REDUCE_SCATTER)(output, grad, group=state.process_group)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """As `reduce_scatter_hook`, or without ``output`` as `allreduce_hook`, of ``grad`` cast to fp16. Collective.

    The mean is brought back to the ``parameter_type`` of ``state``.
    """
    _average_as(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """As `fp16_compress_hook`, cast to bf16."""
    _average_as(torch.bfloat16, state, grad, output)


LOW_PRECISION_HOOKS = [fp16_compress_hook, bf16_compress_hook]
"""The hooks that take a `LowPrecisionState`."""


def _average_as(dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    """One cast of ``grad`` to ``dtype``, and one of what was averaged back."""
    sent = grad.to(dtype)
    if output is None:
        allreduce_hook(state, sent)
        _bring_back(grad, sent, state.parameter_type)
    else:
        received = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, sent, received)
        _bring_back(output, received, state.parameter_type)


def _bring_back(target: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> None:
    """Let ``target`` hold ``value`` in ``dtype``: where it lies if that is its own dtype."""
    if target.dtype != dtype:
        target.data = value.to(dtype)
    elif target is not value:
        target.copy_(value)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)
