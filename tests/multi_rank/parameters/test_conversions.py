"""Conversion of a sharded model, or of a part of it, to another dtype or device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp2 import FSDPModule, FSDPRuntimeError, fully_shard
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import EXACT, Tolerance, assert_sharded_same
from tests.harness.models import UNEVEN_MLP, ModelCase
from tests.harness.shared.state_dicts import inputs, optimizer_of
from tests.harness.shared.training import CASE, shard


def half(module: nn.Module) -> None:
    module.half()


def double(module: nn.Module) -> None:
    module.double()


def to_bfloat16(module: nn.Module) -> None:
    module.to(torch.bfloat16)


def by_swapping(module: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class InItsDtype(nn.Module):
    """Computes in the dtype of its layer and returns the dtype that it was given."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


def _layers() -> nn.Module:
    return nn.Sequential(*[InItsDtype(nn.Linear(m, n)) for m, n in [(13, 23), (23, 9), (9, 1)]])


LAYERS = ModelCase("layers", _layers, UNEVEN_MLP.make_batch, ("0",), UNEVEN_MLP.loss_of)
"""The root owns two layers, so that converting one of them splits its group's buffers."""


def root(model: nn.Module) -> nn.Module:
    return model


def sharded_child(model: nn.Module) -> nn.Module:
    return model[0]


def inside_a_sharded_child(model: nn.Module) -> nn.Module:
    return model[0].layer


def plain_child(model: nn.Module) -> nn.Module:
    return model[1]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """For low precision: exact where AdamW's foreach and for-loop forms may round differently."""
    return torch.optim.SGD(parameters, lr=0.125)


