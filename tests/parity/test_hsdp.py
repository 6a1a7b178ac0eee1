"""HSDP: a 2D mesh shards over its second axis and replicates over its first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from tests.harness import Accumulation, Reference, adamw, assert_same, full_parameters, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import FROZEN, MLP, PARTLY_USED, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import ROOTED, SIZES, TOWER, loss_on, mesh_of, shard, train, trainable
from tests.harness.parity.trace import GATHER, REDUCE, SCATTER, trace_of

NO_TRAFFIC = {GATHER: 0, SCATTER: 0, REDUCE: 0}


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


@multi_rank(4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, TRANSFORMER, TIED, FROZEN, PARTLY_USED], ids=str)
def test_hsdp_trains_like_the_unsharded_model(case: ModelCase) -> None:
    train(case, shard(case, mesh=mesh_of(2, 2)))


@multi_rank(4)
@pytest.mark.parametrize("shape", [(4, 1), (1, 4)], ids=["all_replicate", "all_shard"])
def test_an_axis_of_size_one_is_allowed(shape: tuple[int, int]) -> None:
    train(ROOTED, shard(ROOTED, mesh=mesh_of(*shape)))


@multi_rank(4)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_hsdp_trains_whether_or_not_it_reshards_after_forward(reshard_after_forward: bool) -> None:
    train(ROOTED, shard(ROOTED, mesh=mesh_of(2, 2), reshard_after_forward=reshard_after_forward))


@multi_rank(4)
def test_gradients_have_the_placements_of_their_parameters() -> None:
    model = shard(ROOTED, mesh=mesh_of(2, 2))
    loss_on(ROOTED, model).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == (Replicate(), Shard(0))
        assert parameter.grad.device_mesh == parameter.device_mesh


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


@multi_rank(4)
def test_comm_debug_mode_counts_the_collectives() -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    with CommDebugMode() as forward:
        loss = loss_on(TOWER, model)
    with CommDebugMode() as backward:
        loss.backward()
    ops = torch.ops.c10d
    assert dict(forward.get_comm_counts()) == {ops._allgather_base_: 4}
    assert dict(backward.get_comm_counts()) == {
        ops._allgather_base_: 4,
        ops._reduce_scatter_base_: 4,
        ops.allreduce_: 4,
    }


@multi_rank(4)
def test_accumulation_with_only_reduce_scatter_reduces_across_replicas_once() -> None:
    """`set_requires_all_reduce(False)`: every microbatch is reduce-scattered, the last one all-reduced."""
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    model.zero_grad()
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        trace = trace_of(lambda micro=micro: loss_on(TOWER, model, 0, None, micro).backward())
        assert trace.counts() == {GATHER: 8, SCATTER: 4, REDUCE: 4 * (micro == 2)}
        # What awaits its all-reduce is no gradient yet.
        assert all((parameter.grad is None) == (micro < 2) for parameter in model.parameters())


@multi_rank(4)
@pytest.mark.parametrize("case", [UNEVEN_MLP, FROZEN, PARTLY_USED], ids=str)
def test_accumulation_with_only_reduce_scatter_trains_like_the_reference(case: ModelCase) -> None:
    model = shard(case, mesh=mesh_of(2, 2))

    def before_forward(micro: int) -> None:
        model.set_requires_all_reduce(micro == 2)
        model.set_is_last_backward(micro == 2)

    train(
        case,
        model,
        reference=Reference(case, world_size=4, microbatches=3),
        before_forward=before_forward,
        tolerance=SUM_ORDER,
    )


@multi_rank(4)
@pytest.mark.parametrize("recurse", [True, False])
def test_requires_all_reduce_recurses_unless_told_not_to(recurse: bool) -> None:
    model = shard(ROOTED, mesh=mesh_of(2, 2))
    model.set_requires_all_reduce(False, recurse=recurse)
    loss_on(ROOTED, model).backward()
    assert model[4].weight.grad is None
    assert (model[0].weight.grad is None) == recurse


@multi_rank(4)
def test_without_gradient_sync_nothing_is_reduced_at_all() -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    model.zero_grad()
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        trace = trace_of(lambda micro=micro: loss_on(TOWER, model, 0, None, micro).backward())
        assert trace.counts() == {GATHER: 8, SCATTER: 4 * (micro == 2), REDUCE: 4 * (micro == 2)}
        assert all((parameter.grad is None) == (micro < 2) for parameter in model.parameters())


@multi_rank(4)
def test_accumulation_without_gradient_sync_trains_like_the_reference() -> None:
    model = shard(UNEVEN_MLP, mesh=mesh_of(2, 2))
    train(
        UNEVEN_MLP,
        model,
        reference=Reference(UNEVEN_MLP, world_size=4, microbatches=3, accumulation=Accumulation.REDUCE_LAST),
        before_forward=lambda micro: model.set_requires_gradient_sync(micro == 2),
    )


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


@multi_rank(4)
def test_the_all_reduce_hook_sees_each_group_after_its_all_reduce() -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    expected = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    seen: dict[str, Tensor] = {}
    for name in ("a", "b"):
        getattr(model, name).set_all_reduce_hook(lambda output, name=name: seen.update({name: output.clone()}))
    loss_on(TOWER, model).backward()
    assert list(seen) == ["b", "a"]  # as backward comes to them; the others have no hook
    for name, output in seen.items():
        assert torch.equal(output.flatten()[: SIZES[name] // 2], expected[f"{name}.weight"].flatten())


@multi_rank(4)
def test_what_the_all_reduce_hook_writes_is_the_gradient() -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    expected = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    model.zero_grad()
    model.c.set_all_reduce_hook(lambda output: output.mul_(2))
    loss_on(TOWER, model).backward()
    for name, parameter in model.named_parameters():
        factor = 2 if name.startswith("c") else 1
        assert torch.equal(parameter.grad.full_tensor(), expected[name] * factor)


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


@multi_rank(4)
def test_the_state_dict_of_hsdp_loads_into_another_model() -> None:
    mesh = mesh_of(2, 2)
    model = shard(UNEVEN_MLP, mesh=mesh)
    train(UNEVEN_MLP, model, steps=1)
    state = model.state_dict()
    assert all(value.placements == (Replicate(), Shard(0)) for value in state.values())
    other = shard(UNEVEN_MLP, UNEVEN_MLP.build(seed=1), mesh=mesh)
    other.load_state_dict(state)
    assert_same("parameters", full_parameters(other), full_parameters(model))


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


@multi_rank(4)
def test_optimizer_state_is_sharded_alike_and_clipping_uses_the_global_norm() -> None:
    model = shard(ROOTED, mesh=mesh_of(2, 2))
    optimizer = adamw(trainable(model))
    train(
        ROOTED,
        model,
        reference=Reference(ROOTED, world_size=4, max_norm=0.1),
        optimizer=optimizer,
        tolerance=SUM_ORDER,
    )
    for parameter in model.parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert moment.placements == (Replicate(), Shard(0)) and moment.shape == parameter.shape


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
