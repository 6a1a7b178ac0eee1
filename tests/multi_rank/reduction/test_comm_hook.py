"""`register_comm_hook`: what a hook is given, that it replaces the reduction and the mean, and where it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    Owned,
    clip_grad_norm_,
    fully_shard,
)
from tests.harness import multi_rank
from tests.harness.compare import Tolerance, assert_sharded_same, gradients_of, tolerance_for
from tests.harness.models import FROZEN, PARTLY_USED, TIED, UNEVEN_MLP, ModelCase
from tests.harness.parity.custom_collectives import custom_reduce_scatter
from tests.harness.reference import Accumulation, Reference, adamw
from tests.harness.shared.training import loss_on, trainable
from tests.harness.training import assert_trains_like

Calls = list[tuple[Tensor, Tensor | None]]
_HALF = Tolerance(0.01, 0.01, "the reference sums halves in another order")


def averages(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    """As the engine does, with collectives of its own; the flat gradients of all ranks are summed in rank order."""
    calls.append((flat.clone(), None if output is None else output.clone()))
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    mean = torch.stack(everyone).sum(0) / len(everyone)
    if output is None:
        flat.copy_(mean)
    else:
        output.copy_(mean.chunk(len(everyone))[dist.get_rank()])
        flat.fill_(float("nan"))  # which nobody reads any more


def elsewhere(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    """As torch's own compressing hooks do: the result lies in other memory."""
    if output is None:
        wide = flat.double()
        averages(calls, wide)
        flat.data = wide
    else:
        narrow = output.double()
        averages(calls, flat.double(), narrow)
        output.data = narrow


def to_zeros(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    """Loses everything."""
    (flat if output is None else output).zero_()


def raises(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    raise RuntimeError("the hook's own")


def hooked(
    case: ModelCase, hook: Callable[..., None] = averages, model: nn.Module | None = None, **options: Any
) -> tuple[Any, Calls]:
    calls: Calls = []
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit, **options)
    model.register_comm_hook(calls, hook)  # type: ignore[operator]
    return model, calls


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TIED, FROZEN, PARTLY_USED], ids=str)
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "replicate"])
def test_a_hook_that_averages_trains_like_the_reference(case: ModelCase, strategy: str, world_size: int) -> None:
    model, calls = hooked(case, strategy=strategy)
    reference = Reference(case, world_size=world_size)
    optimizer = adamw(trainable(model))
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_for(world_size))
    assert calls and len(calls) % 3 == 0, "as many in every step"


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_a_hook_sees_the_gradients_of_a_group_and_zeros(strategy: str, world_size: int) -> None:
    """Each element of this rank's gradients once, as many for every rank, and nothing of what else travels."""
    case = UNEVEN_MLP
    model, calls = hooked(case, strategy=strategy)
    plain = case.build()
    for each in (model, plain):
        loss_on(case, each, 0, dist.get_rank()).backward()
    assert len(calls) == 3
    for name, (flat, output) in zip("420", calls, strict=True):  # in the order of backward
        gradients = torch.cat([p.grad.flatten() for p in plain.get_submodule(name).parameters() if p.grad is not None])
        assert torch.equal(flat[flat != 0].sort().values, gradients[gradients != 0].sort().values)
        assert flat.dim() == 1 and flat.dtype == torch.float32
        if strategy == "replicate":
            assert output is None
        else:
            assert output is not None and flat.shape == (world_size * output.numel(),)


