"""The same programs under torch's own FSDP1 and under the wrapper, beside the plain model.

Torch's runs on the CPU if it is told ``device_id=torch.device("cpu")``. Where the two differ on purpose, the test says
what is expected of each.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from fsdp2.compat import fsdp1
from fsdp2.compat.fsdp1 import (
    BackwardPrefetch,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    policies,
)
from fsdp2.compat.fsdp1.config import TrainingState
from tests.fsdp1.helpers.both import (
    CPU,
    SUMS,
    backward,
    both,
    class_of,
    numel_here,
    plain_name,
    sgd,
    whole_gradients,
    whole_weights,
    wrapped,
)
from tests.harness import Reference, multi_rank
from tests.harness.compare import assert_same
from tests.harness.models import UNEVEN_MLP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself

# ---- training ---------------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.full
@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_losses_gradients_and_weights(kind: str, strategy: str, world_size: int) -> None:
    model = wrapped(kind, sharding_strategy=ShardingStrategy[strategy])
    optimizer, reference = sgd(model.parameters()), Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
    for step in range(3):
        record = reference.step()
        loss = backward(model, step)
        assert_same("losses", {"": loss}, {"": record.losses[dist.get_rank()][0]}, tolerance=SUMS)
        assert_same("gradients", whole_gradients(model), record.gradients, tolerance=SUMS)
        optimizer.step()
        optimizer.zero_grad()
    assert_same("weights", whole_weights(model), record.parameters, tolerance=SUMS)


@multi_rank(4)
@pytest.mark.full
@both
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("given", ["groups", "mesh"])
def test_hybrid_strategies(kind: str, strategy: str, given: str, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    arguments: dict[str, Any] = {"device_mesh": mesh}
    if given == "groups":
        arguments = {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    model = wrapped(kind, sharding_strategy=ShardingStrategy[strategy], **arguments)
    optimizer, reference = sgd(model.parameters()), Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
    for step in range(2):
        record = reference.step()
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    saved = model.state_dict() if given == "groups" else whole_weights(model)
    assert_same("weights", {name: value.detach() for name, value in saved.items()}, record.parameters, tolerance=SUMS)


@multi_rank(4)
@pytest.mark.full
@both
def test_a_process_group_of_a_part_of_the_ranks(kind: str, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model = wrapped(kind, nn.Linear(3, 5), process_group=mesh.get_group("shard"))
    assert model.world_size == 2 and model.rank == mesh.get_local_rank("shard")
    model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    mean = 0.5 if dist.get_rank() < 2 else 2.5
    assert_same("gradients", whole_gradients(model), {"weight": torch.full((5, 3), mean), "bias": torch.ones(5)})


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


class WithIdleUnit(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = Branches(), Branches()  # type: ignore[assignment]


@multi_rank(2)
@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("original", [False, True])
def test_unused_parameters_of_a_used_unit_decay(kind: str, strategy: str, original: bool, world_size: int) -> None:
    """They lie in a flat gradient, whose other elements are zeros; parameters of a unit that is not used have none."""
    plain = WithIdleUnit()
    before = copy.deepcopy(plain.state_dict())
    arguments = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": original}
    model = wrapped(kind, plain, auto_wrap_policy=ModuleWrapPolicy({Branches}), **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = model.state_dict()
    torch.testing.assert_close(after["used.idle.weight"], before["used.idle.weight"] * 0.95**2)
    assert not torch.equal(after["used.used.weight"], before["used.used.weight"])
    for name in (name for name in before if name.startswith("idle")):
        assert torch.equal(after[name], before[name]), name


@multi_rank(2)
@both
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 1000.0])
def test_clipping(kind: str, norm_type: float, max_norm: float, world_size: int) -> None:
    model, plain = wrapped(kind), UNEVEN_MLP.build()
    record = Reference(UNEVEN_MLP, world_size=world_size).step()
    for name, parameter in plain.named_parameters():
        parameter.grad = record.gradients[name]
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    backward(model)
    found = model.clip_grad_norm_(max_norm, norm_type)
    assert not isinstance(found, DTensor)
    assert_same("norm", {"": found}, {"": expected}, tolerance=SUMS)
    clipped = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same("gradients", whole_gradients(model), clipped, tolerance=SUMS)


# ---- whole parameters -------------------------------------------------------------------------------


@multi_rank(2)
@both
@pytest.mark.parametrize("writeback", [False, True])
def test_summoned_parameters_are_whole(kind: str, writeback: bool, world_size: int) -> None:
    model, plain = wrapped(kind), UNEVEN_MLP.build()
    with type(model).summon_full_params(model, writeback=writeback):
        found = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        assert_same("weights", {name: each.detach() for name, each in found.items()}, dict(plain.named_parameters()))
        with torch.no_grad():
            for parameter in found.values():
                parameter.fill_(7.0)
    kept = all((value == 7).all() for value in whole_weights(model).values())
    assert kept is writeback


@multi_rank(2)
@both
def test_summoning_of_one_unit(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    assert model.check_is_root()  # torch's takes whatever is called first as the root
    unit = model[0]
    with type(model).summon_full_params(unit, recurse=False):
        shapes = [tuple(parameter.shape) for parameter in unit.parameters()]
        others = [p for name, p in model.named_parameters() if not plain_name(name).startswith("0.")]
        whole = {name: tuple(each.shape) for name, each in UNEVEN_MLP.build().named_parameters()}
        assert shapes == [whole["0.weight"], whole["0.bias"]]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in others]
        assert sum(each.numel() for each in local) < sum(each.numel() for each in UNEVEN_MLP.build()[2:].parameters())
    with type(model).summon_full_params(model, recurse=False):  # the root's own: there are none
        assert sum(numel_here(each) for each in model.parameters()) < sum(map(torch.Tensor.numel, _all(whole)))


@multi_rank(2)
@both
def test_summoning_where_nothing_is_wrapped(kind: str, world_size: int) -> None:
    """Programs summon whatever model they have: one that `fully_shard` has sharded is left alone."""
    cls, model = type(wrapped(kind)), fully_shard(UNEVEN_MLP.build())
    for module in (model, model[0]):
        for recurse in (True, False):
            with cls.summon_full_params(module, recurse=recurse, writeback=False):
                assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    inside = nn.Sequential(wrapped(kind))
    whole = sum(parameter.numel() for parameter in UNEVEN_MLP.build().parameters())
    for recurse, is_whole in ((True, True), (False, False)):
        with cls.summon_full_params(inside, recurse=recurse, writeback=False):
            assert (sum(numel_here(each) for each in inside.parameters()) == whole) is is_whole


def _all(shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    return [torch.empty(shape) for shape in shapes.values()]


@multi_rank(2)
@both
def test_summoning_on_the_first_rank_only(kind: str, world_size: int) -> None:
    model, plain = wrapped(kind), UNEVEN_MLP.build()
    offload = kind == "fsdp2"  # torch's reads memory that it has freed, on the CPU
    with type(model).summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=offload):
        if dist.get_rank() == 0:
            found = {plain_name(name): parameter.detach() for name, parameter in model.named_parameters()}
            assert_same("weights", found, dict(plain.named_parameters()))
            assert all(value.device == CPU for value in found.values())
    with pytest.raises(NotImplementedError, match="rank0_only"):
        type(model).summon_full_params(model, writeback=True, rank0_only=True).__enter__()


@multi_rank(2)
@both
def test_summoned_gradients(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    record = Reference(UNEVEN_MLP, world_size=world_size).step()
    backward(model)
    assert_same("gradients", whole_gradients(model), record.gradients, tolerance=SUMS)
    arguments: dict[str, Any] = {"with_grads": True, "offload_to_cpu": True, "writeback": False}
    if kind == "torch":  # it refuses both together
        with pytest.raises(NotImplementedError, match="with_grads"):
            type(model).summon_full_params(model, **arguments).__enter__()
        return
    with type(model).summon_full_params(model, **arguments):
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_same("gradients", found, record.gradients, tolerance=SUMS)


@multi_rank(2)
@both
def test_apply_sees_whole_parameters(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    shapes: list[tuple[int, ...]] = []
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            whole = [each.weight.dim() == 2 and not isinstance(each.weight, DTensor) for each in layers]
            assert whole.count(True) == 1, "one unit at a time"
            with torch.no_grad():
                module.weight.fill_(3.0)

    assert model.apply(fill) is model
    plain = UNEVEN_MLP.build()
    assert shapes == [tuple(each.weight.shape) for each in plain if isinstance(each, nn.Linear)]
    weights = whole_weights(model)
    assert all((value == 3).all() for name, value in weights.items() if name.endswith("weight"))
    assert torch.equal(weights["0.bias"], plain[0].bias)


# ---- the wrapper as a module ------------------------------------------------------------------------


@multi_rank(2)
@both
def test_attributes(kind: str, world_size: int) -> None:
    model = wrapped(kind, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert (model.rank, model.world_size, model.compute_device) == (dist.get_rank(), world_size, CPU)
    assert model.process_group.size() == world_size
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert type(model.module).__mro__[0 if kind == "torch" else 2] is nn.Sequential
    assert model[0].in_features == model.module[0].in_features == UNEVEN_MLP.build()[0].in_features
    model.module.note = "ours"
    assert model.note == "ours"
    with pytest.raises(AttributeError):
        model.unheard_of  # noqa: B018
    assert model.check_is_root() and not model[0].check_is_root()
    every = type(model).fsdp_modules(model)
    assert every[0] is model and len(every) == 1 + sum(isinstance(each, nn.Linear) for each in UNEVEN_MLP.build())
    assert type(model).fsdp_modules(model, root_only=True) == [model]
    assert [each._has_params for each in every] == [False] + [True] * (len(every) - 1)
    assert [each._is_root for each in every] == [True] + [False] * (len(every) - 1)
    assert model._flat_param is None and every[1]._flat_param.dtype is torch.float32
    assert len(model._all_handles) == len(every) - 1
    given = (model.cpu_offload.offload_params, model.backward_prefetch, model.forward_prefetch, model.limit_all_gathers)
    assert given == (False, BackwardPrefetch.BACKWARD_PRE, False, True)
    assert model.mixed_precision == MixedPrecision()
    assert model.params == [] and len(every[1].params) == 1


@multi_rank(2)
@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_the_state_of_training_and_flat_gradients(kind: str, strategy: str, world_size: int) -> None:
    model = wrapped(kind, sharding_strategy=ShardingStrategy[strategy], use_orig_params=False)
    seen: list[Any] = []
    model.module.register_forward_pre_hook(lambda *_: seen.append(model.training_state))
    model[-1].module.register_full_backward_pre_hook(lambda *_: seen.append(model[-1].training_state))
    unit = model[0]
    assert unit.params[0].grad is None
    backward(model)
    assert seen == [TrainingState.FORWARD_BACKWARD] * 2
    assert model.training_state is unit.training_state is TrainingState.IDLE
    model._assert_state(TrainingState.IDLE)
    model._assert_state([TrainingState.FORWARD_BACKWARD, TrainingState.IDLE])
    (flat,) = unit.params
    assert flat.grad.dtype is torch.float32 and flat.grad.dim() == 1
    parameters = list(unit.parameters())
    expected = sum(
        (each.grad.to_local() if isinstance(each.grad, DTensor) else each.grad).square().sum() for each in parameters
    )
    torch.testing.assert_close(flat.grad.square().sum(), expected)


@multi_rank(2)
@both
def test_one_hook_reduces_all_units(kind: str, world_size: int) -> None:
    model, state = wrapped(kind), object()
    units = [each for each in type(model).fsdp_modules(model) if each._has_params]
    assert all(each._comm_hook is each._comm_hook_state is None for each in units)
    model.register_comm_hook(state, comm_hook := lambda *_: None)
    assert all(each._comm_hook is comm_hook and each._comm_hook_state is state for each in units)


@multi_rank(2)
@both
def test_clipping_without_gradients_warns(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    with pytest.warns(UserWarning, match=f"on rank {dist.get_rank()} with no gradients -- returning the total norm in"):
        assert model.clip_grad_norm_(1.0) == 0.0


@multi_rank(2)
@both
@pytest.mark.parametrize("type_name", ["LOCAL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_one_rank_saves_what_a_plain_module_does(kind: str, type_name: str, world_size: int) -> None:
    alone = [dist.new_group([rank]) for rank in range(world_size)][dist.get_rank()]
    with pytest.warns(UserWarning, match=r"switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since"):
        model = wrapped(kind, nn.Linear(3, 2), process_group=alone)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    with type(model).state_dict_type(model, StateDictType[type_name]):
        saved = model.state_dict()
        assert {name: tuple(each.shape) for name, each in saved.items()} == {"weight": (2, 3), "bias": (2,)}
        assert {type(each) for each in saved.values()} == {torch.Tensor}
        model.load_state_dict({name: torch.ones_like(each) for name, each in saved.items()})
    with type(model).summon_full_params(model):
        assert all(bool((each == 1).all()) for each in model.parameters())


@multi_rank(2)
@both
def test_names(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    model.module.register_buffer("scale", torch.ones(2))
    shown = [name for name, _ in model.named_parameters()]
    plain = [name for name, _ in UNEVEN_MLP.build().named_parameters()]
    assert [plain_name(name) for name in shown] == plain
    assert [plain_name(name) for name, _ in model.named_buffers()] == ["scale"]
    expected = plain if kind == "fsdp2" else [f"_fsdp_wrapped_module.{n[0]}._fsdp_wrapped_module{n[1:]}" for n in plain]
    assert shown == expected
    with type(model).summon_full_params(model):  # torch leaves them out inside
        assert [plain_name(name) for name, _ in model.named_parameters()] == plain


class Named(nn.Linear):
    """Has attributes of names that a wrapper could have too."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.ignored, self.own_parameters, self.is_sharded, self.own_tensors = 1, 2, 3, 4
        self.ranks, self.settings, self.buffer_dtypes, self.named_wrappers, self.cleaned = 5, 6, 7, 8, 9


