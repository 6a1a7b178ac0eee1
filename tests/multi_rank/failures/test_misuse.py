"""Mistakes that show when a sharded model runs: one clear error on every rank, and a way back.

Mistakes that show while wrapping are in `tests/unit/test_errors.py`. Each test makes the same mistake on all ranks,
reads the message, and where the message names a remedy, applies it and trains on beside the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from fsdp2 import FSDPRuntimeError, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import assert_sharded_same, gradients_of
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.shared.mistakes import INPUTS, prepared, train
from tests.harness.shared.training import CASE, shard

# ---- roots ---------------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("backward", [False, True], ids=["forward_only", "with_backward"])
def test_a_submodule_ran_before_its_root(backward: bool, resets: bool) -> None:
    model = shard(TRANSFORMER)
    output = model.blocks[1](torch.randn(2, 8, 32))
    if backward:
        output.sum().backward()
    model.zero_grad()
    if resets:
        model.reset_iter_state()
    train(model, TRANSFORMER, steps=3)


@multi_rank(2)
def test_reset_iter_state_on_a_submodule_names_the_root() -> None:
    model = prepared(True)
    with pytest.raises(FSDPRuntimeError, match=r"root.*Sequential.*not on.*'0'"):
        model[0].reset_iter_state()
    train(model)


# ---- where it is wrapped -------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("what", ["wrapping", "first_forward"])
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "meta", "cpu"])
def test_modes_in_force_do_not_stick(mode: str, what: str) -> None:
    """Wrapping inside the block that built the model on meta, or in an evaluation script."""
    entered = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "meta": torch.device("meta"),
        "cpu": torch.device("cpu"),
    }[mode]
    model = CASE.build()
    if what == "wrapping":
        with entered:
            for unit in CASE.units(model):
                fully_shard(unit)
    else:
        for unit in CASE.units(model):
            fully_shard(unit)
        with entered:
            model(INPUTS)
    train(model)


# ---- ranks that differ ---------------------------------------------------------------------------


def wider_layer(rank: int) -> nn.Module:
    return fully_shard(nn.Sequential(nn.Linear(5, 7 + (rank == 1)), nn.GELU()))


def frozen_on_one_rank(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU())
    model[0].bias.requires_grad_(rank != 1)
    return fully_shard(model)


def other_groups(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    if rank == 1:
        fully_shard(model[1])
    return fully_shard(model)


def no_parameters_of_its_own(rank: int) -> nn.Module:
    """On one rank the root has no group."""
    model = nn.Sequential(nn.Linear(5, 5))
    if rank == 1:
        fully_shard(model[0])
    return fully_shard(model)


def setting(name: str, *one: object, **other: object) -> Callable[[int], nn.Module]:
    """A builder that calls a setter with ``one`` on rank 1 only."""

    def build(rank: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        fully_shard(model[0])
        fully_shard(model)
        if rank == 1:
            getattr(model, name)(*[[model[0]] if each is nn.Module else each for each in one], **other)
        return model

    build.__name__ = name
    return build


SETTINGS = {
    setting("set_gradient_divide_factor", 3.0): r"group 'Sequential': set divide_factor=3\.0",
    setting("set_gradient_reduction", "sum"): r"divide_factor=1\.0",
    setting("set_gradient_reduction", 7): r"denominator=7\.0",
    setting("set_force_sum_reduction_for_comms", True): r"only_sums=True",
    setting("set_reduce_scatter_unused_params", True): r"zeros_for_unused=True",
    setting("set_reduce_scatter_max_input_buffers", 2): r"max_pending=2",
    setting("set_all_reduce_hook", print): r"all_reduce_hook=set",
    setting("set_requires_gradient_sync", False): r"requires_gradient_sync=False",
    setting("set_requires_all_reduce", False): r"requires_all_reduce=False",
    setting("set_reshard_after_forward", False): r"module '0': set reshard_after_forward=False",
    setting("set_reshard_after_backward", False): r"reshard_after_backward=False",
    setting("set_strategy", "zero2"): r"reshard_after_forward=False",
    setting("set_unshard_in_backward", False): r"unshards_in_backward=False",
    setting("set_modules_to_forward_prefetch", nn.Module): r"forward_prefetch=\['0'\]",
    setting("set_modules_to_backward_prefetch", nn.Module): r"backward_prefetch=\['0'\]",
    setting("set_prefetch_budget", 0): r"root: set prefetch_bytes=0",
    setting("set_backward_prefetch", "never"): r"root: set backward_prefetch=never",
    setting("set_full_precision", True): r"full_precision=True",
    setting("set_recovery", "drop_step"): r"on_error=drop_step",
    setting("set_divergence", "join"): r"divergence=join",
    setting("set_replica_check", False): r"compares_parameters=False",
    setting("set_is_last_backward", False): r"is_last_backward=False",
    setting("set_manual_backward_finalization", True): r"finalizes_manually=True",
}

DIFFERING = {
    wider_layer: r"0\.weight \[8, 5\]",
    frozen_on_one_rank: r"0\.bias.*frozen",
    other_groups: r"group '1'",
    no_parameters_of_its_own: r"group '0'",
}


@multi_rank(2, 4)
@pytest.mark.parametrize("build", list(DIFFERING), ids=lambda each: each.__name__)
def test_ranks_with_different_models(build: Callable[[int], nn.Module]) -> None:
    check_disagreement(build)


@multi_rank(2)
def test_ranks_with_different_settings() -> None:
    for build in SETTINGS:
        check_disagreement(build)


def check_disagreement(build: Callable[[int], nn.Module]) -> None:
    model = build(dist.get_rank())
    for _ in range(2):  # again the same error, and no hang
        with pytest.raises(FSDPRuntimeError, match="every rank must build the same") as failure:
            model(torch.randn(2, 5))
        assert_matches({**DIFFERING, **SETTINGS}[build], str(failure.value))
        assert_matches("rank 0", str(failure.value))
        assert_matches("rank 1", str(failure.value))
    dist.barrier()  # nothing is left over in the process group


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.DOTALL), f"no {pattern!r} in:\n{text}"


# ---- gradients -----------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("unsharded_shape", [True, False], ids=["whole", "local"])
def test_gradient_replaced_by_a_plain_tensor(unsharded_shape: bool) -> None:
    """Setting it is torch's to allow; adding to it is where the engine has to give up."""
    model = shard()
    model(INPUTS).sum().backward()
    parameter = model[0].bias
    parameter.grad = None
    try:
        parameter.grad = torch.zeros(97) if unsharded_shape else torch.zeros_like(parameter.to_local())
    except RuntimeError:
        return  # torch refuses it at once, on all ranks
    with pytest.raises(FSDPRuntimeError, match=r"gradient of '0\.bias'.*Tensor that is not on the mesh.*grad to None"):
        model(INPUTS).sum().backward()
    model.zero_grad()
    train(model)


