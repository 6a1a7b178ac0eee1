"""`ShardedGradScaler`: the numbers of the unsharded run, all ranks skip together, and fewer operations than torch's."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    Owned,
    ShardedGradScaler,
    ShardPlacementResult,
    fully_shard,
)
from tests.harness import multi_rank
from tests.harness.compare import FUSED, Tolerance, assert_sharded_same, gradients_of, parameters_of, tolerance_for
from tests.harness.counting import Collectives
from tests.harness.models import MLP, PARTLY_USED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import CASE, loss_on, shard, trainable

SCALE = 2.0**10
HALF = Tolerance(0.02, 2e-3, "half precision, whose rounding differs with the order of sums")


def scaler_of(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler("cpu", init_scale=SCALE, **options)


def inf_in(parameter: Tensor, rank: int) -> None:
    """An infinity in the gradient that ``rank`` holds of ``parameter``."""
    if dist.get_rank() == rank:
        assert parameter.grad is not None
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        local.view(-1)[0] = float("inf")


def skips(scaler: ShardedGradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of ``optimizer`` is left out."""
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() in (SCALE, SCALE / 2)
    return scaler.get_scale() == SCALE / 2


def locals_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local().clone() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def train(
    case: ModelCase,
    model: nn.Module,
    optimizer: Any,
    world_size: int,
    tolerance: Tolerance | None,
    *,
    unscales: bool = True,
    **options: Any,
) -> None:
    """Scaling by a power of two is exact, so gradients and parameters are the reference's."""
    reference, scaler = Reference(case, world_size=world_size, **options), scaler_of()
    for _ in range(3):
        record = reference.step()
        for micro in range(reference.microbatches):
            scaler.scale(loss_on(case, model, record.step, dist.get_rank(), micro)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            assert_sharded_same("gradients", gradients_of(model), record.gradients, tolerance=tolerance)
        if reference.max_norm is not None:
            fsdp2.clip_grad_norm_(model.parameters(), reference.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert_sharded_same("parameters", parameters_of(model), record.parameters, tolerance=tolerance)
    assert scaler.get_scale() == SCALE


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, PARTLY_USED], ids=str)
@pytest.mark.parametrize("options", [{}, {"strategy": "replicate"}, {"offload_policy": CPUOffloadPolicy()}], ids=str)
def test_training_equals_the_reference(case: ModelCase, options: dict[str, Any], world_size: int) -> None:
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit, **options)
    train(case, model, adamw(trainable(model)), world_size, tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2, 4)
def test_accumulated_gradients_and_clipping(world_size: int) -> None:
    model = shard()
    clipped = Tolerance(1e-5, 1e-6, "norms are summed shard by shard")
    train(CASE, model, adamw(trainable(model)), world_size, clipped, microbatches=2, max_norm=0.1)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("make", ["local", "flat", "fused", "local fused", "foreach"])
def test_kinds_of_optimizers(make: str, world_size: int) -> None:
    model = shard()
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "fused": "fused" in make, "foreach": make == "foreach"}
    if "local" in make or make == "flat":
        optimizer = fsdp2.optim.local(torch.optim.AdamW, trainable(model), flat=make == "flat", **options)
    else:
        optimizer = torch.optim.AdamW(trainable(model), **options)
    tolerance = FUSED if make == "flat" or "fused" in make else None
    train(CASE, model, optimizer, world_size, tolerance, unscales="fused" not in make)  # which unscale by themselves
    before, scaler = locals_of(model), scaler_of()
    scaler.scale(loss_on(CASE, model, 3, dist.get_rank())).backward()
    inf_in(model[0].weight, 1)
    assert skips(scaler, optimizer)
    assert all(map(torch.equal, before, locals_of(model)))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_precision(dtype: torch.dtype, world_size: int) -> None:
    """The model is of that dtype as a whole, which torch's GradScaler refuses of fp16."""
    model, plain = (CASE.build().to(dtype) for _ in range(2))
    shard(CASE, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of()
    losses = [
        CASE.loss_of(plain(CASE.batch(0, 0, r).inputs.to(dtype)).float(), CASE.batch(0, 0, r).targets)
        for r in range(world_size)
    ]
    torch.stack(losses).mean().backward()
    batch = CASE.batch(0, 0, dist.get_rank())
    loss = CASE.loss_of(model(batch.inputs.to(dtype)).float(), batch.targets)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.unscale_(optimizer)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=HALF)
    assert {each.dtype for each in gradients_of(model).values() if each is not None} == {dtype}