@multi_rank(2)
@both
def test_attributes_of_the_module_are_not_hidden(kind: str, world_size: int) -> None:
    model = wrapped(kind, nn.Sequential(Named(), Named()), auto_wrap_policy=ModuleWrapPolicy({Named}))
    names = ("ignored", "own_parameters", "is_sharded", "own_tensors")
    names += ("ranks", "settings", "buffer_dtypes", "named_wrappers", "cleaned")
    assert [getattr(model[0], name) for name in names] == list(range(1, 10))
    for name in names:
        setattr(model[0], name, "set")
    assert model.state_dict().keys() == nn.Sequential(Named(), Named()).state_dict().keys()


@multi_rank(2)
@both
def test_modules_go_by_the_names_of_their_own_classes(kind: str, world_size: int) -> None:
    """Transformers' Trainer decides by `_get_name()` whether labels are shifted."""
    model = wrapped(kind, nn.Sequential(Named(), Named()), auto_wrap_policy=ModuleWrapPolicy({Named}))
    for each in (model, copy.deepcopy(model) if kind == "fsdp2" else model):
        assert each.module._get_name() == "Sequential" and each.module[0].module._get_name() == "Named"
    assert repr(model.module).startswith("Sequential(")


@multi_rank(2)
@both
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states", "parameters"])
def test_what_is_ignored(kind: str, argument: str, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    given: list[Any] = list(plain[1].parameters()) if argument == "parameters" else [plain[1]]
    name = "ignored_modules" if argument == "ignored_modules" else "ignored_states"
    expected, before = copy.deepcopy(plain), [id(each) for each in plain[1].parameters()]
    model = wrapped(kind, plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **{name: given})
    assert [id(each) for each in plain[1].parameters()] == before
    data = torch.full((2, 3), 1.0 + dist.get_rank())
    model(data).sum().backward()
    expected(data).sum().backward()
    assert torch.equal(plain[1].weight.grad, expected[1].weight.grad)  # of this rank alone
    saved = model.state_dict()
    assert set(saved) == set(expected.state_dict())
    assert torch.equal(saved["1.weight"], expected[1].weight)


@multi_rank(2)
@both
@pytest.mark.parametrize("own", [False, True])
def test_meta_modules(kind: str, own: bool, world_size: int) -> None:
    class Filled(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, 2.0)
            nn.init.zeros_(self.bias)

    def param_init_fn(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 5.0)

    with torch.device("meta"):
        plain = nn.Sequential(Filled(3, 5), Filled(5, 2))
    policy = ModuleWrapPolicy({Filled})
    model = wrapped(kind, plain, auto_wrap_policy=policy, param_init_fn=param_init_fn if own else None)
    weights = whole_weights(model)
    assert all((weights[f"{each}.weight"] == (5 if own else 2)).all() for each in (0, 1))
    assert all((weights[f"{each}.bias"] == (5 if own else 0)).all() for each in (0, 1))


@multi_rank(2)
@both
def test_param_init_fn_is_called_with_every_module_of_a_unit_on_meta(kind: str, world_size: int) -> None:
    """Also with one that has no tensors of its own, and may fill those of modules below."""
    called: list[str] = []

    def param_init_fn(module: nn.Module) -> None:
        called.append(type(module).__name__)
        if isinstance(module, nn.ModuleDict):
            module.to_empty(device="cpu")
            for parameter in module.parameters():
                nn.init.constant_(parameter, 3.0)

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.Sequential(nn.ModuleDict({"up": nn.Linear(2, 2), "way": nn.ReLU()}), nn.Identity())
            self.last = nn.ModuleDict({"tanh": nn.Tanh(), "down": nn.Linear(2, 2)})

    with torch.device("meta"):
        plain = nn.Sequential(Holding(), nn.Sigmoid())
    model = wrapped(kind, plain, auto_wrap_policy=ModuleWrapPolicy({Holding}), param_init_fn=param_init_fn)
    below = ["Identity", "Linear", "ReLU", "Tanh", "Linear"]
    assert called[:5] == ["Holding", "Sequential", "ModuleDict", "ModuleDict", "Identity"], called
    assert sorted(called) == sorted([*called[:4], *below]), called
    assert all((value == 3).all() for value in whole_weights(model).values())


class Watching(nn.Module):
    """Notes the dtypes that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 1 / 3))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"input": x.dtype, "weight": self.layer.weight.dtype, "buffer": self.scale.dtype}
        return self.norm(self.layer(x)) * self.scale


@multi_rank(2)
@both
@pytest.mark.parametrize("buffers", [None, torch.float16])
def test_mixed_precision(kind: str, buffers: torch.dtype | None, world_size: int) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=buffers)
    plain = Watching()
    model = wrapped(kind, plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=precision)
    output = model(torch.randn(3, 4))
    expected = {"input": torch.bfloat16, "buffer": buffers or torch.float32}
    found = {name: dtype for name, dtype in plain.seen.items() if name != "weight"}  # of a unit that is resharded
    assert found == expected
    assert output.dtype is torch.promote_types(torch.bfloat16, buffers or torch.float32)
    assert plain.norm.running_mean.dtype is torch.float32  # a class that is ignored
    output.float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None and numel_here(p)} == {torch.float32}
    saved = model.state_dict()
    assert saved["layer.weight"].dtype is torch.float32
    assert saved["scale"].dtype is (buffers if kind == "torch" and buffers else torch.float32)  # torch keeps the cast


@multi_rank(2)
@both
@pytest.mark.parametrize("casts", [False, True])
def test_inputs_are_cast_if_asked(kind: str, casts: bool, world_size: int) -> None:
    seen: list[torch.dtype] = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return super().forward(x.to(self.weight.dtype))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return self.inner(x.float())

    precision = MixedPrecision(torch.bfloat16, cast_forward_inputs=casts, cast_root_forward_inputs=casts)
    policy = ModuleWrapPolicy({Inner})
    model = wrapped(kind, Outer(), auto_wrap_policy=policy, mixed_precision=precision)
    model(torch.ones(2, 4)).float().sum().backward()
    assert seen == [torch.bfloat16 if casts else torch.float32] * 2


class Tower(nn.Linear):
    def __init__(self, table: Tensor) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype, self.table.dtype
        return super().forward(x)


@multi_rank(2)
@both
def test_a_unit_that_is_called_without_the_root_is_a_root(kind: str, world_size: int) -> None:
    table = torch.ones(2)
    towers = nn.Sequential(Tower(table), Tower(table))
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.float16)
    model = wrapped(kind, towers, auto_wrap_policy=ModuleWrapPolicy({Tower}), mixed_precision=precision)
    tower = model[1]
    tower(torch.ones(2, 4)).float().sum().backward()
    assert tower.module.seen == (torch.bfloat16, torch.float16)
    assert tower.check_is_root()
    assert model[0].table is table and tower.table is table and table.dtype is torch.float16, "buffers stay shared"
    if kind == "fsdp2":  # torch asserts that there is one root
        model(torch.ones(2, 4)).float().sum().backward()
        assert not tower.check_is_root() and model.check_is_root()
        assert model[0].table is table and tower.table is table
        assert all(model.state_dict()[f"{each}.table"].dtype is torch.float32 for each in (0, 1))


@multi_rank(2)
@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_POST, None])
def test_the_root_comes_after_a_tower_with_any_backward_prefetch(prefetch: Any, world_size: int) -> None:
    towers = nn.Sequential(Tower(torch.ones(2)), Tower(torch.ones(2)))
    model = wrapped("fsdp2", towers, auto_wrap_policy=ModuleWrapPolicy({Tower}), backward_prefetch=prefetch)
    for called in (model[1], model, model[1], model):
        called(torch.ones(2, 4)).float().sum().backward()
        assert all(parameter.grad is not None for parameter in called.parameters())
        model.zero_grad()


@multi_rank(2)
@both
def test_gradients_of_low_precision_are_kept_if_asked(kind: str, world_size: int) -> None:
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = wrapped(kind, nn.Linear(4, 4), mixed_precision=precision)
    model(torch.ones(2, 4)).float().sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert grads and {grad.dtype for grad in grads} == {torch.bfloat16}


# ---- around it --------------------------------------------------------------------------------------


def test_enums_and_configurations_are_torchs_own() -> None:
    from torch.distributed.fsdp import api, fully_sharded_data_parallel

    for name in (*api.__all__, "OptimStateKeyType"):
        theirs = getattr(api, name, None) or getattr(fully_sharded_data_parallel, name)
        assert getattr(fsdp1, name) is theirs, name


@multi_rank(2)
@both
def test_the_device(kind: str, world_size: int) -> None:
    """Torch's needs to be told that it is the CPU; ours takes what is there."""
    make = functools.partial(class_of(kind), nn.Linear(2, 2))
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator, which both would take")
    if kind == "torch":
        with pytest.raises(RuntimeError, match="needs a non-CPU accelerator device"):
            make()
    else:
        assert make().compute_device == CPU
    assert class_of(kind)(nn.Linear(2, 2), device_id=CPU).compute_device == CPU


@multi_rank(2)
@pytest.mark.full
@both
def test_variables_of_the_environment(kind: str, world_size: int) -> None:
    """How torch's sets views and checks them: nothing here. Its fakes, which communicate nothing: not here."""
    harmless = ("FSDP_USE_UNSAFE_SETATTR", "FSDP_SKIP_WRITEBACK_CHECK")
    fakes = () if kind == "torch" else ("FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*harmless, *fakes):
            patch.setenv(name, "1")
        model = wrapped(kind)
        optimizer, reference = sgd(model.parameters()), Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
        for step in range(2):
            record = reference.step()
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        assert_same("weights", whole_weights(model), record.parameters, tolerance=SUMS)


@multi_rank(2)
@both
def test_wrapping_by_hand_and_by_wrap(kind: str, world_size: int) -> None:
    from torch.distributed.fsdp import wrap as torchs

    cls, module = class_of(kind), torchs if kind == "torch" else policies
    plain = nn.Linear(2, 2)
    assert module.wrap(plain) is plain
    with module.enable_wrap(wrapper_cls=cls, device_id=CPU, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        first = module.wrap(nn.Linear(2, 2))
        second = module.wrap(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.FULL_SHARD)
    assert first.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert second.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert module.wrap(plain) is plain


POLICY_ANSWERS = {
    "always_wrap_policy": lambda module: [
        module.always_wrap_policy(nn.ReLU(), recurse, 0) for recurse in (True, False)
    ],
    "lambda_auto_wrap_policy": lambda module: [
        module.lambda_auto_wrap_policy(each, recurse, 0, lambda_fn=lambda given: isinstance(given, nn.Linear))
        for each in (nn.Linear(1, 1), nn.ReLU())
        for recurse in (True, False)
    ],
    "transformer_auto_wrap_policy": lambda module: [
        module.transformer_auto_wrap_policy(each, recurse, 0, transformer_layer_cls={nn.Linear})
        for each in (nn.Linear(1, 1), nn.ReLU())
        for recurse in (True, False)
    ],
    "size_based_auto_wrap_policy": lambda module: [
        module.size_based_auto_wrap_policy(each, recurse, numel, min_num_params=10, **classes)
        for each in (nn.Linear(1, 1), nn.ModuleList(), nn.MultiheadAttention(2, 1))
        for recurse in (True, False)
        for numel in (9, 10)
        for classes in ({}, {"force_leaf_modules": {nn.Linear}}, {"exclude_wrap_modules": {nn.Linear}})
    ],
    "ModuleWrapPolicy": lambda module: [
        module.ModuleWrapPolicy({nn.Linear})(each, recurse)
        for each in (nn.Linear(1, 1), nn.ReLU())
        for recurse in (True, False)
    ],
}


@pytest.mark.parametrize("policy", POLICY_ANSWERS)
def test_answers_of_policies(policy: str) -> None:
    from torch.distributed.fsdp import wrap as torchs

    assert POLICY_ANSWERS[policy](policies) == POLICY_ANSWERS[policy](torchs)
