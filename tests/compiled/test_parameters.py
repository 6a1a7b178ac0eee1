"""Parameters of every kind in graphs: how they are cut, whether they train, who shares them."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import BlockShard, MixedPrecisionPolicy, RowBlocks, fully_shard
from fsdp2.core.transport import NATIVE, VARIABLE
from tests.compiled.helpers.models import WIDTH, batch, build, by_blocks, multi_rank, shard, whole
from tests.compiled.helpers.twins import assert_trains_alike, compiling, one_backward


class Partition(nn.Module):
    """Weights whose second dim is uneven, or has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, 11) / 4)
        self.mixed = nn.Parameter(torch.randn(11, 3, 5) / 4)
        self.one = nn.Parameter(torch.randn(5, 1))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.up)
        return torch.einsum("bi,ijk->bjk", hidden, self.mixed).matmul(self.one).squeeze(-1) + self.bias


def build_cut() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Partition(), nn.Linear(3, 3))


def second_dim(parameter: nn.Parameter) -> Shard:
    return Shard(1) if parameter.dim() > 1 else Shard(0)


def shard_second(model: nn.Module) -> None:
    fully_shard(model[0], shard_placement_fn=second_dim)
    fully_shard(model, shard_placement_fn=second_dim)


# Full: 6 s each when nothing else runs; uneven rows are run by tests/compiled/test_whole_model.py.
@multi_rank(2, 4)
@pytest.mark.full
@pytest.mark.parametrize("again", [True, False])
def test_shards_of_another_dim(again: bool) -> None:
    with compiling() as graphs:

        def shard_cut(model: nn.Module) -> None:
            shard_second(model)
            model.set_reshard_after_forward(again)

        assert_trains_alike(graphs, build_cut, shard_cut, one_backward(batch))
        assert graphs.collectives() == [(2, 0), (2 if again else 0, 2)]


def build_conv() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 5, 2), nn.Flatten(), nn.Linear(20, 3))
    return net.to(memory_format=torch.channels_last)


def images(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last)


@multi_rank(2, 4)
@pytest.mark.full  # 8 s
@pytest.mark.parametrize("dim", [0, 1])
def test_channels_last(dim: int) -> None:
    with compiling() as graphs:

        def shard_net(model: nn.Module) -> None:
            for layer in (model[0], model[2]):
                fully_shard(layer, shard_placement_fn=lambda param: Shard(dim if param.dim() == 4 else 0))
            fully_shard(model)

        model = assert_trains_alike(graphs, build_conv, shard_net, one_backward(images))
        assert graphs.collectives() == [(3, 0), (2, 3)]
        model[2].unshard()
        assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
        model[2].reshard()


class Odd(nn.Module):
    """Parameters of integers and bytes, of no dims, of no elements, complex, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.zero_points = nn.Parameter(torch.arange(5), requires_grad=False)
        self.packed = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False] * 4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.angle = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen_unused = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, x, x * self.scale) + self.shift
        x = torch.tanh(x @ self.weight) * self.packed.sum().float() / 21
        return x + self.empty.sum() + self.angle.abs().sum() + self.zero_points[2].float()


def build_odd() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Odd(), Odd(), nn.Linear(WIDTH, 3))


def shard_parts(model: nn.Module) -> None:
    for part in list(model)[:-1]:
        fully_shard(part)
    fully_shard(model)


@multi_rank(2, full=[4])
@pytest.mark.full  # 10 s
def test_odd_dtypes_and_shapes() -> None:
    with compiling() as graphs, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*omplex.*")  # of backends that generate code; this one does not
        model = assert_trains_alike(graphs, build_odd, shard_parts, one_backward(batch))
        assert graphs.collectives() == [(3, 0), (2, 5)]  # complex gradients by themselves
        assert model[0].zero_points.dtype == torch.int64


class Empty(nn.Module):
    """Parameters without elements beside one with: without rows, columns, or more behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3) / 3)
        self.no_columns = nn.Parameter(torch.randn(3, 0))
        self.no_rows = nn.Parameter(torch.randn(0, 3))
        self.nothing_behind = nn.Parameter(torch.randn(2, 3, 0))
        self.unused = nn.Parameter(torch.randn(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        assert self.no_columns.shape == (3, 0) and self.nothing_behind.shape == (2, 3, 0)
        return x @ self.weight + self.no_columns.sum() + self.no_rows.sum() + self.nothing_behind.sum()


def build_empty() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Empty(), nn.Linear(3, 3))


# Full: 1 s each.
@multi_rank(2, full=[4])
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_empty_parameters(dim: int) -> None:
    def shard_empty(model: nn.Module) -> None:
        for part in (model[0], model):
            fully_shard(part, shard_placement_fn=lambda param: Shard(dim if param.dim() > 1 else 0))

    with compiling() as graphs:
        model = assert_trains_alike(graphs, build_empty, shard_empty, one_backward(batch))
        assert graphs.collectives() == [(2, 0), (0, 2)]  # the first layer's input needs no gradient
        model[0].unshard()
        plain = build_empty()[0]
        assert all(param.shape == getattr(plain, name).shape for name, param in model[0].named_parameters())
        model[0].reshard()


@multi_rank(2, full=[4])
@pytest.mark.full  # 1 s each
@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_but_empty_parameters(dim: int) -> None:
    """A group that has nothing to gather."""

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.randn(3, 0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.empty.sum()

    def build_nothing() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Nothing(), nn.Linear(WIDTH, 3))

    def shard_nothing(model: nn.Module) -> None:
        fully_shard(model[0], shard_placement_fn=lambda _: Shard(dim))
        fully_shard(model)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_nothing, shard_nothing, one_backward(batch))


