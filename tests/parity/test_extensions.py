"""Tensor subclasses that transform themselves around the gather: `fsdp_pre_all_gather`, `fsdp_post_all_gather`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.harness import Reference, multi_rank
from tests.harness.models import Batch, ModelCase
from tests.harness.parity.implementation import API, torch_from
from tests.harness.parity.programs import is_sharded, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, traced

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


@multi_rank(2, 4)
@pytest.mark.parametrize("kind", [OneArgument, FiveArguments, Halves], ids=lambda each: each.__name__)
def test_it_trains_like_the_unsharded_model(kind: type[Wrapped], world_size: int) -> None:
    model = sharded(kind, 16)
    assert is_sharded(model.first.weight) and isinstance(model.first.weight.to_local(), kind)
    steps_like_the_reference(model, 16)
    assert {name for name, _ in CALLS} == {"pre", "post"}


@multi_rank(2, 4)
@pytest.mark.parametrize("kind", [FiveArguments, Halves], ids=lambda each: each.__name__)
def test_uneven_sizes_are_padded_by_the_extension(kind: type[Wrapped], world_size: int) -> None:
    steps_like_the_reference(sharded(kind, 13), 13)


@multi_rank(4)
def test_under_hsdp_the_mesh_is_the_shard_axis() -> None:
    mesh = mesh_of(2, 2)
    steps_like_the_reference(sharded(FiveArguments, 16, mesh=mesh), 16)
    assert all(call["mesh"] == mesh["shard"] for name, call in CALLS if name == "pre")


@multi_rank(2)
def test_the_extension_is_told_sizes_module_and_policy() -> None:
    policy = API.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = sharded(FiveArguments, 13, mp_policy=policy)
    loss_on(plain_case(13), model)
    name, call = CALLS[0]
    assert name == "pre" and call["mesh"].size() == 2
    assert call["size"] == torch.Size([13, 8]) and call["stride"] == (8, 1)
    assert call["module"] is model.first
    assert call["policy"] == policy


@multi_rank(2)
def test_the_first_gather_makes_the_tensor_and_later_ones_write_into_it() -> None:
    model = sharded(FiveArguments, 16)
    for _ in range(2):
        loss_on(plain_case(16), model).backward()
    posts = [call for name, call in CALLS if name == "post"]
    assert [call["out"] for call in posts] == [False, True, True, True]
    assert all(call["dtype"] == torch.float32 and call["shapes"] == [torch.Size([16, 8])] for call in posts)


@multi_rank(2)
def test_param_dtype_is_handed_to_the_extension() -> None:
    """Which decides itself what to gather: here fp32, to compute in bfloat16."""
    model = sharded(FiveArguments, 16, mp_policy=API.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with traced() as trace:
        loss_on(plain_case(16), model).backward()
    posts = [call for name, call in CALLS if name == "post"]
    assert {call["dtype"] for call in posts} == {torch.bfloat16}
    assert trace.of(GATHER)
    model.first.unshard()
    assert model.first.weight.dtype == torch.bfloat16


@multi_rank(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_resharding_or_not(reshard_after_forward: bool) -> None:
    model = sharded(Halves, 16, reshard_after_forward=reshard_after_forward)
    steps_like_the_reference(model, 16)


@multi_rank(2)
def test_offload_hands_the_extension_a_tensor_on_the_device() -> None:
    model = sharded(FiveArguments, 16, offload_policy=API.CPUOffloadPolicy(pin_memory=False))
    steps_like_the_reference(model, 16)


@multi_rank(2)
@pytest.mark.parametrize("rows", [16, 13], ids=["even", "uneven"])
def test_a_subclass_without_extension_is_gathered_as_what_its_operators_make_of_it(rows: int) -> None:
    steps_like_the_reference(sharded(Wrapped, rows), rows)


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


@multi_rank(2)
@torch_from((2, 15), "the method is new")
def test_gathered_memory_is_released_early_where_the_extension_says_so() -> None:
    model = sharded(Releasing, 16)
    sizes: list[int] = []
    model.first.register_forward_pre_hook(
        lambda module, args: sizes.extend(t.untyped_storage().size() for name, t in CALLS if name == "output")
    )
    loss_on(plain_case(16), model)
    assert sizes == [0]
    steps_like_the_reference(sharded(Releasing, 13), 13)


# ---- mistakes ------------------------------------------------------------------------------------


class OnlyPre(Wrapped):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        return (self._inner,), None


class WrongArity(Wrapped):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh, other: int) -> Any:
        return (self._inner,), None

    def fsdp_post_all_gather(self, *args: Any, out: Tensor | None = None) -> Any:
        raise NotImplementedError


@multi_rank(2)
@pytest.mark.parametrize("kind", [OnlyPre, WrongArity], ids=lambda each: each.__name__)
def test_incomplete_extensions_are_refused(kind: type[Wrapped]) -> None:
    with pytest.raises((AssertionError, TypeError, ValueError, RuntimeError), match="all_gather"):
        loss_on(plain_case(16), sharded(kind, 16))


@multi_rank(2)
def test_extensions_may_be_given_to_plain_tensors_after_sharding() -> None:
    """Looked up until the first forward: on the local tensor, as torch's own tests patch them in."""
    case = plain_case(16)
    model = shard(case)
    local = model.first.weight.to_local()
    calls: list[str] = []

    def pre(mesh: DeviceMesh) -> Any:
        calls.append("pre")
        return (model.first.weight.to_local(),), None

    def post(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        calls.append("post")
        return None if out is not None else (outputs[0], (outputs[0],))

    local_tensor = model.first.weight._local_tensor
    local_tensor.fsdp_pre_all_gather, local_tensor.fsdp_post_all_gather = pre, post
    train(case, model, steps=1)
    assert calls == ["pre", "post"] * 2 and local is not None
