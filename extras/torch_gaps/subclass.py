"""A tensor subclass with an all-gather extension: it travels as its value plus one."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

aten = torch.ops.aten
# Operators whose result is a parameter or a piece of one, which stays of the subclass.
_KEPT = {
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.narrow.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.chunk.default,
    aten.view.default,
    aten._to_copy.default,
}


class Shifted(torch.Tensor):
    """Wraps ``inner``; the extension sends ``inner + 1`` and subtracts 1 from what arrives."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Shifted:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Shifted:
        return cls(inner["_inner"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Shifted({self._inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Shifted, lambda each: each._inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, Shifted, result) if func in _KEPT else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What is sent."""
        return (self._inner + 1,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What arrived, without the shift: into ``out``, or as a new tensor and what to free for it."""
        value = outputs[0] - 1
        if out is not None:
            # Autograd has saved `out` and gets the same values: nothing has changed for it.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(value)
            return None
        return value, (value,)
