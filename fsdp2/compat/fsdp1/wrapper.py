"""`FullyShardedDataParallel`: the wrapper of FSDP1 around a module that `fully_shard` shards in place."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.compat.fsdp1 import optim_state, state_dicts, whole
from fsdp2.compat.fsdp1.casting import (
    cast_buffers,
    cast_inputs,
    compute_in_own_dtype,
    computes_in_own_dtype,
    set_buffer,
)
from fsdp2.compat.fsdp1.config import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    TrainingState,
)
from fsdp2.compat.fsdp1.construction import (
    HYBRID,
    check,
    device_of,
    go_by_name,
    ignored_below,
    materialize,
    mesh_of,
    mixed_precision_of,
    move,
    offload_of,
    own_modules,
    refuse_deferred,
    refuse_wrapped,
    strategy_of,
    strategy_on,
    used,
)
from fsdp2.compat.fsdp1.hooked import HookedReduceScatter
from fsdp2.compat.fsdp1.inspection import FlatParameterView, FlatParamHandleView
from fsdp2.compat.fsdp1.names import WRAPPED, Inside, cleaned, saved
from fsdp2.compat.fsdp1.policies import wrap_submodules

_CHECKPOINTED = "_checkpoint_wrapped_module"


class FSDPAssertionError(fsdp2.FSDPRuntimeError, AssertionError):
    """What torch's FSDP1 asserts, so that a program which catches that goes on as it did."""


