"""Mistakes made while wrapping: each is one clear error of the right class, which names the culprit and the remedy.

One process, simulated ranks: nothing here communicates. Mistakes that show only when the model runs are in
`tests/multi_rank/failures/test_misuse.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import (
    FSDPError,
    FSDPModule,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
    fully_shard,
)
from tests.harness.fake import FakeWorlds
from tests.unit.helpers import for_each

WORLD_SIZE = 8


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest, simulate: FakeWorlds) -> None:
    """Rank 3 of 8, but for the test that wants none."""
    if "without_a_world" not in request.node.name:
        simulate(WORLD_SIZE, rank=3)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


class Scaled(nn.Module):
    """A 0-D parameter inside a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.inner.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.temperature


class SilentLayers(nn.ModuleList):
    """A ModuleList that still cannot."""


# ---- the classes ---------------------------------------------------------------------------------


@for_each(
    ("error", "builtin"),
    [
        (FSDPValueError, ValueError),
        (FSDPTypeError, TypeError),
        (FSDPRuntimeError, RuntimeError),
        (FSDPNotImplementedError, NotImplementedError),
    ],
)
def test_errors_are_kin_of_the_builtin_ones(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, FSDPError) and issubclass(error, builtin)
    assert error.__name__ in fsdp2.__all__


# ---- what is passed ------------------------------------------------------------------------------


@for_each(
    ("module", "found"),
    [
        (torch.zeros(3), "Tensor"),
        (nn.Linear, "type"),
        ("model", "str"),
        (None, "NoneType"),
        ([nn.Linear(2, 2), torch.relu], "builtin_function_or_method"),
        ({"a": nn.Linear(2, 2)}, "dict"),
    ],
)
def test_not_a_module(module: Any, found: str) -> None:
    with pytest.raises(FSDPTypeError, match=f"nn.Module or a list of them, got {found}"):
        fully_shard(module)


def test_empty_list() -> None:
    with pytest.raises(FSDPValueError, match="empty list"):
        fully_shard([])


def test_list_with_a_module_twice() -> None:
    layer, other = two_layers()
    with pytest.raises(FSDPValueError, match="holds a module twice"):
        fully_shard([layer, other, layer])
    assert not isinstance(layer, FSDPModule), "a refused call must change nothing"


class OwnUnshard(nn.Linear):
    def unshard(self) -> str:
        return "mine"


def with_own_attribute() -> nn.Module:
    module = nn.Linear(4, 4)
    module.reshard = True  # type: ignore[assignment]
    return module


class OwnState(nn.Linear):
    _fsdp_state = None


def with_own_state() -> nn.Module:
    module = nn.Linear(4, 4)
    module._fsdp_state = "mine"  # type: ignore[assignment]
    return module


@for_each(
    ("make", "name"),
    [
        (lambda: OwnUnshard(4, 4), "unshard"),
        (with_own_attribute, "reshard"),
        (lambda: nn.Sequential(OrderedDict(reset_iter_state=nn.Linear(4, 4))), "reset_iter_state"),
        (lambda: OwnState(4, 4), "_fsdp_state"),
        (with_own_state, "_fsdp_state"),
        (lambda: nn.Sequential(with_own_state()), "_fsdp_state"),
    ],
)
def test_a_module_with_a_name_that_sharded_modules_have(make: Callable[[], nn.Module], name: str) -> None:
    """For none of them would take the place of the other without a word."""
    module = make()
    kind = type(module)
    with pytest.raises(FSDPTypeError, match=f"'{name}' of its own, .* behind FSDPModule.{name}"):
        fully_shard(module)
    assert type(module) is kind and not isinstance(next(module.parameters()), DTensor)


@for_each("container", [nn.ModuleList, nn.ModuleDict, SilentLayers])
def test_container_without_forward(container: Callable[..., nn.Module]) -> None:
    layers = container({"a": nn.Linear(2, 2)} if container is nn.ModuleDict else [nn.Linear(2, 2)])
    with pytest.raises(FSDPValueError, match=f"{container.__name__}.*no forward.*the modules inside"):
        fully_shard(layers)


@for_each("value", ["yes", 1.5, [True], torch.tensor(True)])
def test_reshard_after_forward_of_a_wrong_type(value: Any) -> None:
    model = two_layers()
    with pytest.raises(FSDPValueError, match="reshard_after_forward must be"):  # of torch: ValueError
        fully_shard(model, reshard_after_forward=value)
    assert not isinstance(model, FSDPModule)


@pytest.mark.parametrize("ignored", [["0.weight"], [two_layers()]], ids=["names", "module"])
def test_ignored_params_that_are_not_parameters(ignored: Any) -> None:
    with pytest.raises(FSDPTypeError, match="ignored_params"):
        fully_shard(two_layers(), ignored_params=ignored)


def test_ignored_params_that_is_one_parameter() -> None:
    model = two_layers()
    with pytest.raises(FSDPTypeError, match="ignored_params"):
        fully_shard(model, ignored_params=model[0].weight)


# ---- the mesh ------------------------------------------------------------------------------------


def test_without_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = two_layers()
    with pytest.raises(FSDPRuntimeError, match=r"init_process_group\(\).*torchrun"):
        fully_shard(model)
    assert not isinstance(model, FSDPModule) and not dist.is_initialized()


