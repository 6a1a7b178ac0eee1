"""Settings that meet: pairs of features, each documented on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness import Accumulation, Reference, assert_same, full_parameters, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter
from tests.harness.parity.implementation import API, beyond_torch
from tests.harness.parity.programs import ROOTED, SIZES, TOWER, WIDTH, is_sharded, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import GATHER, traced
from tests.parity.helpers.experts import EXPERTS, place_experts

BF16, FP32 = torch.bfloat16, torch.float32
PRECISION = {"param_dtype": BF16, "reduce_dtype": FP32}


# ---- HSDP with … ---------------------------------------------------------------------------------


@multi_rank(4)
def test_the_all_reduce_hook_waits_for_the_all_reduce_of_an_accumulation() -> None:
    model, calls = shard(TOWER, mesh=mesh_of(2, 2)), []
    model.a.set_all_reduce_hook(lambda output: calls.append(output.numel()))
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        loss_on(TOWER, model, 0, None, micro).backward()
        assert len(calls) == (micro == 2)


@multi_rank(4)
@pytest.mark.parametrize("precision", [{}, PRECISION], ids=["full", "mixed"])
def test_hsdp_accumulates_unsharded_gradients_of_parameters_that_stay_unsharded(precision: dict[str, Any]) -> None:
    model = shard(UNEVEN_MLP, mesh=mesh_of(2, 2), mp_policy=API.MixedPrecisionPolicy(**precision))

    def before_forward(micro: int) -> None:
        model.set_requires_gradient_sync(micro == 2)
        model.set_reshard_after_backward(micro == 2)

    extra = {"grad_dtype": FP32, **precision} if precision else {}
    reference = Reference(UNEVEN_MLP, world_size=4, microbatches=3, accumulation=Accumulation.REDUCE_LAST, **extra)
    train(UNEVEN_MLP, model, reference=reference, before_forward=before_forward)


@multi_rank(4)
def test_hsdp_mixes_microbatches_without_sync_and_without_all_reduce() -> None:
    """Unsharded sums, then a partial reduction, then the whole one."""
    model = shard(ROOTED, mesh=mesh_of(2, 2))

    def before_forward(micro: int) -> None:
        model.set_requires_gradient_sync(micro != 0)
        model.set_requires_all_reduce(micro == 3)

    reference = Reference(ROOTED, world_size=4, microbatches=4)
    train(ROOTED, model, reference=reference, before_forward=before_forward, tolerance=SUM_ORDER)


@multi_rank(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_hsdp_with_chunked_parameters_of_a_list(shape: tuple[int, int]) -> None:
    mesh = mesh_of(*shape)
    model = UNEVEN_MLP.build()
    API.fully_shard([model[0], model[4]], mesh=mesh)
    API.fully_shard(model, mesh=mesh)
    train(UNEVEN_MLP, model)


# ---- an int reshard with … -----------------------------------------------------------------------


@multi_rank(4)
def test_an_int_reshard_gathers_in_param_dtype_and_trains() -> None:
    model = shard(TOWER, reshard_after_forward=2, mp_policy=API.MixedPrecisionPolicy(**PRECISION))
    loss_on(TOWER, model).backward()
    with traced() as trace:
        loss_on(TOWER, model).backward()
    assert {(len(each.ranks), each.dtype) for each in trace.of(GATHER)} == {(4, BF16), (2, BF16)}
    model = shard(UNEVEN_MLP, reshard_after_forward=2, mp_policy=API.MixedPrecisionPolicy(**PRECISION))
    train(UNEVEN_MLP, model, reference=Reference(UNEVEN_MLP, world_size=4, **PRECISION))


@multi_rank(4)
def test_an_int_reshard_gathers_through_the_custom_all_gather_both_times() -> None:
    model, log = shard(TOWER, reshard_after_forward=2), []
    model.b.set_custom_all_gather(custom_all_gather(log))
    loss_on(TOWER, model).backward()
    first = dist.get_rank() // 2 * 2
    assert [entry["ranks"] for entry in log] == [[0, 1, 2, 3], [first, first + 1]]
    model.zero_grad()
    train(TOWER, model)


@multi_rank(4)
def test_an_int_reshard_with_accumulation_and_prefetching() -> None:
    model = shard(TRANSFORMER, reshard_after_forward=2)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    reference = Reference(TRANSFORMER, world_size=4, microbatches=2, accumulation=Accumulation.REDUCE_LAST)
    train(
        TRANSFORMER,
        model,
        steps=2,
        reference=reference,
        before_forward=lambda micro: model.set_requires_gradient_sync(micro == 1),
        tolerance=SUM_ORDER,
    )


# ---- several meshes in one call, with … ----------------------------------------------------------


def on_two_meshes(**options: Any) -> Any:
    info = API.HSDPMeshInfo(mesh=mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    model = EXPERTS.build()
    return shard(EXPERTS, model, mesh=mesh_of(4), shard_placement_fn=place_experts(model, info), **options)


@multi_rank(4)
def test_two_meshes_in_mixed_precision_and_offload() -> None:
    options = {
        "mp_policy": API.MixedPrecisionPolicy(**PRECISION),
        "offload_policy": API.CPUOffloadPolicy(pin_memory=False),
    }
    train(EXPERTS, on_two_meshes(**options), reference=Reference(EXPERTS, world_size=4, **PRECISION))


@multi_rank(4)
def test_two_meshes_with_prefetching_by_hand() -> None:
    model = on_two_meshes()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    train(EXPERTS, model)


@multi_rank(4)
def test_prefetching_gathers_all_meshes_of_a_module() -> None:
    model = on_two_meshes()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    loss_on(EXPERTS, model).backward()
    with traced() as trace:
        model.blocks[0].dense.register_forward_pre_hook(lambda module, args: trace.mark("computes"))
        loss_on(EXPERTS, model)
    before = [each for each in trace.events[: trace.events.index("computes")] if not isinstance(each, str)]
    assert sorted(len(each.ranks) for each in before if each.dtype.is_floating_point) == [2, 2, 4, 4]


@multi_rank(4)
def test_two_meshes_unshard_and_reshard_together() -> None:
    model, plain = on_two_meshes(), EXPERTS.build()
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    for name, parameter in model.blocks[0].named_parameters():
        assert not is_sharded(parameter) and torch.equal(parameter, plain.blocks[0].get_parameter(name))
    model.blocks[0].reshard()
    assert all(is_sharded(parameter) for parameter in model.blocks[0].parameters())
    model.set_separate_reduce_scatter_group()
    train(EXPERTS, model)


@multi_rank(4)
def test_two_meshes_with_an_int_reshard() -> None:
    """Of the mesh of four; the other, of two, goes back to its shards."""
    info = API.HSDPMeshInfo(mesh=mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    model = EXPERTS.build()
    place = place_experts(model, info)
    train(EXPERTS, shard(EXPERTS, model, mesh=mesh_of(4), shard_placement_fn=place, reshard_after_forward=2))


# ---- settings that change while training ---------------------------------------------------------


@multi_rank(2, 4)
def test_settings_that_change_every_step(world_size: int) -> None:
    model, step = shard(TRANSFORMER), [0]

    def before_forward(micro: int) -> None:
        number = step[0]
        step[0] += 1
        model.set_reshard_after_forward(number % 2 == 0)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1 + number % 2]] if number % 3 else [])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[number % 2]] if number % 3 == 1 else [])
        model.set_separate_reduce_scatter_group(number % 4 < 2)
        model.set_reduce_scatter_max_input_buffers(1 + number % 3)
        model.set_is_last_backward(True)

    train(TRANSFORMER, model, steps=6, before_forward=before_forward)


@multi_rank(2)
def test_evaluation_between_with_prefetching_by_hand() -> None:
    model = shard(ROOTED)
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])

    def before_forward(micro: int) -> None:
        with torch.no_grad():
            loss_on(ROOTED, model, 7)
        for unit in ROOTED.units(model):
            unit.reshard()

    train(ROOTED, model, before_forward=before_forward)


@multi_rank(2)
def test_custom_collectives_may_be_set_between_steps() -> None:
    model, gathers, scatters = shard(TOWER), [], []
    train_first = loss_on(TOWER, model)
    train_first.backward()
    model.zero_grad()
    model.c.set_custom_all_gather(custom_all_gather(gathers))
    model.c.set_custom_reduce_scatter(custom_reduce_scatter(scatters))
    train(TOWER, model, steps=2)
    assert len(gathers) == 4 and len(scatters) == 2 and gathers[0]["numel"] >= SIZES["c"]


# ---- modules and parameters of other kinds -------------------------------------------------------


@multi_rank(2)
def test_parametrized_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 13))
            self.last = nn.Linear(13, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)))

    case = ModelCase("weight_norm", Net, TOWER.make_batch, ("first",), F.mse_loss)
    train(case, shard(case))


@multi_rank(2)
def test_attention_that_uses_the_weights_of_its_children() -> None:
    """`nn.MultiheadAttention` never calls its output projection."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.attention(x[None], x[None], x[None], need_weights=False)
            return self.last(y[0])

    case = ModelCase("attention", Net, TOWER.make_batch, ("attention",), F.mse_loss)
    train(case, shard(case))


