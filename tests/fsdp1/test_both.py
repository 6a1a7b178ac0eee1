"""The same programs under torch's own FSDP1 and under the wrapper, beside the plain model.

Torch's runs on the CPU if it is told ``device_id=torch.device("cpu")``. Where the two differ on purpose, the test says
what is expected of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2.compat.fsdp1 import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from tests.harness import Accumulation, Reference, multi_rank
from tests.harness.compare import Tolerance, assert_same
from tests.harness.models import UNEVEN_MLP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself

CPU = torch.device("cpu")
SUMS = Tolerance(rtol=1e-5, atol=1e-6, reason="flat parameters are reduced and summed in other pieces (fp32)")
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
both = pytest.mark.parametrize("kind", ["torch", "fsdp2"])


def class_of(kind: str) -> Any:
    """Torch's is imported here: other tests of a process may put ours in its place."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Torchs

    return Torchs if kind == "torch" else FullyShardedDataParallel


def wrapped(kind: str, module: nn.Module | None = None, **arguments: Any) -> Any:
    """`UNEVEN_MLP`, each layer a unit, or ``module``."""
    arguments = {"device_id": CPU, "use_orig_params": True, **arguments}
    if module is None:
        arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({nn.Linear}))
    return class_of(kind)(UNEVEN_MLP.build() if module is None else module, **arguments)


def plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def backward(model: nn.Module, step: int = 0, micro: int = 0) -> Tensor:
    loss = UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, step, dist.get_rank(), micro))
    loss.backward()
    return loss.detach()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def whole_gradients(model: Any) -> dict[str, Tensor | None]:
    with type(model).summon_full_params(model, writeback=False, with_grads=True):
        return {plain_name(name): None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def whole_weights(model: Any) -> dict[str, Tensor]:
    with type(model).summon_full_params(model, writeback=False):
        return {plain_name(name): p.detach().clone() for name, p in model.named_parameters()}


# ---- training ---------------------------------------------------------------------------------------


@multi_rank(2)
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
@both
def test_a_process_group_of_a_part_of_the_ranks(kind: str, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model = wrapped(kind, nn.Linear(3, 5), process_group=mesh.get_group("shard"))
    assert model.world_size == 2 and model.rank == mesh.get_local_rank("shard")
    model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    mean = 0.5 if dist.get_rank() < 2 else 2.5
    assert_same("gradients", whole_gradients(model), {"weight": torch.full((5, 3), mean), "bias": torch.ones(5)})


@multi_rank(2)
@both
@pytest.mark.parametrize("prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.parametrize("ahead", [False, True])
def test_prefetching_changes_no_number(kind: str, prefetch: str | None, ahead: bool, world_size: int) -> None:
    chosen = prefetch and BackwardPrefetch[prefetch]
    model = wrapped(kind, backward_prefetch=chosen, forward_prefetch=ahead, limit_all_gathers=not ahead)
    reference = Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
    optimizer = sgd(model.parameters())
    for step in range(2):
        record = reference.step()
        backward(model, step)
        assert_same("gradients", whole_gradients(model), record.gradients, tolerance=SUMS)
        optimizer.step()
        optimizer.zero_grad()


@multi_rank(2)
@both
def test_no_sync_accumulates(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    record = Reference(UNEVEN_MLP, world_size=world_size, microbatches=3, accumulation=Accumulation.REDUCE_LAST).step()
    with model.no_sync():
        backward(model, micro=0)
        backward(model, micro=1)
    backward(model, micro=2)
    assert_same("gradients", whole_gradients(model), record.gradients, tolerance=SUMS)


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
        assert sum(_numel_here(each) for each in model.parameters()) < sum(map(torch.Tensor.numel, _all(whole)))


def _numel_here(parameter: Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


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

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
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
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None and _numel_here(p)} == {torch.float32}
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


@multi_rank(2)
@both
def test_gradients_of_low_precision_are_kept_if_asked(kind: str, world_size: int) -> None:
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = wrapped(kind, nn.Linear(4, 4), mixed_precision=precision)
    model(torch.ones(2, 4)).float().sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert grads and {grad.dtype for grad in grads} == {torch.bfloat16}


# ---- state dicts ------------------------------------------------------------------------------------


@multi_rank(2)
@both
def test_what_full_state_dicts_hold(kind: str, world_size: int) -> None:
    model, plain = wrapped(kind), UNEVEN_MLP.build()
    assert_same("weights", {name: value.detach() for name, value in model.state_dict().items()}, plain.state_dict())
    config = FullStateDictConfig(offload_to_cpu=kind == "fsdp2", rank0_only=True)  # as of summoning
    with type(model).state_dict_type(model, FULL, config):
        saved = model.state_dict()
    assert list(saved) == (list(plain.state_dict()) if dist.get_rank() == 0 else [])


@multi_rank(2)
@both
@pytest.mark.parametrize("offload", [False, True])
def test_what_sharded_state_dicts_hold(kind: str, offload: bool, world_size: int) -> None:
    model, plain = wrapped(kind), UNEVEN_MLP.build()
    with type(model).state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=offload)):
        saved = model.state_dict()
    assert {name: tuple(value.size()) for name, value in saved.items()} == {
        name: tuple(value.shape) for name, value in plain.state_dict().items()
    }
    assert {type(value).__name__ for value in saved.values()} == {"ShardedTensor" if kind == "torch" else "DTensor"}
    for name, whole in plain.state_dict().items():
        value = saved[name]
        rows = value.to_local() if kind == "fsdp2" else _rows(value)
        parts = list(whole.chunk(world_size))
        expected = parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole[:0]
        assert torch.equal(rows, expected), name
    with type(model).state_dict_type(model, SHARDED):
        model.load_state_dict(saved)


def _rows(value: Any) -> Tensor:
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0, *value.size()[1:])


@multi_rank(2)
@both
def test_sharded_state_dicts_of_a_mesh_are_dtensors_in_both(kind: str, world_size: int) -> None:
    model = wrapped(kind, device_mesh=init_device_mesh("cpu", (world_size,)))
    with type(model).state_dict_type(model, SHARDED):
        saved = model.state_dict()
    assert all(isinstance(value, DTensor) for value in saved.values())
    plain = UNEVEN_MLP.build().state_dict()
    assert_same("weights", {name: value.full_tensor().detach() for name, value in saved.items()}, plain)


@multi_rank(2)
@both
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_local_state_dicts_hold(kind: str, use_orig_params: bool, world_size: int) -> None:
    model = wrapped(kind, use_orig_params=use_orig_params)
    with type(model).state_dict_type(model, LOCAL, LocalStateDictConfig()):
        saved = model.state_dict()
    units = {name.split(".")[0] for name, _ in UNEVEN_MLP.build().named_parameters()}
    flat = {f"{unit}._flat_param" for unit in units}
    pieces = {name for name, _ in UNEVEN_MLP.build().named_parameters()} if use_orig_params else set()
    assert set(saved) == flat | pieces


@multi_rank(2)
@both
def test_settings(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    cls = type(model)
    before = cls.get_state_dict_type(model)
    assert isinstance(before, StateDictSettings) and before.state_dict_type is FULL
    assert cls.set_state_dict_type(model, SHARDED).state_dict_type is FULL
    assert cls.get_state_dict_type(model).state_dict_type is SHARDED
    assert cls.get_state_dict_type(model[0]).state_dict_config == ShardedStateDictConfig()
    cls.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig())
    assert cls.get_state_dict_type(model).state_dict_config.rank0_only
    with cls.state_dict_type(model, LOCAL):
        assert cls.get_state_dict_type(model).state_dict_type is LOCAL
    assert cls.get_state_dict_type(model).state_dict_type is FULL
    with pytest.raises(RuntimeError):
        cls.set_state_dict_type(model, FULL, ShardedStateDictConfig())
    with pytest.raises(KeyError), cls.state_dict_type(model, SHARDED):
        raise KeyError
    after = cls.get_state_dict_type(model).state_dict_type
    assert after is (SHARDED if kind == "torch" else FULL)  # torch leaves it


@multi_rank(2)
@both
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@pytest.mark.parametrize("directly", [False, True])
def test_training_goes_on_from_state_dicts(kind: str, state_dict_type: str, directly: bool, world_size: int) -> None:
    chosen = StateDictType[state_dict_type]
    model = wrapped(kind, use_orig_params=False)
    optimizer = sgd(model.parameters())
    backward(model)
    optimizer.step()
    other = wrapped(kind, UNEVEN_MLP.build(1), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=False)
    others = sgd(other.parameters())
    cls = type(model)
    with cls.state_dict_type(model, chosen), cls.state_dict_type(other, chosen):
        other.load_state_dict(copy.deepcopy(model.state_dict()) if chosen is FULL else model.state_dict())
        state = cls.optim_state_dict(model, optimizer)
        names = [name for name, _ in UNEVEN_MLP.build().named_parameters()]
        assert sorted(state["state"]) == sorted(names)
        assert sorted(name for group in state["param_groups"] for name in group["params"]) == sorted(names)
        loaded = cls.optim_state_dict_to_load(other, others, state, load_directly=directly)
        if not directly:
            others.load_state_dict(loaded)
    reference = Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
    reference.step()
    record = reference.step()
    optimizer.zero_grad()
    backward(other, 1)
    others.step()
    assert_same("weights", whole_weights(other), record.parameters, tolerance=SUMS)


@multi_rank(2)
@both
def test_the_older_methods(kind: str, world_size: int) -> None:
    model = wrapped(kind, use_orig_params=False)
    optimizer, cls = sgd(model.parameters()), type(model)
    backward(model)
    optimizer.step()
    names = {name for name, _ in UNEVEN_MLP.build().named_parameters()}
    on_first = cls.full_optim_state_dict(model, optimizer)
    assert set(on_first.get("state", ())) == (names if dist.get_rank() == 0 else set())
    full = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert set(full["state"]) == names
    reference = Reference(UNEVEN_MLP, world_size=world_size, make_optimizer=sgd)
    reference.step()
    kept = zip(reference.model.named_parameters(), reference.optimizer.state.values(), strict=True)
    expected = {name: entry["momentum_buffer"] for (name, _), entry in kept}
    found = {name: entry["momentum_buffer"] for name, entry in full["state"].items()}
    assert_same("momentum", found, expected, tolerance=SUMS)
    own = optimizer.state_dict()["state"]
    ways: list[Callable[[], Any]] = [
        lambda: cls.shard_full_optim_state_dict(full, model, optim=optimizer),
        lambda: cls.scatter_full_optim_state_dict(on_first or None, model, optim=optimizer),
        lambda: cls.flatten_sharded_optim_state_dict(cls.sharded_optim_state_dict(model, optimizer), model, optimizer),
    ]
    for way in ways:
        made = way()["state"]
        assert made.keys() == own.keys()
        for key, entry in own.items():
            first, second = entry["momentum_buffer"], made[key]["momentum_buffer"]
            if isinstance(first, DTensor):
                first, second = first.to_local(), second.to_local()
            assert torch.equal(first, second)


@multi_rank(2)
@both
def test_rekeying(kind: str, world_size: int) -> None:
    model = wrapped(kind)
    optimizer, cls = sgd(model.parameters()), type(model)
    backward(model)
    optimizer.step()
    named = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    numbered = cls.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    names = [name for name, _ in UNEVEN_MLP.build().named_parameters()]
    assert sorted(numbered["state"]) == list(range(len(names)))
    for number, name in enumerate(names):
        assert torch.equal(numbered["state"][number]["momentum_buffer"], named["state"][name]["momentum_buffer"])
    back = cls.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
    assert set(back["state"]) == set(names)


# ---- what is refused --------------------------------------------------------------------------------


Misuse = Callable[[str], Any]


def below(kind: str, act: Callable[[Any], Any]) -> Any:
    """``act`` on a wrapper that is not the root."""
    model = wrapped(kind)
    assert model.check_is_root()
    return act(model[0])


def hooked(kind: str, times: int = 1, **arguments: Any) -> Any:
    model = wrapped(kind, **arguments)
    for _ in range(times):
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
    return model


def hooked_late(kind: str) -> None:
    model = wrapped(kind)
    backward(model)
    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)


