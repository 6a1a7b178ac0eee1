"""Models and programs of FSDP1 drawn from seeds, each trained under the wrapper and beside the plain model.

`draw` says what is combined, `Model` is built from it, `run` trains both and compares. The expectation is
`tests.harness.Reference`'s, with what mixed precision leaves alone left alone.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2.compat import fsdp1
from fsdp2.compat.fsdp1 import FullyShardedDataParallel, ShardingStrategy, StateDictType, policies
from tests.harness.compare import EXACT, Tolerance, assert_sharded_same, clean_fqn, gather
from tests.harness.models import Batch, ModelCase
from tests.harness.reference import Accumulation, Reference

STEPS, ROWS, VOCABULARY = 3, 4, 11
KINDS = ("linear", "norm", "conv", "nested", "bare", "frozen", "unused", "odd")
POLICIES = ("none", "hand", "wrap", "classes", "custom", "size", "transformer", "lambda", "or", "always")
SUMS = Tolerance(rtol=1e-4, atol=1e-5, reason="sums in another order (fp32), three steps long")
BF16 = Tolerance(rtol=5e-2, atol=2e-2, reason="sums of numbers of 8 bits, in another order or dtype")


@dataclass(frozen=True)
class Draw:
    """One program."""

    seed: int
    world_size: int
    tokens: bool
    width: int
    hidden: int
    out: int
    blocks: tuple[str, ...]
    tied: bool
    repeated: bool  # the blocks are called twice in a forward
    ignored: str  # "no", as "modules", "states" or "parameters"
    policy: str
    min_num_params: int
    strategy: str
    by_group: bool  # hybrid strategies: groups in the place of a mesh
    mixed: str  # "no"; the dtypes of parameters and reduction; norms left alone
    micro: int
    sync_each: bool
    max_norm: float | None
    optimizer: str
    use_orig_params: bool
    start: str  # "plain", "broadcast" from the first rank, "meta"
    prefetch: str | None
    checkpointed: bool
    offload: bool
    reload: str  # "no", or the type of the state dicts between the first and the second step

    @property
    def tolerance(self) -> Tolerance | None:
        """Bitwise on two ranks where the arithmetic is the same."""
        adds_elsewhere = "float32" in self.mixed and (self.micro > 1 or "norms" in self.mixed)
        in_other_order = self.tied or self.repeated or self.max_norm is not None or self.ignored != "no"
        if self.world_size <= 2 and not (in_other_order or adds_elsewhere):
            return EXACT
        return SUMS if self.mixed == "no" else BF16


def draw(seed: int, world_size: int) -> Draw:
    """The program of a seed."""
    of = random.Random(1000 * seed + world_size)
    tokens = of.random() < 0.5
    blocks = tuple(of.choice(KINDS) for _ in range(of.randint(1, 4)))
    strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if world_size == 4:
        strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    mixed = of.choice(["no", "no", "no", "bf16", "bf16 float32", "bf16 float32 norms"])
    micro = of.choice([1, 1, 2, 3])
    tied = tokens and of.random() < 0.3
    reload = of.choice(["no", "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
    one_flat = reload != "LOCAL_STATE_DICT" or "frozen" not in blocks  # else torch has no flat parameter of the unit
    return Draw(
        seed=seed,
        world_size=world_size,
        tokens=tokens,
        width=of.choice([3, 5, 6, 7]),
        hidden=of.choice([1, 2, 5, 9, 13]),
        out=VOCABULARY if tied else of.choice([1, 3, 6]),
        blocks=blocks,
        tied=tied,
        repeated=of.random() < 0.15,
        ignored=of.choice(["no"] * 5 + ["modules", "states", "parameters"]),
        policy=of.choice(POLICIES),
        min_num_params=of.choice([10, 40, 100]),
        strategy=of.choice(strategies),
        by_group=of.random() < 0.5,
        mixed=mixed,
        micro=micro,
        sync_each=of.random() < 0.5,
        max_norm=of.choice([None, None, None, None, 0.05, 100.0]),
        optimizer="sgd" if mixed != "no" else of.choice(["sgd", "adamw", "groups"]),
        use_orig_params=of.random() < 0.5 or not one_flat,
        start=of.choice(["plain", "plain", "broadcast", "meta"]),
        prefetch=of.choice([None, "BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST"]),
        checkpointed=of.random() < 0.25,
        offload=of.random() < 0.2,
        reload=reload,
    )


# ---- the model --------------------------------------------------------------------------------------


class Own(nn.Module):
    """A layer that is ignored; it computes in the dtype of its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


