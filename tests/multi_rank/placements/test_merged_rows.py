"""`BlockShard`: stacks of fewer matrices than ranks, whose rows are dealt out together, train like unsharded ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import fsdp2
from fsdp2 import (
    BlockShard,
    DataParallelMeshDims,
    FSDPMeshInfo,
    FSDPNotImplementedError,
    FSDPValueError,
    RaggedDTensor,
    RaggedShard,
    ShardPlacementResult,
    fully_shard,
    unwrap,
)
from fsdp2.checkpoint import load_full
from tests.harness import Reference, adamw, multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance, assert_same, full_parameters
from tests.harness.shared.training import trainable
from tests.harness.training import assert_trains_like
from tests.multi_rank.placements.helpers.merged_rows import (
    LEADING,
    MIXTURE,
    Experts,
    assert_lies_in_rows,
    merged,
    rows_of,
    sharded,
    train,
)

ROUNDED = Tolerance(1e-5, 1e-6, "vector and scalar code of fused optimizers round otherwise, as the cut decides")


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_merged_rows_train_like_the_reference(reshard_after_forward: bool | None, world_size: int) -> None:
    model = sharded(reshard_after_forward=reshard_after_forward)
    assert_lies_in_rows(model, world_size, dist.get_rank(), MIXTURE.build())
    train(model, max_norm=0.1, tolerance=SUM_ORDER, steps=3)
    model.reshard()
    assert_lies_in_rows(model, world_size, dist.get_rank())
    for name, parameter in model.named_parameters():
        assert type(parameter) is (RaggedDTensor if name in LEADING else DTensor), name
        if parameter.grad is not None:
            assert parameter.grad.placements == parameter.placements, name
            assert parameter.grad.to_local().shape == parameter.to_local().shape, name


class Foreign(Placement):
    """As torch's class of the same name will be: neither this package's, nor derived from it."""

    def __init__(self, block_numels: tuple[int, ...], block_repeats: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.block_numels, self.block_repeats = block_numels, block_repeats


Foreign.__name__ = "BlockShard"


@multi_rank(2)
def test_torchs_placement_is_taken() -> None:
    theirs = Foreign((4,))
    model = fully_shard(Experts(), shard_placement_fn=lambda p: theirs if p.shape == (3, 5, 4) else None)
    assert model.up.placements == (BlockShard((4,)),) == (theirs,)
    assert type(model.up.placements[0]) is BlockShard
    assert model.up.to_local().shape == ((8, 4), (7, 4))[dist.get_rank()]
    assert BlockShard((4,)) != Foreign((5,)) and BlockShard((4,)) == Foreign((4,), (1,))
    with pytest.raises(FSDPNotImplementedError, match="split_leading"):
        fully_shard(Experts(), shard_placement_fn=lambda p: Foreign((4, 3), (2, 1)))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("flat", [False, True])
def test_local_optimizers_and_fsdp2s_clipping(flat: bool, world_size: int) -> None:
    model = sharded()
    optimizer = fsdp2.optim.local(torch.optim.AdamW, trainable(model), lr=1e-2, eps=1e-3, flat=flat)
    reference = Reference(MIXTURE, world_size=world_size, make_optimizer=adamw, max_norm=0.1)
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=ROUNDED, clip=fsdp2.clip_grad_norm_)
    state = optimizer.state[model.experts.up]["exp_avg"]
    assert state.placements == model.experts.up.placements and state.shape == (3, 5, 4)


@pytest.mark.full
@multi_rank(4)
def test_resharded_to_fewer_ranks_after_forward() -> None:
    model: Any = sharded(reshard_after_forward=2)
    loss = MIXTURE.loss(model, MIXTURE.batch(0, 0, dist.get_rank()))
    part = model.experts.up
    assert part.placements == (Replicate(), BlockShard((4,)))
    assert torch.equal(part.to_local(), rows_of(MIXTURE.build().experts.up.detach(), 2, 2, dist.get_rank() % 2))
    loss.backward()


@pytest.mark.full
@multi_rank(2, 4)
def test_a_group_of_one_rank(world_size: int) -> None:
    """Nothing is gathered: the unsharded parameter lies where the rows do."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    assert_lies_in_rows(model, 1, 0, MIXTURE.build())
    train(model)
    whole = unwrap(model)
    assert whole.experts.up.shape == (3, 5, 4)


# ---- experts on a mesh of their own --------------------------------------------------------------


