"""What programs read of torch's private state, on ours; and pipelining's end of a backward, which goes that way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as TorchsState
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from fsdp2 import FSDPMeshInfo, HSDPMeshInfo, MixedPrecisionPolicy, fully_shard, unwrap
from fsdp2.model.torch_view import TrainingState
from tests.harness import Accumulation, FakeWorlds, Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.models import UNEVEN_MLP


def state_of(module: nn.Module) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def reduce_as_pipelining_does(module: Any, *, by_every_state: bool = False) -> None:
    """The calls of `_PipelineStageBase.perform_reduce_grad` in torch 2.11 to 2.14; of all states, as others do it."""
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    state = state_of(module)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    for each in state._state_ctx.all_states[::-1] if by_every_state else [state]:
        each._root_post_backward_final_callback()


@multi_rank(1)
def test_who_finalizes_by_hand_does_so_after_a_pipeline_has() -> None:
    model = fully_shard(UNEVEN_MLP.build())
    UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, 0)).backward()
    for by_hand in (False, True):
        model.set_manual_backward_finalization(by_hand)
        state_of(model)._root_post_backward_final_callback()
        assert model._get_fsdp_state().root_settings.finalizes_manually is by_hand


@multi_rank(2)
@pytest.mark.parametrize("by_every_state", [False, True])
@pytest.mark.parametrize("replicated", [False, True])
def test_stages_of_a_pipeline_reduce_what_their_microbatches_left(
    replicated: bool, by_every_state: bool, world_size: int
) -> None:
    mesh = init_device_mesh("cpu", (2, 1) if replicated else (2,), mesh_dim_names=("r", "s") if replicated else None)
    model: Any = UNEVEN_MLP.build()
    for unit in UNEVEN_MLP.units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    reference = Reference(UNEVEN_MLP, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST)
    optimizer = adamw(list(model.parameters()))
    for _ in range(3):
        record = reference.step()
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        for micro in range(3):
            UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, record.step, dist.get_rank(), micro)).backward()
        reduce_as_pipelining_does(model, by_every_state=by_every_state)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), record.parameters[name]), name


@multi_rank(2)
def test_post_backward_of_a_group_reduces_once(world_size: int) -> None:
    """Called by hand, as programs that compute a module in pieces do, or when there is nothing left to reduce."""
    model: Any = UNEVEN_MLP.build()
    for unit in UNEVEN_MLP.units(model):
        fully_shard(unit)

    def groups() -> list[Any]:
        return [group for state in state_of(model)._state_ctx.all_states for group in state._fsdp_param_groups]

    assert groups() == []
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    optimizer = adamw(list(model.parameters()))
    assert_trains_like(reference, model, optimizer, steps=1, tolerance=tolerance_for(world_size))
    for group in groups():
        group.post_backward()
    assert len(groups()) == 3 and all(parameter.grad is None for parameter in model.parameters())
    assert_trains_like(reference, model, optimizer, steps=1, tolerance=tolerance_for(world_size))


def test_groups_and_parameters_can_be_read(simulate: FakeWorlds) -> None:
    simulate(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4, bias=False))
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh["shard"])
    group = model[0]._get_fsdp_state()._fsdp_param_group
    assert isinstance(group.mesh_info, HSDPMeshInfo) and group.mesh_info.mesh == mesh
    assert isinstance(state_of(model)._fsdp_param_group.mesh_info, FSDPMeshInfo)
    weight, bias = group.fsdp_params
    assert weight.sharded_param is model[0].weight and bias._module_info.param_name == "bias"
    assert weight._module_info.module is model[0] and weight._module_info.shared_modules == []
    assert weight._orig_size == (6, 4) and weight.sharded_size == (3, 4)
    assert weight.orig_dtype == torch.float32 and weight.param_dtype == torch.bfloat16
    assert group.gradient_divide_factor is None and group.reshard_after_backward and group.reduce_grads
    model[0].set_gradient_divide_factor(3.0)
    model[0].set_force_sum_reduction_for_comms(True)
    model.set_reshard_after_backward(False)
    assert group.gradient_divide_factor == 3.0 and group.force_sum_reduction_for_comms
    assert not group.reshard_after_backward and group.is_sharded
    model[0].unshard()
    assert group.is_unsharded and weight.unsharded_param is model[0].weight
    group.reshard()
    assert group.is_sharded
    model(torch.randn(2, 4))
    assert state_of(model)._is_root and group == state_of(model)._state_ctx.all_states[1]._fsdp_param_groups[0]
    assert state_of(fully_shard(nn.ReLU(), mesh=mesh))._fsdp_param_group is None


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda state: state._device_handle, r"FSDPState has no '_device_handle'.*'What tools can read' in the doc"),
        (lambda state: state._state_ctx.iter_forward_root, r"what states share has no 'iter_forward_root'"),
        (
            lambda state: setattr(state, "_root_post_backward_final_callback", print),
            r"'_root_post_backward_final_callback' of fsdp2's FSDPState .*FSDPLinear.* ignored_params",
        ),
        (lambda state: setattr(state, "_modules", ()), r"'_modules' of fsdp2's FSDPState.* lists what can be set"),
        (
            lambda state: setattr(state._state_ctx, "post_optim_event", None),
            r"'post_optim_event' of fsdp2's view of what states share can only.*set_post_optim_event",
        ),
        (
            lambda state: setattr(state._fsdp_param_group, "post_forward_mesh_info", 2),
            r"post_forward_mesh_info of '.*' can be set to None and to its mesh_info, got 2.*reshard_after_forward=",
        ),
        (lambda state: state._fsdp_param_group.foreach_reduce, r"group has no 'foreach_reduce'.*set_custom_reduce_sc"),
        (lambda state: state._fsdp_param_group.fsdp_params[0]._init_sharded_param, r"parameter has no '_init_sh"),
        (
            lambda state: state._fsdp_param_group.fsdp_params[0]._init_extensions(),
            r"parameter has no '_init_extensions'.* fully_shard\(mp_policy=\.\.\.\)",
        ),
        (
            lambda state: setattr(state._fsdp_param_group, "gradient_divide_factor", 2.0),
            r"'gradient_divide_factor'.*only be read.*set_gradient_divide_factor\(\)",
        ),
    ],
)
def test_what_is_not_offered_says_what_to_use(simulate: FakeWorlds, read: Any, says: str) -> None:
    simulate(2)
    state = state_of(fully_shard(nn.Linear(4, 4)))
    with pytest.raises(AttributeError, match=says):
        read(state)
    assert not hasattr(state, "_unheard_of")


def test_a_root_that_is_to_reshard_after_forward_too(simulate: FakeWorlds) -> None:
    """Programs keep what the root's group has before it becomes a root, and set it again."""
    simulate(2)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    state = state_of(model)
    group = state._fsdp_param_group
    before = group.post_forward_mesh_info
    assert before.mesh == group.mesh_info.mesh and group._reshard_after_forward
    state._lazy_init()
    assert state._is_root and not state_of(model[0])._is_root
    assert group.post_forward_mesh_info is None and not group._reshard_after_forward
    group.post_forward_mesh_info = None
    assert state.reshard_after_forward is None
    group.post_forward_mesh_info = before
    assert group.post_forward_mesh_info.mesh == before.mesh
    model(torch.randn(2, 4)).sum()
    assert group.is_sharded
    group.post_forward_mesh_info = None
    model(torch.randn(2, 4)).sum()
    assert group.is_unsharded