@multi_rank(2, 4)
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_the_result_may_lie_in_other_memory_and_another_dtype(strategy: str, world_size: int) -> None:
    case = UNEVEN_MLP
    model, _ = hooked(case, elsewhere, strategy=strategy)
    reference = Reference(case, world_size=world_size)
    loss_on(case, model, 0, dist.get_rank()).backward()
    expected = reference.step().gradients
    assert_sharded_same("gradients", gradients_of(model), expected, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_which_parameters_had_gradients_travels_apart(strategy: str, world_size: int) -> None:
    """A hook that loses everything still leaves gradients, of zeros, where some rank had one, and None elsewhere."""
    case = PARTLY_USED
    model, _ = hooked(case, to_zeros, strategy=strategy)
    expected = Reference(case, world_size=world_size).step().gradients
    loss_on(case, model, 0, dist.get_rank()).backward()
    found = gradients_of(model)
    assert {name for name, each in found.items() if each is None} == {n for n, g in expected.items() if g is None}
    assert all(not each.to_local().any() for each in found.values() if each is not None)  # type: ignore[attr-defined]


class _UsedByOneRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if dist.get_rank() == 1 else x


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_without_a_gradient_takes_part(strategy: str, dtype: torch.dtype, world_size: int) -> None:
    model = fully_shard(_UsedByOneRank(), strategy=strategy, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    model.register_comm_hook([], averages)
    model(torch.ones(2, 5)).float().sum().backward()
    assert model.never.weight.grad is None and model.always.weight.grad is not None
    expected = torch.full((5,), 2.0 / world_size)
    assert torch.equal(model.sometimes.bias.grad.full_tensor(), expected)


@multi_rank(2)
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_one_call_for_each_reduction(strategy: str, world_size: int) -> None:
    case = UNEVEN_MLP
    model, calls = hooked(case, strategy=strategy)
    reference = Reference(case, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST)
    assert_trains_like(
        reference,
        model,
        adamw(trainable(model)),
        steps=2,
        before_forward=lambda micro: model.set_requires_gradient_sync(micro == 2),
    )
    assert len(calls) == 2 * 3
    reference = Reference(case, world_size=world_size, microbatches=2, model=case.build(1))
    model, calls = hooked(case, strategy=strategy, model=case.build(1))
    assert_trains_like(reference, model, adamw(trainable(model)), steps=1)
    assert len(calls) == 2 * 3, "each backward by itself"


@multi_rank(2)
def test_replicas_that_are_reduced_later(world_size: int) -> None:
    case = UNEVEN_MLP
    model, calls = hooked(case, strategy="replicate")
    reference = Reference(case, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST)
    assert_trains_like(
        reference,
        model,
        adamw(trainable(model)),
        steps=2,
        before_forward=lambda micro: model.set_requires_all_reduce(micro == 2),
    )
    assert len(calls) == 2 * 3


@multi_rank(2)
def test_each_dtype_of_reduction_is_a_call(world_size: int) -> None:
    def policy(name: str, _: nn.Parameter) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32 if name == "bias" else None)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(7, 5), mp_policy=policy)
    calls: Calls = []
    model.register_comm_hook(calls, averages)
    model(torch.ones(2, 7)).float().sum().backward()
    assert len({flat.dtype for flat, _ in calls}) == len(calls)
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((5,), 2.0))
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((5, 7), 2.0))


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    "options",
    [
        {"offload_policy": CPUOffloadPolicy()},
        {"offload_policy": CPUOffloadPolicy(parameters=False, gradients=True)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    ],
    ids=["offloaded", "gradients on the host", "fp16"],
)
def test_beside_other_settings(options: dict[str, Any], world_size: int) -> None:
    case, dtype = UNEVEN_MLP, torch.float16 if "mp_policy" in options else torch.float32
    model, calls = hooked(case, **options)
    reference = Reference(case, world_size=world_size, reduce_dtype=dtype, microbatches=2)
    tolerance = tolerance_for(world_size)
    if dtype is torch.float16:  # sums of halves in rank order, as the reference has them
        tolerance = None if world_size == 2 else _HALF
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2, tolerance=tolerance)
    assert {flat.dtype for flat, _ in calls} == {dtype}


@pytest.mark.full
@multi_rank(2)
def test_owned_parameters_are_part_of_the_chunk_of_their_owner(world_size: int) -> None:
    case = UNEVEN_MLP

    def place(parameter: nn.Parameter) -> Any:
        return Owned(parameter.numel() % 2) if parameter.dim() == 2 else None

    model, _ = hooked(case, shard_placement_fn=place)
    loss_on(case, model, 0, dist.get_rank()).backward()
    expected = Reference(case, world_size=world_size).step().gradients
    assert_sharded_same("gradients", gradients_of(model), expected)


@multi_rank(2)
def test_a_hook_that_raises_leaves_a_model_that_goes_on(world_size: int) -> None:
    case = UNEVEN_MLP
    model, calls = hooked(case, lambda state, *tensors: state[0](*tensors))
    calls.append(lambda *tensors: raises([], *tensors))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the hook's own"):
        loss_on(case, model, 0, dist.get_rank()).backward()
    calls[0] = lambda *tensors: averages([], *tensors)  # type: ignore[call-overload]
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2)


@multi_rank(2)
def test_copies_have_the_hook(world_size: int) -> None:
    case = UNEVEN_MLP
    model, _ = hooked(case)
    made = copy.deepcopy(model)
    with pytest.raises(FSDPRuntimeError, match="A communication hook is already registered"):
        made.register_comm_hook(None, averages)
    loss_on(case, made, 0, dist.get_rank()).backward()
    assert_sharded_same("gradients", gradients_of(made), Reference(case, world_size=world_size).step().gradients)