class FullyShardedDataParallel(nn.Module):
    """A module around ``module``, whose parameters are sharded: FSDP1's interface to `fully_shard`.

    Parameters keep their names, and are DTensors of the whole's shape; nothing is flattened. All ranks must make the
    same calls. The arguments are those of torch's class; 'Programs written for FSDP1' in the documentation says what
    each comes to, and where this class differs on purpose.

    Attributes:
        rank: of this process, among those the unit is sharded over.
        world_size: the number of these.
        compute_device: where forward and backward run.

    Raises:
        FSDPTypeError: an argument of another kind.
        FSDPValueError: arguments that contradict each other, or a wrapped module that is to be ignored.
        FSDPNotImplementedError: parameters of torchdistX.
        FSDPRuntimeError: no process group.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Any] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        check("module", module, nn.Module)
        check("sharding_strategy", sharding_strategy, ShardingStrategy)
        check("cpu_offload", cpu_offload or None, CPUOffload)  # False says the same
        check("backward_prefetch", backward_prefetch, BackwardPrefetch)
        check("mixed_precision", mixed_precision, MixedPrecision)
        check("device_mesh", device_mesh, DeviceMesh)
        refuse_deferred(module)
        self.sharding_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.mixed_precision = mixed_precision or MixedPrecision()
        self._use_orig_params = use_orig_params
        below = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        self._fsdp1_ignored = ignored_below(module, ignored_modules, ignored_states, below, FullyShardedDataParallel)
        self.compute_device = used(device_of(device_id, device_mesh, module, self._fsdp1_ignored))
        mesh = mesh_of(process_group, device_mesh, self.sharding_strategy, self.compute_device.type)
        self._device_mesh = mesh
        self.rank, self.world_size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self.sharding_strategy = strategy_on(self.world_size, self.sharding_strategy)
        self._is_nested = self._is_ready = self._in_full_precision = False
        self._reduces = True
        self._evaluates_in_full_precision = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._fsdp1_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self._buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        if auto_wrap_policy is not None:
            refuse_wrapped(module, below)
            arguments = {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
                "ignored_states": self._fsdp1_ignored.params,
                "device_mesh": device_mesh,
            }
            if mixed_precision is not None:
                self._leave_in_own_dtype(module)
            wrap_submodules(module, auto_wrap_policy, self._fsdp1_ignored, arguments, FullyShardedDataParallel)
        self._fsdp_wrapped_module = module
        self._make_unit(param_init_fn, sync_module_states)
        meshes = [parameter.device_mesh for parameter in self.parameters() if isinstance(parameter, DTensor)]
        self._whole_mesh = max([mesh, *meshes], key=lambda each: each.ndim)  # with tensor parallelism, if there is some
        for each in self._wrappers_below():
            each._is_nested, each._whole_mesh = True, self._whole_mesh
        self.register_state_dict_post_hook(state_dicts.after_state_dict)
        self.register_load_state_dict_pre_hook(state_dicts.before_load)
        self.register_load_state_dict_post_hook(state_dicts.after_load)

    def _leave_in_own_dtype(self, module: nn.Module) -> None:
        """Let modules of the classes that mixed precision ignores compute in their own dtype, in whichever unit."""
        classes = tuple(self.mixed_precision._module_classes_to_ignore or ())
        found = [each for each in module.modules() if isinstance(each, classes)] if classes else []
        compute_in_own_dtype([each for each in found if each not in self._fsdp1_ignored.modules])

    def _make_unit(self, param_init_fn: Any, sync_module_states: bool) -> None:
        """Give this unit's parameters their values, on their device, and shard them."""
        module, ignored, device = self._fsdp_wrapped_module, self._fsdp1_ignored, self.compute_device
        materialize(module, ignored, FullyShardedDataParallel, param_init_fn, device)
        move(module, ignored, FullyShardedDataParallel, device)
        if sync_module_states:
            for dim in reversed(range(self._device_mesh.ndim)):
                group = self._device_mesh.get_group(dim)
                fsdp2.broadcast_parameters(module, process_group=group, ignored_params=ignored.params)
        precision = self.mixed_precision
        if precision.keep_low_precision_grads and precision.param_dtype is not None:
            for parameter in self._own_parameters():
                parameter.grad_dtype = precision.param_dtype
        kept = frozenset(
            parameter for each in self._own_modules() if computes_in_own_dtype(each) for parameter in each.parameters()
        )
        name = module._get_name()
        fsdp2.fully_shard(
            module,
            mesh=self._device_mesh,
            ignored_params=ignored.params,
            **strategy_of(self.sharding_strategy),
            **mixed_precision_of(precision, kept),
            **offload_of(self.cpu_offload),
        )
        go_by_name(module, name)
        # As a flat gradient has them: unused parameters of a unit in which others are used.
        self._unit.set_reduce_scatter_unused_params(True, recurse=False)
        for parameter in self._fsdp1_own_parameters().values():
            parameter._fsdp_flattened = True  # type: ignore[attr-defined]  # by which Lightning knows them

    # -- what is below

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that parameters are sharded over."""
        return self._device_mesh.get_group(self._device_mesh.ndim - 1)

    def _own_modules(self) -> Iterator[nn.Module]:
        return own_modules(self._fsdp_wrapped_module, self._fsdp1_ignored, FullyShardedDataParallel)

    def _own_parameters(self) -> Iterator[nn.Parameter]:
        for module in self._own_modules():
            yield from (each for each in module.parameters(recurse=False) if each not in self._fsdp1_ignored.params)

    def _wrappers_below(self) -> list[FullyShardedDataParallel]:
        return [each for each in self.modules() if each is not self and isinstance(each, FullyShardedDataParallel)]

    @property
    def module(self) -> Any:
        """What is wrapped, inside of a checkpoint wrapper too."""
        wrapped: Any = self._modules[WRAPPED]
        return wrapped._modules.get(_CHECKPOINTED, wrapped)

    @property
    def _unit(self) -> fsdp2.FSDPModule:
        """The sharded module: what is wrapped, or where a checkpoint wrapper came later, what that is around."""
        wrapped: Any = self._modules[WRAPPED]
        module: fsdp2.FSDPModule = wrapped if isinstance(wrapped, fsdp2.FSDPModule) else self.module
        return module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or WRAPPED not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self._modules[WRAPPED], name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_nested = False  # a copy of a part is a root
        for each in self._wrappers_below():
            each._is_nested = True

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one, or it has been called without them."""
        return not self._is_nested

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers at and below ``module``; or those of them that no other is around."""
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        return [each for each in found if not (root_only and each._is_nested)]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of the plain module, and this wrapper under the name of what it wraps.

        So parameters and buffers have plain names as well, also where a module outside of all wrappers is asked.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> Inside:
        return Inside()

    # -- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        if not self._is_ready:
            self._begin()
        if self._evaluates_in_full_precision and not self._is_nested:
            for each in (self, *self._wrappers_below()):
                each._compute_in_full_precision(not each.training)
        precision = self.mixed_precision
        casts = precision.cast_forward_inputs or (precision.cast_root_forward_inputs and not self._is_nested)
        if casts and precision.param_dtype is not None and not self._in_full_precision:
            args, kwargs = cast_inputs(args, precision.param_dtype), cast_inputs(kwargs, precision.param_dtype)
        return self._fsdp_wrapped_module(*args, **kwargs)

    def _begin(self) -> None:
        """The first forward: what cannot be done before it is known which wrapper is the root, the one called first."""
        below = self._wrappers_below()
        self._is_nested = False  # a tower that is called alone, also if a wrapper around it is called later
        for each in below:
            was_root = each._is_ready and not each._is_nested
            if was_root and each.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
                each._unit.set_backward_prefetch("before")  # the setting of the new root counts
            each._is_nested = True
        for each in (self, *below):
            if not each._is_ready:
                each._is_ready = True
                if each.mixed_precision.buffer_dtype is not None:
                    each._buffer_dtypes = cast_buffers(each._own_modules(), each.mixed_precision.buffer_dtype)
        if not self._is_nested and self.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
            self._unit.set_backward_prefetch("never" if self.backward_prefetch is None else "after")

    def _compute_in_full_precision(self, full: bool) -> None:
        """Compute in the parameters' and the buffers' own dtypes, or again as mixed precision says."""
        if full is not self._in_full_precision:
            self._in_full_precision = full
            self._unit.set_full_precision(full, recurse=False)
            for (module, name), dtype in self._buffer_dtypes.items():
                buffer = module._buffers[name]
                if buffer is not None:
                    set_buffer(module, name, buffer.to(dtype if full else self.mixed_precision.buffer_dtype))

    def _refuse_below_root(self, what: str) -> None:
        if self._is_nested:
            raise fsdp2.FSDPRuntimeError(
                f"`{what}()` on inner FSDP instances is not supported. Please call `{what}()` on root FSDP module: it "
                "should only be called on the root FSDP instance."
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients, unsharded, without communication; on the root only.

        Raises:
            FSDPRuntimeError: on a wrapper that another one is around.
        """
        self._refuse_below_root("no_sync")
        unit, before = self._unit, self._reduces
        unit.set_requires_gradient_sync(False)
        self._reduces = False
        try:
            yield
        finally:
            unit.set_requires_gradient_sync(before)
            self._reduces = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the norm of all gradients together, of sharded, replicated and ignored parameters; on the root only.

        Returns:
            The norm before, a plain tensor of no dims: of the whole model.

        Raises:
            FSDPRuntimeError: on a wrapper that another one is around.
        """
        self._refuse_below_root("clip_grad_norm_")
        if all(parameter.grad is None for parameter in self.parameters()):
            warnings.warn(
                f"Called clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- returning the total norm in "
                f"the default dtype {torch.get_default_dtype()}",
                stacklevel=3,  # no_grad's wrapper is between
            )
        total = fsdp2.clip_grad_norm_(self.module, max_norm, norm_type)
        return total.full_tensor() if isinstance(total, DTensor) else total

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce each unit's flat gradient, and average it: see `HookedReduceScatter`.

        Raises:
            FSDPAssertionError: this is not the root, there is a hook, or a unit has replicas.
            FSDPTypeError: ``hook`` cannot be called.
        """
        if not callable(hook):
            raise fsdp2.FSDPTypeError(f"register_comm_hook takes a function as hook, got {hook!r}.")
        if self._is_nested:
            raise FSDPAssertionError("register_comm_hook can only be called on a root instance.")
        wrappers = (self, *self._wrappers_below())
        if any(each._comm_hook is not None for each in wrappers):
            raise FSDPAssertionError("A communication hook is already registered")
        if any(each.sharding_strategy in HYBRID for each in wrappers):
            raise FSDPAssertionError("Communication hook is not supported for hybrid strategies")
        for each in wrappers:
            if each.world_size > 1 and not each._fsdp1_is_sharded:
                raise FSDPAssertionError(
                    "Communication hook is not supported for NO_SHARD on several ranks: shard the parameters, or use "
                    "DistributedDataParallel, which calls hooks of its own in the place of its all-reduce."
                )
        reduce = HookedReduceScatter(state, hook)
        for each in wrappers:
            each._unit.set_custom_reduce_scatter(reduce)
            each._unit.set_gradient_divide_factor(1.0)  # the hook averages
            if each.world_size == 1:  # where nothing is scattered
                each._unit.set_all_reduce_hook(reduce.call)

    def _fsdp1_comm_hook(self, what: str) -> Any:
        """The "hook" or its "state" of the first group: all of a unit have the same."""
        groups = self._unit._get_fsdp_state().unit
        return next((getattr(each.settings.custom_reduce_scatter, what, None) for each in groups), None)

    _comm_hook = property(lambda self: self._fsdp1_comm_hook("hook"))
    _comm_hook_state = property(lambda self: self._fsdp1_comm_hook("state"))

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As of a plain module: ``fn`` finds the unit's parameters whole, and those of units below in their turn."""
        unit: Any = self._unit
        with fsdp2.full_parameters(unit, recurse=False):
            super().apply(fn)
        return self

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, parameters at and below ``module`` are whole: see `fsdp2.full_parameters`.

        Nothing where there is none of these wrappers, as below a module that `fully_shard` alone was called on.
        """
        within: Any = module
        if not recurse:
            within = module._unit if isinstance(module, FullyShardedDataParallel) else None
        elif not FullyShardedDataParallel.fsdp_modules(module):
            within = None
        if within is None:  # programs summon whatever they have, and gather a model of `fully_shard` otherwise
            yield
            return
        block = fsdp2.full_parameters(
            within,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(block)
            except fsdp2.FSDPRuntimeError as error:
                wrappers = FullyShardedDataParallel.fsdp_modules(module)
                if all(each.training_state is TrainingState.IDLE for each in wrappers):
                    raise
                what = f"Cannot manually unshard parameters during forward/backward: {error}"
                raise FSDPAssertionError(what) from None
            yield

    # -- what programs read of flat parameters

    def _fsdp1_own_parameters(self) -> dict[str, nn.Parameter]:
        """This unit's parameters that are not ignored, by all of their names below what is wrapped."""
        own, ignored = self._fsdp1_own_tensors().items(), self._fsdp1_ignored.params
        return {name: each for name, each in own if isinstance(each, nn.Parameter) and each not in ignored}

    @property
    def _fsdp1_is_sharded(self) -> bool:
        """Whether its parameters are sharded, and not whole on every rank."""
        return self.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def _has_params(self) -> bool:
        return bool(self._fsdp1_own_parameters())

    @property
    def _is_root(self) -> bool:
        return not self._is_nested

    @_is_root.setter
    def _is_root(self, value: bool) -> None:
        """Nothing: verl says that a unit is a root while it summons it, which every unit can be here."""

    @property
    def _handle(self) -> FlatParamHandleView | None:
        return FlatParamHandleView(self) if self._has_params else None

    @property
    def _flat_param(self) -> FlatParameterView | None:
        return FlatParameterView(self) if self._has_params else None

    @property
    def params(self) -> list[FlatParameterView]:
        """What `_flat_param` is, if there is one."""
        return [] if self._flat_param is None else [self._flat_param]

    @property
    def training_state(self) -> Any:
        """Whether a forward or backward of the root is running; inside of `summon_full_params` it is idle here."""
        root = self._unit._get_fsdp_state().root
        is_running = root is not None and (root.iteration.in_forward or root.iteration.in_backward)
        return TrainingState.FORWARD_BACKWARD if is_running else TrainingState.IDLE

    def _assert_state(self, state: Any) -> None:
        expected, found = state if isinstance(state, list) else [state], self.training_state
        if found not in expected:
            raise fsdp2.FSDPValueError(f"expected to be in states {expected} but current state is {found}")

    @property
    def _all_handles(self) -> list[FlatParamHandleView]:
        found = [each._handle for each in (self, *self._wrappers_below())]
        return [each for each in found if each is not None]

    def _unshard(self, async_op: bool = False) -> Any:
        return self._unit.unshard(async_op=async_op)

    # -- state dicts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `state_dict_type` says. Collective, unless that is SHARDED."""
        with state_dicts.gathering_below(self):
            return super().state_dict(*args, **kwargs)

    @property
    def _fsdp1_ranks(self) -> whole.Ranks:
        """All that hold a part of the model; of these, the first is the one that ``rank0_only`` means."""
        return whole.Ranks.of_mesh(self._whole_mesh)

    def _fsdp1_buffer_dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes in which buffers of this unit are saved, where mixed precision has cast them, by their names."""
        if not self._buffer_dtypes:
            return {}
        places = dict(cleaned(self._fsdp_wrapped_module.named_modules(remove_duplicate=False)))
        by_module: dict[nn.Module, list[str]] = {}
        for name, module in places.items():
            by_module.setdefault(module, []).append(f"{name}." if name else "")
        return {
            f"{prefix}{name}": dtype
            for (module, name), dtype in self._buffer_dtypes.items()
            for prefix in by_module.get(module, ())
        }

    def _fsdp1_named_wrappers(self) -> Iterator[tuple[str, FullyShardedDataParallel]]:
        """The wrappers below, by all of their names below what is wrapped."""
        for name, each in cleaned(self._fsdp_wrapped_module.named_modules(remove_duplicate=False)):
            if isinstance(each, FullyShardedDataParallel):
                yield name, each

    def _fsdp1_own_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this unit, by all of their names below what is wrapped."""
        own = set(self._own_modules())
        ignored = self._fsdp1_ignored.modules
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self._fsdp_wrapped_module.named_modules(remove_duplicate=False):
            if module in own or module in ignored:
                for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # ties within it too
                    if tensor is not None:
                        found[saved(f"{prefix}.{name}" if prefix else name)] = tensor
        return found

    @staticmethod
    def set_state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Any:
        """Say what state dicts of all wrappers at and below ``module`` hold.

        Returns:
            The settings of before.

        Raises:
            FSDPRuntimeError: a configuration of another type.
        """
        before = FullyShardedDataParallel.get_state_dict_type(module)
        settings = state_dicts.settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        for each in FullyShardedDataParallel.fsdp_modules(module):
            each._fsdp1_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """The settings of the wrappers at and below ``module``.

        Raises:
            FSDPRuntimeError: they differ.
        """
        found = [each._fsdp1_settings for each in FullyShardedDataParallel.fsdp_modules(module)]
        if any(each != found[0] for each in found):
            raise fsdp2.FSDPRuntimeError(
                "wrappers below have different state dict types: call set_state_dict_type() on the outermost module."
            )
        return found[0] if found else state_dicts.settings_of(StateDictType.FULL_STATE_DICT, None, None)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Iterator[None]:
        """`set_state_dict_type` inside; the settings of before are back after it, also after an exception."""
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        before = [each._fsdp1_settings for each in wrappers]
        settings = (state_dict_type, state_dict_config, optim_state_dict_config)
        FullyShardedDataParallel.set_state_dict_type(module, *settings)
        try:
            yield
        finally:
            for each, former in zip(wrappers, before, strict=True):
                each._fsdp1_settings = former

    # -- optimizers' state dicts

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The state of ``optim`` by names of parameters, as the type of state dict says. Collective, if it is FULL."""
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        return optim_state.state_of(model, optim, optim_state_dict, settings, _ranks_of(model, group))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, from what `optim_state_dict` returned; or load it at once."""
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        found = optim_state.state_to_load(
            model, optim, optim_state_dict, settings, _ranks_of(model, group), is_named_optimizer=is_named_optimizer
        )
        if load_directly:
            optim.load_state_dict(found)
        return found

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: Any,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """An optimizer's state with numbers in the place of names, or names in the place of numbers.

        The numbers are those of ``optim``, or of ``optim_input`` (what it was or will be built on), or of the model's
        parameters in their order. Every rank may call it alone.
        """
        parameters = optim_state.parameters_of(model, optim_input, optim)
        return optim_state.rekeyed(optim_state_dict, optim_state_key_type, model, parameters)

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict` of FULL type, on the CPU. Collective."""
        optim_state.warn_of(optim_input)
        return optim_state.state_of(model, optim, None, optim_state.full_settings(rank0_only), _ranks_of(model, group))

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """`optim_state_dict` of SHARDED type."""
        return optim_state.state_of(model, optim, None, optim_state.sharded_settings(), _ranks_of(model, group))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` of whole tensors that every rank has. No communication."""
        found = optim_state.optimizer_like(model, optim_input, optim)
        return optim_state.state_to_load(
            model, found, full_optim_state_dict, optim_state.full_settings(False), _ranks_of(model, None)
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` of whole tensors that rank 0 has. Collective."""
        found = optim_state.optimizer_like(model, optim_input, optim)
        given = full_optim_state_dict or {}
        return optim_state.state_to_load(model, found, given, optim_state.full_settings(True), _ranks_of(model, group))

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` of SHARDED type: nothing is flattened."""
        return optim_state.state_to_load(
            model, optim, sharded_optim_state_dict, optim_state.sharded_settings(), _ranks_of(model, None)
        )


def _ranks_of(model: nn.Module, group: dist.ProcessGroup | None) -> whole.Ranks:
    """All that hold a part of ``model``; those of ``group`` if a program gives one."""
    found = FullyShardedDataParallel.fsdp_modules(model)
    if group is None and found:
        return found[0]._fsdp1_ranks
    return whole.Ranks([dist.group.WORLD if group is None else group])  # type: ignore[list-item]