def test_what_states_share(simulate: FakeWorlds) -> None:
    simulate(2)
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    root, inner = state_of(model), state_of(model[0])
    assert root._state_ctx.all_states == [] and root._state_ctx.is_last_backward
    root._lazy_init()
    assert inner._state_ctx == root._state_ctx and inner._state_ctx.all_states == [root, inner]
    inner._state_ctx.is_last_backward = False
    assert not root._state_ctx.is_last_backward and not root.root.settings.is_last_backward
    assert not root._state_ctx.post_backward_final_callback_queued


def test_a_placement_is_that_of_the_data_parallel_mesh(simulate: FakeWorlds) -> None:
    simulate(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(8, 8), mesh["tp"], RowwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    weight, bias = state_of(model)._fsdp_param_group.fsdp_params
    assert isinstance(model.weight, DTensor) and model.weight.placements[-1] == Shard(1)
    assert weight.fsdp_placement == bias.fsdp_placement == Shard(0)


def test_states_of_training_are_equal_to_torchs() -> None:
    assert [TrainingState[each.name] == each for each in TorchsState] == [True] * 4
    assert [each == TrainingState[each.name] for each in TorchsState] == [True] * 4
    assert TrainingState.IDLE != TorchsState.FORWARD and TorchsState.IDLE != TrainingState.FORWARD
    assert TrainingState.IDLE in {TorchsState.IDLE} and TrainingState.IDLE != "IDLE"


@multi_rank(2)
def test_what_groups_do_shows_while_they_do_it(world_size: int) -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh())
    fully_shard(model[0])
    fully_shard(model)
    group, seen = state_of(model[0])._fsdp_param_group, []

    def note(*_: Any) -> None:
        seen.append(group._training_state.name)

    note()
    model[0].register_forward_hook(note)
    model[1].register_forward_hook(note)
    model[1].register_full_backward_pre_hook(note)
    model[0][0].register_full_backward_pre_hook(note)
    x = torch.randn(2, 4, requires_grad=True)
    x.register_hook(note)
    model(x).sum().backward()
    note()
    assert seen == ["IDLE", "FORWARD", "IDLE", "IDLE", "PRE_BACKWARD", "POST_BACKWARD", "IDLE"]


