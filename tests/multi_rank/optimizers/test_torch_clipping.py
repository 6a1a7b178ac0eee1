"""What `fsdp2.compat.install` puts in the place of torch's clipping functions: the same bits, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils.clip_grad import clip_grad_norm_ as bound_early
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2.compat
from fsdp2 import Owned, fully_shard
from fsdp2.core.mesh import default_mesh
from fsdp2.optim import torch_clipping
from fsdp2.optim.delivered import delivered_of
from tests.harness import Reference, assert_same, fake_world, multi_rank
from tests.harness.models import PARTLY_USED, UNEVEN_MLP, ModelCase
from tests.harness.shared.clipping import MAX_NORM, TRAINED, Kind, make, named_mesh
from tests.harness.shared.optimizers import loss_of
from tests.harness.shared.training import CASE, shard, trainable

TORCHS = {name: getattr(nn.utils, name) for name in ("get_total_norm", "clip_grads_with_norm_", "clip_grad_value_")}
ORDERS = [2.0, 1.0, 3.0, float("inf"), 0.0]


def outcome(function: Callable[[], object]) -> object:
    """What it returns, or what it raises."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def assert_alike(what: str, mine: object, torchs: object) -> None:
    """The same kind of tensor with the same bits, or the same error."""
    assert type(mine) is type(torchs), (what, mine, torchs)
    if not isinstance(mine, Tensor) or not isinstance(torchs, Tensor):
        assert mine == torchs, what
        return
    if isinstance(mine, DTensor) and isinstance(torchs, DTensor):
        assert mine.device_mesh == torchs.device_mesh, what
        if torchs.placements != mine.placements:  # of the largest, which torch leaves in parts
            assert any(each.is_partial("max") for each in torchs.placements), what
            assert all(each.is_replicate() for each in mine.placements), what
            torchs = torchs.redistribute(placements=mine.placements)
        mine, torchs = mine.to_local(), torchs.to_local()
    assert mine.dtype == torchs.dtype
    assert_same(what, {"": torch.nan_to_num(mine, nan=77.0)}, {"": torch.nan_to_num(torchs, nan=77.0)})


def assert_gradients_same(mine: Sequence[Tensor], torchs: Sequence[Tensor]) -> None:
    """Bit for bit, each like its counterpart."""
    for one, other in zip(mine, torchs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_alike("gradient", one.grad, other.grad)


def assert_clip_alike(kinds: Sequence[Kind], **arguments: Any) -> object:
    """Clip gradients of ``kinds`` with either function. Collective."""
    first, _ = make(kinds)
    second, _ = make(kinds)
    mine = outcome(lambda: torch_clipping.clip_grad_norm_(first, MAX_NORM, **arguments))
    torchs = outcome(lambda: nn.utils.clip_grad_norm_(second, MAX_NORM, **arguments))
    assert_alike("norm", mine, torchs)
    assert_gradients_same(first, second)
    halves, _ = make(kinds)
    gradients = [each.grad for each in halves if each.grad is not None]
    total = outcome(lambda: torch_clipping.get_total_norm(gradients, **arguments))
    assert_alike("norm by itself", total, torchs)
    if isinstance(total, Tensor):
        torch_clipping.clip_grads_with_norm_(halves, MAX_NORM, total, arguments.get("foreach"))
        assert_gradients_same(halves, second)
    return mine


EVERYWHERE = [(7, 3), (8,), (11, 2)]  # uneven, with rows on each of four ranks
SHAPES = [*EVERYWHERE, (1, 7), (5, 3)]  # and without rows on some


def kinds_on(mesh: DeviceMesh, *placements: Any, shapes: Sequence[Any] = SHAPES, **options: Any) -> list[Kind]:
    return [Kind(shape, mesh, placements, **options) for shape in shapes]


@multi_rank(1, 2, 4)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", ORDERS)
def test_one_axis(norm_type: float, foreach: bool | None, world_size: int) -> None:
    mesh = named_mesh(shard=world_size)
    shapes = EVERYWHERE if norm_type == float("inf") else SHAPES  # torch's own raises on ranks without rows alone
    assert_clip_alike(kinds_on(mesh, Shard(0), shapes=shapes), norm_type=norm_type, foreach=foreach)
    assert_clip_alike(kinds_on(mesh, Replicate()), norm_type=norm_type, foreach=foreach)


@multi_rank(4)
def test_the_largest_where_some_ranks_have_no_rows() -> None:
    """Torch's own raises on those, and the others wait for them."""
    parameters, whole = make(kinds_on(named_mesh(shard=4), Shard(0)))
    found = torch_clipping.clip_grad_norm_(parameters, MAX_NORM, float("inf"))
    expected = nn.utils.clip_grad_norm_(whole, MAX_NORM, float("inf"))
    assert isinstance(found, DTensor)
    assert_same("norm", {"": found.full_tensor()}, {"": expected})
    for mine, other in zip(parameters, whole, strict=True):
        assert isinstance(mine.grad, DTensor)
        assert_same("gradient", {"": mine.grad.full_tensor()}, {"": other.grad})


@multi_rank(4)
@pytest.mark.parametrize("norm_type", ORDERS)
def test_two_axes(norm_type: float) -> None:
    """Replicas; two sharded dims; both in one list, and dims cut either way."""
    mesh = named_mesh(one=2, two=2)
    for placements in ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(0), Shard(1))):
        cut = [Kind((6, 5), mesh, placements), Kind((8, 3), mesh, placements)]
        assert_clip_alike(cut, norm_type=norm_type)
    assert_clip_alike([Kind((6, 5), mesh, (Replicate(), Shard(d))) for d in (0, 1)], norm_type=norm_type)
    mixed = [Kind((6, 5), mesh, (Shard(0), Shard(1))), Kind((8, 3), mesh, (Shard(0), Replicate()))]
    assert_clip_alike(mixed, norm_type=norm_type)


