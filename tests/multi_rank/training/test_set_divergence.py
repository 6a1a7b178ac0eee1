"""`set_divergence("join")`: ranks that run different modules get the gradients of the mean over all of them."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp2 import (
    FSDPModule,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    accumulate,
    clip_grad_norm_,
    divergence_report,
    fully_shard,
    optim,
    set_watchdog,
)
from tests.harness import multi_rank, others_full
from tests.harness.compare import SUM_ORDER, Tolerance, assert_same, assert_sharded_same, full_parameters, gradients_of
from tests.harness.pooling import needs_pool

BLOCKS, EXPERTS, WIDTH = 3, 2, 5
IN_BF16 = Tolerance(rtol=2e-2, atol=2e-2, reason="bf16 sums in another order")


@dataclass(frozen=True)
class Path:
    """What one rank runs in one microbatch.

    Attributes:
        blocks: which, in this order.
        experts: the one that each of them uses; None: none of them.
        runs: whether there is a forward.
        has_loss: whether there is a backward.
        checkpoints: blocks are computed again in backward, "inside" of the sharded module or "around" it.
    """

    blocks: tuple[int, ...] = tuple(range(BLOCKS))
    experts: dict[int, int | None] = field(default_factory=dict)
    runs: bool = True
    has_loss: bool = True
    checkpoints: str = ""
    breaks_in: int | None = None


class Boom(Exception):
    """What the tests throw."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixed = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(EXPERTS)])

    def inner(self, x: Tensor, expert: int | None) -> Tensor:
        hidden = torch.tanh(self.mixed(x))
        return hidden if expert is None else hidden + self.experts[expert](hidden)

    def forward(self, x: Tensor, expert: int | None, checkpoints: str) -> Tensor:
        if checkpoints == "inside":
            return x + checkpoint(self.inner, x, expert, use_reentrant=False)  # type: ignore[no-any-return]
        return x + self.inner(x, expert)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor, path: Path) -> Tensor:
        x = self.embed(tokens) * self.scale
        for index in path.blocks:
            expert = path.experts.get(index, 0)
            block = self.blocks[index]
            if path.breaks_in == index:
                raise Boom
            if path.checkpoints == "around":
                x = checkpoint(block, x, expert, "", use_reentrant=False)
            else:
                x = block(x, expert, path.checkpoints)
        return self.head(x)  # type: ignore[no-any-return]


def build() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def sharded(
    *,
    hybrid: bool = False,
    order: bool = False,
    blocks: dict[str, Any] | None = None,
    calls: dict[str, Any] | None = None,
    **all_of: Any,
) -> Any:
    if hybrid:
        sizes = (2, dist.get_world_size() // 2)
        all_of["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = build()
    for block in model.blocks:
        assert isinstance(block, Block)
        for expert in block.experts:
            fully_shard(expert, **all_of)
        fully_shard(block, **(all_of | (blocks or {})))
    for each in (model.embed, model.head, model):
        fully_shard(each, **all_of)
    assert isinstance(model, FSDPModule)
    every = [model, model.embed, *[each for b in model.blocks for each in (b, *b.experts)], model.head]  # type: ignore[union-attr,misc]
    model.set_divergence("join", order=every if order else None)
    for setter, value in (calls or {}).items():
        getattr(model, setter)(value)
    return model


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, path: Path, rank: int, step: int) -> Tensor:
    return model(tokens(rank, step), path).float().square().mean()  # type: ignore[no-any-return]


def run(model: Any, path: Path, step: int) -> None:
    """This rank's part of a step."""
    if not path.runs:
        model.join_step()
        return
    try:
        loss = loss_of(model, path, dist.get_rank(), step)
    except Boom:
        model.join_step()
        return
    if path.has_loss:
        loss.backward()
    else:
        del loss
        model.join_step()


def expected(paths: Sequence[Sequence[Path]], plain: nn.Module | None = None) -> dict[str, Tensor | None]:
    """Gradients of the mean over ranks; of microbatches, the first index, the sum."""
    plain = plain or build()
    for step, of_ranks in enumerate(paths):
        for rank, path in enumerate(of_ranks):
            if path.runs and path.has_loss and path.breaks_in is None:
                (loss_of(plain, path, rank, step) / len(of_ranks)).backward()
    return gradients_of(plain)


def drawn(seed: int, world_size: int, **fixed: Any) -> list[Path]:
    """A path for each rank."""
    generator = random.Random(seed)
    found = []
    for _ in range(world_size):
        blocks = tuple(each for each in range(BLOCKS) if generator.random() < 0.6)
        experts = {each: generator.choice([None, 0, 1]) for each in blocks}
        fate = generator.random()
        broken = generator.choice(blocks) if blocks and 0.7 < fate < 0.8 else None
        found.append(Path(blocks, experts, runs=fate < 0.8, has_loss=fate < 0.7, breaks_in=broken, **fixed))
    return found


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hybrid": {"hybrid": True},
    "unsharded after forward": {"reshard_after_forward": False},
    "on fewer ranks after forward": {"reshard_after_forward": 2},
    "blocks stay": {"blocks": {"reshard_after_forward": False}},
    "order": {"order": True},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "prefetch budget": {"calls": {"set_prefetch_budget": 4000}},
    "no backward prefetch": {"calls": {"set_backward_prefetch": "never"}},
    "memory pool": {"calls": {"set_communication_memory_pool": True}},
}


