"""Settings that meet: pairs of features, each documented on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Reference, multi_rank
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter
from tests.harness.parity.implementation import API, beyond_torch
from tests.harness.parity.programs import SIZES, TOWER, WIDTH, loss_on, mesh_of, shard, train
from tests.harness.parity.trace import traced
from tests.parity.helpers.experts import EXPERTS, place_experts

BF16, FP32 = torch.bfloat16, torch.float32
PRECISION = {"param_dtype": BF16, "reduce_dtype": FP32}


# ---- an int reshard with … -----------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
def test_an_int_reshard_gathers_through_the_custom_all_gather_both_times() -> None:
    model, log = shard(TOWER, reshard_after_forward=2), []
    model.b.set_custom_all_gather(custom_all_gather(log))
    loss_on(TOWER, model).backward()
    first = dist.get_rank() // 2 * 2
    assert [entry["ranks"] for entry in log] == [[0, 1, 2, 3], [first, first + 1]]
    model.zero_grad()
    train(TOWER, model)


# ---- several meshes in one call, with … ----------------------------------------------------------


def on_two_meshes(**options: Any) -> Any:
    info = API.HSDPMeshInfo(mesh=mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    model = EXPERTS.build()
    return shard(EXPERTS, model, mesh=mesh_of(4), shard_placement_fn=place_experts(model, info), **options)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("reshard_after_forward", [True, 2])
def test_two_meshes_in_mixed_precision_and_offload(reshard_after_forward: bool | int) -> None:
    """The int is one of the mesh of four; the other, of two, goes back to its shards."""
    model = on_two_meshes(
        mp_policy=API.MixedPrecisionPolicy(**PRECISION),
        offload_policy=API.CPUOffloadPolicy(pin_memory=False),
        reshard_after_forward=reshard_after_forward,
    )
    train(EXPERTS, model, reference=Reference(EXPERTS, world_size=4, **PRECISION))


@pytest.mark.full
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