@multi_rank(1)
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_one_rank_alone_calls_the_hook_too(strategy: str, world_size: int) -> None:
    model, calls = hooked(UNEVEN_MLP, strategy=strategy)
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2)
    assert [output is None for _, output in calls] == [strategy == "replicate"] * 6


# ---- refusals --------------------------------------------------------------------------------------


@multi_rank(2)
def test_a_second_hook_is_refused() -> None:
    model, _ = hooked(UNEVEN_MLP)
    with pytest.raises(FSDPRuntimeError, match="A communication hook is already registered, for"):
        model.register_comm_hook(None, averages)


@multi_rank(2)
def test_a_hook_after_the_first_forward_is_refused() -> None:
    model = fully_shard(nn.Linear(3, 3))
    model(torch.ones(1, 3))
    with pytest.raises(FSDPRuntimeError, match=r"before the first forward or unshard\(\) of Linear"):
        model.register_comm_hook(None, averages)


@multi_rank(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_below_the_root_is_refused(when: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for unit in (model[0], model):
        fully_shard(unit)
    text = "register_comm_hook can only be called on a root instance"
    if when == "before":
        model[0].register_comm_hook(None, averages)
        with pytest.raises(FSDPRuntimeError, match=f"{text}.*'0' has.*call it on Sequential"):
            model(torch.ones(1, 3))
    else:
        model(torch.ones(1, 3))
        with pytest.raises(FSDPRuntimeError, match=f"{text}.*'0' is below"):
            model[0].register_comm_hook(None, averages)


@multi_rank(4)
def test_a_hook_beside_replicas_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model)
    text = r"Communication hook is not supported for hybrid strategies.*2 ranks x 2 replicas.*mesh of one dim"
    with pytest.raises(FSDPValueError, match=text):
        model.register_comm_hook(None, averages)
    model(torch.ones(1, 3)).sum().backward()  # nothing was registered


@multi_rank(2)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["set_gradient_divide_factor", "set_gradient_reduction", "set_custom_reduce_scatter"])
def test_other_reductions_are_refused(name: str, first: bool) -> None:
    value: Any = custom_reduce_scatter([]) if "custom" in name else 3.0
    model: Any = fully_shard(nn.Linear(3, 3))
    calls = [lambda: model.register_comm_hook(None, averages), lambda: getattr(model, name)(value)]
    calls = calls if first else calls[::-1]
    calls[0]()
    with pytest.raises(FSDPValueError, match=r"register_comm_hook\(\) and .* exclude each other"):
        calls[1]()


@multi_rank(2)
@pytest.mark.parametrize("hook", [None, "sum", 3])
def test_a_hook_is_a_function(hook: Any) -> None:
    with pytest.raises(FSDPTypeError, match=r"register_comm_hook.*a function"):
        fully_shard(nn.Linear(3, 3)).register_comm_hook(None, hook)


@multi_rank(2)
def test_ranks_must_register_alike() -> None:
    model = fully_shard(nn.Linear(3, 3))
    if dist.get_rank() == 1:
        model.register_comm_hook(None, averages)
    with pytest.raises(FSDPRuntimeError, match="comm_hook=set"):
        model(torch.ones(1, 3))


def noisy(calls: Calls, flat: Tensor, output: Tensor | None = None) -> None:
    """As differentially private training does, to all elements."""
    averages(calls, flat, output)
    assert output is not None
    output.add_(torch.arange(1.0, output.numel() + 1))


@multi_rank(2)
@pytest.mark.parametrize("kind", ["comm_hook", "all_reduce_hook"])
@pytest.mark.every_combination
def test_norms_do_not_count_what_a_hook_leaves_in_the_padding(kind: str, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    fully_shard(model)
    if kind == "comm_hook":
        model.register_comm_hook([], noisy)  # type: ignore[operator]
    else:  # may be set when gradients have been clipped
        model(torch.ones(2, 5)).square().sum().backward()
        clip_grad_norm_(model, 1.0)
        model.zero_grad()
        model.set_all_reduce_hook(lambda flat: flat.add_(torch.arange(1.0, flat.numel() + 1)))  # type: ignore[operator]
    model(torch.ones(2, 5)).square().sum().backward()
    whole = [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
    expected = torch.cat([each.flatten() for each in whole]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1.0), expected)
    for parameter, before in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), before / (expected + 1e-6))  # type: ignore[union-attr]