@pytest.mark.parametrize("checkpoints", others_full(["", "around", "inside"], [""]))  # 25 s
@pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_pool if k == "memory pool" else ()) for k in KINDS])
@multi_rank(4, full=(2,))
def test_gradients_are_those_of_the_mean_over_all_ranks(kind: str, checkpoints: str, world_size: int) -> None:
    if world_size == 2 and kind in ("hybrid", "on fewer ranks after forward"):
        return  # nothing is sharded
    model = sharded(**KINDS[kind])
    tolerance = IN_BF16 if kind == "bf16" else SUM_ORDER
    for step in range(6):
        paths = drawn(step + 10 * len(kind), world_size, checkpoints=checkpoints)
        run(model, paths[dist.get_rank()], 0)
        assert_sharded_same(f"step {step}: {paths}", gradients_of(model), expected([paths]), tolerance=tolerance)
        model.zero_grad()


@pytest.mark.parametrize("way", ["unsharded", "sharded"])
@multi_rank(2, 4)
def test_microbatches_that_add_up(way: str, world_size: int) -> None:
    model = sharded(hybrid=world_size == 4)
    for seed in range(3):
        paths = [drawn(seed * 7 + micro, world_size) for micro in range(3)]
        for micro, of_ranks in enumerate(paths):
            context: Any = accumulate(model, last=micro == 2) if way == "unsharded" else nullcontext()
            with context:
                run(model, of_ranks[dist.get_rank()], micro)
        assert_sharded_same(f"{paths}", gradients_of(model), expected(paths), tolerance=SUM_ORDER)
        model.zero_grad()


@multi_rank(2, 4)
def test_training_beside_clipping_optimizers_and_evaluation(world_size: int) -> None:
    """The ranks' own optimizers step on the same gradients; evaluations of other modules come between."""
    model, plain = sharded(), build()
    optimizer = optim.local(torch.optim.AdamW, model.parameters(), lr=0.05)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(4):
        paths = drawn(step + 90, world_size)
        run(model, paths[dist.get_rank()], 0)
        expected([paths], plain)
        clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        with torch.no_grad():
            path = drawn(step + 190, world_size)[dist.get_rank()]
            if path.runs and path.breaks_in is None:
                found = loss_of(model, path, dist.get_rank(), 5)
                torch.testing.assert_close(found, loss_of(plain, path, dist.get_rank(), 5), rtol=1e-3, atol=1e-5)
            else:
                model.join_step()
    wanted = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_same("parameters", full_parameters(model), wanted, tolerance=Tolerance(1e-3, 1e-5, "other sums"))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("then", ["backward", "another step"])
def test_an_evaluation_after_a_forward_that_awaits_its_backward(then: str) -> None:
    """Under no_grad a rank that has nothing to evaluate joins a forward, and what awaits its backward still does."""
    model, rank = sharded(), dist.get_rank()
    kept = loss_of(model, Path(), rank, 0)
    for _ in range(2):
        with torch.no_grad():
            if rank == 0:
                model.join_step()
            else:
                found = loss_of(model, Path(), rank, 1)
                torch.testing.assert_close(found, loss_of(build(), Path(), rank, 1))
    step = 0 if then == "backward" else 1
    if step:
        kept = loss_of(model, Path(), rank, step)
    if rank == 0:
        kept.backward()
    else:
        model.join_step()
    plain = build()
    (loss_of(plain, Path(), 0, step) / 2).backward()
    assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)


