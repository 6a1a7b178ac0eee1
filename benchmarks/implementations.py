"""Names of implementations -> models ready to train, and the fake process group they train in.

An implementation is a `fully_shard` function with torch's signature, or a `FullyShardedDataParallel` class: torch's
(`fsdp1`, and `fsdp1-flat` with ``use_orig_params=False``) or fsdp2's (`wrapper`). `unsharded` is the model as it is,
`ddp` torch's DistributedDataParallel around it. Suffixes say more, in this order:

* `-zero2` (of torch and fsdp2) keeps parameters from forward to backward;
* `-pooled` (of fsdp2) keeps the memory of communication, `-no-prefetch` (of fsdp2) gathers nothing ahead, `-cached` (of
  fsdp2) casts shards once in a step, if they are cast (`cache_shards`);
* `-own-mesh` (of torch and fsdp2) says the mesh of each parameter by a `shard_placement_fn`, the one that all have;
* `-whole` is compiled as one graph, `-blocks` block by block, `-hooks` (of fsdp2) block by block with communication
  outside of the graphs, as it is with torch's;
* `-again` is a second instance of the same: an A/A control, whose ratio to the first one shows what the measurement
  itself scatters.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.models import ModelSpec, StackedBlocks, build_model

UNSHARDED = "unsharded"
AGAIN = "-again"
ZERO2 = "-zero2"
OWN_MESH = "-own-mesh"
CACHED = "-cached"
# What may follow the name of ours, and the first two that of torch's -> what is called on the model.
VARIANTS: dict[str, tuple[str, object] | None] = {
    ZERO2: ("set_reshard_after_forward", False),
    OWN_MESH: None,
    "-pooled": ("set_communication_memory_pool", True),
    "-no-prefetch": ("set_prefetch_budget", 0),
    CACHED: None,
}
# What may follow: what of the model is compiled.
WHOLE, BLOCKS, HOOKS = COMPILED = ("-whole", "-blocks", "-hooks")
# Implementation -> the module that has `fully_shard` and `MixedPrecisionPolicy`.
SHARDING_MODULES = {"torch": "torch.distributed.fsdp", "fsdp2": "fsdp2"}
# Implementation -> the module that has what a `shard_placement_fn` returns, with a mesh.
PLACEMENT_MODULES = {"torch": "torch.distributed.fsdp._fully_shard._fsdp_common", "fsdp2": "fsdp2"}
_SAYS_MESHES = "ShardPlacementResult"
IMPLEMENTATIONS = (UNSHARDED, *SHARDING_MODULES)
# Implementation -> the module that has `FullyShardedDataParallel` and what belongs to it.
WRAPPING_MODULES = {
    "fsdp1": "torch.distributed.fsdp",
    "fsdp1-flat": "torch.distributed.fsdp",
    "wrapper": "fsdp2.compat.fsdp1",
}
DDP = "ddp"
_NAMES = (*IMPLEMENTATIONS, *WRAPPING_MODULES, DDP)
NAMES_HELP = (
    f"{', '.join(_NAMES)}; after torch '{ZERO2}' or '{OWN_MESH}', after fsdp2 one of {', '.join(VARIANTS)}; "
    f"then one of {', '.join(COMPILED)}; then '{AGAIN}'"
)


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """What every sharded implementation is told.

    Attributes:
        world_size: ranks of the fake process group.
        reshard_after_forward: None leaves the default: blocks reshard, the root does not.
        param_dtype: dtype of the computation; with bfloat16 gradients are reduced in float32.
        backend: of `torch.compile`, for the implementations that are compiled.
    """

    world_size: int = 8
    reshard_after_forward: bool | None = None
    param_dtype: torch.dtype = torch.float32
    backend: str = "inductor"


@dataclass(frozen=True, slots=True)
class NameParts:
    """What a name says: the implementation, a key of `VARIANTS` or nothing, one of `COMPILED` or nothing."""

    base: str
    variant: str
    compiled: str

    @classmethod
    def of(cls, name: str) -> NameParts:
        rest = name.removesuffix(AGAIN)
        compiled = next((each for each in COMPILED if rest.endswith(each)), "")
        rest = rest.removesuffix(compiled)
        variant = next((each for each in VARIANTS if rest.endswith(each)), "")
        return cls(rest.removesuffix(variant), variant, compiled)


@contextlib.contextmanager
def fake_process_group(world_size: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """This process as rank 0 of `world_size` ranks that do not exist; collectives complete at once.

    A gather fills the output with copies of this rank's input; what a reduction delivers is arbitrary.
    Denormal numbers, which slow arithmetic down, are therefore flushed to zero inside.
    """
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh(device_type, (world_size,))
    finally:
        dist.destroy_process_group()
        torch.set_flush_denormal(False)


def clipping_of(name: str) -> Callable[..., torch.Tensor]:
    """Torch's `clip_grad_norm_`; for ours as it is in a program after `fsdp2.compat.install()`."""
    torchs: Callable[..., torch.Tensor] = torch.nn.utils.clip_grad_norm_
    if base_of(name) != "fsdp2":
        return torchs
    return importlib.import_module("fsdp2.optim.torch_clipping").substitutes()[torchs]  # type: ignore[no-any-return]