class Bare(nn.Module):
    """Parameters of its own beside a layer, one with a single element, and buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.shift = nn.Parameter(torch.rand(1))
        self.layer = nn.Linear(width, width, bias=False)
        self.register_buffer("count", torch.arange(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)
        nn.init.ones_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale + self.shift) + self.count % 2


class Conv(nn.Module):
    """Over the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[:, None]).tanh().mean(1)


class Nested(nn.Module):
    """Layers two levels below."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(width, hidden), "down": nn.Sequential(nn.Linear(hidden, width))})
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner["down"](self.inner["up"](x).tanh()))


class Block(nn.Module):
    """A residual around one of `KINDS`."""

    def __init__(self, kind: str, width: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.unused: nn.Module | None = nn.Linear(width, 2) if kind == "unused" else None
        self.layer: nn.Module
        if kind == "norm":
            self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        elif kind == "conv":
            self.layer = Conv(width)
        elif kind == "nested":
            self.layer = Nested(width, hidden)
        elif kind == "bare":
            self.layer = Bare(width)
        elif kind == "odd":
            self.layer = nn.Sequential(nn.Linear(width, 1, bias=False), nn.Tanh(), nn.Linear(1, width))
        else:
            self.layer = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))
        if kind == "frozen":
            self.layer[0].requires_grad_(False)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Model(nn.Module):
    """What `draw` says."""

    def __init__(self, drawn: Draw) -> None:
        super().__init__()
        self.repeated = drawn.repeated
        self.first = nn.Embedding(VOCABULARY, drawn.width) if drawn.tokens else nn.Linear(drawn.width, drawn.width)
        self.blocks = nn.Sequential(*(Block(kind, drawn.width, drawn.hidden) for kind in drawn.blocks))
        self.own = Own(drawn.width) if drawn.ignored != "no" else None
        self.head = nn.Linear(drawn.width, drawn.out, bias=not drawn.tied)
        if drawn.tied:
            self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.repeated:
            x = self.blocks(x)
        x = self.blocks(x)
        return self.head(x if self.own is None else self.own(x))


def _batch(drawn: Draw, generator: torch.Generator) -> Batch:
    targets = torch.randn(ROWS, drawn.out, generator=generator)
    if drawn.tokens:
        return Batch(torch.randint(VOCABULARY, (ROWS,), generator=generator), targets)
    return Batch(torch.randn(ROWS, drawn.width, generator=generator), targets)


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def case_of(drawn: Draw) -> ModelCase:
    """The model and its data."""
    make, batch = functools.partial(Model, drawn), functools.partial(_batch, drawn)
    return ModelCase(f"drawn {drawn.seed}", make, batch, (), _loss)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3),
    "groups": lambda parameters: torch.optim.AdamW(
        [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
        eps=1e-3,
        amsgrad=True,
        foreach=False,
    ),
}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """In the order of the model."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# ---- the plain one ----------------------------------------------------------------------------------