class TiedBlock(nn.Module):
    """Its weight is that of the module in it as well, which does not always run."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner.weight = self.outer.weight

    def forward(self, x: Tensor, runs_inner: bool) -> Tensor:
        return self.outer(torch.tanh(self.inner(x) if runs_inner else x))  # type: ignore[no-any-return]


class TiedModel(nn.Module):
    """Its head's weight, which belongs to the root, is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([TiedBlock() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, path: Path) -> Tensor:
        x = self.embed(tokens)
        for index in path.blocks:
            x = self.blocks[index](x, path.experts.get(index) is not None)
        return self.head(x)  # type: ignore[no-any-return]


def tied(**options: Any) -> tuple[Any, TiedModel]:
    torch.manual_seed(0)
    plain = TiedModel()
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block.inner)
        fully_shard(block, **options)
    fully_shard(model.embed)
    fully_shard(model, **options)
    model.set_divergence("join")
    return model, plain


@multi_rank(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}])
def test_weights_tied_to_those_of_modules_inside(options: dict[str, Any], world_size: int) -> None:
    model, plain = tied(**options)
    everything, nothing = Path(experts=dict.fromkeys(range(BLOCKS), 0)), Path(runs=False)
    halves = [Path((0, 2), {0: 0}), Path((0, 1), {1: 1})]
    for step, paths in enumerate(
        [[everything, nothing], [everything] * 2, halves, *[drawn(seed, 2) for seed in range(5)]]
    ):
        run(model, paths[dist.get_rank()], 0)
        assert_sharded_same(f"step {step}: {paths}", gradients_of(model), expected([paths], plain), tolerance=SUM_ORDER)
        for each in (model, plain):
            each.zero_grad()


@multi_rank(2)
def test_one_rank_fails_below_tied_weights_and_all_skip_the_batch() -> None:
    """What the walk holds for the block that it was in is let go, as where the forward went on."""
    model, plain = tied()
    path = Path(experts=dict.fromkeys(range(BLOCKS), 0))
    run(model, path, 0)
    model.zero_grad()
    fails = dist.get_rank() == 1

    def fail(*_: object) -> None:
        if fails:
            raise Boom

    handle = model.blocks[-1].outer.register_forward_hook(fail)
    with pytest.raises(Boom) if fails else contextlib.nullcontext():
        loss_of(model, path, dist.get_rank(), 0)
    handle.remove()
    run(model, path, 0)
    assert_sharded_same("gradients", gradients_of(model), expected([[path] * 2], plain), tolerance=SUM_ORDER)


@multi_rank(2)
def test_what_was_joined_is_counted() -> None:
    model = sharded()
    with pytest.raises(FSDPValueError, match="no root that has run a forward since"):
        divergence_report(model)
    everything = Path(experts={0: 0, 1: 0, 2: 0})
    run(model, everything if dist.get_rank() == 0 else Path((1,), {1: 0}), 0)
    report = divergence_report(model)
    unused = 3 if dist.get_rank() == 0 else 7  # experts; and two blocks with two experts each
    assert (report.forward_gathers, report.backward_gathers, report.reductions) == (unused, unused, unused)
    assert report.steps == 0
    gathered = [6 * WIDTH * (WIDTH + 1) // 6 * 4] * unused  # of each the weight and the bias
    assert report.gathered_bytes >= 2 * sum(gathered)
    model.join_step()
    assert divergence_report(model).steps == 1


@multi_rank(2)
def test_the_order_is_that_of_the_last_step_or_as_given() -> None:
    """Modules that lie in the model in another order than forward comes to them."""

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, skips: bool) -> Tensor:
            x = self.first(x)
            return x if skips else self.last(x)

    def make() -> Any:
        torch.manual_seed(0)
        model = Reversed()
        for each in (model.last, model.first, model):
            fully_shard(each)
        return model

    x, skips = torch.ones(2, 4), dist.get_rank() == 1
    given = make()
    given.set_divergence("join", order=[given.first, given.last])
    given(x, skips).sum().backward()
    learned = make()
    learned(x, False).sum().backward()
    learned.zero_grad()
    learned.set_divergence("join")
    learned(x, skips).sum().backward()
    for one, other in zip(given.parameters(), learned.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())
    wrong = make()
    wrong.set_divergence("join")
    with pytest.raises(FSDPRuntimeError, match=r"comes to 'last' \(Linear\) after 'first'.*order=\[\.\.\.\]"):
        wrong(x, False)
    assert given is not None