def base_of(name: str) -> str:
    """The implementation that `name` is an instance of."""
    return NameParts.of(name).base


def available(name: str, param_dtype: torch.dtype = torch.float32) -> bool:
    """Whether implementation `name` is there and can compute in `param_dtype`.

    Raises ValueError for an unknown name.
    """
    parts = NameParts.of(name)
    base_name = parts.base
    ours_alone = parts.variant not in ("", ZERO2, OWN_MESH) or parts.compiled == HOOKS
    takers = ("fsdp2",) if ours_alone else tuple(SHARDING_MODULES) if parts.variant else _NAMES
    if base_name not in takers:
        raise ValueError(f"unknown implementation '{name}': expected {NAMES_HELP}")
    if parts.compiled == WHOLE and base_name == "torch":
        raise ValueError(f"implementation '{name}': torch's hooks cannot be traced, so only '-blocks' compiles")
    if base_name in (UNSHARDED, DDP):
        return True
    if base_name in WRAPPING_MODULES:
        return hasattr(importlib.import_module(WRAPPING_MODULES[base_name]), "FullyShardedDataParallel")
    if parts.variant == OWN_MESH and not hasattr(importlib.import_module(PLACEMENT_MODULES[base_name]), _SAYS_MESHES):
        return False
    needed = ["fully_shard"] if param_dtype == torch.float32 else ["fully_shard", "MixedPrecisionPolicy"]
    module = importlib.import_module(SHARDING_MODULES[base_name])
    return all(hasattr(module, name) for name in needed)


def build_contender(
    name: str, spec: ModelSpec, *, mesh: DeviceMesh, options: ShardingOptions
) -> tuple[nn.Module, torch.Tensor]:
    """A model of shape `spec` under implementation `name`, and its input `(batch_rows, dim)`."""
    inputs = torch.linspace(-1, 1, spec.batch_rows * spec.dim).view(spec.batch_rows, spec.dim)
    if base_of(name) == UNSHARDED:
        inputs = inputs.to(options.param_dtype)
    return build_sharded(name, spec, mesh=mesh, options=options), inputs


