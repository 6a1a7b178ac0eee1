"""Which all-gather is issued when: the default order, explicit prefetching, and what backward does not need."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Reference, multi_rank
from tests.harness.models import TRANSFORMER, Batch, ModelCase
from tests.harness.parity.programs import TOWER, loss_on, shard, step_names, train
from tests.harness.parity.trace import GATHER, SCATTER, traced


def halves(names: list[str]) -> tuple[list[str], list[str]]:
    """Before and after the first reduction or backward mark: forward and backward."""
    first = next(i for i, name in enumerate(names) if name == "forward d") + 1
    return names[:first], names[first:]


def precedes(names: list[str], first: str, second: str) -> bool:
    return names.index(first) < names.index(second)


# ---- the default ---------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("before", [0, 3], ids=["first_step", "later_step"])
def test_each_layer_is_gathered_once_before_each_use_and_its_gradient_reduced_after(before: int) -> None:
    forward, backward = halves(step_names(shard(TOWER), before=before))
    for names, phase in ((forward, "forward"), (backward, "backward")):
        gathered = [name for name in names if name.startswith(GATHER)]
        assert sorted(gathered) == [f"{GATHER} {layer}" for layer in "abcd"]
        assert all(precedes(names, f"{GATHER} {layer}", f"{phase} {layer}") for layer in "abcd")
    assert [name for name in backward if name.startswith(SCATTER)] == [f"{SCATTER} {layer}" for layer in "dcba"]
    assert all(precedes(backward, f"backward {layer}", f"{SCATTER} {layer}") for layer in "abcd")


@pytest.mark.full
@multi_rank(2)
def test_backward_prefetches_the_previous_layer() -> None:
    """By default the next all-gather is issued before the present layer computes its gradients."""
    _, backward = halves(step_names(shard(TOWER)))
    for layer, following in ("dc", "cb", "ba"):
        assert precedes(backward, f"{GATHER} {following}", f"backward {layer}")
    assert precedes(backward, "backward d", f"{GATHER} a")  # but no further


@pytest.mark.full
@multi_rank(2)
def test_forward_does_not_gather_far_ahead_by_default() -> None:
    forward, _ = halves(step_names(shard(TOWER)))
    assert precedes(forward, "forward a", f"{GATHER} c") and precedes(forward, "forward a", f"{GATHER} d")


# ---- forward -------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("before", [0, 2], ids=["first_step", "later_step"])
def test_forward_prefetch_issues_the_gathers_of_the_given_modules_before_computing(before: int) -> None:
    model = shard(TOWER)
    model.a.set_modules_to_forward_prefetch([model.b, model.c, model.d])
    forward, _ = halves(step_names(model, before=before))
    assert all(precedes(forward, f"{GATHER} {layer}", "forward a") for layer in "abcd")
    assert [name for name in forward if name.startswith(GATHER)] == [f"{GATHER} {layer}" for layer in "abcd"]
    model.a.set_modules_to_forward_prefetch([])
    forward, _ = halves(step_names(model))
    assert precedes(forward, "forward a", f"{GATHER} d")


@pytest.mark.full
@multi_rank(2)
def test_forward_prefetch_follows_the_order_of_the_list() -> None:
    model = shard(TOWER)
    model.a.set_modules_to_forward_prefetch([model.d, model.c])
    forward, _ = halves(step_names(model))
    assert precedes(forward, f"{GATHER} a", f"{GATHER} d") and precedes(forward, f"{GATHER} d", f"{GATHER} c")
    assert precedes(forward, f"{GATHER} c", "forward a")


@pytest.mark.full
@multi_rank(2)
def test_every_module_may_prefetch_its_next() -> None:
    model = shard(TOWER)
    for layer, following in ("ab", "bc", "cd"):
        getattr(model, layer).set_modules_to_forward_prefetch([getattr(model, following)])
    forward, _ = halves(step_names(model))
    for layer, following in ("ab", "bc", "cd"):
        assert precedes(forward, f"{GATHER} {following}", f"forward {layer}")
    assert precedes(forward, "forward a", f"{GATHER} c")


@multi_rank(2)
def test_the_root_may_prefetch_too() -> None:
    model = shard(TOWER)
    model.set_modules_to_forward_prefetch([model.a, model.b])
    forward, _ = halves(step_names(model))
    assert precedes(forward, f"{GATHER} b", "forward a")


# ---- backward ------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("before", [0, 2], ids=["first_step", "later_step"])
def test_backward_prefetch_issues_the_gathers_of_the_given_modules_before_computing(before: int) -> None:
    model = shard(TOWER)
    model.d.set_modules_to_backward_prefetch([model.c, model.b, model.a])
    _, backward = halves(step_names(model, before=before))
    assert all(precedes(backward, f"{GATHER} {layer}", "backward d") for layer in "abcd")
    assert [name for name in backward if name.startswith(GATHER)] == [f"{GATHER} {layer}" for layer in "dcba"]
    model.d.set_modules_to_backward_prefetch([])
    _, backward = halves(step_names(model))
    assert precedes(backward, f"{GATHER} c", "backward d")
    assert precedes(backward, "backward d", f"{GATHER} a")


@pytest.mark.full
@multi_rank(2)
def test_backward_prefetch_replaces_the_default_of_that_module() -> None:
    """Told to prefetch ``a``, ``d`` does not prefetch ``c``; the others do as ever."""
    model = shard(TOWER)
    model.d.set_modules_to_backward_prefetch([model.a])
    _, backward = halves(step_names(model))
    assert precedes(backward, f"{GATHER} a", "backward d")
    assert precedes(backward, "backward d", f"{GATHER} c")
    assert precedes(backward, f"{GATHER} b", "backward c")


@multi_rank(2)
@pytest.mark.parametrize("method", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_only_sharded_modules_can_be_prefetched(method: str) -> None:
    model = shard(TOWER)
    with pytest.raises(ValueError, match="Linear"):
        getattr(model.a, method)([model.b, nn.Linear(2, 2)])


# ---- what backward does not need -----------------------------------------------------------------


class Language(nn.Module):
    """The gradient of an embedding does not depend on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(129, 8)
        self.tower = TOWER.make_model()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tower(self.embedding(tokens))


