"""`clip_grad_norm_` over any mix of parameters, against the unsharded gradients clipped by torch."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp2 import (
    FSDPRuntimeError,
    FSDPValueError,
    clip_grad_norm_,
    clip_grads_with_norm_,
    fully_shard,
    get_total_norm,
)
from tests.harness import Reference, assert_same, assert_sharded_same, multi_rank
from tests.harness.compare import gradients_of
from tests.harness.models import MLP
from tests.harness.shared.clipping import (
    MAX_NORM,
    NORMS,
    ROUNDED,
    TRAINED,
    Kind,
    all_reduces,
    assert_clips,
    assert_plain_and_the_same_everywhere,
    distribute,
    expected_norm,
    make,
    named,
    named_mesh,
)
from tests.harness.shared.optimizers import loss_of
from tests.harness.shared.training import CASE, shard

ORDERS = [2.0, 1.0, 3.0, 0.5, float("inf")]


# ---- a module ------------------------------------------------------------------------------------


class _Mixed(nn.Module):
    """Sharded layers, one whose weight is ignored, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.other = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Through all layers."""
        return self.other(torch.tanh(self.last(torch.tanh(self.first(x)))))


def _mixed(world_size: int) -> tuple[nn.Module, nn.Module]:
    """Sharded, and a plain one with the gradients of all ranks."""
    model, plain = _Mixed(), _Mixed()
    fully_shard(model, ignored_params={model.other.weight})
    _backward_of_mixed(model, plain, world_size)
    return model, plain


def _backward_of_mixed(model: nn.Module, plain: nn.Module, world_size: int) -> None:
    batches = [torch.randn(2, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    model(batches[dist.get_rank()]).square().sum().backward()
    for batch in batches:
        (plain(batch).square().sum() / world_size).backward()
    ignored = model.other.weight
    assert ignored.grad is not None and plain.other.weight.grad is not None
    ignored.grad.copy_(plain.other.weight.grad)


@pytest.mark.full
@multi_rank(2, 4)
def test_a_module_stands_for_all_of_its_parameters(world_size: int) -> None:
    """In its first call and in later ones, after zero_grad, and with an ignored parameter replaced in between."""
    model, plain = _mixed(world_size)
    for step in range(4):
        norm = clip_grad_norm_(model, 0.5)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(norm, expected)
        for name, parameter in plain.named_parameters():
            mine = dict(model.named_parameters())[name].grad
            whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
            torch.testing.assert_close(whole, parameter.grad)
        model.zero_grad()
        plain.zero_grad()
        assert clip_grad_norm_(model, 0.5) == 0.0, "nothing is remembered of gradients"
        if step == 1:
            for each in (model, plain):
                each.other.bias.requires_grad_(False)
        _backward_of_mixed(model, plain, world_size)


@multi_rank(2)
def test_modules_that_are_no_root(world_size: int) -> None:
    """Before the first forward, a part of the model, a plain module around it, and one that was changed since."""
    model = shard()
    assert clip_grad_norm_(model, 1.0) == 0.0
    for _ in range(2):
        model.zero_grad()
        loss_of(CASE, model).backward()
        record = Reference(CASE, world_size=world_size).step()
        part = next(name for name, child in model.named_children() if any(True for _ in child.parameters()))
        for module, prefix in ((nn.ModuleList([model]), ""), (model.get_submodule(part), f"{part}."), (model, "")):
            found = [value for name, value in record.gradients.items() if name.startswith(prefix) and value is not None]
            torch.testing.assert_close(clip_grad_norm_(module, 1e9), nn.utils.get_total_norm(found))
    model.extra = nn.Linear(2, 2)
    model.extra.weight.grad = torch.full((2, 2), 100.0)
    assert clip_grad_norm_(model, 1e9) >= 200.0, "what was added since is found"


# ---- norms ---------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", ORDERS)
def test_every_order(norm_type: float, foreach: bool | None) -> None:
    """Rows are uneven, and some ranks hold none of the last layer: torch has no maximum of that."""
    model, plain = shard(), CASE.build()
    loss_of(CASE, model).backward()
    record = Reference(CASE, world_size=dist.get_world_size()).step()
    for name, parameter in plain.named_parameters():
        parameter.grad = record.gradients[name]
    norm = clip_grad_norm_(model.parameters(), MAX_NORM, norm_type, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM, norm_type)
    assert_plain_and_the_same_everywhere(norm)
    assert_same("norm", {"": norm}, {"": expected}, tolerance=TRAINED)
    clipped = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("clipped gradients", gradients_of(model), clipped, tolerance=TRAINED)


def with_zeros(kinds: list[Kind], zero: set[int], row: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those of `make`: gradients in ``zero`` are all zeros, others but in their row ``row``."""
    sharded, whole = make(kinds)
    for index, (mine, yours, kind) in enumerate(zip(sharded, whole, kinds, strict=True)):
        if mine.grad is not None and yours.grad is not None:
            value = torch.zeros_like(yours.grad)
            if index not in zero:
                value[row] = 1.0
            yours.grad.copy_(value)
            with torch.no_grad():
                mine.grad.copy_(distribute(value, kind))
    return sharded, whole


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("row", [0, 2])
def test_order_zero_counts_gradients_like_torch(row: int) -> None:
    """Each once, however many ranks have elements of it that are not zero, and whichever they are."""
    everyone, grid = named_mesh(dp=4), named_mesh(dp=2, tp=2)
    kinds = [
        Kind((10, 3), everyone, (Shard(0),)),
        Kind((3, 3), everyone, (Shard(0),)),  # of which one rank has nothing
        Kind((8, 6), grid, (Shard(0), Shard(1))),
        Kind((8, 6), grid["dp"], (Shard(0),)),
        Kind((6, 6), grid, (Replicate(), Shard(0))),
        Kind((6, 6), grid, (Replicate(), Replicate())),
        Kind((4, 4), grid["tp"], (Shard(0),), has_gradient=False),
        Kind((3, 3)),
    ]
    for zero in (set(), {0, 2, 7}, {1, 3, 4}, set(range(len(kinds)))):
        sharded, whole = with_zeros(kinds, zero, row)
        expected = nn.utils.clip_grad_norm_(whole, 2.5, 0)
        assert expected == len(set(range(len(kinds))) - zero - {6})
        with all_reduces() as carried:
            norm = clip_grad_norm_(sharded, 2.5, 0)
        assert carried == [2, 2, 3]  # a number for each parameter: over all ranks, dp, tp
        assert_plain_and_the_same_everywhere(norm)
        assert norm == expected
        gradients = [named([each.grad for each in every]) for every in (sharded, whole)]
        assert_sharded_same("clipped gradients", *gradients, tolerance=NORMS)