@multi_rank(2)
def test_scaled_outputs_keep_their_dtypes() -> None:
    scaler = scaler_of()
    half, single = torch.tensor(2.0, dtype=torch.float16), torch.ones(2)
    assert torch.equal(scaler.scale(half), torch.tensor(2048.0, dtype=torch.float16))
    assert scaler.scale(half).dtype == torch.float16
    first, (second,) = scaler.scale([half, (single,)])
    assert first.dtype == torch.float16 and torch.equal(second, torch.full((2,), SCALE))
    assert [each.dtype for each in scaler.scale(iter([half, single]))] == [torch.float16, torch.float32]
    with pytest.raises(ValueError, match=r"takes a tensor or an iterable of tensors, got float"):
        scaler.scale(1.0)


@multi_rank(2)
def test_disabled_it_only_steps() -> None:
    model = shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of(enabled=False)
    loss = loss_on(CASE, model, 0, 0)
    assert scaler.scale(loss) is loss
    loss.backward()
    before = locals_of(model)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not all(map(torch.equal, before, locals_of(model))) and scaler.get_scale() == 1.0


# ---- who skips -------------------------------------------------------------------------------------


class _Mixed(nn.Module):
    """Parameters that are sharded, replicated, left alone, owned and used by rank 0 alone, in one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("sharded", "replicated", "plain", "owned", "of_one_rank"):
            self.add_module(name, nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.owned(self.plain(self.replicated(self.sharded(x))))
        return self.of_one_rank(x) if dist.get_rank() == 0 else x


def mixed() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _Mixed()
    fully_shard(model.replicated, strategy="replicate")
    fully_shard(model.owned, shard_placement_fn=lambda _: Owned(1))
    return fully_shard(model, ignored_params=set(model.plain.parameters()))


@multi_rank(2, 4)
@pytest.mark.parametrize("name", ["sharded", "replicated", "plain", "owned", None])
def test_an_infinity_on_one_rank_is_skipped_by_all(name: str | None, world_size: int) -> None:
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of()
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    before = locals_of(model)
    if name is not None:
        inf_in(model.get_submodule(name).weight, 1)
    with Collectives() as collectives:
        scaler.step(optimizer)
    assert collectives.counts == {"allreduce": 1}
    scaler.update()
    assert scaler.get_scale() == (SCALE if name is None else SCALE / 2)
    for now, then, each in zip(locals_of(model), before, model.parameters(), strict=True):
        assert torch.equal(now, then) is (name is not None or each.grad is None or not now.numel())


@multi_rank(2, 4)
def test_an_overflow_in_forward_is_skipped_by_all(world_size: int) -> None:
    """The loss of one rank alone is too large; torch's plain scaler sees the sum too, and this one as well."""
    model = shard()
    optimizer, scaler = adamw(trainable(model)), scaler_of()
    before = locals_of(model)
    factor = float("inf") if dist.get_rank() == 0 else 1.0
    scaler.scale(loss_on(CASE, model, 0, dist.get_rank()) * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2 and all(map(torch.equal, before, locals_of(model)))


@multi_rank(2, 4)
def test_a_rank_without_any_gradient_skips_too(world_size: int) -> None:
    """Only rank 0 has gradients here: of parameters that only it holds rows of."""
    model = fully_shard(nn.Linear(3, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    if dist.get_rank():
        model.zero_grad()
    inf_in(model.weight, 0)
    assert skips(scaler, optimizer)


@multi_rank(2)
def test_without_any_gradient_nothing_is_skipped() -> None:
    model = shard()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    scaler.scale(torch.ones(()))
    assert not skips(scaler, optimizer)


@multi_rank(2)
def test_several_optimizers_of_one_group() -> None:
    """What lies on one buffer is unscaled by the optimizer that has it; one of them may skip without the other."""
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    model(torch.ones(2, 4)).sum().backward()
    expected = {name: g.to_local().clone() for name, g in gradients_of(model).items()}  # type: ignore[union-attr]
    model.zero_grad()
    first = torch.optim.SGD([model[0].weight, model[2].weight, model[2].bias], lr=0.1)
    second = torch.optim.SGD([model[0].bias, model[1].weight], lr=0.1)  # and nobody has that of model[1].bias
    scaler = scaler_of()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    for optimizer in (first, second):
        scaler.unscale_(optimizer)
    for name, gradient in gradients_of(model).items():
        factor = SCALE if name == "1.bias" else 1.0
        assert torch.equal(gradient.to_local(), expected[name] * factor)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(first)
    scaler.update()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    inf_in(model[1].weight, 0)
    before = locals_of(model)
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    stepped = [not torch.equal(*pair) for pair in zip(before, locals_of(model), strict=True)]
    assert stepped == [True, False, False, False, True, True]


@pytest.mark.full
@multi_rank(2, 4)
def test_gradients_that_travelled_alone(world_size: int) -> None:
    """Between them lies memory that nothing was written to, which must not count: here it is not finite."""
    model = fully_shard(nn.Sequential(*(nn.Linear(516, 520) if n % 2 else nn.Linear(520, 516) for n in range(3))))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), scaler_of()
    empty = torch.empty

    def of_nan(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    with mock.patch.object(torch, "empty", of_nan):
        loss = model(torch.ones(2, 520)).sum()
        scaler.scale(loss).backward()
    assert not skips(scaler, optimizer)


@multi_rank(2)
def test_gradients_that_the_user_has_set() -> None:
    """By hooks, or by hand: they lie elsewhere, and those of before stay as they were."""
    model = shard()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    scaler.scale(loss_on(CASE, model, 0, 0)).backward()
    kept = model[0].weight.grad
    was = kept.to_local().clone()
    model[0].weight.grad = kept * 2
    scaler.unscale_(optimizer)
    assert torch.equal(kept.to_local(), was)
    assert torch.equal(model[0].weight.grad.to_local(), was * 2 / SCALE)


@multi_rank(2)
def test_sparse_gradients_of_plain_parameters() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4))
    nn.init.ones_(model[0].weight)
    fully_shard(model, ignored_params={model[0].weight})
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    scaler.scale(model(torch.tensor([1, 1, 2])).sum()).backward()
    expected = model[0].weight.grad.to_dense() / SCALE
    scaler.unscale_(optimizer)
    assert torch.equal(model[0].weight.grad.to_dense(), expected)


@pytest.mark.full
@multi_rank(2)
def test_an_optimizer_from_before_sharding(world_size: int) -> None:
    model = CASE.build()
    optimizer = adamw(trainable(model))
    shard(CASE, model)
    train(CASE, model, optimizer, world_size, None)


@pytest.mark.full
@multi_rank(2)
def test_gradient_buffers_are_used_again(world_size: int) -> None:
    """What the scaler knows of them keeps none of them in use."""
    model = shard()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), scaler_of()
    addresses = []
    for step in range(4):
        scaler.scale(loss_on(CASE, model, step, dist.get_rank())).backward()
        addresses.append([id(parameter.grad) for parameter in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert addresses[1:] == addresses[:-1]


@multi_rank(2)
def test_parameters_that_are_replaced_and_added() -> None:
    model = shard(MLP)
    optimizer, scaler = torch.optim.SGD(model[0].parameters(), lr=0.0), scaler_of()

    def unscaled() -> list[bool]:
        model.zero_grad()
        loss_on(MLP, model, 0, 0).backward()
        before = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        model.zero_grad()
        scaler.scale(loss_on(MLP, model, 0, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return [torch.equal(p.grad.to_local(), b) for p, b in zip(model.parameters(), before, strict=True)]

    assert unscaled() == [True] * 2 + [False] * 4
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert unscaled() == [True] * 4 + [False] * 2
    model.double()
    model.float()
    assert unscaled() == [True] * 4 + [False] * 2


# ---- which ranks -----------------------------------------------------------------------------------


def sizes_of_reductions(action: Callable[[], Any]) -> list[int]:
    """Over how many ranks each all-reduce of ``action`` goes."""
    sizes = []
    reduce = dist.all_reduce

    def reduced(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        sizes.append(dist.get_world_size(group))
        return reduce(*args, group=group, **kwargs)

    with mock.patch.object(dist, "all_reduce", reduced):
        action()
    return sizes


def over_two_dims(kind: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    if kind == "replicas":
        return fully_shard(model, mesh=mesh)
    if kind == "tensor parallel":
        parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["replicate"])
    experts = fsdp2.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    chosen = set(model[1].parameters())
    return fully_shard(model, shard_placement_fn=lambda p: ShardPlacementResult(None, experts) if p in chosen else None)


@multi_rank(4)
@pytest.mark.parametrize("kind", ["replicas", "tensor parallel", "experts"])
def test_ranks_of_two_dims_agree_in_one_all_reduce(kind: str) -> None:
    model = over_two_dims(kind)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    inf_in(model[1].weight, 3)
    assert sizes_of_reductions(lambda: scaler.step(optimizer)) == [4]
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def halves() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))


@multi_rank(4)
@pytest.mark.parametrize("given", [True, False])
def test_stages_agree_if_told_to(given: bool) -> None:
    stage = halves()["shard"]
    model = fully_shard(nn.Linear(4, 4), mesh=stage)
    scaler = scaler_of(process_group=dist.group.WORLD if given else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    inf_in(model.weight, 0)
    assert sizes_of_reductions(lambda: scaler.step(optimizer)) == [4 if given else 2]
    scaler.update()
    skips = given or dist.get_rank() < 2
    assert scaler.get_scale() == (SCALE / 2 if skips else SCALE)


@multi_rank(4)
def test_two_dims_beside_stages_agree_one_after_the_other() -> None:
    """A stage of 1 x 2 ranks, of which no process group has both dims: there are two dims to go over."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("stage", "replicate", "shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["replicate", "shard"])
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    inf_in(model.weight, 3)
    with mock.patch.object(dist, "get_world_size", lambda group=None: 8):  # as if there were another stage
        scaler.unscale_(optimizer)
    assert skips(scaler, optimizer)


@multi_rank(4)
def test_ranks_that_no_group_has() -> None:
    """Parameters on meshes of which none holds the ranks of the others, in a larger world."""
    rows, columns = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))[name] for name in "ab")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=rows)
    fully_shard(model[1], mesh=columns)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_of()
    scaler.scale(torch.ones(()))
    with pytest.raises(FSDPValueError, match=r"lie on meshes of the ranks .*ShardedGradScaler\(process_group=\.\.\.\)"):
        scaler.unscale_(optimizer)


@multi_rank(4)
def test_arguments() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert scaler_of(process_group=group).process_group is group
    else:
        with pytest.raises((FSDPTypeError, FSDPValueError), match="process_group"):
            scaler_of(process_group=group)
    with pytest.raises(FSDPTypeError, match="'enabled'"):
        scaler_of(enabled="yes")


# ---- beside torch's ---------------------------------------------------------------------------------


@multi_rank(2)
def test_state_dicts_are_torchs() -> None:
    plain, scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7), scaler_of()
    for each in (plain, scaler):
        each.scale(torch.ones(()))
    assert scaler.state_dict().keys() == plain.state_dict().keys()
    scaler.load_state_dict(plain.state_dict())
    assert scaler.state_dict() == plain.state_dict() and scaler.get_scale() == 4.0
    again = pickle.loads(pickle.dumps(scaler))
    assert again.get_growth_interval() == 7 and again.get_scale() == 4.0


@pytest.mark.full
@multi_rank(2, 4)
def test_numbers_are_those_of_torchs_sharded_scaler(world_size: int) -> None:
    """On fsdp2's gradients, which it takes one by one: over 6 steps, one of which overflows, and the scale grows."""
    theirs = pytest.importorskip("torch.distributed.fsdp.sharded_grad_scaler", reason="this torch has no FSDP1")
    results = []
    for cls in (theirs.ShardedGradScaler, ShardedGradScaler):
        model = shard()
        optimizer = adamw(trainable(model))
        group = {"process_group": dist.group.WORLD} if cls is not ShardedGradScaler else {}
        scaler = cls("cpu", init_scale=SCALE, growth_interval=2, **group)
        scales = []
        for step in range(6):
            scaler.scale(loss_on(CASE, model, step, dist.get_rank())).backward()
            if step == 3:
                inf_in(model[0].weight, 1)
            with warnings.catch_warnings():  # DTensor's, of torch's found_inf, which has one dim
                warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        results.append((scales, locals_of(model)))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


class _Operators(TorchDispatchMode):
    """Names what is dispatched, below DTensor's own dispatch too.

    Attributes:
        unscaled: how many tensors each kernel that unscales was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.unscaled: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        self.names.append(str(func))
        if "unscale" in self.names[-1]:
            self.unscaled.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16], ids=str)
def test_fewer_operations_than_torchs(reduce_dtype: torch.dtype | None) -> None:
    """One kernel for each dtype and device and one all-reduce, however many parameters; half of what torch's takes."""
    seen: dict[Any, _Operators] = {}
    for cls in (torch.amp.GradScaler, ShardedGradScaler):
        model = TRANSFORMER.build()
        for unit in TRANSFORMER.units(model):
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), cls("cpu", init_scale=SCALE)
        for step in range(3):
            scaler.scale(loss_on(TRANSFORMER, model, step, dist.get_rank())).backward()
            seen[cls] = _Operators()
            with seen[cls]:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if cls is torch.amp.GradScaler:
            assert seen[cls].unscaled == [len(list(model.parameters()))]
    ours, theirs = seen[ShardedGradScaler], seen[torch.amp.GradScaler]
    assert len(ours.names) <= len(theirs.names) / 2, (ours.names, theirs.names)
    assert sum("allreduce" in name for name in ours.names) == 1
    assert ours.unscaled == [4], "one tensor for each group, in one kernel"