def test_a_reset_of_the_training_state_changes_nothing(simulate: FakeWorlds) -> None:
    """Which programs do before they move a model to the host."""
    simulate(2)
    model = fully_shard(nn.Linear(4, 4))
    state_of(model)._fsdp_param_group._training_state = "idle"
    model(torch.randn(2, 4)).sum().backward()


def test_states_are_where_programs_look_for_them(simulate: FakeWorlds) -> None:
    simulate(2)
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    for each in (model, copy.deepcopy(model)):
        assert _get_module_state(each) is state_of(each) is _module_state_mapping[each]()
        assert each[0] not in _module_state_mapping
    unwrap(model)
    assert model not in _module_state_mapping


class Tiled(torch.autograd.Function):
    """A module's forward in pieces, again in backward, after which it reshards: what axolotl's tiled MLP does."""

    @staticmethod
    def forward(ctx: Any, owner: Any, inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.owner, ctx.inner = owner, inner
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([inner(piece) for piece in x.chunk(2)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        group = ctx.owner._get_fsdp_state()._fsdp_param_group
        before = group.reshard_after_backward
        ctx.owner.set_reshard_after_backward(False, recurse=False)
        gradients = []
        for piece, arrived in zip(x.chunk(2), gradient.chunk(2), strict=True):
            piece = piece.detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.inner(piece)
            torch.autograd.backward(output, arrived)
            gradients.append(piece.grad)
        ctx.owner.set_reshard_after_backward(before, recurse=False)
        ctx.owner.reshard()
        return None, None, torch.cat(gradients)


class Block(nn.Module):
    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.before, self.mlp, self.tiled = nn.Linear(8, 8), nn.Linear(8, 8), tiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).tanh()
        return Tiled.apply(self, self.mlp, x) if self.tiled else self.mlp(x)


@multi_rank(2)
def test_resharding_in_the_midst_of_a_backward_waits_for_its_end(world_size: int) -> None:
    """What comes before in the module's forward is still to be differentiated."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(tiled=False), Block(tiled=False))
    model = copy.deepcopy(plain)
    for block in model:
        block.tiled = True
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
        (sum(plain(x).square().mean() for x in inputs) / world_size).backward()  # type: ignore[union-attr]
        model(inputs[dist.get_rank()]).square().mean().backward()
        assert state_of(model[0])._fsdp_param_group.is_sharded
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)
        model.zero_grad()
        plain.zero_grad()
