"""`FullyShardedDataParallel` trains as the plain module does, with each strategy, policy and argument."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPModule, FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.compat.fsdp1 import (
    BackwardPrefetch,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    policies,
)
from fsdp2.compat.fsdp1.construction import device_of, used
from fsdp2.compat.fsdp1.policies import Ignored
from tests.harness import Accumulation, FakeWorlds, Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.models import UNEVEN_MLP

CPU = torch.device("cpu")


def by_hand(**arguments: Any) -> Any:
    """`UNEVEN_MLP`, each unit wrapped."""
    model = UNEVEN_MLP.build()
    for name in UNEVEN_MLP.unit_names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, FullyShardedDataParallel(model.get_submodule(name), **arguments))
    return FullyShardedDataParallel(model, **arguments)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def other_strategy(module: nn.Module) -> bool | dict[str, Any]:
    return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if is_linear(module) else False


def policy_of(name: str, source: Any) -> Any:
    """A policy of ``source``: ours or torch's module of policies."""
    made: dict[str, Callable[[], Any]] = {
        "classes": lambda: source.ModuleWrapPolicy({nn.Linear}),
        "custom": lambda: source.CustomPolicy(other_strategy),
        "size": lambda: functools.partial(source.size_based_auto_wrap_policy, min_num_params=20),
        "transformer": lambda: functools.partial(
            source.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}
        ),
        "lambda": lambda: functools.partial(source.lambda_auto_wrap_policy, lambda_fn=is_linear),
        "or": lambda: functools.partial(source._or_policy, policies=[policy_of("lambda", source)]),
        "always": lambda: source.always_wrap_policy,
    }
    return made[name]()


@multi_rank(2)
@pytest.mark.parametrize("name", ["classes", "custom", "size", "transformer", "lambda", "or", "always"])
def test_policies_make_the_units_that_torch_makes(name: str, world_size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs
    from torch.distributed.fsdp import wrap as torchs_policies

    torchs = Torchs(UNEVEN_MLP.build(), auto_wrap_policy=policy_of(name, torchs_policies), device_id=CPU)

    def units(model: nn.Module, kind: type[nn.Module]) -> list[tuple[str, Any]]:
        found = [(name, each) for name, each in model.named_modules() if isinstance(each, kind)]
        return [(name.replace("_fsdp_wrapped_module.", ""), each.sharding_strategy) for name, each in found]

    for source in (policies, torchs_policies):
        model = FullyShardedDataParallel(UNEVEN_MLP.build(), auto_wrap_policy=policy_of(name, source))
        assert units(model, FullyShardedDataParallel) == units(torchs, Torchs)
        optimizer = adamw(list(model.parameters()))
        assert_trains_like(Reference(UNEVEN_MLP, world_size=world_size), model, optimizer, steps=1)


@multi_rank(2, 4)
@pytest.mark.full
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_accumulation_and_clipping(max_norm: float, world_size: int) -> None:
    model = by_hand()
    reference = Reference(
        UNEVEN_MLP,
        world_size=world_size,
        microbatches=3,
        accumulation=Accumulation.REDUCE_LAST,
        max_norm=max_norm,
    )
    optimizer = adamw(list(model.parameters()))
    record = reference.step()
    with model.no_sync():
        for micro, inside in enumerate((model.no_sync(), contextlib.nullcontext())):
            with inside:
                UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, record.step, dist.get_rank(), micro)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, record.step, dist.get_rank(), 2)).backward()
    norm = model.clip_grad_norm_(max_norm)
    assert not isinstance(norm, DTensor) and norm.dim() == 0
    torch.testing.assert_close(norm, record.gradient_norm)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), record.parameters[name], msg=name)


@multi_rank(2)
def test_names_attributes_and_indices_are_the_modules(world_size: int) -> None:
    plain = UNEVEN_MLP.build()
    model = by_hand()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    outer = nn.Sequential(model)
    assert [name for name, _ in outer.named_parameters()] == [f"0.{name}" for name, _ in plain.named_parameters()]
    assert list(outer.state_dict()) == [f"0.{name}" for name in plain.state_dict()]
    names = {name for name, _ in model.named_modules()}
    assert names == {name for name, _ in plain.named_modules()}
    assert all(isinstance(model.get_submodule(name), FullyShardedDataParallel) for name in UNEVEN_MLP.unit_names)
    assert model.module is model._fsdp_wrapped_module and isinstance(model.module, FSDPModule)
    assert model.check_is_root() and len(FullyShardedDataParallel.fsdp_modules(model, root_only=True)) == 1
    inner = FullyShardedDataParallel.fsdp_modules(model)[1:]
    assert inner and not any(each.check_is_root() for each in inner)
    assert model.train(False) is model and not model.training and not inner[0].module.training


