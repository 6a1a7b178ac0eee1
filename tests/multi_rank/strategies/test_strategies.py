"""ZeRO stages as one argument: each trains like the unsharded model, gathers no more than it says, and may change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPValueError,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    unwrap,
)
from fsdp2.core.state import state_of
from tests.harness import multi_rank, others_full, use_native_collectives
from tests.harness.compare import (
    SUM_ORDER,
    Tolerance,
    assert_same,
    assert_sharded_same,
    full_parameters,
    gradients_of,
    tolerance_for,
)
from tests.harness.models import FROZEN, TRANSFORMER, UNEVEN_MLP
from tests.harness.parity.extensions import FiveArguments
from tests.harness.parity.trace import Trace, trace_of
from tests.harness.reference import Accumulation, adamw
from tests.harness.shared.strategies import HOW, STRATEGIES, reference_for, run_microbatches, shard, train
from tests.harness.shared.training import loss_on, trainable
from tests.harness.shared.ways import hybrid

ROUNDED = Tolerance(0.05, 0.02, "a sum in another order is rounded to another bfloat16 parameter")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GROUPS = 3
"""Of `UNEVEN_MLP`: its units hold all parameters."""


SETTINGS = ("uneven", "two dims", "frozen", "checkpointed", "mixed precision", "offloaded")


def is_whole(parameter: Any) -> bool:
    """Whether the data-parallel ranks hold the same of it."""
    return bool(parameter.to_local().shape == parameter.shape) and all(
        isinstance(placement, Replicate) for placement in parameter.placements
    )


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 25 s on two cores
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("setting", others_full(SETTINGS, SETTINGS[:2]))
def test_every_strategy_trains_like_the_reference(setting: str, strategy: str, how: str, world_size: int) -> None:
    case = {"frozen": FROZEN, "checkpointed": TRANSFORMER}.get(setting, UNEVEN_MLP)
    model, options, extra, tolerance = case.build(), {}, {}, tolerance_for(world_size)
    if setting == "checkpointed":
        for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[index] = checkpoint_wrapper(block)  # type: ignore[index]
    elif setting == "mixed precision":
        options = {"mp_policy": BF16}
        extra = {"param_dtype": torch.bfloat16, "grad_dtype": torch.float32, "reduce_dtype": torch.float32}
        tolerance = None if world_size == 2 else ROUNDED
    elif setting == "offloaded":
        options = {"offload_policy": CPUOffloadPolicy()}
    elif setting == "two dims":  # over both of which "replicate" makes copies
        options, tolerance = hybrid(), SUM_ORDER
    shard(case, strategy, model, **options)
    train(reference_for(case, world_size, how, **extra), model, how=how, tolerance=tolerance)
    assert all(is_whole(parameter) is (strategy == "replicate") for parameter in model.parameters())
    assert shard(case, strategy, model, **options) is model


@multi_rank(4)
def test_named_dims_of_a_mesh(world_size: int) -> None:
    """`dp_mesh_dims` says which dims; the strategy and it must not contradict each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    both = DataParallelMeshDims(replicate=("one", "two"))
    for strategy, dims in (("zero2", both), ("replicate", DataParallelMeshDims("two", "one"))):
        with pytest.raises(FSDPValueError, match=rf"strategy='{strategy}'.*dp_mesh_dims="):
            fully_shard(UNEVEN_MLP.build(), mesh=mesh, dp_mesh_dims=dims, strategy=strategy)  # type: ignore[call-overload]


# ---- what is communicated, and when parameters are whole -----------------------------------------


def counts_of(trace: Trace) -> dict[str, int]:
    return {kind: count for kind, count in trace.counts().items() if count}


