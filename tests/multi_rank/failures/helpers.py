"""A model of which modules raise, and the gradients that its next step must have."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from tests.harness.compare import SUM_ORDER, assert_sharded_same, gradients_of
from tests.harness.models import TRANSFORMER

CASE = TRANSFORMER


class Boom(Exception):
    """What the tests throw."""


def sharded(**options: Any) -> Any:
    model = CASE.build()
    for unit in CASE.units(model):
        fully_shard(unit, **options)
    assert isinstance(model, FSDPModule)
    return model


def loss_of(model: nn.Module, micro: int = 7) -> Tensor:
    return CASE.loss(model, CASE.batch(0, 99, dist.get_rank(), micro))


@contextmanager
def raising(
    module: nn.Module, where: str, exception: type[BaseException] = Boom, ranks: Container[int] = range(8)
) -> Iterator[None]:
    """``module`` raises on ``ranks``: before or after its forward, or in its backward."""

    def throw(*_: object) -> None:
        if dist.get_rank() in ranks:
            raise exception

    def throw_in_backward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(throw)

    if where == "before":
        handle = module.register_forward_pre_hook(throw)
    else:
        handle = module.register_forward_hook(throw_in_backward if where == "backward" else throw)
    try:
        yield
    finally:
        handle.remove()


def differentiate(plain: nn.Module, micro: int) -> None:
    """Adds the mean over all ranks to the gradients of the unsharded model."""
    for rank in range(dist.get_world_size()):
        (CASE.loss(plain, CASE.batch(0, 99, rank, micro)) / dist.get_world_size()).backward()


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    assert_sharded_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)


def assert_gradients(model: nn.Module, micros: Sequence[int]) -> None:
    """The gradients of an unsharded model after these microbatches of all ranks."""
    plain = CASE.build()
    for micro in micros:
        differentiate(plain, micro)
    assert_same_gradients(model, plain)