def half_wrapped(kind: str, **arguments: Any) -> Any:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain[0] = wrapped(kind, plain[0])
    return wrapped(kind, plain, **{name: value(plain) for name, value in arguments.items()})


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))


def single(kind: str, **arguments: Any) -> Any:
    return wrapped(kind, nn.Linear(2, 2), **arguments)


HYBRID = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
MISUSES: dict[str, Misuse] = {
    "ignored twice": lambda kind: single(kind, ignored_modules=[], ignored_states=[]),
    "ignored tensors": lambda kind: single(kind, ignored_modules=[torch.ones(1)]),
    "ignored mixture": lambda kind: single(kind, ignored_states=[nn.Linear(1, 1), nn.Parameter(torch.ones(1))]),
    "ignored wrapper": lambda kind: half_wrapped(kind, ignored_modules=lambda plain: [plain[0]]),
    "policy of wrapped": lambda kind: half_wrapped(kind, auto_wrap_policy=lambda _: ModuleWrapPolicy({nn.Linear})),
    "group and mesh": lambda kind: single(kind, process_group=dist.group.WORLD, device_mesh=hybrid_mesh()["shard"]),
    "one group of two": lambda kind: single(kind, process_group=dist.group.WORLD, **HYBRID),
    "mesh of one dim": lambda kind: single(kind, device_mesh=hybrid_mesh()["shard"], **HYBRID),
    "no function": lambda kind: wrapped(kind, NoReset(), param_init_fn=3),
    "no reset": lambda kind: wrapped(kind, NoReset()),
    "hook twice": lambda kind: hooked(kind, times=2),
    "hook below": lambda kind: below(kind, lambda each: each.register_comm_hook(None, default_hooks.allreduce_hook)),
    "hook late": hooked_late,
    "hook of hybrid": lambda kind: hooked(kind, device_mesh=hybrid_mesh(), **HYBRID),
    "no_sync below": lambda kind: below(kind, lambda each: each.no_sync().__enter__()),
    "clip below": lambda kind: below(kind, lambda each: each.clip_grad_norm_(1.0)),
}


