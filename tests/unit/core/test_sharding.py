"""Where shards lie, for every rank of simulated worlds: as `torch.distributed.fsdp.fully_shard` puts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import FSDPValueError
from fsdp2.core.mesh import DataParallelMesh, mesh_info
from fsdp2.core.options import DataParallelMeshDims
from fsdp2.core.sharding import requested_placement, sharding_of
from tests.harness import fake_world, others_full
from tests.unit.helpers import for_each

SHAPES = [(16, 8), (13, 8), (5, 16), (1, 8), (8,), (3,), (16, 8, 2)]


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh, which of its dims `fully_shard` gets, and how parameters lie before.

    Attributes:
        axes: all dims of the mesh, in order.
        data: the names of the dims that are passed as ``mesh``; None: the whole mesh, with ``dims``.
        dims: the arguments of ``dp_mesh_dims``.
        cut: the dim that ``tp`` cuts; None: parameters are plain (or, on a whole mesh, replicated).
        shard: the dim that is asked for.
    """

    axes: dict[str, int]
    data: tuple[str, ...] | None = None
    dims: dict[str, Any] | None = None
    cut: int | None = None
    shard: int = 0

    @property
    def world_size(self) -> int:
        size = 1
        for each in self.axes.values():
            size *= each
        return size

    def __str__(self) -> str:
        axes = "x".join(f"{name}{size}" for name, size in self.axes.items())
        dims = "" if self.dims is None else f" {self.dims}"
        return f"{axes}{dims} cut {self.cut} shard {self.shard}"


TP = {"dp": 4, "tp": 2}
HSDP_TP = {"replicate": 2, "shard": 2, "tp": 2}
CASES = [
    Case({"shard": 8}, ("shard",)),
    Case({"shard": 3}, ("shard",)),
    Case({"shard": 1}, ("shard",)),
    Case({"shard": 8}, ("shard",), shard=1),
    Case({"shard": 4}, ("shard",), shard=-1),
    Case({"replicate": 2, "shard": 4}, ("replicate", "shard")),
    Case({"replicate": 4, "shard": 2}, ("replicate", "shard"), shard=1),
    *(Case(TP, ("dp",), cut=cut, shard=shard) for cut in (0, 1) for shard in (0, 1)),
    *(Case(HSDP_TP, ("replicate", "shard"), cut=cut, shard=shard) for cut in (0, 1) for shard in (0, 1)),
]
SPMD_CASES = [
    Case({"dp": 8}, dims={"shard": "dp"}),
    Case({"dp": 8}, dims={"replicate": "dp"}),
    Case({"a": 2, "b": 4}, dims={"replicate": "a", "shard": "b"}),
    Case({"a": 2, "b": 4}, dims={"shard": ("a", "b")}),
    Case(TP, dims={"shard": "dp"}, cut=0),
    Case(TP, dims={"shard": "dp"}, cut=1),
    Case(TP, dims={"replicate": "dp"}, cut=0),
    Case({"tp": 2, "dp": 4}, dims={"shard": "dp"}, cut=0),
    Case(HSDP_TP, dims={"replicate": "replicate", "shard": "shard"}, cut=0),
    Case(HSDP_TP, dims={"replicate": "replicate", "shard": "shard"}, cut=1),
    Case({"a": 2, "b": 2, "tp": 2}, dims={"shard": ("a", "b")}, cut=0),
    Case({"a": 2, "b": 2, "tp": 2}, dims={"shard": ("a", "b")}, cut=1),
    Case({"a": 2, "b": 2, "tp": 2}, dims={"replicate": ("a", "b")}, cut=0),
    Case({"c": 2, "a": 2, "b": 2}, dims={"replicate": "c", "shard": ("a", "b")}),
]
SHORT = [CASES[0], CASES[3], CASES[5], CASES[9], CASES[12], *SPMD_CASES[2:4], SPMD_CASES[5], SPMD_CASES[8]]
if not hasattr(torch_fsdp, "DataParallelMeshDims"):  # up to torch 2.12 there is nothing to compare with
    SPMD_CASES = []