def reference_of(drawn: Draw) -> Reference:
    """The plain model, trained as all ranks together would."""
    param_dtype, reduce_dtype = dtypes_of(drawn)
    reference = Reference(
        case_of(drawn),
        world_size=drawn.world_size,
        make_optimizer=OPTIMIZERS[drawn.optimizer],
        microbatches=drawn.micro,
        accumulation=Accumulation.REDUCE_EACH if drawn.sync_each else Accumulation.REDUCE_LAST,
        max_norm=drawn.max_norm,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    if param_dtype is not None:
        for module in reference._worker.modules():
            if isinstance(module, Own):
                module.float()
            if isinstance(module, nn.LayerNorm) and keeps_norms(drawn):
                module.float()
                module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                module.register_forward_hook(lambda _, args, output: output.to(param_dtype))
    return reference


def dtypes_of(drawn: Draw) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Of parameters in forward, and of reduction."""
    if drawn.mixed == "no":
        return None, None
    return torch.bfloat16, torch.float32 if "float32" in drawn.mixed else torch.bfloat16


def keeps_norms(drawn: Draw) -> bool:
    """Mixed precision leaves norms alone; as in torch, where a policy wraps."""
    return drawn.mixed.endswith("norms") and drawn.policy not in ("none", "hand", "wrap")


# ---- the wrapped one --------------------------------------------------------------------------------


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv, Bare))


def _custom(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, Block):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if module.kind == "linear" else True
    return False


def _custom_hybrid(module: nn.Module) -> bool | dict[str, Any]:
    return isinstance(module, Block)


def policy_of(drawn: Draw) -> Any:
    """For ``auto_wrap_policy``."""
    by_lambda = functools.partial(policies.lambda_auto_wrap_policy, lambda_fn=_is_layer)
    by_class = functools.partial(policies.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return {
        "classes": policies.ModuleWrapPolicy({Block, nn.LayerNorm}),
        "custom": policies.CustomPolicy(_custom_hybrid if "HYBRID" in drawn.strategy else _custom),
        "size": functools.partial(policies.size_based_auto_wrap_policy, min_num_params=drawn.min_num_params),
        "transformer": by_class,
        "lambda": by_lambda,
        "or": functools.partial(policies._or_policy, policies=[by_lambda, by_class]),
        "always": policies.always_wrap_policy,
    }.get(drawn.policy)


def arguments_of(drawn: Draw) -> dict[str, Any]:
    """The constructor's that are the same for all units."""
    param_dtype, reduce_dtype = dtypes_of(drawn)
    arguments: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[drawn.strategy],
        "use_orig_params": drawn.use_orig_params,
        "backward_prefetch": drawn.prefetch and fsdp1.BackwardPrefetch[drawn.prefetch],
        "forward_prefetch": drawn.seed % 2 == 0,
        "sync_module_states": drawn.start == "broadcast",
        "device_id": torch.device("cpu"),
    }
    if drawn.offload:
        arguments["cpu_offload"] = fsdp1.CPUOffload(offload_params=True)
    if param_dtype is not None:
        kept: Any = (nn.LayerNorm,) if keeps_norms(drawn) else ()
        arguments["mixed_precision"] = fsdp1.MixedPrecision(
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype if "float32" in drawn.mixed else None,
            _module_classes_to_ignore=kept,
        )
    if "HYBRID" in drawn.strategy:
        mesh = init_device_mesh("cpu", (drawn.world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
        if drawn.by_group:
            arguments["process_group"] = (mesh.get_group(1), mesh.get_group(0))
        else:
            arguments["device_mesh"] = mesh
    return arguments


def wrapped(drawn: Draw, *, seed: int = 0) -> Any:
    """The model under its wrappers, with the values of ``seed``."""
    case, arguments = case_of(drawn), arguments_of(drawn)
    plain: Any = case.build(seed)
    if drawn.start == "meta":
        arguments["param_init_fn"], model = _on_meta(drawn, plain)
    elif drawn.start == "broadcast":
        model = case.build(seed + dist.get_rank())
        if model.own is not None:
            model.own.load_state_dict(plain.own.state_dict())  # type: ignore[union-attr, operator]
    else:
        model = plain
    own = model.own
    if own is not None:
        given: list[Any] = list(own.parameters()) if drawn.ignored == "parameters" else [own]
        arguments["ignored_modules" if drawn.ignored == "modules" else "ignored_states"] = given
    if drawn.policy == "hand":
        for position, block in enumerate(model.blocks):  # type: ignore[arg-type]
            if position % 2 == 0:
                block.layer = FullyShardedDataParallel(block.layer, **arguments)
            model.blocks[position] = FullyShardedDataParallel(block, **arguments)  # type: ignore[operator]
    elif drawn.policy == "wrap":
        with policies.enable_wrap(wrapper_cls=FullyShardedDataParallel, **arguments):
            model.blocks = policies.wrap(model.blocks)  # type: ignore[arg-type]
            model.head = model.head if drawn.tied else policies.wrap(model.head)  # type: ignore[arg-type]
    found: Any = FullyShardedDataParallel(model, auto_wrap_policy=policy_of(drawn), **arguments)
    # Else unused parameters of used units have gradients of zeros, as torch's: the plain model's have none.
    found._unit.set_reduce_scatter_unused_params(False)
    if drawn.checkpointed:
        apply_activation_checkpointing(found, check_fn=lambda module: isinstance(module, Block))
    return found


def _on_meta(drawn: Draw, plain: Any) -> tuple[Callable[[nn.Module], None], Any]:
    """``plain`` on meta but for its ignored part, and what gives each of its modules their values."""
    with torch.device("meta"):
        model: Any = Model(drawn)
    if plain.own is not None:
        model.own = plain.own
    source = dict(zip(model.modules(), plain.modules(), strict=True))
    ignored = set() if plain.own is None else set(plain.own.modules())

    def give_values(module: nn.Module) -> None:
        if module in ignored:  # which has them; it is called with all modules of a unit, as torch's
            return
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                tensor.copy_(getattr(source[module], name))

    return give_values, model


# ---- both -------------------------------------------------------------------------------------------


def run(drawn: Draw) -> None:
    """Train both, and compare losses, gradients, norms and weights; at the end what state dicts and summoning show.

    Collective.
    """
    reference, model = reference_of(drawn), wrapped(drawn)
    optimizer = OPTIMIZERS[drawn.optimizer](trainable(model))
    assert_sharded_same("initial parameters", _parameters(model), _parameters(reference.model))
    for step in range(STEPS):
        if step == 1 and drawn.reload != "no":
            model, optimizer = _reloaded(drawn, model, optimizer)
        if step and drawn.tolerance is BF16:  # else what is rounded in a step decides what the next one is
            with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(reference.model.get_parameter(clean_fqn(name)))
        _step(drawn, reference, model, optimizer)
    _compare_state(drawn, reference, model, optimizer)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {clean_fqn(name): parameter.detach() for name, parameter in model.named_parameters()}


def _assert_same(drawn: Draw, what: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Within the tolerance, which is relative to the largest number."""
    tolerance = drawn.tolerance
    if tolerance is not None:
        largest = max((float(value.abs().max()) for value in expected.values() if value is not None), default=1.0)
        tolerance = replace(tolerance, atol=tolerance.atol * max(1.0, largest))
    assert_sharded_same(what, found, expected, tolerance=tolerance)


def _step(drawn: Draw, reference: Reference, model: Any, optimizer: torch.optim.Optimizer) -> None:
    record = reference.step()
    at = f"in step {record.step}"
    for micro in range(drawn.micro):
        batch = reference.case.batch(reference.seed, record.step, dist.get_rank(), micro)
        with nullcontext() if drawn.sync_each or micro == drawn.micro - 1 else model.no_sync():
            loss = reference.case.loss(model, batch)
            loss.backward()
        _assert_same(drawn, f"losses {at}", {"": loss.detach()}, {"": record.losses[dist.get_rank()][micro]})
    _reduce_ignored(drawn, model)
    found = {clean_fqn(name): parameter.grad for name, parameter in model.named_parameters()}
    _assert_same(drawn, f"gradients {at}", found, record.gradients)
    if drawn.max_norm is not None:
        norm = model.clip_grad_norm_(drawn.max_norm)
        _assert_same(drawn, f"norms {at}", {"": norm}, {"": record.gradient_norm})
    optimizer.step()
    optimizer.zero_grad()
    _assert_same(drawn, f"parameters {at}", _parameters(model), record.parameters)


def _reduce_ignored(drawn: Draw, model: nn.Module) -> None:
    """As the program's own: an average over all ranks."""
    for name, parameter in model.named_parameters():
        if clean_fqn(name).startswith("own.") and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= drawn.world_size


def _reloaded(drawn: Draw, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
    """The same in another model of other values, by state dicts."""
    other = wrapped(drawn, seed=1)
    others = OPTIMIZERS[drawn.optimizer](trainable(other))
    kind = StateDictType[drawn.reload]
    with (
        FullyShardedDataParallel.state_dict_type(model, kind),
        FullyShardedDataParallel.state_dict_type(other, kind),
    ):
        other.load_state_dict(model.state_dict())
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        others.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, others, state))
    return other, others


def _compare_state(drawn: Draw, reference: Reference, model: Any, optimizer: torch.optim.Optimizer) -> None:
    expected = {name: value.detach() for name, value in reference.model.state_dict().items()}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        summoned = {clean_fqn(name): gather(parameter.detach()) for name, parameter in model.named_parameters()}
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    _assert_same(drawn, "summoned parameters", summoned, _parameters(reference.model))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        saved = model.state_dict()
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    _assert_same(drawn, "FULL state dict", saved, expected)
    names = {parameter: name for name, parameter in reference.model.named_parameters()}
    kept = {names[parameter]: entry for parameter, entry in reference.optimizer.state.items()}
    _assert_same(drawn, "optimizer's state", dict(_flat(state["state"])), dict(_flat(kept)))
    groups = [[names[each] for each in group["params"]] for group in reference.optimizer.param_groups]
    assert [group["params"] for group in state["param_groups"]] == groups


def _flat(state: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, entry in state.items():
        for what, value in entry.items():
            if isinstance(value, Tensor):
                yield f"{name} {what}", value