def trace_of_a_step(strategy: str, how: str) -> Trace:
    """Of the second step: the first one compares plans."""
    use_native_collectives()
    model = shard(UNEVEN_MLP, strategy)
    optimizer = adamw(trainable(model))
    for step in range(2):
        trace = trace_of(lambda step=step: run_microbatches(UNEVEN_MLP, model, how, step, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    return trace


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 25 s on two cores
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_stages_differ_in_their_collectives(strategy: str, how: str) -> None:
    micros, accumulation = HOW[how]
    reductions = GROUPS * (micros if accumulation is Accumulation.REDUCE_EACH else 1)
    counts = counts_of(trace_of_a_step(strategy, how))
    if strategy == "replicate":
        assert counts == {"all_reduce": reductions}
        return
    gathers = {"zero3": 2 * GROUPS * micros, "zero2": GROUPS * micros, "zero1": reductions}[strategy]
    assert counts == {"all_gather": gathers, "reduce_scatter": reductions}


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_when_parameters_are_unsharded(strategy: str) -> None:
    model = shard(UNEVEN_MLP, strategy)
    stays = strategy in ("replicate", "zero1")
    for sync in (False, False, True):
        model.set_requires_gradient_sync(sync)
        loss = loss_on(UNEVEN_MLP, model, 0, dist.get_rank())
        assert all(isinstance(each, DTensor) is (strategy == "zero3") for each in model.parameters())
        loss.backward()
        assert all(isinstance(each, DTensor) is (sync or not stays) for each in model.parameters())
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.full
@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 25 s on two cores
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_between_microbatches_is_seen_by_the_next(strategy: str, world_size: int) -> None:
    """An optimizer that steps on what was reduced before; whole parameters of before would be stale."""
    model, plain = shard(UNEVEN_MLP, strategy), UNEVEN_MLP.build()
    for each in (model, plain):
        loss_on(UNEVEN_MLP, each, 0, 0).backward()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    model.set_requires_gradient_sync(False)
    loss_on(UNEVEN_MLP, model, 0, 0)  # leaves parameters whole
    for optimizer in optimizers:
        optimizer.step()
    losses = [loss_on(UNEVEN_MLP, each, 1, 0).detach() for each in (model, plain)]
    assert_same("losses", {"": losses[0]}, {"": losses[1]}, tolerance=tolerance_for(world_size))


# ---- several strategies --------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 25 s on two cores
@pytest.mark.parametrize("how", HOW)
def test_several_in_one_model(how: str, world_size: int) -> None:
    case, model = TRANSFORMER, TRANSFORMER.build()
    for unit, strategy in zip(case.units(model), STRATEGIES, strict=True):
        fully_shard(unit, strategy=strategy)  # type: ignore[call-overload]
    reference = reference_for(case, world_size, how)
    train(reference, model, how=how, tolerance=tolerance_for(world_size))
    assert [is_whole(next(unit.parameters())) for unit in case.units(model)[:2]] == [True, False]
    record = reference.step()
    run_microbatches(case, model, how, record.step, dist.get_rank())
    expected = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(each) for each in record.gradients.values() if each is not None])
    )
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 25 s on two cores
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("first", [None, 2], ids=str)
def test_switching_between_iterations(first: int | None, how: str, world_size: int) -> None:
    """In turn, also from a group that reshards to fewer ranks after forward, and by the other setters."""
    model = shard(UNEVEN_MLP, None, reshard_after_forward=first)
    turn = ("zero2", "zero1", "zero3", "zero1", "zero2", "zero3")

    def switch(step: int) -> None:
        model.set_strategy(turn[step])

    reference = reference_for(UNEVEN_MLP, world_size, how)
    train(reference, model, how=how, steps=6, tolerance=tolerance_for(world_size), before=switch)


