"""DTensors whose rows are dealt out in any numbers, beside plain tensors of the whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import FSDPError, FSDPNotImplementedError, RaggedDTensor, RaggedShard
from tests.harness import multi_rank
from tests.harness.pool import WorkerPools

ROWS = {
    2: [(3, 2), (5, 0), (0, 5), (1, 0)],
    4: [(4, 4, 1, 0), (0, 3, 0, 2), (0, 0, 0, 7), (1, 0, 0, 0), (2, 2, 2, 2)],
}


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def whole(rows: int, seed: int = 0, *, columns: int = 3) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def ragged(value: Tensor, rows: tuple[int, ...], mesh: DeviceMesh | None = None) -> RaggedDTensor:
    return RaggedDTensor.from_whole(value, mesh or world_mesh(), [RaggedShard(rows)])


def each_cut() -> list[tuple[int, ...]]:
    return ROWS[dist.get_world_size()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, foreach=False),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, 0.1, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.1, centered=True, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, 0.1, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, 0.1, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1, foreach=False),
}


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_what_they_do_to_the_whole(name: str) -> None:
    mesh = world_mesh()
    plain = [nn.Parameter(whole(sum(rows), index)) for index, rows in enumerate(each_cut())]
    sharded = [nn.Parameter(ragged(p.detach(), rows, mesh)) for p, rows in zip(plain, each_cut(), strict=True)]
    # One that torch's placements describe is in the same foreach calls, except fused SGD, which DTensor lacks.
    plain.append(nn.Parameter(whole(6, 9)))
    sharded.append(nn.Parameter(distribute_tensor(plain[-1].detach().clone(), mesh, [Shard(0)])))
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in sharded)
    assert all(type(p) is RaggedDTensor for p in sharded[:-1])
    optimizers = [OPTIMIZERS[name](plain), OPTIMIZERS[name](sharded)]
    for step in range(3):
        for index, (p, s) in enumerate(zip(plain, sharded, strict=True)):
            p.grad = whole(p.shape[0], 100 * step + index)
            s.grad = (
                RaggedDTensor.from_whole(p.grad, mesh, s.placements)
                if isinstance(s, RaggedDTensor)
                else distribute_tensor(p.grad, mesh, s.placements)
            )
        for optimizer in optimizers:
            optimizer.step()
        for p, s in zip(plain, sharded, strict=True):
            # Vector and scalar code round otherwise, and where a row falls depends on the cut.
            torch.testing.assert_close(s.full_tensor(), p.detach(), rtol=1e-6, atol=1e-7)
    states = optimizers[1].state_dict()["state"]
    for index in range(len(plain) - 1):
        assert all(type(v) is RaggedDTensor for v in states[index].values() if isinstance(v, Tensor) and v.dim())


@multi_rank(2, 4)
def test_arithmetic_keeps_class_and_rows() -> None:
    for rows in each_cut():
        a, b = whole(sum(rows), 1), whole(sum(rows), 2)
        x, y = ragged(a, rows), ragged(b, rows)
        for f in (
            lambda a, b: (a + b * 2).sqrt().nan_to_num() - torch.where(a > b, a, 0.0),
            lambda a, b: torch.lerp(a, b, 0.3).pow(2).clamp(max=1.0),
            lambda a, b: torch.addcdiv(a, a, b.abs() + 1.0) / torch.tensor(3.0),
            lambda a, b: torch.full_like(a, 2.0) + torch.ones_like(a) + a.clone().double().float(),
            lambda a, b: a.new_zeros(a.shape) + a.to(torch.bfloat16),
            lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
        ):
            expected, result = f(a, b), f(x, y)
            assert type(result) is RaggedDTensor
            assert result.dtype == expected.dtype
            assert result.placements == x.placements
            assert result.shape == expected.shape
            torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=0)
        z = x.detach()
        assert z.add_(y) is z
        assert z.copy_(y) is z
        torch._foreach_add_([z], 1.0)
        torch.testing.assert_close(x.full_tensor(), b + 1, rtol=0, atol=0)
        assert (x == y).dtype == torch.bool


@multi_rank(2, 4)
def test_wholes_and_other_placements() -> None:
    for rows in each_cut():
        value = whole(sum(rows))
        mesh = world_mesh()
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            tensor = ragged(value.to(dtype), rows, mesh)
            torch.testing.assert_close(tensor.full_tensor(), value.to(dtype), rtol=0, atol=0)
        tensor = ragged(value, rows, mesh)
        start = sum(rows[: dist.get_rank()])
        assert torch.equal(tensor.to_local(), value[start : start + rows[dist.get_rank()]])
        replicated = tensor.redistribute(placements=[Replicate()])
        assert type(replicated) is DTensor
        assert torch.equal(replicated.to_local(), value)
        columns = tensor.redistribute(mesh, [Shard(1)])
        assert columns.placements == (Shard(1),)
        assert torch.equal(columns.full_tensor(), value)
        chunked = tensor.redistribute(placements=[Shard(0)])
        expected = distribute_tensor(value, mesh, [Shard(0)])
        assert torch.equal(chunked.to_local(), expected.to_local())
        turned = RaggedShard(tuple(reversed(rows)))
        other = tensor.redistribute(placements=[turned])
        assert other.placements == (turned,)
        assert torch.equal(other.full_tensor(), value)
        assert tensor.redistribute(placements=tensor.placements) is tensor
        assert "RaggedShard" in repr(tensor)


def whole_gradient(tensor: DTensor) -> Tensor:
    gradient = tensor.grad
    assert gradient.placements == tensor.placements
    if torch.__version__ < "2.13":  # autograd's own copy of a gradient is a plain DTensor there, over the same rows
        gradient = RaggedDTensor.from_local(
            gradient.to_local(), gradient.device_mesh, gradient.placements, shape=gradient.shape
        )
    assert type(gradient) is RaggedDTensor
    return gradient.full_tensor()


@multi_rank(2, 4)
def test_gradients_flow_through_wholes_and_parts() -> None:
    for rows in each_cut():
        value, factor = whole(sum(rows)), whole(sum(rows), 5)
        for take in (
            lambda t: t.full_tensor(),
            lambda t: t.redistribute(placements=[Shard(0)]).full_tensor(),
            lambda t: t.redistribute(placements=[RaggedShard(t.placements[0].rows[::-1])]).full_tensor(),
            *([] if torch.__version__ < "2.13" else [lambda t: (t * 2.0).full_tensor()]),
        ):
            tensor = ragged(value, rows).requires_grad_()
            plain = value.clone().requires_grad_()
            (take(tensor) * factor).sum().backward()
            scale = 1.0 if torch.equal(take(tensor), value) else 2.0
            (plain * scale * factor).sum().backward()
            torch.testing.assert_close(whole_gradient(tensor), plain.grad)
        tensor = ragged(value, rows).requires_grad_()
        tensor.to_local().sum().backward()
        assert torch.equal(whole_gradient(tensor), torch.ones_like(value))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
def test_clipping(norm: float, foreach: bool, theirs: bool) -> None:
    mesh = world_mesh()
    gradients = [whole(sum(rows), index) for index, rows in enumerate(each_cut())]
    plain = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    sharded = [nn.Parameter(ragged(torch.zeros_like(g), r, mesh)) for g, r in zip(gradients, each_cut(), strict=True)]
    sharded.append(nn.Parameter(distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])))
    plain.append(nn.Parameter(torch.zeros(8, 3)))
    for p, s, g in zip(plain, sharded, [*gradients, whole(8, 50)], strict=True):
        p.grad = g.clone()
        s.grad = ragged(g, s.placements[0].rows, mesh) if isinstance(s, RaggedDTensor) else None
        if s.grad is None:
            s.grad = distribute_tensor(g, mesh, [Shard(0)])
    clip = torch.nn.utils.clip_grad_norm_ if theirs else fsdp2.clip_grad_norm_
    expected = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm, foreach=foreach)
    total = clip(sharded, 0.5, norm, foreach=foreach)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    torch.testing.assert_close(total, expected)
    for p, s in zip(plain, sharded, strict=True):
        torch.testing.assert_close(s.grad.full_tensor(), p.grad)


@multi_rank(2, 4)
def test_sums_and_norms() -> None:
    for rows in each_cut():
        value = whole(sum(rows))
        tensor = ragged(value, rows)
        torch.testing.assert_close(tensor.sum().full_tensor(), value.sum())
        for order in (2, 1, 3.0, float("inf"), 0):
            torch.testing.assert_close(
                torch.linalg.vector_norm(tensor, order).full_tensor(), torch.linalg.vector_norm(value, order)
            )
            torch.testing.assert_close(tensor.norm(order).full_tensor(), value.norm(order))


@multi_rank(2, 4)
def test_random_numbers_are_those_of_the_whole() -> None:
    for rows in each_cut():
        for fill in (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.xavier_normal_):
            tensor = ragged(whole(sum(rows)), rows)
            torch.manual_seed(3)
            expected = fill(torch.empty(sum(rows), 3))
            torch.manual_seed(3)
            assert fill(tensor) is tensor
            assert torch.equal(tensor.full_tensor(), expected)


@multi_rank(2)
def test_any_and_all_of_a_dim_are_refused_and_of_everything_are_everybodys() -> None:
    for rows in each_cut():
        tensor = ragged(whole(sum(rows)), rows)
        for reduce in (torch.any, torch.all):
            with pytest.raises(FSDPNotImplementedError, match="does not act on each element for itself"):
                reduce(tensor > 0, dim=0)
        assert not (tensor > 1e9).any() and (tensor < 1e9).all()


@multi_rank(2, 4)
def test_the_gradient_scaler_sees_what_is_not_finite_anywhere() -> None:
    for rows in each_cut():
        for bad in (False, True):
            parameter = nn.Parameter(ragged(whole(sum(rows)), rows))
            optimizer = torch.optim.SGD([parameter], 0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            gradient = whole(sum(rows), 3)
            gradient[-1, -1] = torch.inf if bad else 1.0
            parameter.grad = ragged(gradient, rows)
            before = parameter.full_tensor().detach()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            after = parameter.full_tensor().detach()
            expected = before if bad else before - 0.1 * gradient / 4
            torch.testing.assert_close(after, expected)


@multi_rank(2, 4)
def test_copies_and_pickles() -> None:
    for rows in each_cut():
        value = whole(sum(rows))
        for tensor in (ragged(value, rows), nn.Parameter(ragged(value, rows))):
            copied = copy.deepcopy(tensor)
            assert type(copied) is RaggedDTensor
            assert isinstance(copied, nn.Parameter) == isinstance(tensor, nn.Parameter)
            assert copied.to_local().data_ptr() != tensor.to_local().data_ptr() or not tensor.to_local().numel()
            assert torch.equal(copied.full_tensor(), value)
            file = io.BytesIO()
            torch.save(tensor, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            assert type(loaded) is RaggedDTensor
            assert loaded.placements == tensor.placements
            assert torch.equal(loaded.to_local(), tensor.to_local())
            assert torch.equal(loaded.full_tensor(), value)


class Holder(nn.Module):
    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


@multi_rank(2, 4)
def test_conversions_of_modules() -> None:
    for rows in each_cut():
        value = whole(sum(rows))
        holder = Holder(ragged(value, rows))
        for convert, dtype in ((nn.Module.double, torch.float64), (nn.Module.bfloat16, torch.bfloat16)):
            convert(holder)
            assert type(holder.weight) is RaggedDTensor
            assert isinstance(holder.weight, nn.Parameter)
            assert holder.weight.dtype == dtype
            assert holder.weight.to_local().dtype == dtype
            assert torch.equal(holder.weight.full_tensor(), value.double().to(dtype))
        holder.to("meta")
        assert holder.weight.is_meta
        assert holder.weight.to_local().is_meta
        holder.to_empty(device="cpu")
        assert type(holder.weight) is RaggedDTensor
        assert holder.weight.to_local().shape == (rows[dist.get_rank()], 3)
        with torch.no_grad():
            holder.weight.zero_()
        assert torch.equal(holder.weight.full_tensor(), torch.zeros_like(value, dtype=torch.bfloat16))


@multi_rank(4)
def test_beside_replicas_and_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    value = whole(7, columns=5)
    cases: list[tuple[Placement, ...]] = [
        (Replicate(), RaggedShard((3, 4))),
        (RaggedShard((0, 7)), Replicate()),
        (RaggedShard((6, 1)), Shard(1)),
    ]
    for placements in cases:
        tensor = RaggedDTensor.from_whole(value, mesh, placements)
        assert torch.equal(tensor.full_tensor(), value)
        torch.testing.assert_close(tensor.norm().full_tensor(), value.norm())
        torch.testing.assert_close(fsdp2.get_total_norm([tensor]), value.norm())
        local = RaggedDTensor.from_local(tensor.to_local(), mesh, placements, shape=value.shape)
        assert torch.equal((local + tensor).full_tensor(), 2 * value)
        torch.manual_seed(1)
        expected = torch.empty(7, 5).normal_()
        torch.manual_seed(1)
        assert torch.equal(tensor.normal_().full_tensor(), expected)
    for other in (Shard(0), Shard(-2)):
        with pytest.raises(FSDPError, match="cannot lie beside"):
            RaggedDTensor.from_whole(value, mesh, [RaggedShard((3, 4)), other])


@multi_rank(2)
def test_what_is_out_of_reach_says_so() -> None:
    mesh = world_mesh()
    value = whole(5)
    tensor = ragged(value, (4, 1), mesh)
    for f in (
        lambda: tensor @ value.t(),
        lambda: tensor.view(-1),
        lambda: tensor[0],
        lambda: tensor.sum(0),
        lambda: tensor.t(),
        lambda: tensor.max(),
        lambda: torch.cat([tensor, tensor]),
        lambda: tensor.new_zeros(3),
        lambda: tensor.norm(-1),
        lambda: torch._foreach_max([tensor, tensor]),
    ):
        with pytest.raises(FSDPError, match="full_tensor"):
            f()
    chunked = distribute_tensor(value, mesh, [Shard(0)])
    for g in (
        lambda: tensor + value,
        lambda: value + tensor,
        lambda: tensor + chunked,
        lambda: chunked + tensor,
        lambda: chunked.copy_(tensor),
        lambda: tensor.copy_(value),
        lambda: tensor + ragged(value, (1, 4), mesh),
        lambda: tensor + ragged(value[:, :1], (4, 1), mesh),
        lambda: torch._foreach_add_([tensor, chunked], [chunked, tensor]),
        lambda: torch._foreach_copy_([chunked], [tensor]),
    ):
        with pytest.raises(FSDPError, match=r"lie alike.*full_tensor"):
            g()
    with pytest.raises(FSDPError, match="still to be reduced"):
        _ = tensor * tensor.norm()
    assert torch.equal((tensor * tensor.norm().full_tensor()).full_tensor(), value * value.norm())
    for placements, shape in (
        ([RaggedShard((4, 2))], (5, 3)),
        ([RaggedShard((5,))], (5, 3)),
        ([Shard(0)], (5, 3)),
        ([RaggedShard((4, 1)), Replicate()], (5, 3)),
    ):
        with pytest.raises(FSDPError):
            RaggedDTensor.from_local(tensor.to_local(), mesh, placements, shape=shape)
    with pytest.raises(FSDPError, match="not this rank's part"):
        RaggedDTensor.from_local(value, mesh, [RaggedShard((4, 1))], shape=(5, 3))
    for rows in ((), (-1, 6), (1.0, 4)):
        with pytest.raises(FSDPError):
            RaggedShard(rows)
    with pytest.raises(RuntimeError, match="RaggedShard"):
        distribute_tensor(value, mesh, [RaggedShard((4, 1))])
    placement = RaggedShard([4, 1])
    with pytest.raises(AttributeError, match="immutable"):
        placement.rows = (1, 4)
    assert {placement: 1}[RaggedShard((4, 1))] == 1
    assert placement != RaggedShard((1, 4))
    assert placement != Shard(0)


def save_ragged(folder: Path) -> None:
    dcp.save({str(rows): ragged(whole(sum(rows)), rows) for rows in ROWS[4]}, checkpoint_id=folder)


def load_ragged(folder: Path) -> None:
    """On two ranks: into other rows, into chunks, into everything."""
    mesh = world_mesh()
    for take in (lambda n: ragged(torch.zeros(n, 3), (n - n // 4, n // 4)), lambda n: torch.zeros(n, 3)):
        state = {str(rows): take(sum(rows)) for rows in ROWS[4]}
        dcp.load(state, checkpoint_id=folder)
        for rows in ROWS[4]:
            loaded = state[str(rows)]
            found = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
            assert torch.equal(found, whole(sum(rows)))
    chunked = {str(rows): distribute_tensor(torch.zeros(sum(rows), 3), mesh, [Shard(0)]) for rows in ROWS[4]}
    dcp.load(chunked, checkpoint_id=folder)
    for rows in ROWS[4]:
        assert torch.equal(chunked[str(rows)].full_tensor(), whole(sum(rows)))


def test_distributed_checkpoints(pools: WorkerPools, tmp_path: Path) -> None:
    pools[4].run(save_ragged, tmp_path)
    pools[2].run(load_ragged, tmp_path)
