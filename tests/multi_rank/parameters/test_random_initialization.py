"""What draws random numbers for sharded parameters gives them the rows of what the unsharded ones would get.

Each case runs on a plain parameter and on a sharded one, from the same seed. After it the generators must agree too, or
whatever is drawn next differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import init

from fsdp2 import BlockShard, FSDPNotImplementedError, RowBlocks, fully_shard
from tests.harness import multi_rank
from tests.harness.compare import assert_sharded_same

Fill = Callable[[Tensor], object]

INITIALIZERS: dict[str, Fill] = {
    "normal_": init.normal_,
    "uniform_": init.uniform_,
    "trunc_normal_": init.trunc_normal_,
    "trunc_normal_of_a_tail": lambda p: init.trunc_normal_(p, a=1.5, b=2.0),
    "kaiming_uniform_": init.kaiming_uniform_,
    "kaiming_normal_": init.kaiming_normal_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda p: init.sparse_(p, 0.4),
    "eye_": init.eye_,
    "constant_": lambda p: init.constant_(p, 3.0),
}
FILLS: dict[str, Fill] = {
    "data.normal_": lambda p: p.data.normal_(),
    "normal_of_a_generator": lambda p: p.data.normal_(generator=torch.Generator().manual_seed(5)),
    "transposed": lambda p: p.data.t().normal_(),
    "bernoulli_": lambda p: p.data.bernoulli_(0.5),
    "bernoulli_of_a_tensor": lambda p: p.data.bernoulli_(torch.full_like(p, 0.5)),
    "exponential_": lambda p: p.data.exponential_(),
    "geometric_": lambda p: p.data.geometric_(0.3),
    "log_normal_": lambda p: p.data.log_normal_(),
    "cauchy_": lambda p: p.data.cauchy_(),
    "random_": lambda p: p.data.random_(),
    "random_of_a_range": lambda p: p.data.random_(3, 10),
}
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": torch.rand_like,
    "rand_like_in_another_dtype": lambda p: torch.rand_like(p, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randint_like": lambda p: torch.randint_like(p, 0, 100),
    "bernoulli": lambda p: torch.bernoulli(p.detach().sigmoid()),
    "normal": lambda p: torch.normal(p.detach(), 2.0),
    "dropout": nn.functional.dropout,
    "alpha_dropout": lambda p: nn.functional.alpha_dropout(p, training=True),
    "new_empty": lambda p: p.new_empty(p.shape).normal_(),
}


def layer() -> nn.Linear:
    """11 rows: uneven over any number of ranks."""
    torch.manual_seed(1)
    return nn.Linear(5, 11)


def compare(fill: Fill, plain: nn.Module, sharded: nn.Module) -> None:
    """``fill`` does the same to every parameter of both, and takes as much from the generator."""
    made: list[dict[str, Tensor]] = []
    for model in (plain, sharded):
        torch.manual_seed(7)
        results = {name: fill(parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1}
        made.append({name: value.detach() for name, value in results.items() if isinstance(value, Tensor)})
        made.append({name: parameter.detach() for name, parameter in model.named_parameters()})
        made.append({"drawn afterwards": torch.rand(3)})
    for index, what in enumerate(("results", "parameters", "generators")):
        assert_sharded_same(what, made[3 + index], made[index])


@multi_rank(2, 4)
def test_initializers() -> None:
    for fill in (*INITIALIZERS.values(), *FILLS.values(), *MADE.values()):
        compare(fill, layer(), fully_shard(layer()))


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("replicate", [1, 2, 4])
def test_replicas_get_the_same(replicate: int) -> None:
    mesh = init_device_mesh("cpu", (replicate, 4 // replicate), mesh_dim_names=("replicate", "shard"))
    for fill in (init.normal_, init.trunc_normal_, init.kaiming_uniform_, nn.functional.dropout):
        compare(fill, layer(), fully_shard(layer(), mesh=mesh))


@multi_rank(4)
def test_beside_tensor_parallelism() -> None:
    """Both cut dim 0 (the first layer), or one each (the second)."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 11), nn.Linear(11, 7))

    for fill in (init.normal_, init.trunc_normal_, init.xavier_uniform_, torch.rand_like):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharded = parallelize_module(build(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        compare(fill, build(), fully_shard(sharded, mesh=mesh["dp"]))


@multi_rank(2)
def test_other_placements_and_dtypes() -> None:
    def cut_in_dim_1(parameter: nn.Parameter) -> object:
        return Shard(parameter.dim() - 1)

    def merged(parameter: nn.Parameter) -> object:
        return BlockShard.split_leading(parameter.shape, 2) if parameter.dim() == 2 else None

    for placement in (cut_in_dim_1, lambda parameter: RowBlocks(3), merged):
        for dtype in (torch.float32, torch.bfloat16):
            for fill in (init.normal_, init.trunc_normal_, torch.rand_like, nn.functional.dropout):
                compare(fill, layer().to(dtype), fully_shard(layer().to(dtype), shard_placement_fn=placement))

    def columns() -> nn.Module:
        module = nn.Linear(11, 5, bias=False)
        module.weight = nn.Parameter(torch.zeros(11, 5).t())  # whose strides are kept
        return module

    compare(init.normal_, columns(), fully_shard(columns()))


@multi_rank(2)
def test_the_next_forward_sees_new_values() -> None:
    plain, model = layer(), fully_shard(layer())
    inputs = torch.linspace(-1, 1, 10).view(2, 5)
    model(inputs).sum().backward()
    for each in (plain, model):
        torch.manual_seed(3)
        each.reset_parameters()
    assert torch.equal(model(inputs), plain(inputs))


@multi_rank(2)
def test_what_depends_on_other_ranks_values_is_refused() -> None:
    model = fully_shard(layer())
    with pytest.raises(FSDPNotImplementedError, match=r"multinomial.*\(11, 5\).*full_tensor"):
        torch.multinomial(model.weight.detach().abs(), 2)
    assert isinstance(model.weight, DTensor)
