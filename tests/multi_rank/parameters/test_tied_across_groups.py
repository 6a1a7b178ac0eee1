"""Weights tied across `fully_shard` calls: one owner, gradients of all uses reduced once, one object everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, FSDPValueError, MixedPrecisionPolicy, fully_shard
from tests.harness import Reference, adamw, multi_rank
from tests.harness.compare import Tolerance, assert_same, full_parameters
from tests.harness.models import Batch, ModelCase
from tests.harness.training import assert_trains_like

VOCABULARY, WIDTH = 37, 10


class Head(nn.Module):
    """Norm and output projection, whose weight is the embedding's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class Model(nn.Module):
    """Embedding, blocks and head, each of which may be a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.head = Head(self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(generator: torch.Generator) -> Batch:
    drawn = torch.randint(VOCABULARY, (3, 6), generator=generator)
    return Batch(drawn[:, :-1], drawn[:, 1:])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


CASE = ModelCase("tied", Model, tokens, (), loss_of)

# Which modules are groups, in the order of the calls; the root is last. Shared weights are in two of them, or in one
# and the root, which wraps the module that was not named.
UNITS = {
    "embedding first": ("embedding", "blocks.0", "blocks.1", "head", ""),
    "head first": ("head", "blocks.1", "blocks.0", "embedding", ""),
    "root embeds": ("blocks.0", "head", ""),
    "root projects": ("embedding", "blocks.1", ""),
    "lists": (("embedding", "blocks.0"), ("blocks.1", "head"), ""),
}


def shard(units: tuple[Any, ...], model: nn.Module | None = None, **options: Any) -> Any:
    model = CASE.build() if model is None else model
    for names in units:
        modules = [model.get_submodule(name) for name in ((names,) if isinstance(names, str) else names)]
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
    return model


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def train(model: Any) -> None:
    reference = Reference(CASE, world_size=dist.get_world_size())
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=3, tolerance=ALMOST)
    assert_tied(model)


def assert_tied(model: Any) -> None:
    assert model.head.weight is model.embedding.weight
    assert model.blocks[0][0].weight is model.blocks[1][0].weight


# Three uses of a weight, or two whose gradients autograd adds in another order, round otherwise than the reference.
ALMOST = Tolerance(1e-4, 1e-6, "gradients of several uses added up in another order")


@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("units", UNITS)
def test_tied_weights_train_like_the_reference(units: str, reshard_after_forward: bool | None, world_size: int) -> None:
    train(shard(UNITS[units], reshard_after_forward=reshard_after_forward))


@multi_rank(2)
@pytest.mark.parametrize("units", UNITS)
def test_finalized_by_hand(units: str) -> None:
    model, plain = shard(UNITS[units]), CASE.build()
    model.set_manual_backward_finalization(True)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        CASE.loss(model, CASE.batch(0, 0, dist.get_rank(), micro)).backward()
    model.finalize_backward()
    for rank in range(2):
        for micro in range(2):
            (CASE.loss(plain, CASE.batch(0, 0, rank, micro)) / 2).backward()
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)


@multi_rank(2)
@pytest.mark.parametrize("units", UNITS)
def test_the_gradient_is_reduced_once(units: str) -> None:
    """As a hook on the parameter sees: with all uses in it."""
    model, seen = shard(UNITS[units]), []
    model.embedding.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    CASE.loss(model, CASE.batch(0, 0, dist.get_rank())).backward()
    assert len(seen) == 1
    expected = Reference(CASE, world_size=2).step().gradients["embedding.weight"]
    assert expected is not None
    torch.testing.assert_close(seen[0].full_tensor(), expected, rtol=1e-4, atol=1e-6)


@multi_rank(2)
def test_one_use_alone(world_size: int) -> None:
    """The embedding alone, or the head alone: the other group takes no part."""
    model, plain = shard(UNITS["embedding first"]), CASE.build()
    model(CASE.batch(0, 0, 0).inputs)
    ids = torch.arange(5)
    for use in (lambda each: each.embedding(ids).sum(), lambda each: each.head(torch.ones(2, WIDTH)).square().sum()):
        for each in (model, plain):
            each.zero_grad()
            use(each).backward()
        found = model.embedding.weight.grad.full_tensor()
        torch.testing.assert_close(found, plain.embedding.weight.grad, rtol=1e-5, atol=1e-6)


# ---- identity ------------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("units", UNITS)
def test_names_are_those_of_the_plain_model(units: str) -> None:
    model, plain = shard(UNITS[units]), CASE.build()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_tied(model)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("loads", ["in place", "assign", "full"])
def test_on_meta_then_materialized_and_loaded(units: str, loads: str, world_size: int) -> None:
    with torch.device("meta"):
        model = Model()
    shard(UNITS[units], model)
    assert_tied(model)
    if loads != "assign":
        model.to_empty(device="cpu")
        assert_tied(model)
    source = shard(UNITS["embedding first"])
    if loads == "full":
        full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(source.state_dict(), assign=loads == "assign")
    assert_tied(model)
    train(model)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("units", UNITS)
def test_conversions_keep_it(units: str) -> None:
    model = shard(UNITS[units])
    CASE.loss(model, CASE.batch(0, 0, dist.get_rank())).backward()
    model.zero_grad()
    model.double()
    assert_tied(model)
    assert model.head.weight.dtype == torch.float64
    model.float()
    assert_tied(model)
    train(model)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("units", UNITS)
def test_unwrapped_it_is_tied_again(units: str) -> None:
    model = shard(UNITS[units])
    train(model)
    expected = full_parameters(model)
    fsdp2.unwrap(model)
    assert_tied(model)
    assert_same("parameters", {n: p.detach() for n, p in model.named_parameters()}, expected, tolerance=None)
    train(shard(UNITS["lists"], CASE.build()))


# ---- what is refused -----------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("mp_policy", MixedPrecisionPolicy(torch.bfloat16)),
        ("offload_policy", CPUOffloadPolicy()),
        ("shard_placement_fn", last_dim),
    ],
    ids=["mp_policy", "offload_policy", "shard_placement_fn"],
)
def test_two_calls_that_want_it_otherwise(argument: str, value: Any) -> None:
    model = CASE.build()
    fully_shard(model.embedding)
    with pytest.raises(
        FSDPValueError, match=f"'weight' of Head is tied to 'weight' of Embedding.*another '{argument}'"
    ):
        fully_shard(model.head, **{argument: value})
    fully_shard(model.head)
    fully_shard(model)
    CASE.loss(model, CASE.batch(0, 0, dist.get_rank())).backward()


@multi_rank(2)
def test_ignored_in_one_call_only(world_size: int) -> None:
    model = CASE.build()
    fully_shard(model.embedding)
    with pytest.raises(FSDPValueError, match=r"'weight' of Head is in ignored_params, but is tied.*in all calls"):
        fully_shard(model.head, ignored_params=[model.head.weight])


@multi_rank(2)
def test_tied_after_sharding(world_size: int) -> None:
    """Before the second call it is a tie as any other; after both, the second group would lose its parameter."""
    model = CASE.build()
    with torch.no_grad():
        model.head.weight = nn.Parameter(model.embedding.weight.clone())
    fully_shard(model.embedding)
    model.head.weight = model.embedding.weight
    for name in ("blocks.0", "blocks.1", "head", ""):
        fully_shard(model.get_submodule(name))
    train(model)
    model = CASE.build()
    with torch.no_grad():
        model.head.weight = nn.Parameter(model.embedding.weight.clone())
    shard(UNITS["embedding first"], model)
    model.head.weight = model.embedding.weight
    with pytest.raises(FSDPRuntimeError, match=r"'head.weight' was replaced.*tie weights before calling fully_shard"):
        model(CASE.batch(0, 0, 0).inputs)


@multi_rank(2, 4)
@pytest.mark.parametrize("order", ["embedding", "head"])
@pytest.mark.parametrize("jointly", [True, False], ids=["one backward", "two backwards"])
def test_two_roots_that_share_a_weight(jointly: bool, order: str, world_size: int) -> None:
    """Nothing above them is sharded: each is a root, and whichever ends first leaves nothing unreduced."""
    model, plain = shard(UNITS["embedding first"][:-1]), CASE.build()
    ids = torch.arange(dist.get_rank(), 6 + dist.get_rank())
    for step in range(3):
        for each, ranks in ((model, [dist.get_rank()]), (plain, range(world_size))):
            each.zero_grad()
            for rank in ranks:
                ids = torch.arange(step + rank, 6 + step + rank)
                uses = [lambda: each.embedding(ids).sin().sum(), lambda: each.head(torch.ones(2, WIDTH)).square().sum()]  # noqa: B023
                losses = [use() for use in (uses if order == "embedding" else uses[::-1])]
                if jointly:
                    sum(losses).backward()
                else:
                    for loss in losses:
                        loss.backward()
        for name in ("embedding.weight", "head.norm.weight"):
            found, wanted = model.get_parameter(name).grad.full_tensor(), plain.get_parameter(name).grad / world_size
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    fully_shard(model)
    model.zero_grad()
    train(model)


@multi_rank(2)
def test_gathered_by_hand_before_the_first_forward(world_size: int) -> None:
    model = shard(UNITS["head first"])
    for unit in (model.embedding, model.head):
        unit.unshard()
        torch.testing.assert_close(unit.weight, CASE.build().embedding.weight, rtol=0, atol=0)
    model.head.reshard()
    train(model)


@multi_rank(2)
def test_one_of_two_cannot_be_unwrapped(world_size: int) -> None:
    model = shard(UNITS["embedding first"])
    with pytest.raises(FSDPValueError, match="tied to parameters of a Head that is not to be unwrapped"):
        fsdp2.unwrap(model.embedding)
    train(model)


@multi_rank(2)
def test_settings_of_the_weight_are_its_owners(world_size: int) -> None:
    """Of the call that sharded it: another module that holds it has settings of its own group only."""
    model = shard(UNITS["embedding first"])
    seen: list[str] = []
    model.embedding.set_all_reduce_hook(lambda flat: seen.append("embedding"))
    model.head.set_all_reduce_hook(lambda flat: seen.append("head"))
    model.head.set_gradient_divide_factor(7.0)
    CASE.loss(model, CASE.batch(0, 0, dist.get_rank())).backward()
    assert sorted(seen) == ["embedding", "head"]
    expected = Reference(CASE, world_size=2).step().gradients
    for name, scale in (("embedding.weight", 1.0), ("head.norm.weight", 2 / 7)):
        wanted = expected[name]
        assert wanted is not None
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), wanted * scale, rtol=1e-4, atol=1e-6)


@multi_rank(2)
def test_an_embedding_whose_backward_needs_nothing(world_size: int) -> None:
    """Alone; tied to a head it is needed."""
    model = CASE.build()
    fully_shard(model.embedding)
    model.embedding.set_unshard_in_backward(False)
    for name in UNITS["embedding first"][1:]:
        fully_shard(model.get_submodule(name))
    with pytest.raises(FSDPValueError, match="tied to those of another module"):
        model.embedding.set_unshard_in_backward(False)
    train(model)


@multi_rank(2)
@pytest.mark.parametrize("units", UNITS)
def test_messages_name_them_as_their_owner_does(units: str) -> None:
    model = shard(UNITS[units])
    CASE.loss(model, CASE.batch(0, 0, dist.get_rank())).backward()
    model.reshard()
    for module in model.modules():
        state = fully_shard.state(module)
        for group in () if state is None else state.unit:
            for param in group.params:
                assert model.get_parameter(param.path) is param.sharded, param.path