HALVED_FIRST = Tolerance(
    rtol=3e-3,
    atol=2e-7,
    reason="in fp16 gradients are divided before they are added up, lest the sum overflow: subnormal ones lose a bit",
)
PARTS = [root, sharded_child, inside_a_sharded_child, plain_child]


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize(
    ("convert", "part", "when"),
    [
        *[(half, part, "before_first") for part in PARTS],
        *[(double, part, "after_first") for part in PARTS],
        *[(to_bfloat16, part, "while_unsharded") for part in (root, sharded_child)],
        *[(by_swapping, part, "after_first") for part in (root, plain_child)],
        (to_bfloat16, root, "before_first"),
        (half, root, "after_first"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_conversion_of_any_part(
    convert: Callable[[nn.Module], None], part: Callable[[nn.Module], nn.Module], when: str
) -> None:
    model, plain = shard(LAYERS), LAYERS.build()
    optimizer = sgd(list(model.parameters()))
    if when != "before_first":
        reference = Reference(LAYERS, world_size=2, model=plain, make_optimizer=sgd)
        assert_trains_like(reference, model, optimizer, steps=1)
    if when == "while_unsharded":
        model.unshard()
        model[0].unshard()
    convert(part(plain))
    convert(part(model))
    reference = Reference(LAYERS, world_size=2, model=plain, make_optimizer=sgd)
    model.reshard()
    dtypes = {name: value.dtype for name, value in plain.state_dict().items()}
    assert {name: value.dtype for name, value in model.state_dict().items()} == dtypes
    tolerance = HALVED_FIRST if convert is half else EXACT
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes


@pytest.mark.full
@multi_rank(2)
def test_conversion_between_forward_and_backward_is_an_error_or_right() -> None:
    """The saved weights are of the old dtype and their memory may be gone; wrong gradients are what must not happen."""
    model, reference = shard(LAYERS), Reference(LAYERS, world_size=2)
    loss = LAYERS.loss(model, LAYERS.batch(0, 0, dist.get_rank()))
    model.double()
    try:
        loss.backward()
    except RuntimeError:
        pass
    else:
        expected = {name: gradient.double() for name, gradient in reference.step().gradients.items()}
        assert_sharded_same("gradients", {name: p.grad for name, p in model.named_parameters()}, expected)
    model.zero_grad()
    plain = LAYERS.build().double()
    reference = Reference(LAYERS, world_size=2, model=plain)
    assert_trains_like(reference, model, optimizer_of(model), steps=1)


@multi_rank(2)
@pytest.mark.parametrize("sync", [True, False], ids=["reduced", "not_reduced_yet"])
@pytest.mark.parametrize("part", [root, plain_child], ids=lambda f: f.__name__)
def test_conversion_between_two_backwards_keeps_the_gradients(
    part: Callable[[nn.Module], nn.Module], sync: bool
) -> None:
    """As on a plain model, where `_apply` converts gradients too."""
    model, plain = shard(LAYERS), LAYERS.build()
    assert isinstance(model, FSDPModule)
    same = torch.linspace(-1, 1, 4 * 13).view(4, 13)  # on every rank, so that one plain model is the reference
    model.set_requires_gradient_sync(sync)
    for each in (model, plain):
        each(same).sum().backward()
        part(each).double()
    model.set_requires_gradient_sync(True)
    for each in (model, plain):
        each(same).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", {name: p.grad for name, p in model.named_parameters()}, expected)


def back_and_forth(module: nn.Module) -> None:
    """Neither dtype nor values change in the end, but the memory does."""
    module.double().float()


@multi_rank(2)
@pytest.mark.parametrize(
    ("convert", "then"),
    [(half, "reshard"), (double, "state_dict"), (by_swapping, "train"), (back_and_forth, "train")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_conversion_of_a_plain_child_while_it_is_unsharded(convert: Callable[[nn.Module], None], then: str) -> None:
    """No hook of the engine's sees it. It must be an error: else that child would train apart from its shards."""
    model = shard(LAYERS)
    model.unshard()  # as it is between forward and backward
    convert(model[1])
    act = {
        "reshard": model.reshard,
        "state_dict": model.state_dict,
        "train": lambda: LAYERS.loss(model, LAYERS.batch(0, 0, 0)).backward(),
    }[then]
    with pytest.raises(FSDPRuntimeError, match=r"'1\.layer\.(weight|bias)'.*converted.*while.* unsharded.*reshard\(\)"):
        act()
    model.reshard()
    model.zero_grad()
    assert_trains_like(Reference(LAYERS, world_size=2), model, optimizer_of(model), steps=2)


@pytest.mark.full
@multi_rank(2)
def test_round_trip_through_another_dtype_keeps_the_optimizer() -> None:
    model, plain = shard(LAYERS), LAYERS.build()
    optimizer = adamw(list(model.parameters()))
    reference = Reference(LAYERS, world_size=2, model=plain)
    assert_trains_like(reference, model, optimizer, steps=2)
    for each in (model, plain):
        each.double().float()
    assert_trains_like(reference, model, optimizer, steps=2)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("ran_before", [False, True], ids=["before_first", "after_first"])
def test_moving_to_where_it_is_changes_nothing(ran_before: bool) -> None:
    model = shard()
    if ran_before:
        with torch.no_grad():
            model(inputs())
    before = list(model.parameters())
    addresses = [parameter.to_local().data_ptr() for parameter in before]
    model.to("cpu").float().cpu()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == addresses
    assert_trains_like(Reference(CASE, world_size=2), model, optimizer_of(model), steps=2)


@multi_rank(4)
@pytest.mark.parametrize("neighbours", [None, 2])
def test_moving_away_leaves_no_memory_behind(neighbours: int | None) -> None:
    """As from a GPU to the CPU: the next gather is prepared when the model is back, if ever."""
    model: Any = LAYERS.build()
    for unit in LAYERS.units(model):
        fully_shard(unit, reshard_after_forward=neighbours)
    reference = Reference(LAYERS, world_size=4)
    assert_trains_like(reference, model, optimizer_of(model), steps=2, tolerance=tolerance_for(4))
    model.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [group for module in (model, model[0]) for group in fully_shard.state(module).unit]
    buffers = [each for group in groups for each in group.storage.buffers]
    shards = [StorageWeakRef(each.shard.untyped_storage()) for each in buffers]
    unsharded = [each.unsharded.storage for each in buffers]
    del buffers
    model.to("meta")
    assert all(each.expired() for each in shards)
    assert [each.nbytes() for each in unsharded] == [0] * len(shards)
    model.to_empty(device="cpu")
    model.load_state_dict(values)
    reference = Reference(LAYERS, world_size=4, model=reference.model)
    assert_trains_like(reference, model, optimizer_of(model), steps=2, tolerance=tolerance_for(4))