REFUSALS: dict[str, dict[str, tuple[type[Exception], str] | None]] = {
    "ignored twice": {
        "torch": (ValueError, "Cannot pass both ignored_modules and ignored_states at the same time"),
        "fsdp2": (ValueError, "Cannot pass both ignored_modules and ignored_states at the same time"),
    },
    "ignored tensors": {
        "torch": (ValueError, "ignored_modules expects nn.Module list elements"),
        "fsdp2": (TypeError, r"ignored_modules must be an iterable of modules.*got \['Tensor'\]"),
    },
    "ignored mixture": {
        "torch": (ValueError, "ignored_states expects all nn.Parameter or all nn.Module"),
        "fsdp2": (TypeError, r"ignored_states one of modules or of parameters, got \['Linear', 'Parameter'\]"),
    },
    "ignored wrapper": {
        "torch": (ValueError, "should not include FSDP modules"),
        "fsdp2": (ValueError, "wrapped already cannot be ignored"),
    },
    "policy of wrapped": {
        "torch": (ValueError, "FSDP auto wrapping requires modules to not already have FSDP applied"),
        "fsdp2": (RuntimeError, "auto_wrap_policy cannot be used on a module of which a part is wrapped"),
    },
    "group and mesh": {
        "torch": (ValueError, "Cannot pass both process_group and device_mesh at the same time"),
        "fsdp2": (ValueError, "Cannot pass both process_group and device_mesh at the same time"),
    },
    "one group of two": {
        "torch": (ValueError, r"either None or Tuple\[dist.ProcessGroup, dist.ProcessGroup\]"),
        "fsdp2": (ValueError, r"a tuple \(shard group, replicate group\) under HYBRID_SHARD"),
    },
    "mesh of one dim": {
        "torch": (ValueError, "Expected device_mesh to have ndim=2"),
        "fsdp2": (ValueError, r"needs a device_mesh of 2 dim\(s\)"),
    },
    "no function": {
        "torch": (ValueError, "to be callable"),
        "fsdp2": (TypeError, "param_init_fn must be a function of a module, got int"),
    },
    "no reset": {
        "torch": (AttributeError, "has no attribute 'reset_parameters'"),
        "fsdp2": (ValueError, r"no reset_parameters\(\): pass param_init_fn"),
    },
    "hook twice": {
        "torch": (AssertionError, "A communication hook is already registered"),
        "fsdp2": (RuntimeError, "A communication hook is already registered"),
    },
    "hook below": {
        "torch": (AssertionError, "register_comm_hook can only be called on a root instance"),
        "fsdp2": (RuntimeError, "register_comm_hook can only be called on a root instance"),
    },
    "hook late": {"torch": None, "fsdp2": (RuntimeError, "must be called before the first forward")},
    "hook of hybrid": {
        "torch": (AssertionError, "Communication hook is not supported for hybrid strategies"),
        "fsdp2": (ValueError, "Communication hook is not supported for hybrid strategies"),
    },
    "no_sync below": {
        "torch": (RuntimeError, r"`no_sync\(\)` on inner FSDP instances is not supported"),
        "fsdp2": (RuntimeError, r"`no_sync\(\)` on inner FSDP instances is not supported"),
    },
    "clip below": {
        "torch": (RuntimeError, "should only be called on the root FSDP instance"),
        "fsdp2": (RuntimeError, r"`clip_grad_norm_\(\)` on inner FSDP instances is not supported"),
    },
}


@multi_rank(2)
@both
@pytest.mark.parametrize("misuse", REFUSALS)
def test_what_is_refused(kind: str, misuse: str, world_size: int) -> None:
    refusal = REFUSALS[misuse][kind]
    if refusal is None:
        MISUSES[misuse](kind)
        return
    with pytest.raises(refusal[0], match=refusal[1]):
        MISUSES[misuse](kind)


def test_every_misuse_has_an_answer() -> None:
    assert MISUSES.keys() == REFUSALS.keys()
