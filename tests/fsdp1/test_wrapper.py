"""`FullyShardedDataParallel` trains as the plain module does, with each strategy, policy and argument."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPModule, FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.compat.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    enable_wrap,
    policies,
    wrap,
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


@multi_rank(2, 4)
@pytest.mark.parametrize("strategy", [each.name for each in ShardingStrategy])
def test_strategies(strategy: str, world_size: int) -> None:
    chosen = ShardingStrategy[strategy]
    arguments: dict[str, Any] = {"sharding_strategy": chosen, "device_id": CPU}
    if "HYBRID" in strategy:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        arguments["process_group"] = (mesh.get_group(1), mesh.get_group(0))
    model = by_hand(**arguments)
    optimizer = adamw(list(model.parameters()))
    reference = Reference(UNEVEN_MLP, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_for(world_size))
    assert model.sharding_strategy is chosen and model.world_size == (2 if "HYBRID" in strategy else world_size)


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


@multi_rank(2)
def test_what_torch_gives_for_the_same_program(world_size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    losses = []
    for kind in (FullyShardedDataParallel, Torchs):
        model = kind(UNEVEN_MLP.build(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        of_kind = []
        for step in range(3):
            loss = UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, step, dist.get_rank()))
            loss.backward()
            of_kind.append((loss.item(), model.clip_grad_norm_(0.5).item()))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(of_kind)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-6)


@multi_rank(2, 4)
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
        for micro in range(2):
            (UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, record.step, dist.get_rank(), micro)) / 1).backward()
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
    assert (model.rank, model.world_size, model.compute_device) == (dist.get_rank(), world_size, CPU)
    wrapped = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    assert wrapped[0].out_features == 3
    wrapped.module.note = "ours"
    assert wrapped.note == "ours"
    with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
        wrapped.unheard_of  # noqa: B018
    for refused in (lambda: inner[0].no_sync().__enter__(), lambda: inner[0].clip_grad_norm_(1.0)):
        with pytest.raises(FSDPRuntimeError, match="on root FSDP module"):
            refused()
    assert model.train(False) is model and not model.training and not inner[0].module.training


@multi_rank(2)
def test_copies_train(world_size: int) -> None:
    model = copy.deepcopy(by_hand())
    assert model.check_is_root() and len(FullyShardedDataParallel.fsdp_modules(model, root_only=True)) == 1
    assert_trains_like(Reference(UNEVEN_MLP, world_size=world_size), model, adamw(list(model.parameters())), steps=2)


@multi_rank(2)
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


@multi_rank(2)
def test_offloading_with_accumulation(world_size: int) -> None:
    model = by_hand(cpu_offload=CPUOffload(offload_params=True))
    reference = Reference(UNEVEN_MLP, world_size=world_size, microbatches=2, accumulation=Accumulation.REDUCE_LAST)

    def before_forward(micro: int) -> None:
        model.module.set_requires_gradient_sync(micro == 1)

    optimizer = adamw(list(model.parameters()))
    assert_trains_like(reference, model, optimizer, steps=2, before_forward=before_forward)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((5,), 1 / 3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        self.seen += [x.dtype, self.scale.dtype]
        x = self.norm(self.first(x))
        self.seen += [x.dtype]
        skips.append(x)
        return self.last(x * self.scale)


@multi_rank(2)
def test_mixed_precision(world_size: int) -> None:
    torch.manual_seed(0)
    plain = WithNorm()
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = FullyShardedDataParallel(
        copy.deepcopy(plain), mixed_precision=precision, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    skips: list[torch.Tensor] = []
    output = model(torch.randn(8, 6), skips)
    assert model.seen == [torch.bfloat16] * 3 and output.dtype is torch.bfloat16 and len(skips) == 1
    assert model.norm.weight.dtype is torch.float32 and model.norm.running_mean.dtype is torch.float32
    output.float().square().mean().backward()
    assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
    saved = model.state_dict()
    assert saved["scale"].dtype is torch.float32 and saved["norm.running_mean"].dtype is torch.float32
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}


@multi_rank(2)
def test_inputs_of_units_are_cast_only_if_asked(world_size: int) -> None:
    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.saw = x.dtype
            return super().forward(x.to(self.weight.dtype))

    for casts in (False, True):
        precision = MixedPrecision(torch.bfloat16, cast_forward_inputs=casts, keep_low_precision_grads=True)
        model = nn.Sequential(Inner(4, 4))
        model[0] = FullyShardedDataParallel(model[0], mixed_precision=precision)
        model.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        root = FullyShardedDataParallel(model, mixed_precision=precision)
        root(torch.randn(2, 4)).sum().backward()
        assert model[0].module.saw is (torch.bfloat16 if casts else torch.float32)
        assert all(parameter.grad.dtype is torch.bfloat16 for parameter in root.parameters())


@multi_rank(2)
def test_what_is_ignored_stays_whole(world_size: int) -> None:
    for argument in ("ignored_modules", "ignored_states", "parameters"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2))
        given = [plain[1]] if argument != "parameters" else list(plain[1].parameters())
        name = "ignored_modules" if argument == "ignored_modules" else "ignored_states"
        model = FullyShardedDataParallel(plain, auto_wrap_policy=always_wrap_policy, **{name: given})
        sharded = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
        assert sharded == {"0.weight", "0.bias", "2.weight", "2.bias"}
        model(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()
        assert plain.get_parameter("1.0.weight").grad is not None
    with pytest.raises(FSDPValueError, match="cannot be ignored"):
        FullyShardedDataParallel(model, ignored_modules=[model[0]])
    with pytest.raises(FSDPValueError, match="ignored_states at the same time"):
        FullyShardedDataParallel(nn.Linear(2, 2), ignored_modules=[], ignored_states=[])
    with pytest.raises(FSDPTypeError, match="iterable of modules"):
        FullyShardedDataParallel(nn.Linear(2, 2), ignored_modules=[torch.ones(1)])  # type: ignore[list-item]


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


@pytest.mark.parametrize("given", [1, torch.device("cpu", 1), "cpu"])
def test_the_cpu_has_no_index(given: Any) -> None:
    """Tensors on it say none: a device with one would be another, to programs that compare."""
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


def test_wrap_within_enable_wrap(simulate: FakeWorlds) -> None:
    simulate(2)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        first, second = wrap(nn.Linear(2, 2)), wrap(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.FULL_SHARD)
    assert first.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert second.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert isinstance(wrap(nn.Linear(2, 2)), nn.Linear)


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
    with pytest.raises(FSDPValueError, match="both process_group and device_mesh"):
        FullyShardedDataParallel(
            nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))
        )
    with pytest.raises(FSDPValueError, match=r"reset_parameters\(\)"), torch.device("meta"):
        FullyShardedDataParallel(WithNorm())


@multi_rank(2)
def test_whole_parameters_for_a_while(world_size: int) -> None:
    plain = UNEVEN_MLP.build()
    model = by_hand()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert not isinstance(found, DTensor) and torch.equal(found, expected), name
    inner = FullyShardedDataParallel.fsdp_modules(model)[1]
    with FullyShardedDataParallel.summon_full_params(inner, recurse=False):
        assert not any(isinstance(parameter, DTensor) for parameter in inner.parameters())
        assert sum(isinstance(parameter, DTensor) for parameter in model.parameters()) > 0
        next(inner.parameters()).data.fill_(2.0)
    assert (next(inner.parameters()).full_tensor() == 2).all()

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            assert not isinstance(parameter, DTensor)
            parameter.data.fill_(3.0)

    assert model.apply(fill) is model
    assert all((parameter.full_tensor() == 3).all() for parameter in model.parameters())


@multi_rank(2, 4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_communication_hook_reduces_as_the_engine_does(strategy: str, world_size: int) -> None:
    from fsdp2.compat.fsdp1 import comm_hooks

    model = by_hand(sharding_strategy=ShardingStrategy[strategy])
    hook = comm_hooks.allreduce_hook if strategy == "NO_SHARD" else comm_hooks.reduce_scatter_hook
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


@multi_rank(2)
def test_no_sync_inside_of_no_sync(world_size: int) -> None:
    model = by_hand()
    with model.no_sync():
        with model.no_sync():
            UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, dist.get_rank(), 0)).backward()
        UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, dist.get_rank(), 1)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, dist.get_rank(), 2)).backward()
    record = Reference(UNEVEN_MLP, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), record.gradients[name], msg=name)
