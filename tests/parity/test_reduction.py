"""What the reduction of gradients makes of them: scaling, forced sums, parameters that got none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import assert_same, multi_rank
from tests.harness.compare import SUM_ORDER
from tests.harness.models import MLP, UNEVEN_MLP, ModelCase
from tests.harness.parity.custom_collectives import custom_reduce_scatter
from tests.harness.parity.implementation import beyond_torch
from tests.harness.parity.programs import TOWER, loss_on, mesh_of, shard, train


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole, by name."""
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


# ---- scaling -------------------------------------------------------------------------------------


WITHOUT_SUMS = beyond_torch("gloo knows no PREMUL_SUM")


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize(
    ("factor", "force_sum"),
    [
        pytest.param(1.0, False, marks=WITHOUT_SUMS),
        pytest.param(3.0, False, marks=WITHOUT_SUMS),
        (None, False),
        (3.0, True),
        (8.0, True),
    ],
)
def test_the_divide_factor_replaces_the_world_size(factor: float | None, force_sum: bool, world_size: int) -> None:
    factor = factor or float(world_size)
    model = shard(UNEVEN_MLP)
    loss_on(UNEVEN_MLP, model).backward()
    expected = {name: gradient * (world_size / factor) for name, gradient in gradients(model).items()}
    model.zero_grad()
    for unit in UNEVEN_MLP.units(model):
        unit.set_gradient_divide_factor(factor)
        unit.set_force_sum_reduction_for_comms(force_sum)
    loss_on(UNEVEN_MLP, model).backward()
    assert_same("gradients", gradients(model), expected, tolerance=SUM_ORDER)


@multi_rank(2)
@pytest.mark.parametrize("method", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
@pytest.mark.filterwarnings("ignore:.*set_gradient_divide_factor:DeprecationWarning")
def test_the_divide_factor_is_of_one_module_only(method: str) -> None:
    model = shard(TOWER)
    loss_on(TOWER, model).backward()
    expected = gradients(model)
    model.zero_grad()
    model.b.set_force_sum_reduction_for_comms(True)
    getattr(model.b, method)(4.0)
    loss_on(TOWER, model).backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name] * (0.5 if name.startswith("b") else 1.0)), name


@multi_rank(2)
def test_the_old_name_of_the_divide_factor_warns() -> None:
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        shard(TOWER).a.set_reduce_scatter_divide_factor(2.0)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("force_sum", [pytest.param(False, marks=WITHOUT_SUMS), True])
def test_the_divide_factor_under_hsdp_is_for_both_axes_together(force_sum: bool) -> None:
    model = shard(TOWER, mesh=mesh_of(2, 2))
    loss_on(TOWER, model).backward()
    expected = {name: gradient * 4 / 3 for name, gradient in gradients(model).items()}
    model.zero_grad()
    for unit in TOWER.units(model):
        unit.set_gradient_divide_factor(3.0)
        unit.set_force_sum_reduction_for_comms(force_sum)
    loss_on(TOWER, model).backward()
    assert_same("gradients", gradients(model), expected, tolerance=SUM_ORDER)


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("force_sum", [True, False])
def test_forced_sums_are_the_only_operation_that_the_collectives_see(force_sum: bool, world_size: int) -> None:
    model, log = shard(TOWER), []
    for unit in TOWER.units(model):
        unit.set_force_sum_reduction_for_comms(force_sum)
        unit.set_custom_reduce_scatter(custom_reduce_scatter(log))
    train(TOWER, model)
    assert log and all((entry["op"] == dist.ReduceOp.SUM) == force_sum for entry in log)


# ---- parameters without gradients ----------------------------------------------------------------


class Switched(nn.Module):
    """Which of the two branches runs depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.branches = nn.ModuleList([nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)])
        self.use = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[self.use](torch.tanh(self.first(x)))


SWITCHED = ModelCase("switched", Switched, MLP.make_batch, (), F.mse_loss)


@multi_rank(2, 4)
@pytest.mark.parametrize("recurse", [True, False])
def test_ranks_may_use_different_parameters_where_unused_ones_are_reduced_too(recurse: bool, world_size: int) -> None:
    model, plain = shard(SWITCHED), SWITCHED.build()
    model.set_reduce_scatter_unused_params(True, recurse=recurse)
    for rank in range(world_size):
        plain.use = rank % 2
        loss_on(SWITCHED, plain, 0, rank).backward()
    model.use = dist.get_rank() % 2
    loss_on(SWITCHED, model).backward()
    expected = {name: parameter.grad / world_size for name, parameter in plain.named_parameters()}
    assert_same("gradients", gradients(model), expected, tolerance=SUM_ORDER)


@multi_rank(2)
@pytest.mark.parametrize("enable", [True, False])
def test_unused_parameters_have_zero_gradients_only_where_asked(enable: bool) -> None:
    model = shard(SWITCHED)
    model.set_reduce_scatter_unused_params(enable)
    loss_on(SWITCHED, model).backward()
    gradient = model.branches[1].weight.grad
    assert (gradient is not None) == enable
    assert gradient is None or torch.equal(gradient.full_tensor(), torch.zeros(16, 32))


@multi_rank(2)
def test_a_parameter_unused_in_the_last_microbatch_keeps_its_gradient() -> None:
    model, plain = shard(SWITCHED), SWITCHED.build()
    for micro in range(2):
        model.use = plain.use = 1 - micro
        model.set_requires_gradient_sync(micro == 1)
        loss_on(SWITCHED, model, 0, None, micro).backward()
        for rank in range(2):
            loss_on(SWITCHED, plain, 0, rank, micro).backward()
    expected = {name: parameter.grad / 2 for name, parameter in plain.named_parameters()}
    assert_same("gradients", gradients(model), expected, tolerance=SUM_ORDER)


class Nested(nn.Module):
    """An unused parameter in the root's group, and one in the group of ``inner``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Switched()
        self.last, self.unused = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


@multi_rank(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_unused_parameters_of_submodules_only_with_recurse(recurse: bool) -> None:
    case = ModelCase("nested", Nested, MLP.make_batch, ("inner",), F.mse_loss)
    model = shard(case)
    model.set_reduce_scatter_unused_params(True, recurse=recurse)
    loss_on(case, model).backward()
    assert torch.equal(model.unused.weight.grad.full_tensor(), torch.zeros(16, 16))
    assert (model.inner.branches[1].weight.grad is not None) == recurse