@multi_rank(2)
def test_modules_that_run_several_times() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, calls: str) -> Tensor:
            for each in calls:
                x = torch.tanh(getattr(self, each)(x))
            return x

    torch.manual_seed(0)
    plain = Twice()
    torch.manual_seed(0)
    model: Any = Twice()
    for each in (model.a, model.b, model):
        fully_shard(each)
    model.set_divergence("join", order=[model.a, model.b, model.a])
    for calls in [("aba", "ab"), ("b", "aba"), ("a", "ba"), ("", "a"), ("aa", "b")]:
        x = torch.ones(2, 4)
        model(x.clone().requires_grad_(), calls[dist.get_rank()]).sum().backward()
        for each in calls:
            if each:
                (plain(x, each).sum() / 2).backward()
        assert_sharded_same(str(calls), gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)
        model.zero_grad()
        plain.zero_grad()


@multi_rank(2)
def test_back_to_error() -> None:
    """Settings compare again, and orders are learned as if nothing had been."""
    model = sharded()
    run(model, Path((0,)) if dist.get_rank() else Path((1, 2)), 0)
    model.zero_grad()
    model.set_divergence("error")
    for step in range(2):
        run(model, Path((0, 2)), step)
    wanted = expected([[Path((0, 2))] * 2] * 2)
    assert_sharded_same("two steps", gradients_of(model), wanted, tolerance=SUM_ORDER)
    with pytest.raises(FSDPRuntimeError, match=r"join_step\(\) needs set_divergence\('join'\)"):
        model.join_step()


@multi_rank(2)
def test_what_cannot_be_joined_says_so() -> None:
    """Each on both ranks, from where a step can be left and run again."""
    model = sharded()
    with pytest.raises(FSDPRuntimeError, match=r"on the root, Model, not on 'blocks\.0'"):
        run(model, Path(), 0)
        model.blocks[0].join_step()
    model.zero_grad()
    with pytest.raises(FSDPNotImplementedError, match=r"with create_graph=True"):
        loss_of(model, Path(), 0, 0).backward(create_graph=True)
    run(model, Path(), 0)
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    with pytest.raises(FSDPNotImplementedError, match="set_manual_backward_finalization"):
        run(model, Path(), 0)
    model.set_manual_backward_finalization(False)
    handle = model.blocks[0].register_forward_hook(lambda *_: model.join_step())
    with pytest.raises(FSDPRuntimeError, match="outside of forward and backward"):
        run(model, Path(), 0)
    handle.remove()
    expert = model.blocks[0].experts[0]
    expert.forward = lambda x: expert.weight
    with pytest.raises(FSDPNotImplementedError, match=r"'blocks\.0\.experts\.0' \(Linear\) returns parameters"):
        run(model, Path(), 0)
    del expert.forward
    handle = model.blocks[1].register_full_backward_hook(throw)
    with pytest.raises(Boom):
        run(model, Path(), 0)
    handle.remove()
    with pytest.raises(FSDPRuntimeError, match=r"join_step\(\) after a backward that an exception has left"):
        model.join_step()
    model.zero_grad()
    run(model, Path(), 0)
    assert_sharded_same("after all", gradients_of(model), expected([[Path()] * 2]), tolerance=SUM_ORDER)


def throw(*_: object) -> None:
    """Leaves a backward."""
    raise Boom


@multi_rank(2)
def test_one_checkpoint_around_several_modules_is_refused() -> None:
    model = sharded()
    first, second = model.blocks[0], model.blocks[1]

    def both(x: Tensor) -> Tensor:
        return second(first(x, 0, ""), 0, "")  # type: ignore[no-any-return]

    def forward(x: Tensor) -> Tensor:
        return checkpoint(both, model.embed(x), use_reentrant=True)  # type: ignore[no-any-return]

    model.forward = forward
    with pytest.raises(FSDPRuntimeError, match="Activation checkpointing of several sharded modules in one region"):
        model(tokens(0, 0)).sum().backward()