def _tokens(generator: torch.Generator) -> Batch:
    return Batch(torch.randint(129, (4,), generator=generator), torch.randn(4, 8, generator=generator))


LANGUAGE = ModelCase("language", Language, _tokens, ("embedding", "tower.a", "tower.b"), F.mse_loss)


@multi_rank(2)
def test_parameters_that_backward_does_not_need_are_not_gathered_for_it() -> None:
    model = shard(LANGUAGE)
    sizes = {"embedding": 130 * 8}  # padded to 2 ranks

    def gathers_of_embedding() -> int:
        with traced() as trace:
            loss = loss_on(LANGUAGE, model)
            trace.mark("backward")
            loss.backward()
        names = trace.named(sizes)
        return names[names.index("backward") :].count(f"{GATHER} embedding")

    for _ in range(2):
        loss_on(LANGUAGE, model).backward()
    assert gathers_of_embedding() == 1
    model.embedding.set_unshard_in_backward(False)
    assert gathers_of_embedding() == 0
    assert gathers_of_embedding() == 0
    model.embedding.set_unshard_in_backward(True)
    gathers_of_embedding()
    assert gathers_of_embedding() == 1


@multi_rank(2, 4)
def test_training_without_gathering_the_embedding_in_backward(world_size: int) -> None:
    model = shard(LANGUAGE)
    model.embedding.set_unshard_in_backward(False)
    train(LANGUAGE, model, reference=Reference(LANGUAGE, world_size=world_size, microbatches=2))


# ---- after the optimizer -------------------------------------------------------------------------


@multi_rank(2)
def test_the_event_after_the_optimizer_is_used_once_and_dropped() -> None:
    model = shard(TOWER)
    loss_on(TOWER, model).backward()
    event = torch.cpu.Event() if hasattr(torch.cpu, "Event") else torch.Event("cpu")
    model.set_post_optim_event(event)
    alive = weakref.ref(event)
    del event
    gc.collect()
    assert alive() is not None
    loss_on(TOWER, model).backward()
    gc.collect()
    assert alive() is None


@multi_rank(2)
def test_training_with_an_event_after_every_optimizer_step() -> None:
    model = shard(TRANSFORMER)

    def before_forward(micro: int) -> None:
        event = torch.cpu.Event()
        event.record()
        model.set_post_optim_event(event)

    train(TRANSFORMER, model, before_forward=before_forward)


@multi_rank(2)
def test_asynchronous_unshards_in_forward_and_backward() -> None:
    """`_set_unshard_async_op`: private in torch, but what clients call."""
    model = shard(TRANSFORMER)
    model._set_unshard_async_op(True)
    train(TRANSFORMER, model)