@multi_rank(2)
def test_order_zero_where_one_rank_has_replaced_a_gradient() -> None:
    """Ranks that know how the gradients lie and ranks that look at each speak of the same ones."""
    model = nn.Sequential(*[nn.Linear(4, rows, bias=False) for rows in (2, 6, 4)])  # which do not lie so: largest first
    model.forward = lambda x: torch.cat([each(x) for each in model], 1).sum()  # type: ignore[method-assign, assignment]
    fully_shard(model)
    for replaced in (False, True):
        model(torch.ones(2, 4)).backward()
        small, large, middle = model.parameters()
        for each, rank in ((small, 0), (large, 1)):  # each has elements on one rank alone, the third on none
            each.grad.to_local().fill_(float(dist.get_rank() == rank))
        middle.grad.to_local().zero_()
        if replaced and dist.get_rank() == 0:
            large.grad = large.grad.clone()
        assert clip_grad_norm_(model.parameters(), 1.0, 0.0).item() == 2
        model.zero_grad()


@multi_rank(4)
def test_order_zero_over_further_ranks() -> None:
    """Stages add up; a gradient that is sharded over a dim of ``mesh`` counts once there."""
    grid = named_mesh(pp=2, dp=2)
    stages = [[Kind((6, 3), grid["dp"], (Shard(0),)), Kind((4, 2))], [Kind((11, 2), grid["dp"], (Shard(0),))]]
    sharded, _ = with_zeros(stages[grid.get_local_rank("pp")], set(), 0)
    assert clip_grad_norm_(sharded, 1.0, 0, mesh=grid["pp"]) == 3
    sharded, _ = with_zeros(stages[grid.get_local_rank("pp")], set(), 0)
    assert clip_grad_norm_(sharded, 1.0, 0, mesh=grid) == 4  # the plain one is another on both ranks of dp


