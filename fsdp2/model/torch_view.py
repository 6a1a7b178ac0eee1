"""A read-only view of our state under the names of torch's private state, made when a program asks for it.

The engine knows nothing of it, and keeps nothing up to date for it. Names are those of torch 2.11 to 2.15. A name that
is not offered raises an AttributeError that says what to use instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp2._remedies import TOOLS
from fsdp2.core.backward import Stage
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import DataParallelMesh, DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.param import FSDPParam
from fsdp2.core.sharding import placement_of
from fsdp2.core.state import FSDPState, offer
from fsdp2.errors import ParamPhase


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """Which modules hold a parameter, and under which names."""

    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module]
    shared_param_names: list[str]


class TrainingState(Enum):
    """What a group does now, under torch's names. Members equal those of torch's ``TrainingState`` with the same name.

    Programs compare them with torch's class, which they import from torch.
    """

    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    IDLE = auto()

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == type(self).__name__ and getattr(other, "name", None) == self.name

    def __hash__(self) -> int:
        return super().__hash__()  # the hash of the name, as in torch's enum


_INSTEAD = {
    "gradient_divide_factor": "set_gradient_divide_factor()",
    "force_sum_reduction_for_comms": "set_force_sum_reduction_for_comms()",
    "reshard_after_backward": "set_reshard_after_backward()",
    "reduce_grads": "set_requires_gradient_sync()",
    "all_reduce_grads": "set_requires_all_reduce()",
    "unshard_in_backward": "set_unshard_in_backward()",
    "_comm_ctx": "set_modules_to_forward_prefetch(), set_post_optim_event() or share_comm_ctx()",
    "all_gather_copy_in_stream": "set_post_optim_event()",
    "post_optim_event": "set_post_optim_event()",
    "post_forward_mesh_info": "set_reshard_after_forward()",
    "foreach_reduce": "set_custom_reduce_scatter() or set_all_reduce_hook()",
    "foreach_all_gather": "set_custom_all_gather()",
    "_all_gather_comm": "set_custom_all_gather()",
    "_reduce_scatter_comm": "set_custom_reduce_scatter()",
    "_auto_reshard_after_forward": "set_reshard_after_forward()",
}


_ELSEWHERE = {
    "_init_extensions": (
        "whether a parameter gathers itself is looked up when it is sharded. For a dtype of its own, pass a function "
        "as fully_shard(mp_policy=...), which gets each parameter's name"
    ),
}
"""What to use instead, where no method of `FSDPModule` is it."""


def _refuse(what: str, name: str) -> NoReturn:
    instead = _INSTEAD.get(name)
    use = f"use FSDPModule.{instead}" if instead else _ELSEWHERE.get(name, f"{TOOLS} lists what can be read")
    raise AttributeError(f"fsdp2's {what} has no '{name}', which is private to torch's fully_shard: {use}.", name=name)


class _View:
    """A view: its attributes are read, not set, and an attribute that it does not have is refused by name."""

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
        """The sharded parameter, which optimizers see."""
        return self._param.sharded

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """The parameter that forward computes with; None before the first forward."""
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
        """The size of this rank's shard."""
        return self._param.local.shape

    @property
    def orig_dtype(self) -> torch.dtype:
        """The dtype of the sharded parameter."""
        return self._param.dtype

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype in which it is gathered; None: its own."""
        return self._param.policy.param_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which its gradient is reduced, if the policy names one."""
        return self._param.policy.reduce_dtype

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The parameter's own mixed-precision policy."""
        return self._param.policy

    @property
    def fsdp_placement(self) -> Any:
        """The placement in which the data-parallel mesh shards it."""
        return placement_of(self._param.sharding.partition, self._param.sharding.mesh.shard_size)

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """The mesh that it is sharded over."""
        return _info(self._param.sharding.mesh)


