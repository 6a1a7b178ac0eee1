"""Tensor subclasses that transform themselves around the gather: `fsdp_pre_all_gather`, `fsdp_post_all_gather`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.harness import multi_rank
from tests.harness.parity.extensions import (
    CALLS,
    FiveArguments,
    Halves,
    OneArgument,
    Releasing,
    Wrapped,
    plain_case,
    sharded,
    steps_like_the_reference,
)
from tests.harness.parity.implementation import API, installed_from, torch_from
from tests.harness.parity.programs import is_sharded, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, traced


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    ("kind", "rows"),
    [(OneArgument, 16), (FiveArguments, 16), (FiveArguments, 13), (Halves, 13)],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_extensions_train_like_the_unsharded_model(kind: type[Wrapped], rows: int, world_size: int) -> None:
    """Uneven sizes are padded by the extension."""
    model = sharded(kind, rows)
    assert is_sharded(model.first.weight) and isinstance(model.first.weight.to_local(), kind)
    steps_like_the_reference(model, rows)
    assert {name for name, _ in CALLS} == {"pre", "post"}


@multi_rank(4)
def test_under_hsdp_the_mesh_is_the_shard_axis() -> None:
    mesh = mesh_of(2, 2)
    steps_like_the_reference(sharded(FiveArguments, 16, mesh=mesh), 16)
    assert all(call["mesh"] == mesh["shard"] for name, call in CALLS if name == "pre")


@pytest.mark.full
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


@pytest.mark.full
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
def test_offload_hands_the_extension_a_tensor_on_the_device() -> None:
    model = sharded(FiveArguments, 16, offload_policy=API.CPUOffloadPolicy(pin_memory=False))
    steps_like_the_reference(model, 16)


@multi_rank(2)
@pytest.mark.parametrize("rows", [16, 13], ids=["even", "uneven"])
def test_a_subclass_without_extension_is_gathered_as_what_its_operators_make_of_it(rows: int) -> None:
    steps_like_the_reference(sharded(Wrapped, rows), rows)


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


@multi_rank(2)
@installed_from((2, 15), "grad_dtype policies")
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, None], ids=str)
def test_the_backward_of_an_extension_reads_the_dtype_that_is_wanted(reduce_dtype: torch.dtype | None) -> None:
    """While it is unsharded."""
    model = sharded(FiveArguments, 16, mp_policy=API.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
    wanted = []
    model.first.register_forward_pre_hook(lambda module, args: wanted.append(module.weight.grad_dtype))
    for _ in range(3):
        loss_on(plain_case(16), model).backward()
    assert wanted == [reduce_dtype or torch.float32] * 3
    assert model.first.weight.grad.dtype == torch.float32