class EvenExperts(nn.Module):
    """4 experts, of (5, 4): of 2, 10 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up
        if isinstance(up, DTensor):  # of a whole mesh, or over the experts alone
            placements = [Partial() if each.is_replicate() else each for each in up.placements]
            up = up.to_local(grad_placements=placements)
        return torch.bmm(x, up.transpose(1, 2))


class _OverExperts(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.up = nn.Parameter(distribute_tensor(module.up.detach(), device_mesh, [Shard(0)], src_data_rank=None))
        return module


def _experts_over(mesh: Any, way: str) -> nn.Module:
    torch.manual_seed(0)
    model = EvenExperts()
    if way == "slices":
        parallelize_module(model, mesh["ep"], _OverExperts())
        return fully_shard(model, mesh=mesh["efsdp"], shard_placement_fn=merged_by_two)
    whole = distribute_tensor(model.up.detach(), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    model.up = nn.Parameter(whole)
    dims = DataParallelMeshDims(shard="efsdp")
    return fully_shard(model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=merged_by_two)


def merged_by_two(parameter: nn.Parameter) -> BlockShard:
    return BlockShard.split_leading(parameter.shape, 2)


@multi_rank(4)
@pytest.mark.parametrize("way", ["slices", "whole mesh"])
def test_experts_on_a_mesh_of_their_own(way: str) -> None:
    """The experts are dealt out first; of the two that a rank has left, the rows are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    plain, model = EvenExperts(), _experts_over(mesh, way)
    assert model.up.placements == (BlockShard((4,)), Shard(0))
    data, expert = mesh.get_coordinate()
    own = plain.up.detach()[2 * expert : 2 * expert + 2].reshape(10, 4)[5 * data : 5 * data + 5]
    assert torch.equal(model.up.to_local(), own)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, eps=1e-3) for each in (plain, model)]
    for step in range(3):
        x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(step))
        plain(x).square().sum().backward()
        model(x[2 * expert : 2 * expert + 2]).square().sum().backward()
        torch.testing.assert_close(model.up.grad.full_tensor(), plain.up.grad)
        for clip in (nn.utils.clip_grad_norm_, fsdp2.clip_grad_norm_):
            found = clip(model.parameters(), 0.5)
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model.up.full_tensor(), plain.up.detach())
    again = _experts_over(mesh, way)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again.up.full_tensor(), plain.up.detach())
    torch.manual_seed(7)
    nn.init.normal_(plain.up)
    torch.manual_seed(7)
    nn.init.normal_(again.up)
    assert torch.equal(again.up.full_tensor(), plain.up.detach())
    load_full(model, {"up": again.up})
    assert torch.equal(model.up.full_tensor(), plain.up.detach())


@multi_rank(4)
def test_what_cannot_lie_beside_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def holder(shape: tuple[int, ...], placement: Placement) -> nn.Module:
        module = nn.Module()
        whole = distribute_tensor(torch.zeros(shape), mesh["tp"], [placement], src_data_rank=None)
        module.up = nn.Parameter(whole)
        module.forward = lambda: None  # type: ignore[assignment]
        return module

    for shape, placement in (((4, 6, 4), Shard(1)), ((4, 6, 4), Shard(2)), ((3, 6, 4), Shard(0))):
        with pytest.raises(FSDPValueError, match=r"'up' of Module, which is to be BlockShard.*evenly, as of experts"):
            fully_shard(holder(shape, placement), mesh=mesh["dp"], shard_placement_fn=merged_by_two)
        with pytest.raises(FSDPValueError, match="evenly, as of experts"):
            RaggedDTensor.from_whole(torch.zeros(shape), mesh, [BlockShard((4,)), placement])
    whole = torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(0))
    tensor = RaggedDTensor.from_whole(whole, mesh, [Shard(0), BlockShard((4,))])
    assert torch.equal(tensor.full_tensor(), whole)


@pytest.mark.full
@multi_rank(4)
def test_a_mesh_of_its_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(merged_by_two(parameter), FSDPMeshInfo(mesh["b"], shard_mesh_dim=0))

    model = fully_shard(EvenExperts(), mesh=mesh["a"], shard_placement_fn=place)
    assert model.up.placements == (BlockShard((4,)),)
    assert model.up.device_mesh == mesh["b"]


# ---- copies, conversions, initialization ---------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
def test_copies_train_on(world_size: int) -> None:
    model = sharded()
    for other in (copy.deepcopy(model), copy.deepcopy(model).double().float()):
        assert_lies_in_rows(other, world_size, dist.get_rank())
        train(other, steps=1)
    train(model, steps=1)
    again = sharded(unwrap(sharded()))
    train(again, steps=1)
    assert_same("whole", dict(unwrap(copy.deepcopy(again)).named_parameters()), full_parameters(again))


@multi_rank(2, 4)
def test_on_meta_then_initialized_with_the_numbers_of_the_whole(world_size: int) -> None:
    plain: Any = MIXTURE.build()
    with torch.device("meta"):
        model: Any = MIXTURE.make_model()
    sharded(model)
    model.to_empty(device="cpu")
    model.load_state_dict(sharded().state_dict())
    for each in (plain, model):
        torch.manual_seed(3)
        each.reset_parameters()
        each.experts.reset_parameters()
        nn.init.trunc_normal_(each.deep)
    assert_same("drawn", full_parameters(model), dict(plain.named_parameters()))
    assert_lies_in_rows(model, world_size, dist.get_rank(), plain)