@multi_rank(2)
def test_a_rank_that_does_not_join_is_named() -> None:
    set_watchdog(1.0)
    model = sharded()
    run(model, Path(), 0)
    if dist.get_rank() == 0:
        model.set_divergence("error")
    with pytest.raises(FSDPRuntimeError, match=r"ranks \d and \d can never meet: .*all-gather of 'blocks\.0'"):
        run(model, Path((0,) if dist.get_rank() else (1,)), 0)
    set_watchdog()


@multi_rank(2)
def test_ranks_that_follow_other_orders_are_told() -> None:
    model = sharded()
    units = [each for each in model.modules() if isinstance(each, FSDPModule)]
    model.set_divergence("join", order=units if dist.get_rank() else [model, *units[:0:-1]])
    with pytest.raises(FSDPRuntimeError, match=r"the ranks have different plans"):
        run(model, Path(), 0)


@multi_rank(2)
def test_layers_that_are_roots_of_their_own_are_told_to_get_a_common_one() -> None:
    set_watchdog(1.0)
    layers: Any = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    for layer in layers:
        fully_shard(layer)
        layer.set_divergence("join")
    x = layers[0](torch.ones(2, 3))  # one root may be all that there is
    with pytest.warns(UserWarning, match=r"each a root of their own: Linear and Linear\..*fully_shard also on one"):
        x = layers[1](x)
    layers[2](x).sum().backward()  # said once
    with pytest.raises(FSDPRuntimeError, match=r"set_divergence\('join'\) on one root that contains all of these"):
        layers[1 + dist.get_rank()](layers[0](torch.ones(2, 3))).sum().backward()
    set_watchdog()


@multi_rank(2)
def test_a_root_after_another_that_is_gone_is_not_told() -> None:
    for _ in range(2):
        model: Any = fully_shard(nn.Linear(3, 3))
        model.set_divergence("join")
        model(torch.ones(2, 3)).sum().backward() if dist.get_rank() else model.join_step()
        del model  # the warning would be an error


@multi_rank(2)
def test_words() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(FSDPValueError, match="takes 'error' or 'join', got 'joins'"):
        model.set_divergence("joins")
    with pytest.raises(FSDPValueError, match="order has Linear, which is not below"):
        model.set_divergence("join", order=[nn.Linear(2, 2)])
    model.set_divergence("join", order=[model])
    with pytest.raises(FSDPRuntimeError, match=r"lacks '0', which fully_shard was called on as well"):
        model(torch.ones(1, 2))


@multi_rank(2)
@pytest.mark.parametrize("where", ["forward", "backward", "reset_iter_state"])
def test_a_rank_without_a_batch_joins_the_step_after_one_that_was_left(where: str) -> None:
    """By all ranks: it is a step of its own, of which nothing has begun."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for each in (*model, model):
        fully_shard(each)
    model.set_divergence("join")
    if where != "reset_iter_state":
        model.set_recovery("drop_step", abort_together=True)
    x = torch.ones(2, 4)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    output = model(x) if where == "reset_iter_state" else None
    if output is not None:
        model.reset_iter_state()
    else:
        with pytest.raises((Boom, FSDPRuntimeError)):
            fail_on_first_rank(model, x, where)
    model.zero_grad()
    if dist.get_rank() == 1:
        model.join_step()
    else:
        model(x).sum().backward()
    torch.testing.assert_close(model[1].bias.grad.full_tensor(), torch.full((4,), 1.0))
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(model[1].bias.grad.full_tensor(), torch.full((4,), 2.0))


def fail_on_first_rank(model: Any, x: Tensor, where: str) -> None:
    def fails(*_: Any) -> None:
        raise Boom

    handle = model[1].register_forward_pre_hook(fails) if dist.get_rank() == 0 and where == "forward" else None
    try:
        output = model(x)
        if dist.get_rank() == 0 and where == "backward":
            output.register_hook(fails)
        output.sum().backward()
        model(x).sum().backward()  # where the others learn of it, at the latest
    finally:
        if handle is not None:
            handle.remove()
