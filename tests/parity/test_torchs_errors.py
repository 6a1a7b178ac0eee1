"""Every mistake that torch refuses on purpose is refused by us with the same kind of error.

Those that belong to one feature stand with it: SPMD meshes, placements, finalization, custom collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness import multi_rank
from tests.harness.models import UNEVEN_MLP
from tests.harness.parity.implementation import API, IS_TORCH, beyond_torch
from tests.harness.parity.programs import ROOTED, TOWER, is_sharded, loss_on, mesh_of, shard, step_names, train


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


# ---- arguments -----------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str | None]] = {
    "a mesh of three axes": (
        lambda: {"mesh": mesh_of(2, 1, 1, names=("a", "b", "c"))},
        r"1D or 2D|1-D or 2-D|one.*two",
    ),
    "a mesh of two axes without names": (lambda: {"mesh": init_device_mesh("cpu", (2, 1))}, "mesh_dim_names"),
    "a device": (lambda: {"mesh": "cpu"}, None),
    "ranks": (lambda: {"mesh": [0, 1]}, None),
    "a process group": (lambda: {"mesh": dist.group.WORLD}, None),
    "no module": (lambda: {"module": None}, None),
    "the class of a module": (lambda: {"module": nn.Linear}, None),
    "an empty list": (lambda: {"module": []}, None),
    "a float": (lambda: {"reshard_after_forward": 1.0}, "reshard_after_forward"),
    "a list of a bool": (lambda: {"reshard_after_forward": [True]}, "reshard_after_forward"),
}


@multi_rank(2)
@pytest.mark.parametrize("name", list(WRONG))
def test_an_argument_of_another_kind(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises((AssertionError, AttributeError, IndexError, TypeError, ValueError), match=says):
        API.fully_shard(**{"module": linear(), **make()})


@multi_rank(2)
def test_a_module_that_is_sharded_already() -> None:
    module = API.fully_shard(linear())
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        API.fully_shard(module, reshard_after_forward=False)


# ---- parameters ----------------------------------------------------------------------------------


@multi_rank(2)
def test_a_scalar_parameter() -> None:
    """torch refuses it; ours is replicated (tests/multi_rank/parameters/test_odd_parameters.py)."""
    module = linear()
    module.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scale") if IS_TORCH else nullcontext():
        API.fully_shard(module)


@multi_rank(2)
def test_a_non_contiguous_parameter() -> None:
    """torch refuses it; ours keeps its strides (tests/multi_rank/parameters/test_odd_parameters.py)."""
    module = linear()
    module.weight = nn.Parameter(torch.randn(4, 6).T)
    with pytest.raises(NotImplementedError, match="contiguous") if IS_TORCH else nullcontext():
        API.fully_shard(module)


@multi_rank(2)
def test_a_tensor_parallel_parameter_on_a_mesh_that_is_not_part_of_the_same_one() -> None:
    module = linear()
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), other, [Shard(0)]))
    with pytest.raises((ValueError, AssertionError, RuntimeError, NotImplementedError)):
        API.fully_shard(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


# ---- reshard_after_forward -----------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("value", [3, 0, -2, 8, 5])
def test_an_int_that_does_not_divide_the_shard_axis(value: int) -> None:
    with pytest.raises(ValueError, match=rf"{value}"):
        API.fully_shard(linear(), reshard_after_forward=value)


@multi_rank(4)
def test_an_int_is_compared_with_the_shard_axis_and_not_with_the_world() -> None:
    with pytest.raises(ValueError, match="4"):
        API.fully_shard(linear(), mesh=mesh_of(2, 2), reshard_after_forward=4)


# ---- what a mistake must leave alone -------------------------------------------------------------


def attributes_and_hooks(model: nn.Module) -> dict[str, object]:
    """Of every module, its class, what it has as attributes, and how many hooks of each kind."""
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")}
        found[name] = type(module).__name__, sorted(vars(module)), hooks
    return found


def assert_as_untouched(model: Any) -> None:
    """``model``, a sharded `TOWER` before its first step, looks and runs like another that nothing was done to.

    The order of all collectives in the first steps shows what is resharded, prefetched and reduced when; the gradients
    show factors and hooks.
    """
    untouched = shard(TOWER)
    assert attributes_and_hooks(model) == attributes_and_hooks(untouched)
    for _ in range(3):
        assert step_names(model, before=0) == step_names(untouched, before=0)
    for mine, other in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())
    model.zero_grad()


# ---- running -------------------------------------------------------------------------------------


@multi_rank(2)
def test_reset_on_a_submodule() -> None:
    model = shard(UNEVEN_MLP)
    loss_on(UNEVEN_MLP, model).backward()
    with pytest.raises(RuntimeError, match="root"):
        model[0].reset_iter_state()
    model.zero_grad()
    train(UNEVEN_MLP, model, steps=1)


@multi_rank(2)
@beyond_torch("AttributeError")
def test_reset_before_the_first_forward_does_nothing() -> None:
    model = shard(TOWER)
    before = list(model.parameters())
    model.reset_iter_state()
    assert all(mine is yours for mine, yours in zip(model.parameters(), before, strict=True))
    assert_as_untouched(model)
    train(TOWER, model, steps=1)


# ---- settings ------------------------------------------------------------------------------------


Mistake = tuple[type[Exception] | tuple[type[Exception], ...], Callable[[Any], object]]
MISTAKES: dict[str, Mistake] = {
    "forward_prefetch_of_plain_modules": (ValueError, lambda m: m.a.set_modules_to_forward_prefetch([linear()])),
    "backward_prefetch_of_plain_modules": (ValueError, lambda m: m.a.set_modules_to_backward_prefetch([linear()])),
    "reshard_after_forward_int": (ValueError, lambda m: m.set_reshard_after_forward(2)),
    "reshard_after_forward_none": (ValueError, lambda m: m.set_reshard_after_forward(None)),
    "buffers_zero": (ValueError, lambda m: m.set_reduce_scatter_max_input_buffers(0)),
    "buffers_zero_of_one": (ValueError, lambda m: m.set_reduce_scatter_max_input_buffers(0, recurse=False)),
    "buffers_bool": (TypeError, lambda m: m.set_reduce_scatter_max_input_buffers(True)),
    "buffers_float": (TypeError, lambda m: m.set_reduce_scatter_max_input_buffers(2.0)),
    "share_with_plain_modules": (ValueError, lambda m: API.share_comm_ctx([m, linear()])),
    "forward_method_missing": (ValueError, lambda m: API.register_fsdp_forward_method(m, "missing")),
    "positional_recurse": (TypeError, lambda m: m.set_requires_gradient_sync(True, False)),
    "positional_recurse_of_backward": (TypeError, lambda m: m.set_reshard_after_backward(True, False)),
    "positional_stream": (TypeError, lambda m: m.a.set_all_reduce_hook(lambda output: output.zero_(), None)),
    "positional_mesh": (TypeError, lambda m: API.fully_shard(linear(), mesh_of(2))),
    "unknown_option": (TypeError, lambda m: API.fully_shard(linear(), unknown=1)),
    "empty_mesh_dims": (ValueError, lambda m: API.DataParallelMeshDims()),
}


@multi_rank(2)
@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_wrong_setting_is_refused_and_changes_nothing(name: str) -> None:
    expected, mistake = MISTAKES[name]
    model = shard(TOWER)
    with pytest.raises(expected):
        mistake(model)
    assert_as_untouched(model)
    train(TOWER, model, steps=1)


@multi_rank(2)
def test_reshard_after_forward_is_the_one_setter_with_a_positional_recurse() -> None:
    model = shard(ROOTED, reshard_after_forward=True)
    model.set_reshard_after_forward(False, False)
    loss = loss_on(ROOTED, model)
    assert is_sharded(model[0].weight) and is_sharded(model[2].weight), "the modules below were left alone"
    assert not is_sharded(model[4].weight), "the root's own parameters were not"
    loss.backward()
    model.zero_grad()
    train(ROOTED, model, steps=1)


@multi_rank(2)
def test_symmetric_memory_needs_its_backend() -> None:
    """On gloo there is none: an error when it is asked for or when it is first used, not silence."""
    model = shard(TOWER)
    with pytest.raises((RuntimeError, ValueError, AssertionError, NotImplementedError, AttributeError)):
        model.a.set_symm_mem_for_comm()
        loss_on(TOWER, model)