@multi_rank(2)
def test_what_does_not_lie_alike_is_torchs() -> None:
    """Plain tensors, several dtypes, sums that are not reduced, missing gradients, none at all."""
    mesh = named_mesh(shard=2)
    plain = [Kind((3, 2)), Kind((4,))]
    assert_clip_alike(plain)
    assert_clip_alike(kinds_on(mesh, Shard(0), dtype=torch.bfloat16))
    assert_clip_alike([*kinds_on(mesh, Shard(0)), *kinds_on(mesh, Shard(0), dtype=torch.float64)])
    assert_clip_alike([*kinds_on(mesh, Shard(0)), *plain])
    assert_clip_alike([*kinds_on(mesh, Shard(0)), Kind((3,), mesh, (Shard(0),), has_gradient=False)])
    assert_clip_alike(kinds_on(mesh, Shard(0), has_gradient=False))
    sums = [torch.ones(4), torch.arange(3.0)]
    for norm in (nn.utils.get_total_norm, torch_clipping.get_total_norm):
        found = norm([DTensor.from_local(each, mesh, [Partial()]) for each in sums])
        assert isinstance(found, DTensor)
        expected = torch.linalg.vector_norm(2 * torch.cat(sums))
        assert_same("norm of sums", {"": found.full_tensor()}, {"": expected}, tolerance=TRAINED)