@multi_rank(2)
@pytest.mark.full
def test_copies_train(world_size: int) -> None:
    model = copy.deepcopy(by_hand())
    assert model.check_is_root() and len(FullyShardedDataParallel.fsdp_modules(model, root_only=True)) == 1
    assert_trains_like(Reference(UNEVEN_MLP, world_size=world_size), model, adamw(list(model.parameters())), steps=2)


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"])
def test_prefetching(prefetch: str | None, world_size: int) -> None:
    model = by_hand(
        backward_prefetch=prefetch and BackwardPrefetch[prefetch], forward_prefetch=True, limit_all_gathers=False
    )
    assert_trains_like(Reference(UNEVEN_MLP, world_size=world_size), model, adamw(list(model.parameters())), steps=3)
    settings = fsdp2.fully_shard.state(model.module).root.settings  # type: ignore[attr-defined]
    moments = {None: "never", "BACKWARD_PRE": "before", "BACKWARD_POST": "after"}
    assert settings.backward_prefetch == moments[prefetch]


class Reporting(nn.Module):
    """Notes the dtypes that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.layer.weight.dtype, self.shift.dtype)
        return self.layer(x) + self.shift


@multi_rank(2)
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("kind", ["ours", "torchs"])
def test_full_precision_in_evaluation(asked: bool, kind: str, world_size: int) -> None:
    """``FSDP_USE_FULL_PREC_IN_EVAL=1``, here and with torch's own."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    half = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=True)
    wrap: Any = FullyShardedDataParallel if kind == "ours" else Torchs
    arguments = {"mixed_precision": half, "device_id": torch.device("cpu"), "use_orig_params": True}
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1" if asked else "0")
        model = wrap(nn.Sequential(wrap(Reporting(), **arguments), Reporting()), **arguments)
    plain = nn.Sequential(Reporting(), Reporting())
    x = torch.rand(2, 5)
    for _ in range(2):
        model.train()
        model(x).sum().backward()
        inner, outer = (each for each in model.modules() if isinstance(each, Reporting))
        assert inner.seen == outer.seen == (torch.bfloat16,) * 3
        model.eval()
        with torch.no_grad():
            found = model(x)
        expected = torch.float32 if asked else torch.bfloat16
        assert inner.seen == outer.seen == (expected,) * 3
        if asked and kind == "ours":
            plain.load_state_dict(model.state_dict())
            torch.testing.assert_close(found, plain(x).detach(), rtol=1e-6, atol=1e-6)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x)))


class Placed(nn.Module):
    """Whose parameters are said to be on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.places = [torch.device("cpu"), torch.device(device)]

    def parameters(self, recurse: bool = True) -> Any:
        return (Mock(device=each) for each in self.places)


def test_the_device_that_is_asked_for_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each rank is on its own, where no program has called ``torch.cuda.set_device()``."""
    current = [0]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: current.__setitem__(0, index))
    for given, placed, expected in (
        (3, "cpu", 3),
        (torch.device("cuda", 2), "cuda:1", 2),
        (None, "cuda:1", 1),
        (None, "meta", 1),
        (torch.device("cuda"), "cpu", 1),
        (None, "cpu", 1),
    ):
        device = used(device_of(given, None, Placed(placed), Ignored(frozenset(), frozenset())))
        assert device == torch.device("cuda", expected) and current == [expected], (given, placed)
    used(device_of(CPU, None, Placed("cuda:2"), Ignored(frozenset(), frozenset())))
    assert current == [1]


def test_the_cpu_has_no_index() -> None:
    """Tensors on it say none: a device with one would be another, to programs that compare."""
    for given in (1, torch.device("cpu", 1), "cpu"):
        assert device_of(given, None, Placed("cpu"), Ignored(frozenset(), frozenset())) == CPU