# ---- mixtures ------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("norm_type", ORDERS)
def test_four_meshes(norm_type: float) -> None:
    """Dense parameters over all ranks, others over two axes or one of them, experts on a mesh of their own."""
    everyone, grid, experts = named_mesh(dp=4), named_mesh(dp=2, tp=2), named_mesh(edp=2, ep=2)
    kinds = [
        Kind((10, 3), everyone, (Shard(0),)),
        Kind((8, 6), grid, (Shard(0), Shard(1))),
        Kind((8, 6), grid["dp"], (Shard(0),)),
        Kind((6, 6), grid, (Replicate(), Shard(0))),
        Kind((6, 6), grid, (Shard(0), Replicate())),
        Kind((2, 4, 3), experts, (Shard(1), Shard(0))),
        Kind((2, 3), experts["ep"], (Shard(0),)),
        Kind((3, 3)),
    ]
    # Slots: {all}, {dp, tp}, {dp}, {tp}; experts: process groups of the same ranks are the same.
    k = 2 if norm_type == float("inf") else 1
    assert_clips(kinds, norm_type=norm_type, carried=[k, 2 * k, 2 * k])


@multi_rank(4)
@pytest.mark.parametrize("seed", range(8))
def test_drawn_mixtures(seed: int) -> None:
    """Any meshes, placements, sizes (many smaller than the ranks) and dtypes, with and without gradient."""
    draw = random.Random(seed)
    grid, cube = named_mesh(dp=2, tp=2), named_mesh(replicate=2, shard=1, tp=2)
    meshes = [None, named_mesh(dp=4), grid, grid["dp"], grid["tp"], named_mesh(edp=2, ep=2), cube]

    def kind() -> Kind:
        mesh = draw.choice(meshes)
        placements = tuple(draw.choice([Shard(0), Shard(1), Replicate()]) for _ in range(mesh.ndim if mesh else 0))
        shape = (draw.randrange(10), draw.randint(1, 6))
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        return Kind(shape, mesh, placements, dtype, has_gradient=draw.random() < 0.8)

    kinds = [Kind((3, 3)), *(kind() for _ in range(12))]
    assert_clips(kinds, norm_type=draw.choice(ORDERS), foreach=draw.choice([None, False]), tolerance=ROUNDED)


@multi_rank(2, 4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_several_dtypes(norm_type: float, world_size: int) -> None:
    dp = named_mesh(dp=world_size)
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    kinds = [Kind((9, 5), dp, (Shard(0),), dtype) for dtype in dtypes] + [Kind((3,), dtype=torch.bfloat16)]
    assert_clips(kinds, norm_type=norm_type, carried=[2 if norm_type == float("inf") else 1], tolerance=ROUNDED)


@multi_rank(2)
def test_narrow_gradients_have_a_float32_norm(world_size: int) -> None:
    """4,096 ones: in bfloat16 their squares would not add up beyond 256."""
    sharded, _ = make([Kind((4096,), named_mesh(dp=world_size), (Shard(0),), torch.bfloat16)] * 3)
    for parameter in sharded:
        parameter.grad = torch.ones_like(parameter)
    norm = clip_grad_norm_(sharded, 1.0)
    assert norm.dtype == torch.float32
    assert torch.allclose(norm, torch.tensor(3 * 4096.0).sqrt(), rtol=1e-6)


# ---- gradients that are not there ----------------------------------------------------------------


@multi_rank(2, 4)
def test_what_is_sent_does_not_depend_on_gradients(world_size: int) -> None:
    """Each rank lacks others: nothing hangs, and the norm is that of what there is."""
    dp = named_mesh(dp=world_size)
    sharded, _ = make([Kind((2 * world_size, 3), dp, (Shard(0),))] * 3 + [Kind((3,), dp, (Replicate(),))])
    rank, total = dist.get_rank(), torch.zeros(())
    for index, parameter in enumerate(sharded[:3]):
        for owner in range(world_size):
            if owner % 3 != index:
                part = parameter.grad.full_tensor().chunk(world_size)[owner]  # type: ignore[union-attr]
                total += part.square().sum()
    for index, parameter in enumerate(sharded):
        if rank % 3 == index or index == 3:
            parameter.grad = None
    with all_reduces() as carried:
        norm = clip_grad_norm_(sharded, MAX_NORM)
    assert carried == [1]
    assert_plain_and_the_same_everywhere(norm)
    assert torch.allclose(norm, total.sqrt(), rtol=NORMS.rtol)


@multi_rank(2)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 0.0])
def test_no_gradient_anywhere(norm_type: float) -> None:
    model = shard()
    with all_reduces() as carried:
        assert clip_grad_norm_(model.parameters(), MAX_NORM, norm_type) == 0
    assert len(carried) == 1


