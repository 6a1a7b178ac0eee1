"""HSDP: a 2D mesh shards over its second axis and replicates over its first."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness import assert_same, full_parameters, multi_rank
from tests.harness.models import MLP, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import ROOTED, SIZES, TOWER, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, REDUCE, SCATTER, trace_of


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("case", [MLP, UNEVEN_MLP], ids=str)
def test_parameters_are_replicated_over_the_first_axis_and_sharded_over_the_second(case: ModelCase) -> None:
    mesh = mesh_of(2, 2)
    model, plain = shard(case, mesh=mesh), case.build()
    originals = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(), Shard(0))
        assert parameter.device_mesh == mesh
        assert parameter.shape == originals[name].shape
        chunks = originals[name].detach().chunk(2)
        coordinate = dist.get_rank() % 2
        expected = chunks[coordinate] if coordinate < len(chunks) else originals[name].detach()[:0]
        assert torch.equal(parameter.to_local(), expected)
    assert_same("parameters", full_parameters(model), {name: p.detach() for name, p in originals.items()})
    loss_on(case, model).backward()
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements and parameter.grad.device_mesh == mesh


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize(
    ("case", "shape"), [(TRANSFORMER, (2, 2)), (TIED, (2, 2)), (ROOTED, (4, 1)), (ROOTED, (1, 4))], ids=str
)
def test_hsdp_trains_like_the_unsharded_model(case: ModelCase, shape: tuple[int, int]) -> None:
    train(case, shard(case, mesh=mesh_of(*shape)))


@pytest.mark.full
@multi_rank(4)
def test_a_step_gathers_and_scatters_within_a_shard_group_and_reduces_across() -> None:
    mesh = mesh_of(2, 2)
    model = shard(TOWER, mesh=mesh)
    loss_on(TOWER, model).backward()  # bookkeeping of the first iteration
    trace = trace_of(lambda: loss_on(TOWER, model).backward())
    assert trace.counts() == {GATHER: 8, SCATTER: 4, REDUCE: 4}
    shard_ranks = tuple(dist.get_process_group_ranks(mesh["shard"].get_group()))
    replicas = tuple(dist.get_process_group_ranks(mesh["replicate"].get_group()))
    assert {each.ranks for kind in (GATHER, SCATTER) for each in trace.of(kind)} == {shard_ranks}
    assert {each.ranks for each in trace.of(REDUCE)} == {replicas}
    names = trace.named(SIZES)
    assert sorted(name for name in names if name.startswith(SCATTER)) == [f"{SCATTER} {layer}" for layer in "abcd"]
    halves = trace.named({layer: numel // 2 for layer, numel in SIZES.items()})
    assert sorted(name for name in halves if name.startswith(REDUCE)) == [f"{REDUCE} {layer}" for layer in "abcd"]


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("setter", ["set_requires_all_reduce", "set_requires_gradient_sync"])
def test_accumulation_reduces_across_replicas_once(setter: str) -> None:
    """Every microbatch is reduce-scattered, or none but the last; the last one is all-reduced."""
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    model.zero_grad()
    for micro in range(3):
        getattr(model, setter)(micro == 2)
        trace = trace_of(lambda micro=micro: loss_on(TOWER, model, 0, None, micro).backward())
        scatters = 4 if micro == 2 or setter == "set_requires_all_reduce" else 0
        assert trace.counts() == {GATHER: 8, SCATTER: scatters, REDUCE: 4 * (micro == 2)}
        # What awaits its all-reduce is no gradient yet.
        assert all((parameter.grad is None) == (micro < 2) for parameter in model.parameters())


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("recurse", [True, False])
def test_requires_all_reduce_recurses_unless_told_not_to(recurse: bool) -> None:
    model = shard(ROOTED, mesh=mesh_of(2, 2))
    model.set_requires_all_reduce(False, recurse=recurse)
    loss_on(ROOTED, model).backward()
    assert model[4].weight.grad is None
    assert (model[0].weight.grad is None) == recurse


@pytest.mark.full
@multi_rank(4)
def test_gradient_sync_sets_all_reduce_too() -> None:
    """`set_requires_gradient_sync` controls both; the order of the two setters decides."""
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)
    assert trace_of(lambda: loss_on(TOWER, model).backward()).counts()[REDUCE] == 4
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    assert trace_of(lambda: loss_on(TOWER, model).backward()).counts()[REDUCE] == 0


# ---- the hook ------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
def test_the_all_reduce_hook_sees_and_may_change_each_group_after_its_all_reduce() -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    expected = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    seen: dict[str, Tensor] = {}

    def hook(name: str, output: Tensor) -> None:
        seen[name] = output.clone()
        output.mul_(2)

    for name in ("a", "b"):
        getattr(model, name).set_all_reduce_hook(partial(hook, name))
    loss_on(TOWER, model).backward()
    assert list(seen) == ["b", "a"]  # as backward comes to them; the others have no hook
    for name, output in seen.items():
        assert torch.equal(output.flatten()[: SIZES[name] // 2], expected[f"{name}.weight"].flatten())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.to_local(), expected[name] * (2 if name[0] in seen else 1))


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("with_stream", [False, True])
def test_a_hook_makes_hsdp_out_of_fsdp(with_stream: bool) -> None:
    """Without native HSDP the hook gets the reduce-scatter output and may do the all-reduce itself."""
    mesh = mesh_of(2, 2)
    model = shard(UNEVEN_MLP, mesh=mesh["shard"])
    replicas = mesh["replicate"].get_group()
    options = {"stream": torch.cpu.current_stream()} if with_stream else {}
    for unit in UNEVEN_MLP.units(model):
        unit.set_all_reduce_hook(lambda output: dist.all_reduce(output, dist.ReduceOp.AVG, replicas), **options)
    train(UNEVEN_MLP, model)


@multi_rank(4)
def test_a_stream_for_the_hook_is_refused_with_native_hsdp() -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2))
    with pytest.raises(ValueError, match="stream"):
        model.a.set_all_reduce_hook(lambda output: None, stream=torch.cpu.current_stream())


# ---- around it -----------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
def test_the_full_state_dict_of_hsdp_goes_to_a_plain_model_and_back() -> None:
    model = shard(UNEVEN_MLP, mesh=mesh_of(2, 2))
    train(UNEVEN_MLP, model, steps=1)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    plain = UNEVEN_MLP.build(seed=1)
    plain.load_state_dict(full)
    assert_same("parameters", {n: p.detach() for n, p in plain.named_parameters()}, full_parameters(model))
    other = shard(UNEVEN_MLP, UNEVEN_MLP.build(seed=2), mesh=mesh_of(2, 2))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if dist.get_rank() == 0 else {}, options=options)
    assert_same("parameters", full_parameters(other), full_parameters(model))


@pytest.mark.full
@multi_rank(4)
def test_hsdp_and_fsdp_groups_live_in_one_model() -> None:
    """Each call brings its mesh: one unit on the 2D mesh, the others sharded over all ranks."""
    hybrid, flat = mesh_of(2, 2), mesh_of(4)
    model = UNEVEN_MLP.build()
    API.fully_shard(model[0], mesh=hybrid)
    API.fully_shard(model[2], mesh=flat)
    API.fully_shard(model, mesh=flat)
    assert model[0].weight.placements == (Replicate(), Shard(0))
    assert model[2].weight.placements == (Shard(0),)
    train(UNEVEN_MLP, model)