@multi_rank(2)
@pytest.mark.parametrize("own", [False, True])
def test_meta_modules_are_given_values_and_ties_stay(own: bool, world_size: int) -> None:
    with torch.device("meta"):
        plain = Tied()

    def param_init_fn(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(1.0)

    torch.manual_seed(dist.get_rank())
    model = FullyShardedDataParallel(
        plain,
        param_init_fn=param_init_fn if own else None,
        sync_module_states=not own,
    )
    assert model.head.weight is model.embedding.weight and len(list(model.parameters())) == 3
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if own:
        assert all((value == 1).all() for value in whole.values())
    else:
        assert not any(value.isnan().any() for value in whole.values())
    model(torch.arange(4)).sum().backward()


@multi_rank(2)
def test_ties_of_several_units_stay_on_meta(world_size: int) -> None:
    with torch.device("meta"):
        plain = Tied()

    def param_init_fn(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(2.0 if isinstance(module, nn.Embedding) else 1.0)

    policy = ModuleWrapPolicy({nn.Linear, nn.Embedding})
    model = FullyShardedDataParallel(plain, auto_wrap_policy=policy, param_init_fn=param_init_fn)
    assert len(list(model.parameters())) == 3
    expected = Tied()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.fill_(2.0 if name.startswith("embedding") else 1.0)
    expected(torch.arange(4)).sum().backward()
    model(torch.arange(4)).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), expected.get_parameter(name).grad), name


class Contained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.ModuleList([nn.Linear(3, 3)])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["b"][0](self.layers["a"](x))


@multi_rank(2)
def test_containers_that_a_policy_chooses_are_left_alone(world_size: int) -> None:
    """Torch wraps them for nothing: everything inside is in a unit of its own."""
    model = FullyShardedDataParallel(Contained(), auto_wrap_policy=always_wrap_policy)
    wrapped = {name for name, each in model.named_modules() if isinstance(each, FullyShardedDataParallel)}
    assert wrapped == {"", "layers.a", "layers.b.0"}
    model(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    def chooses(module: nn.Module) -> bool:
        return isinstance(module, nn.ModuleList)

    with pytest.raises(FSDPValueError, match="cannot shard a ModuleList: it has no forward"):
        FullyShardedDataParallel(Contained(), auto_wrap_policy=CustomPolicy(chooses))


@multi_rank(2)
def test_values_come_from_the_first_rank(world_size: int) -> None:
    torch.manual_seed(dist.get_rank())
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    plain[1].running_mean.fill_(dist.get_rank() + 5.0)
    model = FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), sync_module_states=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected.get_parameter(name)), name
    assert (model[1].running_mean == 5.0).all()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"sharding_strategy": "full"}, FSDPTypeError, "sharding_strategy must be a ShardingStrategy"),
        ({"mixed_precision": torch.bfloat16}, FSDPTypeError, "mixed_precision must be a MixedPrecision"),
        ({"auto_wrap_policy": 3}, FSDPTypeError, "auto_wrap_policy must be a policy"),
        ({"process_group": "world"}, FSDPValueError, "must be a process group"),
        (
            {"process_group": "world", "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
            FSDPValueError,
            r"\(shard group, replicate group\)",
        ),
        ({"param_init_fn": 3}, FSDPTypeError, "param_init_fn must be a function"),
    ],
)
def test_wrong_arguments(simulate: FakeWorlds, arguments: Any, error: type[Exception], says: str) -> None:
    simulate(2)
    with pytest.raises(error, match=says):
        FullyShardedDataParallel(nn.Linear(2, 2), **arguments)


@multi_rank(2, 4)
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_communication_hook_reduces_as_the_engine_does(strategy: str, world_size: int) -> None:
    from fsdp2.compat.fsdp1 import comm_hooks

    model = by_hand(sharding_strategy=ShardingStrategy[strategy])
    hook = comm_hooks.reduce_scatter_hook
    with pytest.raises(FSDPRuntimeError, match="can only be called on a root instance"):
        FullyShardedDataParallel.fsdp_modules(model)[1].register_comm_hook(None, hook)
    model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), hook)
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    assert_trains_like(reference, model, adamw(list(model.parameters())), steps=2, tolerance=tolerance_for(4))


@multi_rank(2)
def test_experts_keep_their_values_where_others_come_from_the_first_rank(world_size: int) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(dist.get_rank() + 1.0)
    model = FullyShardedDataParallel(plain, sync_module_states=True, ignored_states=[plain[1]])
    assert all((parameter.full_tensor() == 1).all() for parameter in model[0].parameters())
    assert all((parameter == dist.get_rank() + 1).all() for parameter in model[1].parameters())
