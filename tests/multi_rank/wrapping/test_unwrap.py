"""`unwrap` gives the plain module back: parameters, gradients, classes, hooks, and optimizers that go on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import (
    FSDPModule,
    FSDPRuntimeError,
    FSDPValueError,
    fully_shard,
    register_fsdp_forward_method,
    unwrap,
)
from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, assert_same, assert_sharded_same, gather, gradients_of, parameters_of
from tests.harness.compare import tolerance_for as tolerance
from tests.harness.models import CONV, FROZEN, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.reference import Reference, adamw
from tests.harness.shared.training import shard, trainable
from tests.harness.shared.ways import hybrid
from tests.harness.training import assert_trains_like


def step_plain(case: ModelCase, model: nn.Module, step: int, world_size: int) -> None:
    """Gradients of a plain ``model`` that is the same on all ranks, averaged by hand."""
    case.loss(model, case.batch(0, step, dist.get_rank())).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size


@multi_rank(2, 4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, CONV, TIED, FROZEN], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_unwrapped_module_is_the_plain_module_again(case: ModelCase, steps: int, world_size: int) -> None:
    plain, model = case.build(), case.build()
    buffers = dict(model.named_buffers())
    shard(case, model)
    reference = Reference(case, world_size=world_size)
    records = assert_trains_like(
        reference, model, adamw(trainable(model)), steps=steps, tolerance=tolerance(world_size)
    )
    assert unwrap(model) is model
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    for module, original in zip(model.modules(), plain.modules(), strict=True):
        assert vars(module).keys() == vars(original).keys()
        for name, value in vars(original).items():
            if name.endswith("_hooks"):
                assert len(getattr(module, name)) == len(value), name
    duplicates = {"remove_duplicate": False}
    assert [name for name, _ in model.named_parameters(**duplicates)] == [
        name for name, _ in plain.named_parameters(**duplicates)
    ]
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    for parameter, original in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(parameter) is nn.Parameter and parameter.is_leaf
        assert parameter.requires_grad is original.requires_grad and parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert vars(parameter).keys() <= vars(original).keys()
    expected = records[-1].parameters if records else parameters_of(plain)
    assert_same("parameters", parameters_of(model), expected, tolerance=tolerance(world_size))
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


@multi_rank(2, 4)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("whole_steps", [2, 0])
@pytest.mark.parametrize("again", ["alike", "otherwise"])
def test_the_optimizer_goes_on_and_back(again: str, whole_steps: int, at_once: bool, world_size: int) -> None:
    """Sharded, then whole, then sharded again, all with one optimizer."""
    case, model = UNEVEN_MLP, shard(UNEVEN_MLP)
    optimizer = adamw(list(model.parameters()))
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance(world_size))
    unwrap(model, optimizers=[optimizer] if at_once else ())
    if at_once:
        assert set(optimizer.state) == set(model.parameters())
    for step in range(2, 2 + whole_steps):
        record = reference.step()
        step_plain(case, model, step, world_size)
        assert_same("gradients", gradients_of(model), record.gradients, tolerance=SUM_ORDER)
        optimizer.step()
        optimizer.zero_grad()
        assert_same("parameters", parameters_of(model), record.parameters, tolerance=SUM_ORDER)
        assert set(optimizer.state) == set(model.parameters())
    if again == "alike":
        shard(case, model)
    else:
        fully_shard(model, **hybrid())
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=tolerance(world_size))


@multi_rank(2)
def test_gradients_are_gathered() -> None:
    case = FROZEN
    model, plain = shard(case), case.build()
    case.loss(model, case.batch(0, 0, dist.get_rank())).backward()
    for rank in range(2):
        (case.loss(plain, case.batch(0, 0, rank)) / 2).backward()
    unwrap(model)
    assert_same("gradients", gradients_of(model), gradients_of(plain), tolerance=SUM_ORDER)


@multi_rank(2)
@pytest.mark.parametrize("moment", ["unsharded", "evaluation", "kept", "prefetched", "failed"])
def test_whatever_is_registered_at_the_moment(moment: str) -> None:
    case = TRANSFORMER
    model = shard(case, reshard_after_forward=False if moment == "kept" else None)
    assert isinstance(model, FSDPModule)
    batch = case.batch(0, 0, dist.get_rank())
    if moment == "unsharded":
        model.unshard()
    elif moment == "prefetched":
        model.blocks[1].unshard(async_op=True)
    elif moment == "failed":
        handle = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            case.loss(model, batch)
        handle.remove()
    else:
        with torch.no_grad():
            case.loss(model, batch)
    unwrap(model)
    assert_same("parameters", parameters_of(model), parameters_of(case.build()))
    assert_same("loss", {"": case.loss(model, batch)}, {"": case.loss(case.build(), batch)})


@multi_rank(4)
def test_tensor_parallelism_stays() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case = dataclasses.replace(UNEVEN_MLP, make_model=lambda: nn.Sequential(nn.Linear(12, 22), nn.Linear(22, 9)))
    model = case.build()
    plain = case.build()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    placements = {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(3, 12)).sum().backward()
    unwrap(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, (nn.Parameter, DTensor))
        assert isinstance(parameter, DTensor) == (name in placements)
        if isinstance(parameter, DTensor):
            assert parameter.device_mesh == mesh["tp"] and parameter.placements == placements[name]
    whole = {name: gather(parameter.detach()) for name, parameter in model.named_parameters()}
    assert_same("parameters", whole, parameters_of(plain))
    plain(torch.ones(3, 12)).sum().backward()
    gathered = {name: gather(parameter.grad) for name, parameter in model.named_parameters()}
    assert_same("gradients", gathered, gradients_of(plain), tolerance=SUM_ORDER)


@multi_rank(2)
def test_a_submodule_and_its_parent(world_size: int) -> None:
    """The parent refuses parameters that nobody reduces, and goes on once they are sharded again."""
    model = shard(TRANSFORMER)
    optimizer = adamw(list(model.parameters()))
    reference = Reference(TRANSFORMER, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=2)
    unwrap(model.blocks[1])
    assert not isinstance(model.blocks[1], FSDPModule) and isinstance(model.blocks[0], FSDPModule)
    with pytest.raises(FSDPRuntimeError, match=r"blocks\.1\..*belongs to no group"):
        TRANSFORMER.loss(model, TRANSFORMER.batch(0, 0, 0))
    fully_shard(model.blocks[1], reshard_after_forward=False)
    assert_trains_like(reference, model, optimizer, steps=2)


@multi_rank(2)
def test_what_users_have_set_stays() -> None:
    model = UNEVEN_MLP.build()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("module"))
    model[0].weight.tag = "mine"
    shard(UNEVEN_MLP, model)
    model[2].weight.register_post_accumulate_grad_hook(lambda _: calls.append("parameter"))
    register_fsdp_forward_method(model[2], "forward")
    model[2].note = "after"
    unwrap(model)
    UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, 0)).backward()
    assert calls == ["module", "parameter"] and model[0].weight.tag == "mine" and model[2].note == "after"
    assert "forward" not in vars(model[2])


@multi_rank(2)
def test_on_meta() -> None:
    with torch.device("meta"):
        model = TIED.build()
    shard(TIED, model)
    unwrap(model)
    assert all(parameter.is_meta and type(parameter) is nn.Parameter for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight and model.head.weight.shape == (64, 32)


@multi_rank(2)
def test_what_is_refused() -> None:
    model = shard(TRANSFORMER)
    assert isinstance(model, FSDPModule)
    with pytest.raises(FSDPValueError, match=r"'attention.qkv.weight' belongs to the group of Block.*unwrap the Block"):
        unwrap(model.blocks[0].attention)
    plain = nn.Linear(2, 2)
    assert unwrap(plain) is plain

    def inside(*_: object) -> None:
        with pytest.raises(FSDPRuntimeError, match="inside a forward or backward"):
            unwrap(model)

    def inside_backward(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(inside)

    handles = [model.head.register_forward_pre_hook(inside), model.head.register_forward_hook(inside_backward)]
    model.set_requires_gradient_sync(False)
    TRANSFORMER.loss(model, TRANSFORMER.batch(0, 0, dist.get_rank())).backward()
    for handle in handles:
        handle.remove()
    with pytest.raises(FSDPRuntimeError, match="wait for their reduction"):
        unwrap(model)
    model.reset_iter_state()
    loss = TRANSFORMER.loss(model, TRANSFORMER.batch(0, 0, dist.get_rank()))
    unwrap(model)
    with pytest.raises(FSDPRuntimeError, match="unwrapped between a forward and its backward"):
        loss.backward()


@multi_rank(2)
def test_ranks_that_differ_raise_on_all() -> None:
    model = shard(UNEVEN_MLP)
    UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, dist.get_rank())).backward()
    if dist.get_rank() == 1:
        model[2].bias.grad = None
    with pytest.raises(FSDPRuntimeError, match="the ranks would unwrap different parameters"):
        unwrap(model)
    model.zero_grad()
    unwrap(model)


@multi_rank(2)
def test_a_gradient_that_is_placed_otherwise_is_refused_on_all_ranks() -> None:
    """As what one rank alone cannot unwrap is."""
    model = shard(UNEVEN_MLP)
    UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, dist.get_rank())).backward()
    weight = model[0].weight
    sharded = weight.grad
    weight.grad = sharded.redistribute(placements=[Replicate()])
    with pytest.raises(FSDPRuntimeError, match=r"gradient of '0\.weight' .* not sharded like .* redistribute it"):
        unwrap(model)
    weight.grad = sharded
    gradient = model[2].bias.grad
    whole = gradient.redistribute(placements=[Replicate()])
    if dist.get_rank() == 1:
        model[2].bias.grad = whole
    what = "not sharded like" if dist.get_rank() == 1 else "the ranks would unwrap different parameters"
    with pytest.raises(FSDPRuntimeError, match=what):
        unwrap(model)
    model[2].bias.grad = gradient
    whole = sharded.full_tensor()
    unwrap(model)
    assert torch.equal(model[0].weight.grad, whole)


@multi_rank(2)
def test_part_of_a_list() -> None:
    model = UNEVEN_MLP.build()
    fully_shard([model[0], model[2]])
    fully_shard(model)
    with pytest.raises(FSDPValueError, match=r"in one group with \(Linear\)"):
        unwrap(model[0])
    unwrap(model)
    assert_sharded_same("parameters", parameters_of(model), parameters_of(UNEVEN_MLP.build()))