def build_sharded(name: str, spec: ModelSpec, *, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """A model of shape `spec` under implementation `name`, compiled as it says.

    Raises ValueError for an unknown name.
    """
    available(name, options.param_dtype)
    model = build_model(spec)
    if base_of(name) == UNSHARDED:
        model.to(options.param_dtype)
    elif base_of(name) == DDP:
        return compile_model(name, _replicate(model, mesh), options.backend)
    elif base_of(name) in WRAPPING_MODULES:
        return compile_model(name, wrap_blocks(base_of(name), model, mesh=mesh, options=options), options.backend)
    shard_blocks(name, model, mesh=mesh, options=options)
    return compile_model(name, model, options.backend)


def compile_model(name: str, model: nn.Module, backend: str) -> nn.Module:
    """`model`, compiled in place as `name` says; blocks of the `StackedBlocks` in it by themselves."""
    compiled = NameParts.of(name).compiled
    if compiled == WHOLE:
        model.compile(backend=backend, fullgraph=True)
    elif compiled:
        if compiled == HOOKS:
            importlib.import_module("fsdp2").set_graph_capture(model, False)
        for block in next(each for each in model.modules() if isinstance(each, StackedBlocks)).blocks:
            block.compile(backend=backend, fullgraph=True)
    return model


def _replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Under DDP, with gradients that lie in its buckets, which saves it a copy of them."""
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)


def shard_blocks(name: str, model: nn.Module, *, mesh: DeviceMesh, options: ShardingOptions) -> None:
    """Shards every one of `model.blocks`, and `model`, with implementation `name`; `unsharded` leaves it alone."""
    base_name = base_of(name)
    if base_name == UNSHARDED:
        return
    variant = NameParts.of(name).variant
    fully_shard = _bind_fully_shard(base_name, mesh=mesh, options=options, variant=variant)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)  # type: ignore[arg-type]
    fully_shard(model)
    if then := VARIANTS.get(variant):
        getattr(model, then[0])(then[1])


def wrap_blocks(name: str, model: StackedBlocks, *, mesh: DeviceMesh, options: ShardingOptions) -> nn.Module:
    """Wraps every one of `model.blocks`, and `model`, with FSDP1's class of implementation `name`."""
    module = importlib.import_module(WRAPPING_MODULES[name])
    arguments: dict[str, object] = {
        "process_group": mesh.get_group(),  # of a mesh, torch has no LOCAL state dict
        "device_id": torch.device("cpu"),
        "use_orig_params": name != "fsdp1-flat",
    }
    if options.reshard_after_forward is False:
        arguments["sharding_strategy"] = module.ShardingStrategy.SHARD_GRAD_OP
    if options.param_dtype != torch.float32:
        arguments["mixed_precision"] = module.MixedPrecision(options.param_dtype, torch.float32)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = module.FullyShardedDataParallel(block, **arguments)
    wrapped: nn.Module = module.FullyShardedDataParallel(model, **arguments)
    return wrapped


def shard_group(name: str, module: nn.Module, *, mesh: DeviceMesh, options: ShardingOptions) -> None:
    """Shards `module`, as one group, with implementation `name`; `unsharded` leaves it alone."""
    base_name = base_of(name)
    if base_name != UNSHARDED:
        _bind_fully_shard(base_name, mesh=mesh, options=options)(module)


def _bind_fully_shard(
    name: str, *, mesh: DeviceMesh, options: ShardingOptions, variant: str = ""
) -> Callable[[nn.Module], object]:
    module = importlib.import_module(SHARDING_MODULES[name])
    arguments: dict[str, object] = {"mesh": mesh}
    if options.reshard_after_forward is not None:
        arguments["reshard_after_forward"] = options.reshard_after_forward
    if options.param_dtype != torch.float32:
        further = {"cache_shards": True} if variant == CACHED else {}
        arguments["mp_policy"] = module.MixedPrecisionPolicy(
            param_dtype=options.param_dtype, reduce_dtype=torch.float32, **further
        )
    if variant == OWN_MESH:
        kinds = importlib.import_module(PLACEMENT_MODULES[name])
        placement = kinds.ShardPlacementResult(Shard(0), kinds.FSDPMeshInfo(mesh, shard_mesh_dim=0))
        arguments["shard_placement_fn"] = lambda parameter: placement
    return lambda target: module.fully_shard(target, **arguments)