@pytest.mark.full
@multi_rank(2)
def test_gradient_replaced_by_a_sharded_tensor_is_added_to() -> None:
    model, plain = shard(), CASE.build()
    for each in (model, plain):
        each(INPUTS).sum().backward()
    parameter = model[0].bias
    ones = torch.ones(97)
    parameter.grad = distribute_tensor(ones, parameter.device_mesh, parameter.placements)
    model(INPUTS).sum().backward()
    assert plain[0].bias.grad is not None
    assert_sharded_same("gradients", {"0.bias": parameter.grad}, {"0.bias": ones + plain[0].bias.grad})


# ---- share_memory: a segmentation fault of torch's, if it were reached ----------------------------


def on_the_root(model: nn.Module) -> None:
    model[0].share_memory()


def on_a_plain_parent(model: nn.Module) -> None:
    model.share_memory()


def on_a_plain_child(model: nn.Module) -> None:
    model[0][0].share_memory()


def on_the_parameter(model: nn.Module) -> None:
    model[0][0].weight.share_memory_()


@multi_rank(2)
@pytest.mark.parametrize(
    "share", [on_the_root, on_a_plain_parent, on_a_plain_child, on_the_parameter], ids=lambda each: each.__name__
)
def test_share_memory_by_every_way(share: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)))
    fully_shard(model[0])
    with pytest.raises(FSDPRuntimeError, match=r"share_memory.*before sharding"):
        share(model)
    model(torch.randn(2, 5)).sum().backward()


# ---- errors of the user's own --------------------------------------------------------------------


class Fails(nn.Module):
    """Raises in its forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(13, 13)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        if self.fails:
            raise ValueError("the user's own")
        return y


FAILING = ModelCase(
    "failing", lambda: nn.Sequential(Fails(), Fails(), nn.Linear(13, 1)), UNEVEN_MLP.make_batch, ("0", "1"), F.mse_loss
)


@multi_rank(2)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize("when", ["after_forward", "after_a_failed_forward"])
def test_model_zero_grad_clears_sharded_gradients_while_unsharded_ones_are_registered(
    when: str, set_to_none: bool
) -> None:
    """The usual loop calls it between forward and backward: left-over gradients would be added to, silently."""
    model, plain = shard(FAILING), FAILING.build()
    for each in (model, plain):
        each(INPUTS).sum().backward()
        each[0].fails = when == "after_a_failed_forward"
        try:
            loss = each(INPUTS).square().sum()
        except ValueError:
            each[0].fails = False
            each.zero_grad(set_to_none)
            loss = each(INPUTS).square().sum()
        else:
            each.zero_grad(set_to_none)
        loss.backward()
    assert_sharded_same("gradients", gradients_of(model), gradients_of(plain))