@multi_rank(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(value: float) -> None:
    """An error on every rank, and nothing is scaled; or scaled by what it is."""
    mesh = named_mesh(shard=2)
    for raises in (True, False):
        parameters, others = make(kinds_on(mesh, Shard(0)))[0], make(kinds_on(mesh, Shard(0)))[0]
        for each in (parameters, others):
            assert isinstance(each[0].grad, DTensor)
            each[0].grad.to_local().fill_(value)
        arguments: dict[str, Any] = {"error_if_nonfinite": raises}
        mine = outcome(lambda p=parameters, a=arguments: torch_clipping.clip_grad_norm_(p, 1.0, **a))
        torchs = outcome(lambda p=others, a=arguments: nn.utils.clip_grad_norm_(p, 1.0, **a))
        assert_alike("norm", mine, torchs)
        assert isinstance(mine, str) is raises
        assert_gradients_same(parameters, others)


@multi_rank(2)
def test_values_are_clamped() -> None:
    mesh = named_mesh(shard=2)
    for kinds in (kinds_on(mesh, Shard(0)), [*kinds_on(mesh, Shard(0)), Kind((3, 2))]):
        first, second = make(kinds)[0], make(kinds)[0]
        mine = outcome(lambda p=first: torch_clipping.clip_grad_value_(p, 0.25))
        torchs = outcome(lambda p=second: nn.utils.clip_grad_value_(p, 0.25))
        assert mine == torchs
        assert_gradients_same(first, second)


def test_generators_single_tensors_and_nothing() -> None:
    """Warnings too are torch's."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    assert torch_clipping.clip_grad_norm_(parameter, 1.0).item() == pytest.approx(12**0.5)
    assert torch_clipping.clip_grad_norm_((each for each in [parameter]), 1e9).item() == pytest.approx(1.0)
    with pytest.warns(UserWarning, match="empty generator"):
        assert torch_clipping.clip_grad_norm_((each for each in ()), 1.0).item() == 0
    assert torch_clipping.clip_grad_norm_([], 1.0).item() == 0


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [CASE, PARTLY_USED], ids=str)
def test_a_program_that_clips_trains_like_the_reference(case: ModelCase, world_size: int) -> None:
    """As it stands, whether it has torch's function from before or asks for it each time."""

    def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    with fsdp2.compat.install():
        for clip in (nn.utils.clip_grad_norm_, bound_early):
            model = shard(case)
            reference = Reference(case, world_size=world_size, make_optimizer=momentum, max_norm=MAX_NORM)
            optimizer = momentum(trainable(model))
            for step in range(3):
                record = reference.step()
                loss_of(case, model, step).backward()
                norm = clip(model.parameters(), MAX_NORM)
                assert isinstance(norm, DTensor) and record.gradient_norm is not None
                assert_same("norm", {"": norm.full_tensor()}, {"": record.gradient_norm}, tolerance=TRAINED)
                optimizer.step()
                optimizer.zero_grad()
                found = {name: each.full_tensor() for name, each in model.named_parameters()}
                assert_same(f"parameters {step}", found, record.parameters, tolerance=TRAINED)
    assert nn.utils.clip_grad_norm_ is bound_early
    assert {name: getattr(nn.utils, name) for name in TORCHS} == TORCHS


@multi_rank(2)
def test_owned_parameters_are_torchs_to_refuse() -> None:
    """Placements that torch does not know go the way that they go without us."""
    models = [UNEVEN_MLP.build() for _ in range(2)]
    for model in models:
        fully_shard(model, shard_placement_fn=lambda parameter: Owned(0))
        loss_of(UNEVEN_MLP, model).backward()
    mine = outcome(lambda: torch_clipping.clip_grad_norm_(models[0].parameters(), MAX_NORM))
    torchs = outcome(lambda: nn.utils.clip_grad_norm_(models[1].parameters(), MAX_NORM))
    assert_alike("norm", mine, torchs)


@multi_rank(1, 2, 4)
@pytest.mark.parametrize("norm_type", [2.0, 3.0, 0.0])  # inf is not taken so
@pytest.mark.parametrize("case", [CASE, UNEVEN_MLP], ids=str)
def test_gradients_as_they_were_delivered(case: ModelCase, norm_type: float) -> None:
    """The same bits; also once they were replaced, and where they are not finite: then padding remains zeros."""

    def trained(value: float | None) -> list[nn.Parameter]:
        model = shard(case)
        loss_of(case, model).backward()
        parameters = trainable(model)
        if value is not None:
            parameters[0].grad.to_local().fill_(value)  # type: ignore[union-attr]
        return parameters

    for value in (None, float("nan"), float("inf")):
        first, second, third, fourth = [trained(value) for _ in range(4)]
        before = [each.grad.to_local()._version for each in first]  # type: ignore[union-attr]
        for each in fourth:
            each.grad = each.grad.clone()  # type: ignore[union-attr]
        torchs = outcome(lambda p=second: nn.utils.clip_grad_norm_(p, MAX_NORM, norm_type))
        for parameters in (first, fourth):
            assert_alike("norm", outcome(lambda p=parameters: clip(p, norm_type)), torchs)
            assert_gradients_same(parameters, second)
        if isinstance(torchs, Tensor):
            torch_clipping.clip_grads_with_norm_(third, MAX_NORM, torchs)
            assert_gradients_same(third, second)
            for each, version in zip(first, before, strict=True):
                local = each.grad.to_local()  # type: ignore[union-attr]
                assert local._version > version or not local.numel() or norm_type == 0
        delivered = delivered_of(first)
        assert delivered is not None
        slices = delivered.slices()
        assert slices is not None
        of_parameters = sum(each.grad.to_local().isfinite().logical_not().sum() for each in first)  # type: ignore
        assert sum(each.isfinite().logical_not().sum() for each in slices) == of_parameters


def clip(parameters: list[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    return torch_clipping.clip_grad_norm_(parameters, MAX_NORM, norm_type)


class CountsDTensors(TorchDispatchMode):
    """How many operations there are, and reach DTensors."""

    count = every = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.every += 1
        self.count += any(issubclass(each, DTensor) for each in types)
        return func(*args, **(kwargs or {}))


def sharded(layers: int) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    return model


@pytest.mark.filterwarnings("ignore:fsdp2.compat.install.. comes too late")  # for models of other tests
def test_no_gradient_goes_through_dtensor() -> None:
    with fake_world(4):
        model = sharded(8)
        with CountsDTensors() as counted, fsdp2.compat.install():
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert counted.count == 0


def test_modules_that_were_sharded_by_themselves() -> None:
    """Over equal meshes: what `fully_shard` takes where none is given is one mesh, others need not be."""
    with fake_world(4):
        for mesh in (lambda: None, lambda: named_mesh(shard=4)):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 12), nn.Linear(12, 16))
            for module in (*model, model):
                fully_shard(module, mesh=mesh())
            model(torch.ones(2, 4)).sum().backward()
            meshes = {id(each.device_mesh) for each in model.parameters()}  # type: ignore[attr-defined]
            assert len(meshes) == (1 if mesh() is None else 3)
            with CountsDTensors() as counted:
                torch_clipping.clip_grad_norm_(model.parameters(), 1.0)
            assert counted.count == 0
    with fake_world(4):
        assert default_mesh() is not model[0].weight.device_mesh, "which is of a world that is gone"


def test_equal_gradients_cost_no_operation_each() -> None:
    with fake_world(4):
        found = []
        for layers in (4, 16):
            model = sharded(layers)
            torch_clipping.clip_grad_norm_(model.parameters(), 1.0)
            with CountsDTensors() as counted:
                torch_clipping.clip_grad_norm_(model.parameters(), 1.0)
            found.append(counted.every)
        assert found[0] == found[1] < 20, found


@pytest.mark.full  # 9 s
def test_compiled_programs_are_torchs() -> None:
    with fake_world(2):
        model = sharded(3)

        def clip() -> Tensor:
            return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        with fsdp2.compat.install():
            found = torch.compile(clip, backend="aot_eager")()
            assert isinstance(found, DTensor)
