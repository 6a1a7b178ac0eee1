"""Equal modules that the ranks shard in another order, or of which one rank has more: the same ones, if used alike.

Which is which, ranks learn as they first run them. A rank that then runs another one than the others is told so.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import FSDPRuntimeError, fully_shard, set_watchdog
from tests.harness import multi_rank
from tests.harness.compare import assert_sharded_same, gradients_of, tolerance_for
from tests.harness.shared.ways import WAYS

Shard = Callable[[nn.Module], Any]


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def reversed_on_one_rank(models: list[nn.Module], shard: Shard) -> None:
    for model in models[::-1] if is_last() else models:
        shard(model)


def one_more_before(models: list[nn.Module], shard: Shard) -> Any:
    extra = shard(copy.deepcopy(models[-1])) if is_last() else None
    for model in models:
        shard(model)
    return extra


def one_more_between(models: list[nn.Module], shard: Shard) -> Any:
    shard(models[0])
    extra = shard(copy.deepcopy(models[-1])) if is_last() else None
    for model in models[1:]:
        shard(model)
    return extra


def by_threads(models: list[nn.Module], shard: Shard) -> None:
    """Each by a thread of its own; the last rank's come in the other order."""
    turns = [threading.Event() for _ in models]

    def work(index: int) -> None:
        turns[index].wait()
        shard(models[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for turn, thread in list(zip(turns, threads, strict=True))[:: -1 if is_last() else 1]:
        turn.set()
        thread.join()


MAKERS = [reversed_on_one_rank, one_more_before, one_more_between, by_threads]


def kind() -> type[nn.Linear]:
    """A class of its own, as modules of other tests may be there yet."""
    return type("Layer", (nn.Linear,), {})


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, 5) for _ in range(count)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKERS)
@multi_rank(2, 4)
def test_they_train_if_ranks_use_them_alike(world_size: int, make: Any, way: str) -> None:
    gc.collect()
    arguments, layer = WAYS[way](), kind()
    torch.manual_seed(0)
    models = [layer(5, 3) for _ in range(3)]
    references = copy.deepcopy(models)
    extra = make(models, lambda model: fully_shard(model, **arguments))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for indices in ((0, 1, 2), (2, 0, 1)):
            for index, x in zip(indices, batches(3), strict=True):
                for each in (models[index], references[index]):
                    each(x).square().sum().backward()
    (warning,) = {str(each.message).partition("Difference")[0] for each in found}
    assert "the ranks called fully_shard on modules of the class Layer" in warning
    for model, reference in zip(models, references, strict=True):
        assert_sharded_same(
            "gradients", gradients_of(model), gradients_of(reference), tolerance=tolerance_for(world_size)
        )
    assert extra is None or is_last()


@multi_rank(2, 4)
def test_another_one_than_before_is_told(world_size: int) -> None:
    """Sharded in another order, and run alike once: from then on it is known which is which."""
    layer = kind()
    models = [layer(5, 3) for _ in range(3)]
    reversed_on_one_rank(models, fully_shard)
    with pytest.warns(UserWarning, match="in another order"):
        models[0](batches(1)[0]).sum().backward()
    set_watchdog(0.5)
    try:
        with pytest.raises(FSDPRuntimeError, match="can never meet"):
            models[1 if is_last() else 0](batches(1)[0])
    finally:
        set_watchdog(10.0)


@multi_rank(2, 4)
def test_another_one_than_by_the_order_that_held_is_told(world_size: int) -> None:
    layer = kind()
    models = [fully_shard(layer(5, 3)) for _ in range(3)]
    models[0](batches(1)[0]).sum().backward()
    with pytest.raises(FSDPRuntimeError, match="different modules of the class Layer"):
        models[2 if is_last() else 1](batches(1)[0])
    for model in models:
        model(batches(1)[0]).sum().backward()
