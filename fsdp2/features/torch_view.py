"""What programs read of torch's private state, on ours: a read-only view, made when it is asked for.

The engine knows nothing of it, and keeps nothing up to date for it. Names are torch's (2.11 to 2.15). What is not
offered raises an AttributeError that says what to use instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from fsdp2._remedies import TOOLS
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import DataParallelMesh, DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.param import FSDPParam
from fsdp2.core.root import FSDPRoot, Unit
from fsdp2.core.state import offer
from fsdp2.errors import ParamPhase


class Viewed(Protocol):
    """A state, as far as its view is concerned; see `FSDPState`."""

    modules: tuple[nn.Module, ...]
    unit: Unit
    mesh: DataParallelMesh
    root: FSDPRoot | None
    is_root: bool
    states: Sequence[Any]
    reshard_after_backward: bool | None

    def end_module_backward(self, *, reduces: bool) -> None:
        """Reshard and reduce."""


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """Which modules hold a parameter, and under which names."""

    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module]
    shared_param_names: list[str]


_INSTEAD = {
    "gradient_divide_factor": "set_gradient_divide_factor()",
    "force_sum_reduction_for_comms": "set_force_sum_reduction_for_comms()",
    "reshard_after_backward": "set_reshard_after_backward()",
    "reduce_grads": "set_requires_gradient_sync()",
    "all_reduce_grads": "set_requires_all_reduce()",
    "unshard_in_backward": "set_unshard_in_backward()",
    "_comm_ctx": "set_modules_to_forward_prefetch(), set_post_optim_event() or share_comm_ctx()",
    "all_gather_copy_in_stream": "set_post_optim_event()",
    "_lazy_init": "unshard(), which initializes the root",
    "foreach_reduce": "set_custom_reduce_scatter() or set_all_reduce_hook()",
    "foreach_all_gather": "set_custom_all_gather()",
    "_all_gather_comm": "set_custom_all_gather()",
    "_reduce_scatter_comm": "set_custom_reduce_scatter()",
    "_auto_reshard_after_forward": "set_reshard_after_forward()",
}


def _refuse(what: str, name: str) -> NoReturn:
    instead = _INSTEAD.get(name)
    use = f"use FSDPModule.{instead}" if instead else f"{TOOLS} lists what can be read"
    raise AttributeError(f"fsdp2's {what} has no '{name}', which is private to torch's fully_shard: {use}.", name=name)


class _View:
    """Attributes are read, not set; one that is not there is refused by name."""

    __slots__ = ()
    _what = "view"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self._what, name)

    def __setattr__(self, name: str, value: Any) -> None:
        instead = _INSTEAD.get(name, "a method of the module, if there is one")
        raise AttributeError(f"'{name}' of fsdp2's {self._what} can only be read; use FSDPModule.{instead}.", name=name)


class ParamView(_View):
    """One parameter, as torch's ``FSDPParam``."""

    __slots__ = ("_param",)
    _what = "view of a parameter"
    _param: FSDPParam

    def __init__(self, param: FSDPParam) -> None:
        object.__setattr__(self, "_param", param)

    @property
    def sharded_param(self) -> nn.Parameter:
        """What optimizers see."""
        return self._param.sharded

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """What forward computes with; None before the first."""
        return self._param.unsharded

    _unsharded_param = unsharded_param

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        return self._param.local

    @property
    def _param_fqn(self) -> str:
        return self._param.path

    @property
    def _module_info(self) -> ModuleInfo:
        (module, name), *others = self._param.uses
        return ModuleInfo(module, name, [each[0] for each in others], [each[1] for each in others])

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(self._param.shape)

    @property
    def sharded_size(self) -> torch.Size:
        """Of this rank's shard."""
        return self._param.local.shape

    @property
    def orig_dtype(self) -> torch.dtype:
        """Of the sharded parameter."""
        return self._param.dtype

    @property
    def param_dtype(self) -> torch.dtype | None:
        """In which it is gathered; None: as it is."""
        return self._param.policy.param_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which its gradient is reduced, if the policy says so."""
        return self._param.policy.reduce_dtype

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Its own."""
        return self._param.policy

    @property
    def fsdp_placement(self) -> Any:
        """How the data-parallel mesh cuts it."""
        return self._param.sharding.spec.placements[-1]

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """Over which ranks."""
        return _info(self._param.sharding.mesh)


