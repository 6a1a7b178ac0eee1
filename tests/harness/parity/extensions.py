"""Tensor subclasses that transform themselves around the gather, a log of their calls, and a model with one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.harness import Reference
from tests.harness.models import Batch, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.language import EVEN, tensor_parallel
from tests.harness.parity.programs import loss_on, shard

aten = torch.ops.aten

# Operators whose result is a parameter or a piece of one, which stays of the subclass.
KEPT = {
    aten.detach.default,
    aten.split.Tensor,
    aten.chunk.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.narrow.default,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.alias.default,
}

CALLS: list[tuple[str, Any]] = []
"""What the extensions below were called with, on this rank."""


class Wrapped(torch.Tensor):
    """A tensor that wraps another one; its extension gathers the inner tensor as it is."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Wrapped:
        return cls(inner["_inner"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self._inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {type(each) for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Wrapped)}
        (kind,) = kinds
        args, kwargs = pytree.tree_map_only(Wrapped, lambda each: each._inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, kind, result) if func in KEPT else result


class OneArgument(Wrapped):
    """The older signature: the mesh alone."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        CALLS.append(("pre", {"mesh": mesh, "inner": type(self._inner)}))
        return (self._inner,), "metadata"

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        return _post(self, outputs, metadata, param_dtype, out)


class FiveArguments(Wrapped):
    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        CALLS.append(
            ("pre", {"mesh": mesh, "size": outer_size, "stride": outer_stride, "module": module, "policy": mp_policy})
        )
        inner = self._inner
        rows = -(-outer_size[0] // mesh.size())
        if inner.shape[0] < rows:  # inputs must be of one size on all ranks
            inner = F.pad(inner, (0, 0) * (inner.dim() - 1) + (0, rows - inner.shape[0]))
        return (inner,), "metadata"

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        return _post(self, outputs, metadata, param_dtype, out)


class Halves(FiveArguments):
    """Travels as two tensors of bfloat16 whose sum is the value: half the bytes each, and metadata that counts."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        (inner,), _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        high = inner.bfloat16()
        return (high, (inner - high).bfloat16()), {"terms": 2}

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        assert metadata == {"terms": 2}
        high, low = outputs
        value = high.float() + low.float()
        CALLS.append(("post", {"out": out is not None, "dtype": param_dtype, "shapes": [t.shape for t in outputs]}))
        if out is not None:
            out = _local(out)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(value.view(-1)[: out.numel()].view_as(out))
            return None
        return value, (value,)


def _local(out: Tensor) -> Tensor:
    """Of a tensor parallel parameter ``out`` is the DTensor."""
    return out._local_tensor if isinstance(out, DTensor) else out


def _post(self: Wrapped, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, out: Tensor | None) -> Any:
    assert metadata == "metadata"
    (output,) = outputs
    CALLS.append(("post", {"out": out is not None, "dtype": dtype, "shapes": [output.shape]}))
    if out is not None:
        out = _local(out)
        if output.dtype == out.dtype:
            assert out.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        else:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(output)
        return None
    value = output.to(dtype)
    return value, (value,) if value is not output else (output,)


class Net(nn.Module):
    """Two bias-free layers; ``make`` says which tensors their weights are."""

    def __init__(self, kind: type[Wrapped] | None, rows: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, rows, bias=False)
        self.last = nn.Linear(rows, 4)
        if kind is not None:
            self.first.weight = nn.Parameter(kind(self.first.weight.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def _vectors(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator))


def plain_case(rows: int) -> ModelCase:
    return ModelCase(f"rows{rows}", lambda: Net(None, rows), _vectors, ("first",), F.mse_loss)


def sharded(kind: type[Wrapped], rows: int, **options: Any) -> Any:
    """The reference's model, its first weight wrapped, sharded in two units."""
    CALLS.clear()
    case = plain_case(rows)
    model = case.build()
    model.first.weight = nn.Parameter(kind(model.first.weight.detach().clone()))
    return shard(case, model, **options)


def steps_like_the_reference(model: Any, rows: int, *, steps: int = 3, **reference: Any) -> None:
    """Gradients of every step and the losses; the wrapped parameter is updated through its local tensor."""
    case = plain_case(rows)
    oracle = Reference(case, world_size=dist.get_world_size(), make_optimizer=_sgd, **reference)
    for _ in range(steps):
        record = oracle.step()
        loss = loss_on(case, model, record.step)
        loss.backward()
        assert torch.allclose(loss.detach(), record.losses[dist.get_rank()][0], rtol=1e-4, atol=1e-6)
        for name, parameter in model.named_parameters():
            expected = record.gradients[name]
            gradient = parameter.grad.full_tensor()
            assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-5), name
            with torch.no_grad():
                local = parameter.to_local()
                inner = local._inner if isinstance(local, Wrapped) else local
                inner -= 0.1 * parameter.grad.to_local()
            parameter.grad = None


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Releasing(FiveArguments):
    """Its value is a copy of what was gathered, which may go as soon as it is made."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (output,) = outputs
        CALLS.append(("output", output))
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(output.view(-1)[: out.numel()].view_as(out))
            return None
        value = output.clone()
        return value, (value,)


def parallelized_with_extension(kind: type[Wrapped], mesh: DeviceMesh, **options: Any) -> Any:
    model = tensor_parallel(EVEN.build(), mesh["tp"], sequence=True)
    for block in model.blocks:
        up = block.feed_forward.up
        wrapped = kind(up.weight.to_local().detach().clone())
        up.weight = nn.Parameter(DTensor.from_local(wrapped, mesh["tp"], [Shard(0)], run_check=False))
    for unit in EVEN.units(model):
        API.fully_shard(unit, mesh=mesh["dp"], **options)
    return model
