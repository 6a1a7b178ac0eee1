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
from tests.harness import multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same
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
def test_the_same_from_inside_out_twice() -> None:
    """Three levels: each outer module takes over from an inner root."""
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)), nn.Linear(5, 3))
    fully_shard(model[0][0])
    fully_shard(model[0])
    fully_shard(model)
    inputs = torch.randn(2, 5)
    model[0][0](inputs)
    model[0](inputs).sum().backward()
    model(inputs).sum().backward()
    model.reset_iter_state()
    with pytest.raises(FSDPRuntimeError, match="on the root"):
        model[0].reset_iter_state()


@multi_rank(2)
def test_reset_iter_state_on_a_submodule_names_the_root() -> None:
    model = prepared(True)
    with pytest.raises(FSDPRuntimeError, match=r"root.*Sequential.*not on.*'0'"):
        model[0].reset_iter_state()
    train(model)


# ---- where it is wrapped -------------------------------------------------------------------------


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


def another_dtype(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU())
    if rank == 1:
        model[0].bias = nn.Parameter(model[0].bias.double())
    return fully_shard(model)


def more_layers(rank: int) -> nn.Module:
    return fully_shard(nn.Sequential(*[nn.Linear(5, 5) for _ in range(2 + (rank == 1))]))


def other_groups(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    if rank == 1:
        fully_shard(model[1])
    return fully_shard(model)


def other_names(rank: int) -> nn.Module:
    layers = {"left": nn.Linear(5, 5), "right": nn.Linear(5, 5)}
    model = nn.Sequential()
    for name in sorted(layers, reverse=rank == 1):
        model.add_module(name, layers[name])
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
    another_dtype: r"float64",
    more_layers: r"\+.*2\.weight",
    other_groups: r"group '1'",
    other_names: r"right\.weight",
    no_parameters_of_its_own: r"group '0'",
}


@multi_rank(2)
@pytest.mark.parametrize("build", list(DIFFERING), ids=lambda each: each.__name__)
def test_ranks_with_different_models(build: Callable[[int], nn.Module]) -> None:
    check_disagreement(build)


@multi_rank(2)
def test_ranks_with_different_settings() -> None:
    for build in SETTINGS:
        check_disagreement(build)


@multi_rank(4)
@pytest.mark.parametrize("build", [wider_layer, no_parameters_of_its_own], ids=lambda each: each.__name__)
def test_one_of_four_ranks_with_a_different_model(build: Callable[[int], nn.Module]) -> None:
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


# ---- frozen parameters of any dtype --------------------------------------------------------------


class Quantized(nn.Module):
    """Integers of every kind, looked up and dequantized; one is large enough to be gathered directly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            values = torch.randint(low, high, shape, generator=generator, dtype=torch.int64)
            return nn.Parameter(values.to(dtype), requires_grad=False)

        self.int8 = frozen(13, 7, dtype=torch.int8)
        self.uint8 = frozen(5, 13, dtype=torch.uint8)
        self.int64 = frozen(3, 5, dtype=torch.int64)
        self.bool = frozen(7, dtype=torch.bool)
        self.int16 = frozen(1, 3, dtype=torch.int16)
        self.large = frozen(1_100_003, dtype=torch.uint8)
        self.float16 = nn.Parameter(torch.randn(7, 3, generator=generator).half(), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(7, 3, generator=generator))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        gate = torch.where(self.bool, x, -x)
        return (gate @ (self.scale * self.float16.float())) + self.large[:3].float() / 255


@multi_rank(2, 4)
def test_frozen_integer_parameters_are_gathered_byte_for_byte(world_size: int) -> None:
    model, plain = Quantized(), Quantized()
    expected = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    fully_shard(model)
    optimizers = [torch.optim.SGD([each.scale], lr=0.1) for each in (model, plain)]
    inputs = torch.linspace(-2, 2, 28).view(4, 7)
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs).square().sum().backward()
            optimizer.step()
        assert_same("what forward saw", model.seen, plain.seen, tolerance=tolerance_for(world_size))
        frozen = {name: value for name, value in model.seen.items() if name != "scale"}
        assert_same("integers", frozen, {name: expected[name] for name in frozen})
    assert all(p.grad is None for name, p in model.named_parameters() if name != "scale")
    # torch's gloo cannot gather every dtype, so compare shards.
    assert_sharded_same("state", model.state_dict(), plain.state_dict(), tolerance=tolerance_for(world_size))


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
    """Raises in its forward or backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(13, 13)
        self.fail = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.fail == "forward":
            raise ValueError("the user's own")
        if self.fail == "backward":
            y.register_hook(_raise)
        return x + y


def _raise(gradient: Tensor) -> None:
    raise ValueError("the user's own")


def _failing() -> nn.Module:
    return nn.Sequential(Fails(), Fails(), nn.Linear(13, 1))


FAILING = ModelCase("failing", _failing, UNEVEN_MLP.make_batch, ("0", "1"), F.mse_loss)


@multi_rank(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_the_users_passes_through_and_leaves_nothing_behind(where: str) -> None:
    model = shard(FAILING)
    sharded = list(model.parameters())
    for fail in (where, "", where):
        model[0].fail = fail
        if fail:
            with pytest.raises(ValueError, match="the user's own"):
                model(INPUTS).sum().backward()
        else:
            model(INPUTS).sum().backward()
    model[0].fail = ""
    for parameter in sharded:
        parameter.grad = None
    train(model, FAILING)


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
        each[0].fail = "forward" if when == "after_a_failed_forward" else ""
        try:
            loss = each(INPUTS).square().sum()
        except ValueError:
            each[0].fail = ""
            each.zero_grad(set_to_none)
            loss = each(INPUTS).square().sum()
        else:
            each.zero_grad(set_to_none)
        loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", {name: p.grad for name, p in model.named_parameters()}, expected)