@pytest.mark.full
@multi_rank(2)
def test_switching_changes_what_is_gathered() -> None:
    use_native_collectives()
    model = shard(UNEVEN_MLP, "zero3")
    rank = dist.get_rank()
    run_microbatches(UNEVEN_MLP, model, "no_sync", 0, rank)
    for strategy, gathers in (("zero1", 1), ("zero2", 3), ("zero3", 6), ("zero1", 1)):
        model.set_strategy(strategy)
        for parameter in model.parameters():
            parameter.grad = None
        counts = counts_of(trace_of(lambda: run_microbatches(UNEVEN_MLP, model, "no_sync", 1, rank)))
        assert counts == {"all_gather": gathers * GROUPS, "reduce_scatter": GROUPS}, strategy


@multi_rank(2)
def test_switching_reaches_the_modules_below_unless_it_is_told_not_to() -> None:
    for recurse in (True, False):
        model = UNEVEN_MLP.build()
        fully_shard(model[0], strategy="zero3")  # type: ignore[index]
        fully_shard(model, strategy="zero3")
        model.set_strategy("zero2", recurse=recurse)  # type: ignore[operator]
        loss_on(UNEVEN_MLP, model, 0, 0)
        whole = [not isinstance(model[index].weight, DTensor) for index in (0, 2)]  # type: ignore[index]
        assert whole == [recurse, True]


@multi_rank(2)
def test_between_sharded_and_whole_is_refused() -> None:
    model = UNEVEN_MLP.build()
    fully_shard(model[0], strategy="replicate")  # type: ignore[index]
    fully_shard(model, strategy="zero3")
    for strategy, recurse, name in (("zero2", True, "0|Linear"), ("replicate", False, "Sequential")):
        with pytest.raises(FSDPValueError, match=rf"parameters of '({name})' are .*fsdp2\.unwrap\(model\)"):
            model.set_strategy(strategy, recurse=recurse)  # type: ignore[operator]
    model[0].set_strategy("replicate")  # type: ignore[index, operator]
    model.set_strategy("zero1", recurse=False)  # type: ignore[operator]
    loss_on(UNEVEN_MLP, model, 0, 0)
    assert not isinstance(model[2].weight, DTensor)  # type: ignore[index]


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 25 s on two cores
def test_between_sharded_and_whole_by_unwrap(world_size: int) -> None:
    """With the optimizer that trained it before."""
    reference = reference_for(UNEVEN_MLP, world_size, "one")
    model, optimizer = shard(UNEVEN_MLP, "replicate"), None
    for strategy in ("zero3", "replicate", "zero1"):
        optimizer = train(reference, model, how="one", optimizer=optimizer, steps=2, tolerance=SUM_ORDER)
        shard(UNEVEN_MLP, strategy, unwrap(model, optimizers=[optimizer]))
    train(reference, model, how="one", optimizer=optimizer, steps=2, tolerance=SUM_ORDER)
    assert optimizer is not None and set(optimizer.state) == set(model.parameters())


# ---- state dicts and copies ----------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 25 s on two cores
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_dicts(strategy: str, world_size: int) -> None:
    """Those of one strategy, taken amid accumulation as well, load into another."""
    case, model = UNEVEN_MLP, shard(UNEVEN_MLP, strategy)
    reference = reference_for(case, world_size, "one")
    train(reference, model, how="one", steps=2, tolerance=tolerance_for(world_size))
    model.set_requires_gradient_sync(False)
    loss_on(case, model, 2, dist.get_rank()).backward()
    held = model.state_dict()
    assert all(is_whole(each) is (strategy == "replicate") for each in held.values())
    expected = {name: parameter.detach() for name, parameter in reference.model.named_parameters()}
    assert_sharded_same("the state dict", held, expected, tolerance=tolerance_for(world_size))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_same("the full state dict", whole, expected, tolerance=tolerance_for(world_size))
    for other in STRATEGIES:
        target = shard(case, other, case.build(1))
        run_microbatches(case, target, "no_sync", 0, dist.get_rank())
        set_model_state_dict(target, dict(whole), options=StateDictOptions(full_state_dict=True))
        assert_same("what was loaded", full_parameters(target), expected, tolerance=tolerance_for(world_size))


