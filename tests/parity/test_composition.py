"""Together with the rest of torch: checkpointing, gradient scaling, transforms, inference mode, hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.harness import Reference, adamw, assert_same, full_parameters, multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance
from tests.harness.models import MLP, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API, beyond_torch
from tests.harness.parity.programs import ROOTED, TOWER, WIDTH, is_sharded, loss_on, mesh_of, shard, train, trainable
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
@pytest.mark.parametrize("outer", [True, False], ids=["around_the_unit", "within_the_unit"])
@pytest.mark.parametrize("way", list(WAYS))
def test_checkpoints_around_and_within_units(way: str, outer: bool, world_size: int) -> None:
    train(_chain(None, outer), shard(_chain(way, outer)))


@multi_rank(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("way", list(WAYS))
def test_checkpoints_with_both_ways_of_resharding(way: str, reshard_after_forward: bool) -> None:
    train(_chain(None, True), shard(_chain(way, True), reshard_after_forward=reshard_after_forward))


@multi_rank(2)
@pytest.mark.parametrize("way", ["reentrant", "non_reentrant"])
def test_checkpoints_with_accumulation_and_mixed_precision(way: str) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = shard(_chain(way, True), mp_policy=API.MixedPrecisionPolicy(**precision))
    train(
        _chain(None, True),
        model,
        reference=Reference(_chain(None, True), world_size=2, microbatches=2, grad_dtype=torch.float32, **precision),
        before_forward=lambda micro: model.set_requires_gradient_sync(micro == 1),
        tolerance=Tolerance(rtol=2e-2, atol=5e-3, reason="bfloat16"),
    )


@multi_rank(2)
def test_the_checkpoint_wrapper_under_the_unit() -> None:
    case = TRANSFORMER
    model = case.build()
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "Block")
    for block in model.blocks:
        API.fully_shard(block)
    train(case, API.fully_shard(model))


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


# ---- gradient scaling ----------------------------------------------------------------------------


@multi_rank(2, 4)
def test_the_stock_gradient_scaler(world_size: int) -> None:
    model, reference = shard(UNEVEN_MLP), Reference(UNEVEN_MLP, world_size=world_size)
    optimizer, scaler = adamw(trainable(model)), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        record = reference.step()
        scaler.scale(loss_on(UNEVEN_MLP, model, record.step)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert_same("parameters", full_parameters(model), record.parameters, tolerance=SUM_ORDER)


@multi_rank(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    model = shard(UNEVEN_MLP)
    before = full_parameters(model)
    optimizer, scaler = adamw(trainable(model)), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loss = loss_on(UNEVEN_MLP, model)
    scaler.scale(loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert_same("parameters", full_parameters(model), before)


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


@multi_rank(2)
def test_gradients_of_inputs() -> None:
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    inputs = [torch.randn(4, 13, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
    for each, x in zip((model, plain), inputs, strict=True):
        each(x).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@multi_rank(2)
def test_autograd_grad_instead_of_backward() -> None:
    """Gradients asked for inputs only: nothing is reduced, nothing stays unsharded."""
    model, plain = shard(UNEVEN_MLP), UNEVEN_MLP.build()
    results = []
    for each in (model, plain):
        x = torch.randn(4, 13, generator=torch.Generator().manual_seed(0)).requires_grad_()
        results.append(torch.autograd.grad(each(x).sum(), x)[0])
    assert torch.equal(*results)
    train(UNEVEN_MLP, model, steps=2)


# ---- hooks on gradients --------------------------------------------------------------------------


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


@multi_rank(2, 4)
def test_the_optimizer_steps_in_backward(world_size: int) -> None:
    model, reference = shard(UNEVEN_MLP), Reference(UNEVEN_MLP, world_size=world_size)
    for parameter in model.parameters():
        optimizer = adamw([parameter])

        def step(p: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        record = reference.step()
        loss_on(UNEVEN_MLP, model, record.step).backward()
        tolerance = None if world_size == 2 else SUM_ORDER
        assert_same("parameters", full_parameters(model), record.parameters, tolerance=tolerance)
        assert all(parameter.grad is None for parameter in model.parameters())


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


@multi_rank(2)
def test_backward_hooks_on_modules() -> None:
    model, plain = shard(TOWER), TOWER.build()
    seen: list[Tensor] = []
    for each in (model, plain):
        each.c.register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0]))
        loss_on(TOWER, each).backward()
    assert torch.equal(*seen)


# ---- several losses, several models --------------------------------------------------------------


@multi_rank(2, 4)
def test_two_models_trained_in_turns(world_size: int) -> None:
    """A generator and a critic: two roots, the gradient of one flowing through the other."""
    first, second = shard(TOWER), shard(TOWER, TOWER.build(seed=1))
    plain = [TOWER.build(), TOWER.build(seed=1)]
    inputs = [TOWER.batch(0, 0, rank).inputs for rank in range(world_size)]
    second(first(inputs[dist.get_rank()])).square().mean().backward()
    for x in inputs:
        plain[1](plain[0](x)).square().mean().backward()
    for mine, theirs in zip((first, second), plain, strict=True):
        for name, parameter in theirs.named_parameters():
            gradient = mine.get_parameter(name).grad.full_tensor()
            assert torch.allclose(gradient, parameter.grad / world_size, rtol=1e-4, atol=1e-6), name


def roots(*, share: bool) -> tuple[Any, Any]:
    first, second = shard(UNEVEN_MLP), shard(UNEVEN_MLP)
    if share:
        assert API.share_comm_ctx([first, second]) is None
        assert API.share_comm_ctx([]) is None
    return first, second


@multi_rank(2)
@pytest.mark.parametrize("share", [True, False])
def test_two_roots_trained_one_after_the_other(share: bool) -> None:
    first, second = roots(share=share)
    for _ in range(2):
        for model in (first, second):
            loss_on(UNEVEN_MLP, model).backward()
            model.zero_grad()
    for model in (first, second):
        train(UNEVEN_MLP, model, steps=2)


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


@multi_rank(2)
def test_an_iteration_that_failed_is_forgotten_by_reset() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP.make_model()
            self.fail = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if self.fail:
                raise KeyError("as meant")
            return y

    case = ModelCase("failing", Failing, MLP.make_batch, ("inner.0", "inner.2"), F.mse_loss)
    model, plain = shard(case), case.build()
    with pytest.raises(KeyError, match="as meant"):
        loss_on(case, model)
    model.reset_iter_state()
    model.fail = plain.fail = False
    train(case, model, reference=Reference(case, world_size=2, model=plain))


@multi_rank(4)
def test_checkpoints_under_hsdp() -> None:
    train(_chain(None, True), shard(_chain("non_reentrant", True), mesh=mesh_of(2, 2)))