@multi_rank(2, 4)
def test_tied_across_calls(world_size: int) -> None:
    first, second = Experts(), Experts()
    second.up = first.up
    model: Any = nn.ModuleList([first, second])
    for unit in model:
        fully_shard(unit, shard_placement_fn=merged())
    assert model[0].up is model[1].up
    other = [Experts(), Experts()]
    other[1].up = other[0].up
    fully_shard(other[0], shard_placement_fn=merged())
    with pytest.raises(FSDPValueError, match="shard_placement_fn"):
        fully_shard(other[1], shard_placement_fn=lambda parameter: BlockShard.split_leading(parameter.shape, 3))


# ---- the tensor ----------------------------------------------------------------------------------


@multi_rank(2, 4)
def test_tensors_by_hand(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    rank = dist.get_rank()
    for shape, k in (((3, 5, 4), 2), ((2, 3, 4), 2), ((1, 3, 4), 2), ((2, 1, 3, 4), 3), ((3, 4), 2)):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        placement = BlockShard.split_leading(shape, k)
        tensor = RaggedDTensor.from_whole(whole, mesh, [placement])
        assert torch.equal(tensor.to_local(), rows_of(whole, k, world_size, rank)) and tensor.shape == shape
        assert torch.equal(tensor.full_tensor(), whole)
        again = RaggedDTensor.from_local(tensor.to_local().clone(), mesh, [placement], shape=shape)
        assert torch.equal((again * 2 + tensor).full_tensor(), 3 * whole)
        torch.testing.assert_close(tensor.sum().full_tensor(), whole.sum())
        torch.testing.assert_close(torch.linalg.vector_norm(tensor).full_tensor(), whole.norm())
        assert torch.equal(tensor.redistribute(placements=[Shard(1)]).full_tensor(), whole)
        assert torch.equal(tensor.redistribute(placements=[Replicate()]).to_local(), whole)
        rows = [shape[0]] + [0] * (world_size - 1)
        assert torch.equal(tensor.redistribute(placements=[RaggedShard(rows)]).full_tensor(), whole)
        loaded = pickle.loads(pickle.dumps(tensor))
        assert loaded.placements == tensor.placements and torch.equal(loaded.to_local(), tensor.to_local())


@multi_rank(2)
def test_what_the_tensor_refuses() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    tensor = RaggedDTensor.from_whole(whole, mesh, [BlockShard((4,))])
    refused: list[Callable[[], Any]] = [
        lambda: tensor.view(15, 4),
        lambda: tensor.transpose(0, 1),
        lambda: tensor.sum(0),
        lambda: tensor[0],
        lambda: torch.bmm(tensor, tensor.transpose(1, 2)),
    ]
    for use in refused:
        with pytest.raises(FSDPNotImplementedError, match="full_tensor"):
            use()
    for other in (distribute_tensor(whole, mesh, [Replicate()]), distribute_tensor(whole, mesh, [Shard(0)]), whole):
        with pytest.raises(FSDPValueError, match="do not lie alike"):
            tensor + other
    with pytest.raises(FSDPValueError, match=r"of shape \(7, 4\) is not this rank's part"):
        RaggedDTensor.from_local(torch.zeros(7, 4), mesh, [BlockShard((4,))], shape=(3, 6, 4))
    with pytest.raises(FSDPNotImplementedError, match="merged leading dims"):
        RaggedDTensor.from_whole(whole, mesh, [BlockShard((3,))])


@multi_rank(2)
def test_mistakes_are_refused() -> None:
    def shard(placement: Any, parameter: torch.Tensor) -> None:
        module = nn.Module()
        module.up = nn.Parameter(parameter)
        module.forward = lambda: None  # type: ignore[assignment]
        fully_shard(module, shard_placement_fn=lambda p: placement)

    stack = torch.randn(3, 5, 4)
    with pytest.raises(FSDPValueError, match=r"'up'.*use Shard\(0\)"):
        shard(BlockShard((20,)), stack)
    for placement in (BlockShard((5,)), BlockShard((4, 8)), BlockShard((4, 5), (2, 3)), BlockShard((60,))):
        with pytest.raises(FSDPNotImplementedError, match=r"'up'.*split_leading"):
            shard(placement, stack)
    with pytest.raises(FSDPNotImplementedError, match=r"'up'.*split_leading"):
        shard(BlockShard((1,)), torch.tensor(1.0))
    with pytest.raises(FSDPValueError, match=r"'up' of shape \(3, 5, 4\) is not contiguous"):
        shard(BlockShard((4,)), torch.randn(3, 4, 5).transpose(1, 2))
    with pytest.raises(FSDPValueError, match=r"BlockShard\.split_leading"):
        shard(Replicate(), stack)