@multi_rank(2, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_models_of_another_dtype_throughout(dtype: torch.dtype, world_size: int) -> None:
    model, plain = UNEVEN_MLP.build().to(dtype), UNEVEN_MLP.build().to(dtype)
    shard(UNEVEN_MLP, model)
    batches = [UNEVEN_MLP.batch(0, 0, rank) for rank in range(world_size)]
    mine = batches[dist.get_rank()]
    F.mse_loss(model(mine.inputs.to(dtype)), mine.targets.to(dtype)).backward()
    for batch in batches:
        F.mse_loss(plain(batch.inputs.to(dtype)), batch.targets.to(dtype)).backward()
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        assert gradient.dtype == dtype
        assert torch.allclose(gradient.full_tensor(), parameter.grad / world_size, rtol=2e-2, atol=2e-3), name


@multi_rank(2)
@beyond_torch("parameters without elements fail in the first reduction")
def test_a_parameter_without_elements() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.empty = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.empty.sum()

    case = ModelCase("empty", Net, TOWER.make_batch, (), F.mse_loss)
    train(case, shard(case))


@multi_rank(2)
def test_the_largest_parameter_of_one_rank_only() -> None:
    """Rows fewer than ranks beside a big matrix: shards of very different sizes in one group."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, WIDTH))
            self.first, self.last = nn.Linear(WIDTH, 301), nn.Linear(301, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x * self.scale)))

    case = ModelCase("sizes", Net, TOWER.make_batch, (), F.mse_loss)
    model = shard(case)
    train(case, model)
    assert isinstance(model.scale, DTensor) and model.scale.placements == (Shard(0),)


@multi_rank(2)
def test_full_parameters_after_every_kind_of_use() -> None:
    model = shard(ROOTED)
    expected = {name: parameter.detach() for name, parameter in ROOTED.build().named_parameters()}
    model.unshard()
    model[0].unshard()
    for unit in ROOTED.units(model):
        unit.reshard()
    assert_same("parameters", full_parameters(model), expected)
    loss_on(ROOTED, model).backward()
    assert_same("parameters", full_parameters(model), expected)
    assert all(parameter.placements != (Replicate(),) for parameter in model.parameters())