def module_of(case: Case, mesh: DeviceMesh) -> nn.Module:
    """Parameters of many shapes, placed as ``case`` says; the same whenever it is called."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    for index, shape in enumerate(SHAPES):
        if case.shard >= len(shape) or (case.cut or 0) >= len(shape):
            continue
        if any(shape[dim] % 8 for dim in (case.cut or 0, case.shard % len(shape)) if dim):
            continue  # torch wants dims behind the first to be even
        whole: Tensor = torch.randn(shape, generator=generator)
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if case.cut is not None:
            placements[(mesh.mesh_dim_names or ()).index("tp")] = Shard(case.cut)
        if case.data is None:
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        elif case.cut is not None:
            whole = distribute_tensor(whole, mesh["tp"], [Shard(case.cut)], src_data_rank=None)
        module.register_parameter(f"p{index}", nn.Parameter(whole))
    module.forward = lambda: None  # type: ignore[assignment,method-assign]
    return module


def sharded_with(implementation: Any, case: Case, mesh: DeviceMesh) -> dict[str, DTensor]:
    module = module_of(case, mesh)
    options: dict[str, Any] = {"mesh": mesh if case.data is None or mesh.ndim == 1 else mesh[case.data]}
    if case.dims is not None:
        options["dp_mesh_dims"] = implementation.DataParallelMeshDims(**case.dims)
    if case.shard:
        options["shard_placement_fn"] = lambda parameter: Shard(case.shard)
    implementation.fully_shard(module, **options)
    found = dict(module.named_parameters())
    assert found and all(isinstance(parameter, DTensor) for parameter in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("case", others_full([*CASES, *SPMD_CASES], SHORT), ids=str)  # 1 s each
def test_parameters_lie_where_torch_puts_them(case: Case) -> None:
    for rank in range(case.world_size):
        with fake_world(case.world_size, rank):
            mesh = init_device_mesh("cpu", tuple(case.axes.values()), mesh_dim_names=tuple(case.axes))
            theirs, ours = (sharded_with(each, case, mesh) for each in (torch_fsdp, fsdp2))
            assert list(theirs) == list(ours)
            for name, expected in theirs.items():
                found = ours[name]
                assert found.placements == expected.placements, name
                assert torch.equal(found.device_mesh.mesh, expected.device_mesh.mesh), name
                assert found.device_mesh.mesh_dim_names == expected.device_mesh.mesh_dim_names, name
                assert (found.shape, found.stride()) == (expected.shape, expected.stride()), name
                local, expected_local = found._local_tensor, expected._local_tensor
                assert local.numel() == expected_local.numel(), name
                if local.numel():  # of parts without elements torch loses the other sizes in some cases
                    assert torch.equal(local, expected_local) and local.stride() == expected_local.stride(), name


# ---- what `sharding_of` and `requested_placement` refuse ------------------------------------------------------------


def data_parallel(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataParallelMesh:
    return DataParallelMesh.from_info(mesh_info(mesh, dims))


@contextmanager
def world(**axes: int) -> Iterator[DeviceMesh]:
    """Rank 1 on a mesh with these dims."""
    size = 1
    for each in axes.values():
        size *= each
    with fake_world(size, 1):
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def parameter_on(mesh: DeviceMesh, *placements: Placement, shape: tuple[int, ...] = (8, 8)) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None))


def test_a_parameter_of_no_dims_is_replicated() -> None:
    with world(replicate=2, shard=2, tp=2) as mesh:
        parameter = nn.Parameter(torch.tensor(1.0))
        dim, found = requested_placement(None, parameter, "x", data_parallel(mesh["replicate", "shard"]))
        assert dim is None
        assert sharding_of(parameter, dim, found, "'x'").spec.placements == (Replicate(), Replicate())
        both = sharding_of(parameter_on(mesh["tp"], Replicate(), shape=()), dim, found, "'x'")
        assert both.spec.placements == (Replicate(), Replicate(), Replicate())
        with pytest.raises(FSDPValueError, match="'x' has 0 dims"):
            requested_placement(lambda _: Shard(0), parameter, "x", found)


def test_strides_are_those_of_the_parameter_if_it_is_dense() -> None:
    with world(shard=4) as mesh:
        for tensor, stride in ((torch.zeros(3, 8).t(), (1, 8)), (torch.zeros(8, 6)[:, :3], (3, 1))):
            sharding = sharding_of(nn.Parameter(tensor), 1, data_parallel(mesh), "'x'")
            assert sharding.spec.tensor_meta.stride == stride


def test_meshes_must_be_slices_of_one() -> None:
    with world(dp=2, tp=2) as mesh:
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
        message = r"'x'.*cannot be combined.*slices of one mesh.*mesh\['dp'\].*sharded again"
        with pytest.raises(FSDPValueError, match=message):
            sharding_of(parameter_on(other, Shard(0)), 0, data_parallel(mesh["dp"]), "'x'")


@for_each(
    ("make", "message"),
    [
        (lambda mesh: nn.Parameter(torch.zeros(8)), "'x' is a plain tensor; with dp_mesh_dims every parameter must"),
        (lambda mesh: parameter_on(mesh["tp"], Shard(0)), "'x'.*on the mesh|'x'.*mesh"),
        (lambda mesh: parameter_on(mesh, Shard(0), Replicate()), r"'x' has placement .*'dp'; it must be Replicate"),
    ],
)
def test_on_a_whole_mesh_parameters_are_replicated_dtensors(
    make: Callable[[DeviceMesh], nn.Parameter], message: str
) -> None:
    with world(dp=2, tp=2) as mesh:
        dims = DataParallelMeshDims(shard="dp")
        with pytest.raises(FSDPValueError, match=message):
            sharding_of(make(mesh), 0, data_parallel(mesh, dims), "'x'")


def test_the_requested_dim_is_counted_from_either_end() -> None:
    with world(shard=4) as mesh:
        default, parameter = data_parallel(mesh), nn.Parameter(torch.zeros(4, 4, 4))
        asked = [requested_placement(lambda p, a=a: a, parameter, "x", default) for a in (None, Shard(1), Shard(-1))]
        assert asked == [(0, default), (1, default), (2, default)]
        assert requested_placement(None, parameter, "x", default) == (0, default)
        for dim in (3, -4):
            with pytest.raises(FSDPValueError, match="parameter 'x' has 3 dims"):
                requested_placement(lambda p, dim=dim: Shard(dim), parameter, "x", default)


@for_each(
    ("answer", "message"),
    [
        (0, "must return Shard"),
        (Replicate(), "must return Shard"),
        (fsdp2.RaggedShard((2, 2)), "must return Shard"),
        (fsdp2.ShardPlacementResult(fsdp2.RaggedShard((2, 2)), None), "mesh_info for parameter 'x'"),  # type: ignore[arg-type]
        (fsdp2.ShardPlacementResult(Replicate(), None), "mesh_info for parameter 'x'"),  # type: ignore[arg-type]
        (fsdp2.ShardPlacementResult(Shard(0), "mesh"), "mesh_info for parameter 'x'"),
    ],
)
def test_other_answers_are_refused(answer: Any, message: str) -> None:
    with world(shard=4) as mesh, pytest.raises(FSDPValueError, match=message) as refused:
        requested_placement(lambda p: answer, nn.Parameter(torch.zeros(4)), "x", data_parallel(mesh))
    if "must return" in message:
        for form in ("Shard(i)", "Owned(rank)", "RowBlocks(rows)"):
            assert str(refused.value).count(form) == 1


def test_an_answer_may_name_a_mesh_of_either_kind_and_of_torchs_classes() -> None:
    with world(a=2, b=2) as mesh:
        default, parameter = data_parallel(mesh["b"]), nn.Parameter(torch.zeros(4, 4))
        infos = [
            fsdp2.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
            torch_fsdp._fully_shard._fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
        ]
        for info in infos:
            answer = fsdp2.ShardPlacementResult(Shard(1), info)
            dim, found = requested_placement(lambda p, answer=answer: answer, parameter, "x", default)
            assert (dim, found.shard_size, found.replicate_size) == (1, 2, 2)
        replicated = fsdp2.ShardPlacementResult(None, fsdp2.DDPMeshInfo(mesh["a"], replicate_mesh_dim=0))
        with pytest.raises(FSDPValueError, match="no dim to shard over"):
            requested_placement(lambda p: replicated, parameter, "x", default)