class GroupView(_View):
    """One group, as torch's ``FSDPParamGroup``."""

    __slots__ = ("_group", "_state")
    _what = "view of a group"
    _group: FSDPParamGroup
    _state: FSDPState

    def __init__(self, group: FSDPParamGroup, state: FSDPState) -> None:
        object.__setattr__(self, "_group", group)
        object.__setattr__(self, "_state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "post_forward_mesh_info":
            self._rest_after_forward(value)
        elif name != "_training_state":  # programs reset it before they reshard; it is computed here, so ignore that
            super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupView) and other._group is self._group

    def __hash__(self) -> int:
        return hash(self._group)

    @property
    def fsdp_params(self) -> list[ParamView]:
        """All parameters of the group."""
        return [ParamView(param) for param in self._group.params]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that `fully_shard` was called on."""
        return self._state.modules

    @property
    def mesh_info(self) -> DataParallelMeshInfo:
        """The mesh that the parameters are sharded over."""
        return _info(self._group.mesh)

    @property
    def post_forward_mesh_info(self) -> DataParallelMeshInfo | None:
        """The mesh that parameters are sharded over between forward and backward; None: they stay unsharded."""
        state = self._state
        if state.reshard_after_forward is False or (state.reshard_after_forward is None and state.is_root):
            return None
        post_forward = self._group.storage.post_forward
        return self.mesh_info if post_forward is None else _info(post_forward.mesh)

    def _rest_after_forward(self, info: Any) -> None:
        """Set whether forward ends resharded. A program may have read None here before the root took its default."""
        module: Any = self._state.modules[0]
        before = self.post_forward_mesh_info
        meshes = {getattr(each, "mesh", None) for each in (info, before)}
        if len(meshes) == 1 and (info is None) is (before is None):
            return  # it is set to what it is
        if info is not None and getattr(info, "mesh", None) != self.mesh_info.mesh:
            raise AttributeError(
                f"post_forward_mesh_info of '{self._group.name}' can be set to None and to its mesh_info, got "
                f"{info!r}; for fewer ranks call fully_shard(reshard_after_forward=<how many>).",
                name="post_forward_mesh_info",
            )
        module.set_reshard_after_forward(info is not None, recurse=False)

    @property
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @property
    def _training_state(self) -> TrainingState:
        state, root = self._state, self._state.root
        if root is None:
            return TrainingState.IDLE
        if (
            state.calls and state.backward.stage is not Stage.RUNNING
        ):  # also a forward that checkpointing runs again in backward
            return TrainingState.FORWARD
        is_gathering = self._group.phase is ParamPhase.UNSHARDING
        if root.iteration.in_backward:
            if state.backward.stage is Stage.RUNNING or is_gathering:
                return TrainingState.PRE_BACKWARD
            return TrainingState.POST_BACKWARD if self._group.reducer.is_reducing else TrainingState.IDLE
        return TrainingState.FORWARD if is_gathering and root.iteration.in_forward else TrainingState.IDLE

    @property
    def device(self) -> torch.device:
        """The device that the group computes on."""
        return self._group.mesh.device

    @property
    def _module_fqn(self) -> str:
        return self._group.name

    @property
    def gradient_divide_factor(self) -> float | None:
        """The factor that `set_gradient_divide_factor` has set."""
        return self._group.settings.divide_factor

    @property
    def force_sum_reduction_for_comms(self) -> bool:
        """The flag that `set_force_sum_reduction_for_comms` has set."""
        return self._group.settings.only_sums

    @property
    def reduce_grads(self) -> bool:
        """The flag that `set_requires_gradient_sync` has set."""
        return self._group.settings.requires_gradient_sync

    @property
    def all_reduce_grads(self) -> bool:
        """The flag that `set_requires_all_reduce` has set."""
        return self._group.settings.requires_all_reduce

    @property
    def reshard_after_backward(self) -> bool:
        """Whether the end of a backward that reduces frees the unsharded parameters."""
        return self._state.reshard_after_backward is not False

    @property
    def unshard_in_backward(self) -> bool:
        """The flag that `set_unshard_in_backward` has set."""
        return self._group.settings.unshards_in_backward

    @property
    def is_sharded(self) -> bool:
        """Whether the sharded parameters are registered, and no gather is under way."""
        return self._group.phase is ParamPhase.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self._group.phase is ParamPhase.UNSHARDED

    @property
    def is_sharded_post_forward(self) -> bool:
        """Whether the parameters are sharded over fewer ranks, between forward and backward."""
        return self._group.phase is ParamPhase.SHARDED_POST_FORWARD

    def reshard(self) -> None:
        """Reshard this group, as `FSDPModule.reshard` does for all groups of its module."""
        self._group.reshard(by_user=True)

    def post_backward(self) -> None:
        """Reduce what backwards have left, and reshard, as the module's settings say. Collective if anything is left.

        This is done for all groups of the module together. Without gradients left nothing happens.
        """
        if self._state.root is not None and any(group.reducer.is_due() for group in self._state.unit):
            self._state.backward.end(reduces=True)


def _info(mesh: DataParallelMesh) -> DataParallelMeshInfo:
    made: dict[str, Any] = {"dp_mesh_dims": mesh.dims, "spmd_mesh": mesh.spmd_mesh}
    if mesh.replicate_group is None:
        return FSDPMeshInfo(mesh.device_mesh, shard_mesh_dim=0, **made)
    if mesh.shard_group is None:
        return DDPMeshInfo(mesh.device_mesh, replicate_mesh_dim=0, **made)
    return HSDPMeshInfo(mesh.device_mesh, shard_mesh_dim=1, replicate_mesh_dim=0, **made)


def _groups(state: FSDPState) -> list[GroupView]:
    return [GroupView(group, state) for group in state.unit]


def _only_group(state: FSDPState) -> GroupView | None:
    """The group; the first one if the module has several meshes; None without parameters."""
    return GroupView(state.unit[0], state) if state.unit else None


class ContextView(_View):
    """What the states below a root share, as torch's ``FSDPStateContext``."""

    __slots__ = ("_state",)
    _what = "view of what states share"
    _state: FSDPState

    def __init__(self, state: FSDPState) -> None:
        object.__setattr__(self, "_state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "is_last_backward":
            module: Any = self._state.modules[0]
            module.set_is_last_backward(value)
        else:
            super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContextView) and other._key is self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> object:
        return self._state if self._state.root is None else self._state.root

    @property
    def all_states(self) -> list[Any]:
        """All states below the root; empty before the first forward."""
        return [] if self._state.root is None else list(self._state.root.states)

    @property
    def is_last_backward(self) -> bool:
        """The flag that `set_is_last_backward` has set."""
        root = self._state.root
        return (self._state.root_settings if root is None else root.settings).is_last_backward

    @property
    def post_backward_final_callback_queued(self) -> bool:
        """Whether a backward has begun that has not ended."""
        return self._state.root is not None and self._state.root.iteration.in_backward