class GroupView(_View):
    """One group, as torch's ``FSDPParamGroup``."""

    __slots__ = ("_group", "_state")
    _what = "view of a group"
    _group: FSDPParamGroup
    _state: Viewed

    def __init__(self, group: FSDPParamGroup, state: Viewed) -> None:
        object.__setattr__(self, "_group", group)
        object.__setattr__(self, "_state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_training_state":  # which programs reset before they reshard: there is none to be reset
            super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupView) and other._group is self._group

    def __hash__(self) -> int:
        return hash(self._group)

    @property
    def fsdp_params(self) -> list[ParamView]:
        """All of its parameters."""
        return [ParamView(param) for param in self._group.params]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those that `fully_shard` was called on."""
        return self._state.modules

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """Over which ranks."""
        return _info(self._group.mesh)

    @property
    def post_forward_mesh_info(self) -> DataParallelMeshInfo | None:
        """Over which ranks parameters rest after forward, if it is fewer."""
        post_forward = self._group.storage.post_forward
        return None if post_forward is None else _info(post_forward.mesh)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._group.mesh.device

    @property
    def _module_fqn(self) -> str:
        return self._group.name

    @property
    def gradient_divide_factor(self) -> float | None:
        """What `set_gradient_divide_factor` has set."""
        return self._group.settings.divide_factor

    @property
    def force_sum_reduction_for_comms(self) -> bool:
        """What `set_force_sum_reduction_for_comms` has set."""
        return self._group.settings.only_sums

    @property
    def reduce_grads(self) -> bool:
        """What `set_requires_gradient_sync` has set."""
        return self._group.settings.requires_gradient_sync

    @property
    def all_reduce_grads(self) -> bool:
        """What `set_requires_all_reduce` has set."""
        return self._group.settings.requires_all_reduce

    @property
    def reshard_after_backward(self) -> bool:
        """Whether the end of a backward that reduces frees the unsharded parameters."""
        return self._state.reshard_after_backward is not False

    @property
    def unshard_in_backward(self) -> bool:
        """What `set_unshard_in_backward` has set."""
        return self._group.settings.unshards_in_backward

    @property
    def is_sharded(self) -> bool:
        """Whether the sharded parameters are registered, and nothing is under way."""
        return self._group.phase is ParamPhase.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self._group.phase is ParamPhase.UNSHARDED

    @property
    def is_sharded_post_forward(self) -> bool:
        """Whether they rest on fewer ranks."""
        return self._group.phase is ParamPhase.SHARDED_POST_FORWARD

    def reshard(self) -> None:
        """As `FSDPModule.reshard`, of this group."""
        self._group.reshard()

    def post_backward(self) -> None:
        """Reduce what backwards have left, and reshard, as the settings of the module say. Collective if they did.

        Of all groups of the module together; nothing where there is nothing left.
        """
        if self._state.root is not None and any(group.reducer.is_due() for group in self._state.unit):
            self._state.end_module_backward(reduces=True)


def _info(mesh: DataParallelMesh) -> DataParallelMeshInfo:
    made: dict[str, Any] = {"dp_mesh_dims": mesh.dims, "spmd_mesh": mesh.spmd_mesh}
    if mesh.replicate_group is None:
        return FSDPMeshInfo(mesh.device_mesh, shard_mesh_dim=0, **made)
    if mesh.shard_group is None:
        return DDPMeshInfo(mesh.device_mesh, replicate_mesh_dim=0, **made)
    return HSDPMeshInfo(mesh.device_mesh, shard_mesh_dim=1, replicate_mesh_dim=0, **made)


def _groups(state: Viewed) -> list[GroupView]:
    return [GroupView(group, state) for group in state.unit]


def _only_group(state: Viewed) -> GroupView | None:
    """The group, or the first of several meshes; None without parameters."""
    return GroupView(state.unit[0], state) if state.unit else None


def _context(state: Viewed) -> SimpleNamespace:
    return SimpleNamespace(all_states=list(state.states) if state.root is not None else [])


def _finalizer(state: Viewed) -> Callable[[], None]:
    def _root_post_backward_final_callback() -> None:
        """Reduce what the microbatches accumulated, wait, and register the sharded parameters. Collective."""
        module: Any = state.modules[0]
        before = module._get_fsdp_state().root_settings.finalizes_manually
        module.set_manual_backward_finalization(True)
        try:
            module.finalize_backward()
        finally:
            module.set_manual_backward_finalization(before)

    return _root_post_backward_final_callback


_OFFERED: dict[str, Callable[[Any], Any]] = {
    "_fsdp_param_group": _only_group,
    "_fsdp_param_groups": _groups,
    "_state_ctx": _context,
    "_root_post_backward_final_callback": _finalizer,
    "_modules": lambda state: state.modules,
    "_is_root": lambda state: None if state.root is None else state.is_root,
    "_device": lambda state: state.mesh.device,
    "_mp_policy": lambda state: state.arguments.mp_policy,
}


_REFUSED = (
    "_auto_reshard_after_forward",
    "_device_handle",
    "_lazy_init",
    "_modules_to_run_forward",
    "_post_forward",
    "_post_forward_hook_handle",
    "_pre_forward",
    "_pre_forward_hook_handle",
    "_root_pre_forward",
    "_states_to_backward_prefetch",
    "_states_to_forward_prefetch",
)
"""Other names of torch's ``FSDPState``."""


for _name, _view in _OFFERED.items():
    offer(_name, _view)
for _name in _REFUSED:
    offer(_name, functools.partial(lambda name, state: _refuse("FSDPState", name), _name))
