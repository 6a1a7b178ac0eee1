"""The hooks that FSDP1 brings give what torch's of these names give, called by themselves and in training.

Torch's compressing hooks end with ``record_stream``, which there is not on CPU: their arithmetic is run without it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS, default_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.compat.fsdp1 import comm_hooks
from tests.fsdp1.helpers.both import wrapped
from tests.harness import multi_rank
from tests.harness.compare import Tolerance, assert_sharded_same, gradients_of, tolerance_for
from tests.harness.models import UNEVEN_MLP
from tests.harness.reference import Reference
from tests.harness.shared.training import loss_on

PLAIN = ("allreduce_hook", "reduce_scatter_hook")
COMPRESSING = ("fp16_compress_hook", "bf16_compress_hook")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COMPRESSED = Tolerance(0.02, 5e-3, "gradients travel in half precision")


def state_of(module: Any, name: str) -> Any:
    kind = module.LowPrecisionState if name in COMPRESSING else module.DefaultState
    return kind(dist.group.WORLD)


def called(module: Any, name: str, dtype: torch.dtype, *, sharded: bool, state: Any = None) -> Tensor:
    """What a hook makes of this rank's gradient."""
    world_size, numel = dist.get_world_size(), 24
    generator = torch.Generator().manual_seed(dist.get_rank())
    grad = torch.randn(world_size * numel, generator=generator).to(dtype)
    output = torch.full((numel,), 7.0, dtype=dtype)
    with mock.patch.object(Tensor, "record_stream", lambda *_: None):
        getattr(module, name)(state or state_of(module, name), grad, *([output] if sharded else []))
    return output if sharded else grad


def test_names_and_fields_are_torchs() -> None:
    assert [hook.__name__ for hook in comm_hooks.LOW_PRECISION_HOOKS] == [h.__name__ for h in LOW_PRECISION_HOOKS]
    for name in ("DefaultState", "LowPrecisionState"):
        ours, theirs = getattr(comm_hooks, name), getattr(default_hooks, name)
        assert set(ours.__slots__) == set(theirs.__slots__)
        with pytest.raises(ValueError, match="Expected to pass in an explicit ProcessGroup to"):
            ours(None)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 8, 12, 64, 96, 1000, 4096])
def test_the_division_is_shared_out_as_torchs(world_size: int) -> None:
    group: Any = object()
    with mock.patch.object(dist, "get_world_size", lambda group: world_size):
        ours, theirs = (module.LowPrecisionState(group, torch.bfloat16) for module in (comm_hooks, default_hooks))
    for name in ("gradient_predivide_factor", "gradient_postdivide_factor", "world_size", "parameter_type"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.process_group is group


@multi_rank(2, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*PLAIN, *COMPRESSING])
def test_results_are_torchs_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    for sharded in (True, False) if name in COMPRESSING else (name == "reduce_scatter_hook",):
        ours, theirs = (called(module, name, dtype, sharded=sharded) for module in (comm_hooks, default_hooks))
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@multi_rank(2)
@pytest.mark.parametrize("name", COMPRESSING)
def test_the_parameter_type_is_what_comes_back(name: str) -> None:
    for sharded in (True, False):
        for parameter_type in DTYPES:
            results = [
                called(
                    module,
                    name,
                    torch.float32,
                    sharded=sharded,
                    state=module.LowPrecisionState(dist.group.WORLD, parameter_type),
                )
                for module in (comm_hooks, default_hooks)
            ]
            assert {each.dtype for each in results} == {parameter_type} and torch.equal(*results)


@multi_rank(2)
@pytest.mark.parametrize("sharded", [True, False])
def test_compressing_is_one_cast_there_and_one_back(sharded: bool) -> None:
    """Nothing else is copied, and what is filled stays where it lies."""
    copies: list[int] = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_cast = func._opname == "copy_" and args[0].dtype != args[1].dtype  # gloo copies as well
            if is_cast or func._opname in ("_to_copy", "clone"):
                copies.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    grad, output = torch.ones(32), torch.empty(16)
    target = output if sharded else grad
    address = target.data_ptr()
    with Casts():
        comm_hooks.fp16_compress_hook(
            comm_hooks.LowPrecisionState(dist.group.WORLD), grad, *([output] if sharded else [])
        )
    assert copies == [32, 16 if sharded else 32] and target.data_ptr() == address
    assert torch.equal(target, torch.ones_like(target))


# ---- in training -------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("of", ["ours", "torch's"])
@pytest.mark.parametrize("name", ["reduce_scatter_hook", *COMPRESSING])
def test_gradients_of_a_sharded_model(name: str, of: str, world_size: int) -> None:
    case, module = UNEVEN_MLP, comm_hooks if of == "ours" else default_hooks
    model = wrapped("fsdp2")
    model.register_comm_hook(state_of(module, name), getattr(module, name))
    expected = Reference(case, world_size=world_size).step().gradients
    with mock.patch.object(Tensor, "record_stream", lambda *_: None):
        loss_on(case, model, 0, dist.get_rank()).backward()
    tolerance = COMPRESSED if name in COMPRESSING else tolerance_for(world_size)
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=tolerance)


def hooked_by(kind: str, module: Any, name: str) -> Any:
    model = wrapped(kind)
    model.register_comm_hook(state_of(module, name), getattr(module, name))
    return model


def losses_of(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        loss = loss_on(UNEVEN_MLP, model, step, dist.get_rank())
        losses.append(loss.detach())
        with mock.patch.object(Tensor, "record_stream", lambda *_: None):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@multi_rank(2, 4)
@pytest.mark.full
@pytest.mark.parametrize("name", ["reduce_scatter_hook", *COMPRESSING])
def test_training_is_that_of_torchs_fsdp1(name: str, world_size: int) -> None:
    """The same hooks, each on its own engine: on 2 ranks the same bits, for a sum has one rounding."""
    found, expected = (
        losses_of(hooked_by(kind, module, name)) for kind, module in (("fsdp2", comm_hooks), ("torch", default_hooks))
    )
    if world_size == 2:
        assert torch.equal(torch.stack(found), torch.stack(expected))
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4 if name == "reduce_scatter_hook" else 0.02, atol=1e-4)