def _initializer(state: FSDPState) -> Callable[[], None]:
    def _lazy_init() -> None:
        """Make the module a root, if it is below none. Collective if it becomes one."""
        state.ensure_root()

    return _lazy_init


def _finalizer(state: FSDPState) -> Callable[[], None]:
    def _root_post_backward_final_callback() -> None:
        """Reduce what the microbatches accumulated, wait, and register the sharded parameters. Collective.

        It acts on the whole root, whichever of its states is asked. Without gradients left nothing happens.
        """
        owner: Any = state if state.root is None else state.root.owner
        module = owner.modules[0]
        # `finalize_backward` is allowed only in the mode in which the user finalizes.
        before = owner.root_settings.finalizes_manually
        module.set_manual_backward_finalization(True)
        try:
            module.finalize_backward()
        finally:
            module.set_manual_backward_finalization(before)

    return _root_post_backward_final_callback


_OFFERED: dict[str, Callable[[Any], Any]] = {
    "_fsdp_param_group": _only_group,
    "_fsdp_param_groups": _groups,
    "_lazy_init": _initializer,
    "_state_ctx": ContextView,
    "_root_post_backward_final_callback": _finalizer,
    "_modules": lambda state: state.modules,
    "_is_root": lambda state: None if state.root is None else state.is_root,
    "_device": lambda state: state.mesh.device,
    "_mp_policy": lambda state: state.arguments.mp_policy,
}


_REFUSED = (
    "_auto_reshard_after_forward",
    "_device_handle",
    "_modules_to_run_forward",
    "_post_forward",
    "_post_forward_hook_handle",
    "_pre_forward",
    "_pre_forward_hook_handle",
    "_root_pre_forward",
    "_states_to_backward_prefetch",
    "_states_to_forward_prefetch",
)
"""Other names of torch's ``FSDPState``, which are refused by name."""


_SET_INSTEAD = {
    "_root_post_backward_final_callback": (
        "it is not called at the end of backward here. Let what it reduces be sharded or replicated by fully_shard "
        "(strategy='replicate'), or leave it out with ignored_params and reduce it after backward()"
    ),
    "_mp_policy": "pass mp_policy to fully_shard, which may be a function of the parameter's name",
}
"""What to do instead of setting an attribute of a state."""


def _refuse_to_set(name: str, state: FSDPState, value: object) -> NoReturn:
    del value
    instead = _SET_INSTEAD.get(name, f"{TOOLS} lists what can be set")
    raise AttributeError(
        f"'{name}' of fsdp2's FSDPState (of {type(state.modules[0]).__name__}) can only be read: {instead}.", name=name
    )


for _name, _view in _OFFERED.items():
    offer(_name, _view, functools.partial(_refuse_to_set, _name))
for _name in _REFUSED:
    offer(_name, functools.partial(lambda name, state: _refuse("FSDPState", name), _name), None)
