"""`RowBlocks`: shards that cut through no block of rows train like the unsharded model, whatever else is asked for."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import (
    DataParallelMeshDims,
    FSDPError,
    FSDPMeshInfo,
    FSDPValueError,
    RaggedDTensor,
    RaggedShard,
    RowBlocks,
    ShardPlacementResult,
    fully_shard,
    unwrap,
)
from tests.harness import Reference, adamw, multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, full_parameters, tolerance_for
from tests.harness.parity.extensions import Wrapped
from tests.harness.shared.training import trainable
from tests.harness.training import assert_trains_like
from tests.multi_rank.placements.helpers.row_blocks import (
    BLOCK_ROWS,
    BLOCKY,
    assert_no_block_is_cut,
    expected_rows,
    in_blocks,
    sharded,
    train,
)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("rows", BLOCK_ROWS)
def test_row_blocks_train_like_the_reference(rows: int, reshard_after_forward: bool | None, world_size: int) -> None:
    model = sharded(rows, reshard_after_forward=reshard_after_forward)
    assert_no_block_is_cut(model, rows, world_size, dist.get_rank())
    train(model, max_norm=0.1, tolerance=SUM_ORDER, steps=3)
    model.reshard()
    assert_no_block_is_cut(model, rows, world_size, dist.get_rank())


@multi_rank(2, 4)
@pytest.mark.parametrize("rows", BLOCK_ROWS)
def test_row_blocks_are_ragged_only_where_they_must(rows: int, world_size: int) -> None:
    for name, parameter in sharded(rows).named_parameters():
        if not parameter.dim():
            assert parameter.placements == (Replicate(),)
            continue
        size = parameter.shape[0]
        dealt = expected_rows(size, rows, world_size)
        chunks = [len(each) for each in torch.arange(size).chunk(world_size)]
        chunks += [0] * (world_size - len(chunks))
        expected = Shard(0) if dealt == chunks else RaggedShard(dealt)
        assert parameter.placements == (expected,), name
        assert type(parameter) is (RaggedDTensor if dealt != chunks else DTensor)
        assert isinstance(parameter, nn.Parameter)


@pytest.mark.full
@multi_rank(2, 4)
def test_large_parameters_travel_alone(world_size: int) -> None:
    """520 rows of 2 KiB in blocks of 128: 5 blocks; the unsharded parameter is gathered straight into place."""
    torch.manual_seed(0)
    plain = nn.Linear(512, 520)
    model = fully_shard(copy.deepcopy(plain), shard_placement_fn=in_blocks(128))
    rows = {2: (384, 136), 4: (256, 256, 8, 0)}[world_size]
    assert model.weight.placements == (RaggedShard(rows),)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, model)]
    for step in range(2):
        batches = [
            torch.randn(2, 512, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(world_size)
        ]
        (sum(plain(batch).square().mean() for batch in batches) / world_size).backward()
        model(batches[dist.get_rank()]).square().mean().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model.weight.full_tensor(), plain.weight.detach())


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("rows", BLOCK_ROWS)
def test_resharded_to_fewer_ranks_after_forward(rows: int) -> None:
    model = sharded(rows, reshard_after_forward=2)
    loss = BLOCKY.loss(model, BLOCKY.batch(0, 0, dist.get_rank()))
    part = model.parts[0].weight
    assert part.to_local().shape[0] == expected_rows(12, rows, 2)[dist.get_rank() % 2]
    loss.backward()


@multi_rank(2, 4)
def test_tied_across_calls(world_size: int) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 7, bias=False), nn.Tanh(), nn.Linear(7, 7, bias=False))
        model[2].weight = model[0].weight
        return model

    plain, model = build(), build()
    for unit in (model[0], model[2], model):
        fully_shard(unit, shard_placement_fn=in_blocks(3))
    assert model[0].weight is model[2].weight
    assert model[0].weight.placements == (RaggedShard(expected_rows(7, 3, world_size)),)
    batches = [torch.randn(3, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    (sum(plain(batch).square().mean() for batch in batches) / world_size).backward()
    model(batches[dist.get_rank()]).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
    other = build()
    fully_shard(other[0], shard_placement_fn=in_blocks(3))
    with pytest.raises(FSDPValueError, match="shard_placement_fn"):
        fully_shard(other[2], shard_placement_fn=in_blocks(4))


# ---- meshes --------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _compare(model: Any, data_rank: int, data_size: int) -> None:
    torch.manual_seed(0)
    plain = TwoLayers()
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2, eps=1e-3) for each in (plain, model)]
    for step in range(3):
        batches = [torch.randn(3, 6, generator=torch.Generator().manual_seed(7 * step + r)) for r in range(data_size)]
        (sum(plain(batch).square().mean() for batch in batches) / data_size).backward()
        model(batches[data_rank]).square().mean().backward()
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        torch.testing.assert_close(fsdp2.clip_grad_norm_(model.parameters(), 0.05), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.detach())


def _two_layers(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(TwoLayers(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _rows_of_down(parameter: nn.Parameter) -> RowBlocks | None:
    return RowBlocks(3) if parameter.shape[0] == 7 else None


@multi_rank(4)
def test_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _two_layers(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=_rows_of_down)
    assert model.down.weight.placements == (RaggedShard((6, 1)), Shard(1))
    _compare(model, mesh.get_local_rank("dp"), 2)
    with pytest.raises(FSDPValueError, match=r"'up.weight'.*tensor parallelism has cut the rows"):
        fully_shard(_two_layers(mesh["tp"]), mesh=mesh["dp"], shard_placement_fn=in_blocks(3))


@multi_rank(4)
def test_on_a_mesh_of_named_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    model = torch.distributed.tensor.distribute_module(TwoLayers(), mesh)
    for name, parameter in model.named_parameters():
        assert all(placement.is_replicate() for placement in parameter.placements), name
    dims = DataParallelMeshDims(shard=("a", "b"))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=in_blocks(3))
    assert model.down.weight.placements == (RaggedShard((3, 3, 1, 0)),)
    for parameter in model.parameters():
        assert parameter.full_tensor().shape == parameter.shape


@pytest.mark.full
@multi_rank(4)
def test_a_mesh_of_its_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(RowBlocks(5), FSDPMeshInfo(mesh["b"], shard_mesh_dim=0))

    model = fully_shard(nn.Linear(3, 7, bias=False), mesh=mesh["a"], shard_placement_fn=place)
    assert model.weight.placements == (RaggedShard((5, 2)),)
    assert model.weight.device_mesh == mesh["b"]


# ---- copies, conversions, unwrapping -------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, 4)
def test_on_meta_then_loaded(world_size: int) -> None:
    with torch.device("meta"):
        model = BLOCKY.make_model()
    sharded(4, model)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(sharded(4).state_dict())
    train(model, steps=2)


@multi_rank(2, 4)
def test_initialized_after_sharding_like_before(world_size: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 12)
    fully_shard(model, shard_placement_fn=in_blocks(5))
    model.to_empty(device="cpu")
    torch.manual_seed(4)
    model.reset_parameters()
    torch.manual_seed(4)
    expected = nn.Linear(6, 12)
    assert_same("initial", full_parameters(model), {n: p.detach() for n, p in expected.named_parameters()})


@pytest.mark.full
@multi_rank(2, 4)
def test_unwrapped_and_sharded_again(world_size: int) -> None:
    model = sharded(4)
    reference = Reference(BLOCKY, world_size=world_size)
    optimizer = adamw(trainable(model))
    tolerance = tolerance_for(world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance)
    for rows in (5, 1, 64):
        unwrap(model, optimizers=[optimizer])
        assert all(not isinstance(parameter, DTensor) for parameter in model.parameters())
        sharded(rows, model)
        record = reference.step()
        BLOCKY.loss(model, BLOCKY.batch(0, record.step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same("parameters", full_parameters(model), record.parameters, tolerance=tolerance or SUM_ORDER)


@pytest.mark.full
@multi_rank(2)
def test_optimizers_from_before(world_size: int) -> None:
    model = BLOCKY.build()
    optimizer = adamw(trainable(model))
    sharded(4, model)
    assert_trains_like(Reference(BLOCKY, world_size=world_size), model, optimizer, steps=2)


# ---- extensions ----------------------------------------------------------------------------------


class Quantized(Tensor):
    """A plain local tensor that travels as int8 and one scale for each block of rows, as quantized all-gathers do."""

    block_rows = 4
    seen: ClassVar[list[int]] = []

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        values, g = self.as_subclass(Tensor), Quantized.block_rows
        Quantized.seen.append(values.shape[0])
        room = len(torch.arange(-(-size[0] // g)).chunk(mesh.size())[0])  # blocks that every rank sends
        padded = torch.zeros(room * g, *size[1:], dtype=values.dtype)
        padded[: values.shape[0]] = values
        blocks = padded.view(room, -1)
        scales = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return ((blocks / scales).round().to(torch.int8), scales), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        values, scales = outputs
        whole = (values.to(param_dtype) * scales).view(-1, *self.shape[1:])
        if out is None:
            return whole, (whole,)
        out.as_strided(whole.shape, whole.stride(), 0).copy_(whole) if out.shape != whole.shape else out.copy_(whole)
        return None


def quantized_in_blocks(whole: Tensor, rows: int) -> Tensor:
    parts = []
    for block in whole.split(rows):
        scale = block.abs().amax().clamp_min(1e-12) / 127
        parts.append((block / scale).round() * scale)
    return torch.cat(parts)


@multi_rank(2, 4)
def test_a_quantized_gather_cuts_no_block(world_size: int) -> None:
    """What the module computes with is the whole weight quantized block by block, as no shard cuts a block."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 18, bias=False)  # 5 blocks
    model = fully_shard(copy.deepcopy(plain), shard_placement_fn=in_blocks(4))
    assert model.weight.placements == (RaggedShard({2: (12, 6), 4: (8, 8, 2, 0)}[world_size]),)
    rows = model.weight.to_local().shape[0]
    local = model.weight.to_local().detach().as_subclass(Quantized)
    model.weight._local_tensor = local
    batch = torch.randn(3, 6)
    expected = batch @ quantized_in_blocks(plain.weight.detach(), 4).t()
    for _ in range(2):
        torch.testing.assert_close(model(batch), expected)
    assert set(Quantized.seen[-2:]) == {rows}
    Quantized.seen.clear()