# ---- not finite ----------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_error_if_nonfinite_is_raised_on_every_rank(norm_type: float, value: float, world_size: int) -> None:
    """The value lies in one rank's shard only."""
    model = shard()
    loss_of(CASE, model).backward()
    for bad_rank in (0, world_size - 1):
        gradient = model[0].weight.grad.to_local()
        if dist.get_rank() == bad_rank:
            gradient[0, 0] = value
        before = [each.grad.to_local().clone() for each in model.parameters()]
        with pytest.raises(FSDPRuntimeError, match=r"total norm of order .* is (nan|inf)"):
            clip_grad_norm_(model.parameters(), MAX_NORM, norm_type, error_if_nonfinite=True)
        for parameter, gradients in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad.to_local().nan_to_num(), gradients.nan_to_num()), "nothing was scaled"
        norm = get_total_norm([each.grad for each in model.parameters()], norm_type)
        assert norm.isnan() if value != value else norm == float("inf")
        if dist.get_rank() == bad_rank:
            gradient[0, 0] = 0.0


# ---- mistakes ------------------------------------------------------------------------------------


@multi_rank(2)
def test_partial_gradients_are_refused_by_name() -> None:
    model = shard()
    loss_of(CASE, model).backward()
    weight = model[2].weight
    mesh = named_mesh(dp=2)
    weight.grad = DTensor.from_local(torch.ones(weight.shape), mesh, [Partial()], run_check=False)
    with pytest.raises(FSDPValueError, match=r"gradient of parameter '2.weight' has placement .*Reduce it first"):
        clip_grad_norm_(model.parameters(), MAX_NORM)


@multi_rank(2)
def test_gradients_spread_otherwise_are_refused() -> None:
    sharded, _ = make([Kind((3,)), Kind((4, 2), named_mesh(dp=2), (Shard(0),))])
    sharded[1].grad = sharded[1].grad.redistribute(placements=[Replicate()])  # type: ignore[union-attr]
    with pytest.raises(FSDPValueError, match=r"number 1 of those passed, of shape \(4, 2\) is spread over other"):
        clip_grad_norm_(sharded, MAX_NORM)
    sharded[1].grad = sharded[1].grad.redistribute(placements=[Shard(1)])  # type: ignore[union-attr]
    assert clip_grad_norm_(sharded, MAX_NORM) > 0  # over the same ranks, though cut otherwise


# ---- further ranks -------------------------------------------------------------------------------


