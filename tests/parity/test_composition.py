"""Together with the rest of torch: checkpointing, gradient scaling, transforms, inference mode, hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.harness import Reference, adamw, assert_same, full_parameters, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API, beyond_torch
from tests.harness.parity.programs import ROOTED, TOWER, WIDTH, is_sharded, loss_on, shard, train, trainable
from tests.harness.parity.trace import GATHER, traced

# ---- activation checkpointing --------------------------------------------------------------------


def _must_save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non_reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, _must_save_products),
    ),
}


class Recomputed(nn.Module):
    """A block whose inside is recomputed: the unit is around the checkpoint."""

    def __init__(self, way: str | None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner(x) if self.way is None else WAYS[self.way](self.inner, x))


class Chain(nn.Module):
    """Blocks after a first layer, so that their inputs need gradients; ``outer`` recomputes whole blocks."""

    def __init__(self, way: str | None, *, outer: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Recomputed(None if outer else way) for _ in range(3))
        self.way = way if outer else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.way is None else WAYS[self.way](block, x)
        return x


def _chain(way: str | None, outer: bool) -> ModelCase:
    units = ("blocks.0", "blocks.1", "blocks.2")
    return ModelCase("chain", partial(Chain, way, outer=outer), TOWER.make_batch, units, F.mse_loss)


@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("outer", [True, False], ids=["around_the_unit", "within_the_unit"])
@pytest.mark.parametrize("way", list(WAYS))
def test_checkpoints_around_and_within_units(
    way: str, outer: bool, reshard_after_forward: bool, world_size: int
) -> None:
    train(_chain(None, outer), shard(_chain(way, outer), reshard_after_forward=reshard_after_forward))


@pytest.mark.full
@multi_rank(2)
def test_a_checkpointed_unit_is_gathered_once_in_backward() -> None:
    case = _chain("non_reentrant", True)
    model = shard(case)
    for _ in range(2):
        loss_on(case, model).backward()
    losses = [loss_on(case, model)]
    with traced() as trace:
        losses[0].backward()
    numel = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    gathered = sum(each.numel for each in trace.of(GATHER))
    assert 3 * numel <= gathered < 4 * numel


# ---- autocast, transforms, inference mode --------------------------------------------------------


@multi_rank(2)
def test_autocast() -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    with torch.autocast("cpu", torch.bfloat16):
        loss_on(UNEVEN_MLP, model).backward()
        for rank in range(2):
            loss_on(UNEVEN_MLP, plain, 0, rank).backward()
    for name, parameter in plain.named_parameters():
        mine = model.get_parameter(name).grad.full_tensor()
        assert torch.allclose(mine, parameter.grad / 2, rtol=1e-2, atol=1e-4)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(torch.no_grad, id="no_grad"),
        pytest.param(
            torch.inference_mode,
            id="inference_mode",
            marks=beyond_torch(
                "a first forward in inference mode spoils training: in-place update of inference tensors"
            ),
        ),
    ],
)
def test_evaluation_in_any_mode_before_between_and_after_training(mode: Callable[[], Any]) -> None:
    model, reference = shard(ROOTED), Reference(ROOTED, world_size=2)
    optimizer = adamw(trainable(model))
    for _ in range(3):
        with mode():
            inputs = ROOTED.batch(0, 9, 0).inputs
            assert torch.equal(model(inputs), reference.model(inputs))
            assert torch.equal(model(inputs), reference.model(inputs))
        for unit in ROOTED.units(model):
            unit.reshard()
        record = reference.step()
        loss_on(ROOTED, model, record.step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same("parameters", full_parameters(model), record.parameters)


@multi_rank(2)
def test_vmap_over_a_forward() -> None:
    model, plain = shard(TOWER), TOWER.build()
    inputs = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(torch.vmap(model)(inputs), torch.vmap(plain)(inputs))
    assert torch.vmap(model)(inputs).shape == inputs.shape
    for unit in TOWER.units(model):
        unit.reshard()
    train(TOWER, model, steps=1)


@multi_rank(2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
def test_jvp_through_a_forward() -> None:
    model, plain = shard(TOWER), TOWER.build()
    generator = torch.Generator().manual_seed(0)
    point, tangent = (torch.randn(4, WIDTH, generator=generator) for _ in range(2))
    mine, theirs = (torch.func.jvp(each, (point,), (tangent,)) for each in (model, plain))
    assert torch.allclose(mine[0], theirs[0]) and torch.allclose(mine[1], theirs[1])
    for unit in TOWER.units(model):
        unit.reshard()
    train(TOWER, model, steps=1)


# ---- hooks on gradients --------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
def test_post_accumulate_hooks_see_the_reduced_gradient_once_per_backward(world_size: int) -> None:
    model, record = shard(UNEVEN_MLP), Reference(UNEVEN_MLP, world_size=world_size).step()
    seen: list[str] = []
    for name, parameter in model.named_parameters():

        def check(p: nn.Parameter, name: str = name) -> None:
            assert isinstance(p.grad, DTensor) and is_sharded(p)
            assert torch.allclose(p.grad.full_tensor(), record.gradients[name], rtol=1e-5, atol=1e-6)
            seen.append(name)

        parameter.register_post_accumulate_grad_hook(check)
    loss_on(UNEVEN_MLP, model).backward()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.full
@multi_rank(2)
def test_hooks_of_the_user_see_unsharded_parameters_before_and_sharded_ones_after() -> None:
    model = TOWER.build()
    seen: list[tuple[str, bool]] = []
    model.b.register_forward_pre_hook(lambda module, args: seen.append(("pre, early", is_sharded(module.weight))))
    model.b.register_forward_hook(lambda module, args, out: seen.append(("post, early", is_sharded(module.weight))))
    shard(TOWER, model)
    model.b.register_forward_pre_hook(lambda module, args: seen.append(("pre, late", is_sharded(module.weight))))
    model.b.register_forward_hook(lambda module, args, out: seen.append(("post, late", is_sharded(module.weight))))
    model(TOWER.batch(0, 0, 0).inputs)
    assert seen == [("pre, early", False), ("pre, late", False), ("post, early", False), ("post, late", True)]


@pytest.mark.full
@multi_rank(2)
def test_backward_hooks_on_modules() -> None:
    model, plain = shard(TOWER), TOWER.build()
    seen: list[Tensor] = []
    for each in (model, plain):
        each.c.register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0]))
        loss_on(TOWER, each).backward()
    assert torch.equal(*seen)


# ---- several losses, several models --------------------------------------------------------------


def roots(*, share: bool) -> tuple[Any, Any]:
    first, second = shard(UNEVEN_MLP), shard(UNEVEN_MLP)
    if share:
        assert API.share_comm_ctx([first, second]) is None
        assert API.share_comm_ctx([]) is None
    return first, second


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize(
    "share", [pytest.param(True, marks=beyond_torch("IndexError: one backward clears the order of the other")), False]
)
def test_two_roots_with_interleaved_forwards_and_backwards(share: bool) -> None:
    """As chunks of a model in a pipeline."""
    models = roots(share=share)
    outputs = [loss_on(UNEVEN_MLP, model, 0, None, micro) for micro in range(2) for model in models]
    for loss in outputs:
        loss.backward()
    record = Reference(UNEVEN_MLP, world_size=2, microbatches=2).step()
    for model in models:
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        assert_same("gradients", gradients, record.gradients, tolerance=SUM_ORDER)
        model.zero_grad()
        train(UNEVEN_MLP, model, steps=1)


@pytest.mark.full
@multi_rank(2)
def test_an_iteration_that_failed_is_forgotten_by_reset() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("as meant")

    model = shard(ROOTED)
    hook = model[4].register_forward_hook(fail)
    with pytest.raises(KeyError, match="as meant"):
        loss_on(ROOTED, model)
    model.reset_iter_state()
    hook.remove()
    train(ROOTED, model)