@multi_rank(2, 4)
def test_a_subclass_that_says_nothing(world_size: int) -> None:
    """Its values are gathered; its rows are split with the operators that such classes implement."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 18)
    model = copy.deepcopy(plain)
    model.weight = nn.Parameter(Wrapped(model.weight.detach()), requires_grad=False)
    fully_shard(model, shard_placement_fn=in_blocks(4))
    assert model.weight.placements == (RaggedShard(expected_rows(18, 4, world_size)),)
    batch = torch.randn(3, 6)
    for _ in range(2):
        torch.testing.assert_close(model(batch), plain(batch))


# ---- what is refused -----------------------------------------------------------------------------


@multi_rank(2)
def test_mistakes_are_refused() -> None:
    for rows, match in ((0, "at least 1"), (-3, "at least 1"), (2.0, "an int"), (True, "an int"), ("4", "an int")):
        with pytest.raises(FSDPError, match=match):
            RowBlocks(rows)
    with pytest.raises(FSDPValueError, match=r"'scale'.*has no dims"):
        fully_shard(BLOCKY.build(), shard_placement_fn=lambda parameter: RowBlocks(4))
    with pytest.raises(FSDPValueError, match="RowBlocks"):
        fully_shard(BLOCKY.build(), shard_placement_fn=lambda parameter: 4)
    with pytest.raises(FSDPValueError, match="RowBlocks"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda parameter: RaggedShard((1, 1)))


@multi_rank(2)
def test_replacements_that_do_not_lie_alike_are_refused() -> None:
    model: Any = sharded(4)
    value = torch.randn(12, 6)
    old = model.parts[0].weight
    for new in (
        distribute_tensor(value, old.device_mesh, [Shard(0)]),
        DTensor.from_local(value, old.device_mesh, old.placements, shape=value.shape, stride=value.stride()),
        RaggedDTensor.from_whole(value, old.device_mesh, [RaggedShard((4, 8))]),
    ):
        with pytest.raises((FSDPError, RuntimeError), match=r"cannot be adopted|not supported"):
            model.parts[0].weight = nn.Parameter(new)  # torch 2.15 refuses the second of them itself
            model(torch.randn(4, 6))
    model.parts[0].weight = nn.Parameter(RaggedDTensor.from_whole(value, old.device_mesh, old.placements))
    model(torch.randn(4, 6))
    assert torch.equal(model.parts[0].weight.full_tensor(), value)