def test_mesh_of_too_many_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipeline", "replicate", "shard"))
    with pytest.raises(FSDPValueError, match=r"3 dims \('pipeline', 'replicate', 'shard'\).*mesh\["):
        fully_shard(two_layers(), mesh=mesh)


@pytest.mark.parametrize(("names", "other"), [(("dp", "tp"), "dp"), (("pp", "shard"), "shard")])
def test_mesh_with_a_dim_of_model_parallelism(names: tuple[str, str], other: str) -> None:
    """Given as a whole: its ranks would count as more data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    with pytest.raises(FSDPValueError, match=rf"pass the other dim, mesh\['{other}'\], or say in dp_mesh_dims"):
        fully_shard(nn.Linear(4, 4), mesh=mesh)


def test_mesh_of_a_wrong_type() -> None:
    with pytest.raises(FSDPTypeError, match=r"DeviceMesh, got ProcessGroup.*init_device_mesh"):
        fully_shard(two_layers(), mesh=dist.group.WORLD)  # type: ignore[arg-type]


def test_mesh_of_devices_that_are_not_here() -> None:
    absent = "xpu" if torch.cuda.is_available() else "cuda"
    mesh = DeviceMesh(absent, list(range(WORLD_SIZE)))
    with pytest.raises(FSDPValueError, match=f"'{absent}', which is not available.*init_device_mesh"):
        fully_shard(two_layers(), mesh=mesh)


def test_mesh_without_this_rank() -> None:
    with pytest.raises(FSDPValueError, match="rank 3 is not part of"):
        fully_shard(two_layers(), mesh=DeviceMesh("cpu", [0, 1]))


# ---- order and ownership -------------------------------------------------------------------------


def test_the_same_module_twice() -> None:
    model = fully_shard(two_layers())
    assert fully_shard(model) is model
    with pytest.raises(
        FSDPValueError, match=r"already called on this Sequential.*'reshard_after_forward': None.*False"
    ):
        fully_shard(model, reshard_after_forward=False)


def test_a_module_that_was_in_a_list() -> None:
    model = two_layers()
    fully_shard(list(model))
    with pytest.raises(FSDPValueError, match=r"already called on this Linear.*'module': on \(Linear, Linear\)"):
        fully_shard(model[0])


def test_parent_before_child_names_the_owner() -> None:
    model = fully_shard(two_layers())
    with pytest.raises(FSDPValueError, match=r"'weight' of Linear.*as '1.weight'.*group of Sequential.*bottom-up"):
        fully_shard(model[1])
    assert not isinstance(model[1], FSDPModule)


def test_grandparent_before_child_names_the_owner() -> None:
    model = nn.Sequential(two_layers(), nn.Linear(3, 3))
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(FSDPValueError, match=r"'bias' of Linear|'weight' of Linear.*as '0.weight'"):
        fully_shard(model[0][0])


@pytest.mark.parametrize("index", [0, 2])
def test_parameters_of_a_list_are_named_by_their_own_modules(index: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    fully_shard([model[0], model[2]])
    fully_shard(model)
    model(torch.randn(2, 6))
    model[index].bias = nn.Parameter(torch.zeros(6))
    with pytest.raises(FSDPRuntimeError, match=f"parameter '{index}.bias' was replaced"):
        model(torch.randn(2, 6))


# ---- parameters ----------------------------------------------------------------------------------


def test_zero_dim_parameter_can_be_ignored_or_reshaped() -> None:
    model = Scaled()
    fully_shard(model, ignored_params=[model.inner.temperature])
    assert not isinstance(model.inner.temperature, DTensor) and isinstance(model.inner.weight, DTensor)
    model = Scaled()
    model.inner.temperature = nn.Parameter(model.inner.temperature.data.view(1))
    fully_shard(model)
    assert model.inner.temperature.shape == (1,)
    # One row over eight ranks: rank 0 has it, this one none.
    assert isinstance(model.inner.temperature, DTensor) and model.inner.temperature.to_local().shape == (0,)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_uninitialized_parameter_is_named() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.LazyLinear(3))
    with pytest.raises(FSDPValueError, match=r"'1\.(weight|bias)' of Sequential.*not initialized.*forward"):
        fully_shard(model)
    model(torch.zeros(2, 5))
    fully_shard(model)


# ---- what a sharded module refuses ---------------------------------------------------------------


def test_share_memory() -> None:
    """By other ways than these it would kill the process: see `test_misuse.py`, where a death is survived."""
    model = nn.Sequential(two_layers(), nn.Linear(3, 3))
    fully_shard(model[0])
    fully_shard(model)
    for module in (model, model[0]):
        with pytest.raises(FSDPRuntimeError, match=r"share_memory.*before sharding"):
            module.share_memory()


def test_a_refused_call_leaves_a_model_that_can_still_be_sharded() -> None:
    model = nn.Sequential(two_layers(), nn.LazyLinear(2))
    with pytest.raises(FSDPValueError, match=r"'1.weight' of Sequential is not initialized"):
        fully_shard(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    fully_shard(model, ignored_params=[model[1].weight, model[1].bias])
    assert isinstance(model[0][0].weight, DTensor)


def test_a_mesh_that_is_one_dim_of_a_larger_one() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("other", "shard"))
    model = fully_shard(two_layers(), mesh=mesh["shard"])
    assert model[0].weight.to_local().shape == (1, 5)  # 7 rows over 4 ranks, the last of them