class Switched(nn.Module):
    """Uses one of two layers, by an argument that the graph is made for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


def build_switched() -> nn.Module:
    torch.manual_seed(0)
    return Switched()


@multi_rank(2)
@pytest.mark.full  # 5 s
@pytest.mark.parametrize("zeros", [False, True])
def test_a_parameter_that_some_ranks_or_steps_do_not_use(zeros: bool) -> None:
    """On rank 1 the second layer alone; in steps 2 and 4 on all ranks the first alone."""

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number * 10 + rank)
        loss = model(batch(generator), rank if number % 2 else 0).square().sum()
        loss.backward()
        return [loss.detach()]

    def shard_switched(model: nn.Module) -> None:
        fully_shard(model)
        model.set_reduce_scatter_unused_params(zeros)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_switched, shard_switched, step)


class Tied(nn.Module):
    """Embedding and head share their weight; `inside` of one group or between two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def build_tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(11, (4, 3), generator=generator)


@multi_rank(2, full=[4])
@pytest.mark.full
def test_tied_in_one_group() -> None:
    with compiling() as graphs:

        def shard_tied(model: nn.Module) -> None:
            fully_shard(model.body)
            fully_shard(model)

        model = assert_trains_alike(graphs, build_tied, shard_tied, one_backward(tokens))
        assert model.head.weight is model.embedding.weight
        assert graphs.collectives() == [(2, 0), (1, 2)]


@multi_rank(2, full=[4])
@pytest.mark.full  # 8 s
def test_tied_across_groups() -> None:
    with compiling() as graphs:

        def shard_tied(model: nn.Module) -> None:
            for part in (model.embedding, model.body, model.head):
                fully_shard(part)
            fully_shard(model)

        model = assert_trains_alike(graphs, build_tied, shard_tied, one_backward(tokens))
        assert model.head.weight is model.embedding.weight
        gathers, scatters = zip(*graphs.collectives(), strict=True)
        assert gathers[0] == 2 and scatters[-1] == 2  # the shared group is gathered once for the whole


def by_dtype(parameter: nn.Parameter) -> Any:
    return torch.bfloat16 if parameter.dim() > 1 else torch.float32


@multi_rank(2, full=[4])
@pytest.mark.full  # 8 s
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_dtypes_by_parameter(reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, param_dtype_override_fn=by_dtype
    )
    with compiling() as graphs:
        assert_trains_alike(graphs, build_norms, lambda model: shard_parts_of(model, policy), one_backward(batch))
        assert graphs.collectives()[0] == (3, 0)


class Norms(nn.Module):
    """A weight, and a norm whose weight and statistics are fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.norm = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (WIDTH,), self.norm, 1e-6)
        return x + torch.tanh(normed.to(self.weight.dtype) @ self.weight)


def build_norms() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Norms(), Norms(), nn.Linear(WIDTH, 3))


def shard_parts_of(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    for part in list(model)[:-1]:
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@multi_rank(2)
@pytest.mark.full  # 8 s
@pytest.mark.parametrize("rows", [2, 3, 8, "merged"])
def test_row_blocks(rows: int | str) -> None:
    def shard_blocks(model: nn.Module) -> None:
        def place(param: nn.Parameter) -> RowBlocks | BlockShard | None:
            if param.dim() < 2:
                return None
            return RowBlocks(rows) if isinstance(rows, int) else BlockShard.split_leading(param.shape, 2)

        shard(model, shard_placement_fn=place)

    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard_blocks, one_backward(batch))
        assert graphs.collectives() == [(4, 0), (3, 4)]


@multi_rank(2)
@pytest.mark.full  # 12 s each
@pytest.mark.parametrize("way", ["", NATIVE])
@pytest.mark.parametrize("compile", [whole, by_blocks])
def test_large_parameters_travel_alone(compile: Any, way: str) -> None:
    """Above 512 KiB of each rank a parameter is gathered and reduced from where it lies."""
    os.environ[VARIABLE] = way
    alone = way == NATIVE  # where a graph shows each: an operator of ours stands for all of a group's
    with compiling() as graphs:
        assert_trains_alike(graphs, Large, shard, one_backward(batch), compile=compile)
        assert graphs.collectives()[0] == ((1 if compile is by_blocks else 2) + alone, 0)


class Large(nn.Module):
    """One layer of 1.4 MB between small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 600), nn.Linear(600, 600), nn.Linear(600, WIDTH))])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)