@multi_rank(4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("empty_stage", [False, True])
def test_pipeline_stages(norm_type: float, empty_stage: bool) -> None:
    """The first stage has other parameters than the second, which may have none at all."""
    grid = named_mesh(pp=2, dp=2)
    first = [Kind((6, 3), grid["dp"], (Shard(0),)), Kind((4,)), Kind((5, 2), grid["dp"], (Shard(0),))]
    second = [] if empty_stage else [Kind((11, 2), grid["dp"], (Shard(0),))]
    stages = [make(first), make(second)]
    sharded, whole = stages[grid.get_local_rank("pp")]
    norm = clip_grad_norm_(sharded, MAX_NORM, norm_type, mesh=grid["pp"])
    expected = expected_norm([each.grad for _, stage in stages for each in stage], norm_type)
    assert_plain_and_the_same_everywhere(norm)
    assert_same("norm", {"": norm}, {"": expected}, tolerance=NORMS)
    nn.utils.clip_grads_with_norm_(whole, MAX_NORM, expected)
    gradients = [named([each.grad for each in every]) for every in (sharded, whole)]
    assert_sharded_same("clipped gradients", *gradients, tolerance=NORMS)


@multi_rank(4)
def test_a_further_mesh_does_not_count_twice() -> None:
    """Plain tensors that differ between ranks (experts) are summed over it; what is sharded over it already is not."""
    grid, again = named_mesh(pp=2, dp=2), named_mesh(pp=2, dp=2)
    sharded, whole = make([Kind((6, 3), grid["dp"], (Shard(0),)), Kind((4,))])
    sharded[1].grad *= dist.get_rank()  # type: ignore[operator]
    first, second = (expected_norm([each.grad], 2.0).square() for each in whole)
    with all_reduces() as carried:
        norm = clip_grad_norm_(sharded, MAX_NORM, mesh=again)
    assert carried == [1, 1]
    expected = (2 * first + second * (1 + 4 + 9)).sqrt()  # both stages have the first
    assert_same("norm", {"": norm}, {"": expected}, tolerance=NORMS)


@multi_rank(2)
def test_a_process_group_becomes_a_mesh() -> None:
    group = dist.new_group([0, 1])
    norm = get_total_norm(torch.full((), 3.0 + dist.get_rank()), mesh=DeviceMesh.from_group(group, "cpu"))
    assert norm == 5.0


# ---- around --------------------------------------------------------------------------------------


@multi_rank(2)
def test_the_two_halves() -> None:
    """Also with a norm that torch made, a DTensor. The whole adds up gradients of one buffer in another order."""
    models = [shard(MLP) for _ in range(3)]
    for model in models:
        loss_of(MLP, model).backward()
    norms: list[Tensor] = [clip_grad_norm_(models[0].parameters(), MAX_NORM)]
    for model, total_norm in zip(models[1:], (get_total_norm, nn.utils.get_total_norm), strict=True):
        norms.append(total_norm([each.grad for each in model.parameters()]))
        clip_grads_with_norm_(model.parameters(), MAX_NORM, norms[-1])
    assert torch.allclose(norms[0], norms[1], rtol=NORMS.rtol, atol=NORMS.atol) and isinstance(norms[2], DTensor)
    for a, b, c in zip(*(model.parameters() for model in models), strict=True):
        for other in (b, c):
            assert torch.allclose(a.grad.to_local(), other.grad.to_local(), rtol=NORMS.rtol, atol=NORMS.atol)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("passed", ["originals", "unsharded"])
def test_predecessors_stand_for_the_sharded_parameters(passed: str) -> None:
    """Those that an optimizer may have been built on, too early."""
    model = CASE.build()
    originals = list(model.parameters())
    shard(CASE, model)
    reference = Reference(CASE, world_size=2, max_norm=MAX_NORM)
    model.set_reshard_after_backward(False)
    loss_of(CASE, model).backward()
    parameters = originals if passed == "originals" else list(model.parameters())
    assert not any(isinstance(each, DTensor) for each in parameters)
    record = reference.step()
    norm = clip_grad_norm_(parameters, MAX_NORM)
    assert_same("norm", {"": norm}, {"": record.gradient_norm}, tolerance=TRAINED)
    model.reshard()
    assert_same("norm", {"": clip_grad_norm_(model.parameters(), 1.0)}, {"": torch.tensor(MAX_NORM)}, tolerance=TRAINED)


@pytest.mark.full
@multi_rank(2)
def test_a_model_whose_gradients_were_clipped_is_collected() -> None:
    """What a root remembers of its parameters goes with it."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()
    clip_grad_norm_(model, 1.0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@multi_rank(2)
def test_norms_do_not_count_what_a_hook_leaves_in_the_padding(world_size: int) -> None:
    """The hook may be set when gradients have been clipped."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(5, 3))
    model(torch.ones(2, 5)).square().sum().backward()
    clip_grad_norm_(model, 1.0)
    model.zero_grad()
    model.set_all_reduce_hook(lambda flat: flat.add_(torch.arange(1.0, flat.numel() + 1)))
    model(torch.ones(2, 5)).square().sum().backward()
    whole = [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
    expected = torch.cat([each.flatten() for each in whole]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1.0), expected)
    for parameter, before in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), before / (expected + 1e-6))  # type: ignore[union-attr]
