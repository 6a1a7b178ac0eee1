"""What multi-rank tests may compare bit for bit: see [Note: bitwise] in `tests/harness/reference.py`.

A shard is a piece of a parameter, so its elements lie elsewhere in the processor's vectors than those of the whole.
These tests show for the processor at hand which arithmetic does not care. Where one fails, comparisons of its kind on
several ranks need a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.optim.ordinary import VECTORS_BYTES
from tests.harness.compare import FUSED, difference
from tests.unit.helpers import for_each

NUMEL = 203  # no multiple of any vector
LENGTHS = (1, 3, 5, 8, 9, 15, 17, 31, 33, 50, 97)

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

ALIKE: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, amsgrad=True, foreach=True),
    "adam foreach": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2, foreach=False),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2, foreach=False),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1e-2, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2, foreach=False),
}

OTHERWISE: dict[str, Optimizer] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3, amsgrad=True, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
}


def pieces() -> Iterator[slice]:
    """Where shards may begin and end."""
    for start in range(33):
        for length in LENGTHS:
            yield slice(start, start + length)


def trained(make: Optimizer, values: Tensor, gradients: Tensor) -> Tensor:
    """The parameter after three steps."""
    parameter = nn.Parameter(values.clone())
    optimizer = make([parameter])
    for step in range(3):
        parameter.grad = gradients * (step + 1)
        optimizer.step()
    return parameter.detach()


FLOAT64 = pytest.param(torch.float64, marks=pytest.mark.full)  # 1.5 s


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64], ids=str)
@pytest.mark.parametrize("name", ALIKE)
def test_steps_on_a_piece_are_those_on_the_whole(name: str, dtype: torch.dtype) -> None:
    """For-loop and foreach optimizers add, multiply, divide and take roots, each rounded for itself.

    Ordinary optimizers step on runs of parameters for that reason, see `fsdp2.optim.ordinary.may_be_flat`.
    """
    values, gradients = torch.randn(NUMEL, dtype=dtype), torch.randn(NUMEL, dtype=dtype)
    whole = trained(ALIKE[name], values, gradients)
    for piece in pieces():
        assert torch.equal(trained(ALIKE[name], values[piece], gradients[piece]), whole[piece]), piece


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERWISE)
def test_fused_steps_on_a_piece_are_those_on_the_whole_but_for_the_last_bits(name: str) -> None:
    """Their kernels contract a product and a sum in the scalar code of a tail, not in vectors, or the reverse."""
    values, gradients = torch.randn(NUMEL), torch.randn(NUMEL)
    whole = trained(OTHERWISE[name], values, gradients)
    for piece in pieces():
        found = trained(OTHERWISE[name], values[piece], gradients[piece])
        assert difference(found, whole[piece], FUSED) is None, piece


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OTHERWISE)
def test_fused_steps_on_pieces_that_fill_vectors_are_those_on_the_whole(
    name: str, dtype: torch.dtype, threads: int
) -> None:
    """Of those, ordinary optimizers step on runs, too."""
    unit = VECTORS_BYTES // dtype.itemsize
    numel = 41 * unit
    values, gradients = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = trained(OTHERWISE[name], values, gradients)
        for start in range(0, 40, 3):
            for count in (1, 2, 5, 41 - start):
                piece = slice(start * unit, (start + count) * unit)
                assert torch.equal(trained(OTHERWISE[name], values[piece], gradients[piece]), whole[piece]), piece
    finally:
        torch.set_num_threads(before)


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_reductions_over_ranks_round_alike(dtype: torch.dtype) -> None:
    """What the engine itself does to gradients: sums, a division by the number of ranks, factors, casts."""
    a, b = torch.randn(NUMEL).to(dtype), torch.randn(NUMEL).to(dtype)

    def reduced(a: Tensor, b: Tensor) -> Tensor:
        total = (a + b).float().div_(3.0).to(dtype)
        return total.mul_(0.3).add_(b)

    whole = reduced(a, b)
    assert all(torch.equal(reduced(a[piece], b[piece]), whole[piece]) for piece in pieces())


def test_activations_round_alike_in_tensors_of_one_shape_only() -> None:
    """So the model is computed on whole parameters and inputs, as the reference's is: then bits are the same."""
    x = torch.randn(NUMEL)
    for function in (F.silu, F.softplus, F.gelu, torch.sigmoid):
        whole = function(x)
        assert torch.equal(function(x.clone()), whole)
        assert all(difference(function(x[piece]), whole[piece], FUSED) is None for piece in pieces())