@multi_rank(4)
def test_copies_of_replicas_over_two_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(UNEVEN_MLP, "replicate", mesh=mesh)
    copied = copy.deepcopy(model)
    train(reference_for(UNEVEN_MLP, 4, "one"), copied, how="one", tolerance=SUM_ORDER)


# ---- what is refused -----------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [("replicate", True), ("replicate", 2), ("zero1", True), ("zero2", True), ("zero2", 2), ("zero3", False)],
    ids=str,
)
def test_a_contradicting_reshard_after_forward(strategy: Any, reshard: Any) -> None:
    message = f"strategy='{strategy}' and reshard_after_forward={reshard} contradict each other"
    with pytest.raises(FSDPValueError, match=message):
        fully_shard(UNEVEN_MLP.build(), strategy=strategy, reshard_after_forward=reshard)
    agrees = strategy == "zero3"
    loss_on(UNEVEN_MLP, shard(UNEVEN_MLP, strategy, reshard_after_forward=agrees), 0, 0).backward()


@multi_rank(2)
@pytest.mark.parametrize("wrong", ["zero0", "ddp", "", 3, True, ["zero1"]], ids=str)
def test_what_is_no_strategy(wrong: Any) -> None:
    message = "strategy must be one of 'replicate', 'zero1', 'zero2', 'zero3', got"
    with pytest.raises(FSDPValueError, match=message):
        fully_shard(UNEVEN_MLP.build(), strategy=wrong)
    model = shard(UNEVEN_MLP, "zero2")
    for each in (wrong, None):
        with pytest.raises(FSDPValueError, match=message):
            model.set_strategy(each)
    with pytest.raises(TypeError):
        model.set_strategy("zero1", True)


@multi_rank(2)
def test_a_placement_function_of_replicas() -> None:
    with pytest.raises(FSDPValueError, match="strategy='replicate' and shard_placement_fn contradict each other"):
        fully_shard(UNEVEN_MLP.build(), strategy="replicate", shard_placement_fn=lambda parameter: None)


@multi_rank(2)
def test_another_strategy_in_a_second_call_is_named() -> None:
    for first, other in (("zero2", "zero3"), ("zero3", "replicate"), (None, "zero3")):
        model = shard(UNEVEN_MLP, first)
        state = state_of(model)
        assert shard(UNEVEN_MLP, first, model) is model and state_of(model) is state
        message = rf"another argument 'strategy': {first} before, {other} now"
        with pytest.raises(FSDPValueError, match=message):
            fully_shard(model, strategy=other)  # type: ignore[call-overload]


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tensor_subclass_that_gathers_itself(strategy: str) -> None:
    model: Any = UNEVEN_MLP.build()
    model[2].weight = nn.Parameter(FiveArguments(model[2].weight.detach().clone()))
    fully_shard(model, strategy=strategy)  # type: ignore[call-overload]
    record = reference_for(UNEVEN_MLP, 2, "no_sync").step()
    run_microbatches(UNEVEN_MLP, model, "no_sync", 0, dist.get_rank())
    assert_sharded_same("gradients", gradients_of(model), record.gradients)


@pytest.mark.full
@multi_rank(2)
def test_tied_weights_of_several_strategies(world_size: int) -> None:
    """Sharded alike they may differ in how long they stay; one whole and one sharded is refused."""

    def build() -> Any:
        model = TRANSFORMER.build()
        model.head.weight = model.embedding.weight
        return model

    model: Any = build()
    fully_shard(model.embedding, strategy="zero1")
    fully_shard(model.head, strategy="zero3")
    fully_shard(model, strategy="zero2")
    reference = reference_for(TRANSFORMER, world_size, "no_sync", model=build())
    train(reference, model, how="no_sync")
    model = build()
    fully_shard(model.embedding, strategy="replicate")
    with pytest.raises(FSDPValueError, match=r"is tied to 'weight' of Embedding.*another 'strategy'"):
        fully_shard(model.head, strategy="zero3")
