"""`FSDPState`: what one `fully_shard` call attaches to its module(s): the hooks around forward and backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import _torch
from fsdp2.core.agreement import (
    Number,
    refuse_disagreement,
    refuse_list_as_root,
    refuse_meta,
    refuse_unowned_parameters,
    settings_of,
)
from fsdp2.core.backward import ModuleBackward, Stage
from fsdp2.core.buffers import moved_to
from fsdp2.core.failure import recover_if_failed, reset
from fsdp2.core.hooks import STATE, ModuleHooks, on_real_parameters
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.options import (
    MixedPrecisionPolicy,
    ModulePolicy,
    PolicyFunction,
    RootSettings,
)
from fsdp2.core.places import PLACE
from fsdp2.core.plan import Waiting
from fsdp2.core.prefetch import Prefetch, Unit
from fsdp2.core.root import ON_ROOT, FSDPRoot
from fsdp2.core.running import refuse_inside_of_a_pass
from fsdp2.core.several_roots import SharedComm, claim, refuse_busy, release, roots_of, share_context, supersede
from fsdp2.core.streams import FSDPCommContext, device_for
from fsdp2.core.structure import Structure, module_paths
from fsdp2.core.trees import Replaced, cast_floating_point, cast_inputs, map_inputs, tensors_anywhere_in
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, ParamPhase

# Hooks that torch.compile traces into although nothing was prepared for that: they refuse.


class Untraced:
    """Stands in for the graph hooks of a state while no compiled call is under way."""

    def pre_forward(self, *_: Any) -> NoReturn:
        """Refuse.

        Raises:
            FSDPRuntimeError: always, with the remedy.
        """
        raise FSDPRuntimeError(
            "torch.compile traces into a sharded module that nothing has prepared for it. Compile a module on which "
            "fully_shard was called (torch.compile(model), model.compile() or block.compile()), or call "
            "fsdp2.prepare_compile(model) before each call of a compiled function that calls it."
        )

    def called_eagerly(self, name: str) -> None:
        """Do nothing: no graph was expected to contain this call."""

    def post_forward(self, output: Any) -> Any:
        """Return ``output``. (It is never called, as `pre_forward` refuses.)"""
        return output


UNTRACED = Untraced()


# `ShardArguments`: the arguments of a `fully_shard` call, and a comparison with those of another call.


Strategy = Literal["replicate", "zero1", "zero2", "zero3"]
"""A ZeRO stage by name; ``"replicate"`` is distributed data parallelism."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardArguments:
    """The validated arguments of one `fully_shard` call.

    Attributes:
        mesh: the ranks to shard and replicate over; ``dp_mesh_dims`` has been applied.
        reshard_after_forward: whether to reshard, and to how many ranks if not to all.
        shard_placement_fn: as it was passed.
        mp_policy: a policy of this package, also where torch's was passed.
        offload_policy: a policy of this package, also where torch's was passed.
        ignored_params: the ignored parameters that lie below the module.
        strategy: as it was passed.
        grouping: for a model that `auto_shard` was called on, the arguments by which it chose groups, by name.
            `fully_shard` has no such argument.
    """

    mesh: DataParallelMesh
    reshard_after_forward: tuple[bool | None, int | None]
    shard_placement_fn: Any
    mp_policy: MixedPrecisionPolicy | PolicyFunction
    offload_policy: Any
    ignored_params: frozenset[nn.Parameter]
    strategy: Strategy | None = None
    grouping: tuple[tuple[str, str | int], ...] = ()

    def difference(self, other: ShardArguments) -> str | None:
        """The name of the first argument that is not the same in ``other``; None if all are.

        Meshes are the same if they are equal or communicate over the same process groups; functions if they are equal.
        """
        if self.strategy != other.strategy:
            return "strategy"
        mine, theirs = self.mesh, other.mesh
        if mine.dims != theirs.dims or mine.spmd_mesh != theirs.spmd_mesh:
            passed = [each.device_mesh if each.spmd_mesh is None else each.spmd_mesh for each in (mine, theirs)]
            return "dp_mesh_dims" if passed[0] == passed[1] else "mesh"
        if mine.device != theirs.device or (mine.device_mesh != theirs.device_mesh and mine.key != theirs.key):
            return "mesh"
        for name in ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params"):
            if getattr(self, name) != getattr(other, name):
                return name
        return None


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""


class Round:
    """Which modules of a list are still to be called before the unit that they share is resharded.

    A round begins with the first call of a member, in a forward or in a recompute, and ends when all were called.

    Attributes:
        members: the list; empty for a module alone.
        to_run: the members to be called yet; empty between rounds, and for a module alone.
    """

    __slots__ = ("_recomputes", "members", "to_run")

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.members = modules if len(modules) > 1 else ()
        self._recomputes = False
        self.to_run: set[nn.Module] = set()

    def begins_with(self, module: nn.Module, recompute: bool) -> bool:
        """Whether this call is the first of a round."""
        if recompute is not self._recomputes:
            self.to_run.clear()  # what is left of the other kind is not called any more: not all need a recompute
            self._recomputes = recompute
        begins = module not in self.to_run
        if begins:
            self.to_run.update(self.members)
        return begins


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that `fully_shard` attached to ``module``, if it did.

    Raises:
        FSDPTypeError: the program has put something else there.
    """
    state: FSDPState | None = module.__dict__.get(STATE)
    if state is not None and not isinstance(state, FSDPState):
        refuse_own_name(module, STATE)
    return state


def refuse_own_name(module: nn.Module, name: str) -> NoReturn:
    """Raise `FSDPTypeError`: ``module`` has something of its own under a ``name`` that `fully_shard` needs."""
    raise FSDPTypeError(
        f"{type(module).__name__} has '{name}' of its own, which fully_shard would hide behind FSDPModule.{name}: give "
        "it another name."
    )


def forget_state(state: FSDPState) -> None:
    """Take ``state`` and its hooks off its modules."""
    state.module_hooks.detach()
    for module in state.modules:
        del module.__dict__[STATE]


def states_below(module: nn.Module) -> list[FSDPState]:
    """The states of ``module`` and everything below it, each once, in the order of ``module.modules()``."""
    states = (state_of(each) for each in module.modules())
    return list(dict.fromkeys(state for state in states if state is not None))


def states_below_all(modules: Sequence[nn.Module]) -> list[FSDPState]:
    """`states_below` for several modules, each state once."""
    return list(dict.fromkeys(state for module in modules for state in states_below(module)))


_RANGES = {
    "_gather_for_forward": "pre_forward",
    "_leave_forward": "post_forward",
    "_gather_for_recompute": "pre_forward",
    "_gather": "pre_backward",
    "_end": "post_backward",
}
"""The names by which profilers show these methods, as torch's FSDP does: ``FSDP::pre_forward (fqn)``."""


class FSDPState:
    """The hooks of one module, or of a list of modules that share their groups.

    Attributes:
        modules: the modules that `fully_shard` was called on.
        class_name: the class of the first of them, without ``FSDP`` before it.
        unit: the groups of this call, one per mesh; empty if the modules have no parameters of their own.
        mesh: the mesh of the call; ``shard_placement_fn`` may have given parameters another one.
        policy: the dtypes of what forward takes and returns.
        root: the root that this state runs below, the last one to claim it; None before lazy initialization.
        roots: all roots that it lies below.
        own_root: the root that its own module is; None if it is none.
        reshard_after_forward: what the user has set; None: reshard, unless this is the root.
        reshard_after_backward: whether the end of its backward frees its unsharded parameters; None: if it reduces.
        forward_prefetch: the units to gather ahead in this module's forward; None: those that are expected to come.
        backward_prefetch: the units to gather ahead in this module's backward; None: those that are expected to come.
        arguments: the arguments of the call.
        module_hooks: the other hooks that hang on the modules.
        graph_hooks: takes the place of the hooks inside of a graph while a compiled call is under way.
        prepared_hooks: the ``graph_hooks`` of the last compiled call.
        is_captured: whether torch.compile may take what the hooks do into its graph.
        own: the groups of the unit that no other state uses.
        shared: the groups of the unit that other states use as well, by tied weights.
        calls: how many calls of its modules, or of their methods, are under way: one may be inside of another.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        unit: Unit,
        policy: ModulePolicy,
        arguments: ShardArguments,
        ignored_params: frozenset[nn.Parameter],
    ) -> None:
        self.begin(modules, unit, policy, arguments, ignored_params)
        for module in self.modules:
            module.__dict__[STATE] = self
            self.module_hooks.handles += [
                _torch.prepend_forward_hook(module, self.pre_forward),
                module.register_forward_hook(self.post_forward, prepend=False),
            ]

    def begin(
        self,
        modules: Sequence[nn.Module],
        unit: Unit,
        policy: ModulePolicy,
        arguments: ShardArguments,
        ignored_params: frozenset[nn.Parameter],
    ) -> None:
        """Set all attributes. A copy of a state begins here too, since its modules have the hooks already."""
        self.modules = tuple(modules)
        self.class_name = type(modules[0]).__name__
        self.unit = unit
        self.mesh = arguments.mesh
        self.policy = policy
        self.in_full_precision = False
        self.root: FSDPRoot | None = None
        self.roots: list[FSDPRoot] = []
        self.own_root: FSDPRoot | None = None
        self.is_root = False
        self._root_settings = RootSettings()
        params = [param for group in unit for param in group.params]
        numel = sum(math.prod(param.shape) for param in params)
        self._number = Number((self.class_name, dist.get_rank(), str(self.mesh), len(params), numel))
        self.post_optim_event: Any = None
        self.shared_comm: SharedComm | None = None
        self.reshard_after_forward = arguments.reshard_after_forward[0]
        self.reshard_after_backward: bool | None = True
        self.forward_prefetch: Prefetch = None
        self.backward_prefetch: Prefetch = None
        self.ignored_params = ignored_params
        self.arguments = arguments
        self.module_hooks = ModuleHooks()
        self.graph_hooks: Any = UNTRACED
        self.prepared_hooks: Any = UNTRACED
        self.is_captured = True
        self.backward = ModuleBackward(self)
        self._replaced = Replaced()
        self._replaced_in_calls: list[Replaced | None] = []  # a stack: one entry for each call under way
        self.own = unit
        self.shared: Unit = ()
        for group in unit:
            group.sharers.append(self)
        self.round = Round(self.modules)
        self._dispatch_modes = 0  # how many dispatch modes were active when its last call began
        self.attributes_outside: dict[str, Any] = {}  # what `inference()` sets back at its end, for copies made inside
        self.calls = 0
        self._structure = Structure(())

    @property
    def name(self) -> str:
        """The name for messages: the group's name once the root is known, else the class of the (first) module."""
        return self.unit[0].name if self.unit else self.class_name

    @property
    def states(self) -> tuple[FSDPState, ...]:
        """The states of all sharded modules below, if its own module is a root; else ()."""
        return () if self.own_root is None else self.own_root.states  # type: ignore[return-value]

    def on_real_parameters(self, action: Callable[..., None], *args: Any) -> None:
        """Run ``action`` outside of functorch's transforms; if a profiler runs, it shows the action as a range."""
        if _torch.profiler._is_profiler_enabled:
            action = self._shown(action)
        if _torch.functorch_is_active():
            on_real_parameters(action, *args)
        else:
            action(*args)

    def _shown(self, action: Callable[..., None]) -> Callable[..., None]:
        name = _RANGES.get(getattr(action, "__name__", ""))
        if name is None or not self.unit:
            return action

        def shown(*args: Any) -> None:
            with _torch.in_range(f"FSDP::{name} ({self.name})"):
                action(*args)

        return shown

    # -- lazy initialization

    def ensure_root(self) -> FSDPRoot:
        """The root that this state belongs to. On first use this state's module becomes the root, which is collective.

        Raises:
            FSDPRuntimeError: another root is using a module below, a parameter is not ready, was added or replaced, or
                the ranks' plans differ.
        """
        if self.root is None:
            self.on_real_parameters(self._become_root)
        assert self.root is not None, "lazy initialization sets the root"
        return self.root

    def _become_root(self) -> None:
        names: dict[FSDPState, str] = {}
        paths = module_paths(self.modules)
        for each, name in paths.items():
            state = state_of(each)
            if state is not None:
                names.setdefault(state, name)
        states = tuple(names)
        groups = list(dict.fromkeys(group for state in states for group in state.unit))
        # States that share tied weights count too, if they are not below: their roots must use the same communication
        # context, so that whichever root ends a backward waits for all reductions of a shared group.
        related = names | {sharer: sharer.name for group in groups for sharer in group.sharers if sharer not in names}
        # These refusals come before anything has changed. Later ones name groups and parameters as they are called
        # below this root, so the groups are renamed before.
        refuse_busy(self.class_name, related, None)
        self._refuse_other_settings(names)
        shared = self._comm_ctx
        share_context(shared, roots_of(related))
        supersede(names)
        for state, name in names.items():
            for group in state.unit:
                if group.sharers[0] is not state and group.sharers[0] in names:
                    continue  # tied weights keep the name that the first state gives them
                group.rename(name or self.class_name, paths)
        self._refuse_unowned()
        refuse_meta(self.modules, self.class_name)
        if shared.comm is None:
            shared.comm = FSDPCommContext(device_for(self.mesh.device))
        for group in groups:
            if not group.is_prepared or group.comm is not shared.comm:
                group.prepare(shared.comm)
        # Ranks compare plans, so groups are prepared before; and agree on this root's number, which then goes into the
        # labels of all exchanges.
        settings = settings_of(states, groups, self.root_settings)
        refuse_disagreement(self.class_name, groups, self.mesh, settings, self._number)
        for group in groups:
            group.belong_to(self._number.value)
        root = FSDPRoot(self, states, shared, groups, self._root_settings)
        root.post_optim_event, self.post_optim_event = self.post_optim_event, None
        for state in states:
            state.shared = tuple(group for group in state.unit if group.is_shared)
            state.own = tuple(group for group in state.unit if not group.is_shared)
        for action in ON_ROOT:
            action(states, groups)
        self.own_root = root
        claim(root, states)

    def _reclaim(self, root: FSDPRoot) -> None:
        """Claim back the states that other roots have claimed since this root last ran."""
        lost = {state: state.name for state in root.states if state.root is not root}
        refuse_busy(self.class_name, lost, root)
        share_context(self._comm_ctx, roots_of(lost))
        claim(root, root.states)

    @property
    def _comm_ctx(self) -> SharedComm:
        """The holder of the communication context, common to roots that share one. (torch's pipelining compares it.)"""
        if self.root is not None:
            return self.root.shared_comm
        if self.shared_comm is None:
            self.shared_comm = SharedComm()
        return self.shared_comm

    def compute_through(self, comm: FSDPCommContext) -> None:
        """Let the root that this state may become use ``comm``, instead of making a communication context."""
        self._comm_ctx.comm = comm

    @property
    def root_settings(self) -> RootSettings:
        """The settings of the root that its own module is, or will have if it becomes one."""
        return self._root_settings if self.own_root is None else self.own_root.settings

    def configure_root(self, **changes: Any) -> None:
        """Change settings of the root that this state belongs to, or may become."""
        if self.root is None:
            self._root_settings = dataclasses.replace(self._root_settings, **changes)
        else:
            self.root.settings = dataclasses.replace(self.root.settings, **changes)

    def _refuse_other_settings(self, names: dict[FSDPState, str]) -> None:
        for state, name in names.items():
            setter = None if state is self else state.root_settings.setter_called()
            if setter is not None:
                raise FSDPRuntimeError(
                    f"{setter} was called on '{name}' ({state.class_name}), which is not the root; call it on the "
                    f"root, {self.class_name}."
                )

    def _refuse_unowned(self) -> None:
        states = states_below_all(self.modules)
        ignored = {parameter for state in states for parameter in state.ignored_params}
        params = [param for state in states for group in state.unit for param in group.params]
        refuse_unowned_parameters(self.modules, self.class_name, params, ignored)
        self._structure = Structure(self.modules)

    def has_changed_structure(self) -> bool:
        """Whether modules or parameters were added or removed below since it became a root, or last noticed."""
        return self._structure.has_changed()

    def refuse_changed_structure(self) -> None:
        """Look for parameters that no group owns once more, if modules or parameters were added or removed since."""
        if self._structure.has_changed():
            self._refuse_unowned()

    def quiesce(self, *, frees: bool = True) -> None:
        """Reshard the parameters before the user's code looks at them or replaces them.

        Not ``frees``: values that a graph still reads stay in memory, see `FSDPParamGroup.rest_in_place`.
        """
        if self.root is not None:
            recover_if_failed(self.root)
            refuse_inside_of_a_pass(self.root, self.modules, self.name)
            self.root.comm.let_host_write_shards()
        for group in self.unit:
            group.refuse_set_data()
            group.quiesce(frees=frees)

    def adopt_replaced(self) -> None:
        """Take over parameters that the user has replaced in the modules."""
        for group in self.unit:
            group.adopt_replaced()

    def take_over(self) -> None:
        """End the roots that submodules became by running before this module, and drop their iterations."""
        for state in states_below_all(self.modules):
            if state.root is not None:
                reset(state.root)
                state.root.dissolve()

    # -- forward

    def pre_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: Callable[..., Any] | None = None,
    ) -> Inputs | None:
        """Gather, cast the inputs and await the backward, before the forward of (one of) the module(s) or ``method``.

        Returns the inputs to use instead, or None if they stay.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.graph_hooks.pre_forward(module, args, kwargs)  # type: ignore[no-any-return]
        self._dispatch_modes = modes = _torch.count_dispatch_modes()
        if modes and torch.is_grad_enabled() and _torch.clones_saved_tensors():
            raise FSDPNotImplementedError(
                f"{self.class_name} is sharded, and runs inside of torch.autograd.graph."
                "allow_mutation_on_saved_tensors(): that copies what forward has saved before it is written, and each "
                "all-gather writes the parameters. Run the sharded module outside of it, and inside only what is "
                "written in place."
            )
        if modes and _torch.is_checkpointed_selectively():
            # Selective checkpointing would take our operators for the model's: keep their results, and not run them in
            # the recompute. So this runs once more, without its modes.
            changed = _torch.outside_selective_checkpoints(self.pre_forward, module, args, kwargs, method)
            self._dispatch_modes = modes  # `post_forward` runs under them again
            return changed  # type: ignore[no-any-return]
        if self.graph_hooks is not UNTRACED:
            self.graph_hooks.called_eagerly(self.name)
        root = self.ensure_root()
        # A forward inside of a backward is a recompute, as activation checkpointing runs it. (Without gradients, in the
        # backward of another model, it is a forward like any other.)
        recompute = _torch.current_backward() != -1 and (torch.is_grad_enabled() or root.iteration.in_backward)
        # The module's backward may have begun before: then it has gathered, and its end is awaited already.
        is_watched = recompute and self.backward.stage is Stage.RUNNING and self.is_unsharded()
        if not is_watched:
            self.on_real_parameters(self._gather_for_recompute if recompute else self._gather_for_forward, root)
        inputs: Inputs | None = None
        if self.is_root and not recompute:
            inputs = self.on_device(args, kwargs, self._replaced)
        if self.policy.inputs is not None and not self.in_full_precision:
            args, kwargs = inputs or (args, kwargs)
            inputs = cast_inputs(self.policy.inputs, method or module.forward, args, kwargs, self._replaced)
        # Inputs are watched once: not by a forward that a method of the module calls, which has watched its own, nor by
        # the later modules of a list.
        is_outermost = not is_watched and self.calls <= 1
        begins = is_outermost and (not self.round.members or self.round.begins_with(module, recompute))
        if begins and self.unit and torch.is_grad_enabled():
            args, kwargs = inputs or (args, kwargs)
            inputs = self.backward.await_end(args, kwargs, self._replaced) or inputs
        if self._replaced.containers or self._replaced.casts or self._replaced_in_calls:
            self._keep_replaced()
        return inputs

    def on_device(self, args: tuple[Any, ...], kwargs: dict[str, Any], replaced: Replaced) -> Inputs | None:
        """The inputs of the root, moved to the device of its parameters; None if they stay."""
        device = self.mesh.device
        if not self.is_root or device.type == "cpu":
            return None
        return map_inputs(lambda tensor: moved_to(device, tensor), args, kwargs, replaced)

    def _keep_replaced(self) -> None:
        """Push what this call has put into the caller's containers, to be taken out when the call is over."""
        if self._replaced.containers or self._replaced.casts:
            self._replaced_in_calls.append(self._replaced)
            self._replaced = Replaced()
        else:  # a call around this one has replaced something, and this one pops its own entry
            self._replaced_in_calls.append(None)

    def _restore_inputs(self) -> None:
        """The call is over: give the caller's containers back what they held, except where the module has written."""
        replaced = self._replaced_in_calls.pop()
        if replaced is not None:
            replaced.take_out()

    def is_unsharded(self) -> bool:
        """Whether the parameters of its unit are unsharded."""
        return all(group.phase is ParamPhase.UNSHARDED for group in self.unit)

    def _gather_for_recompute(self, root: FSDPRoot) -> None:
        if self.unit:
            root.schedule.enter_recompute(self)
            for group in self.shared:
                group.users.add(self)

    def _gather_for_forward(self, root: FSDPRoot) -> None:
        recover_if_failed(root)
        if self.is_root:
            if not root.iteration.in_forward:
                if self.round.members:
                    refuse_list_as_root(self.modules)
                if root.is_disturbed:
                    self._reclaim(root)
                root.begin_forward()
                self.refuse_changed_structure()
        elif not root.iteration.in_forward:  # a submodule is called by itself
            root.join()
        if self.unit:
            # Outside of the root's forward there is no order to follow or to learn.
            if root.iteration.in_forward:
                root.schedule.enter_forward(self)
            else:
                root.schedule.gather(self.unit)
            for group in self.shared:
                group.users.add(self)

    def join_step(self) -> None:
        """This rank runs nothing in this step, and takes part in the collectives of the others. Collective.

        Raises:
            FSDPRuntimeError: this is no root, or ``set_divergence("join")`` was not called.
        """
        root = self.ensure_root()
        if not self.is_root:
            raise FSDPRuntimeError(f"join_step() must be called on the root, {root.name}, not on '{self.name}'.")
        if root.settings.divergence != "join":
            raise FSDPRuntimeError("join_step() needs set_divergence('join'), called on the root, on all ranks.")
        if root.is_disturbed:
            self._reclaim(root)
        root.join_step()

    def _shows_parameters(self, outputs: Iterable[torch.Tensor]) -> bool:
        """Whether one of ``outputs`` is a parameter or a view of one. The caller reads it, so the unit stays unsharded.

        It is resharded when the backward is over or, without gradients, after the next call.
        """
        for tensor in outputs:
            for group in self.unit:
                if group.storage.lies_on_unsharded(tensor):
                    return True
        return False

    def end_round(self) -> None:
        """The root's forward is over, and not all modules of the list were called in it."""
        self.round.to_run.clear()
        self.leave_as_set(self.unit)

    def reshards_as_set(self) -> bool:
        """Whether the unit is resharded at the end of a forward, or of a gather that stands for one (see `JOINING`)."""
        return not self.round.to_run and self._reshards_now()

    def leave_as_set(self, unit: Unit) -> None:
        """Reshard ``unit``, some of its groups, if the settings say that a forward ends resharded."""
        if self.reshards_as_set():
            for group in unit:
                if not group.users:
                    group.reshard_after_forward(torch.is_grad_enabled())

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard, arrange for the gather in backward and cast the output, after the forward of (one of) the module(s).

        Returns the output to use instead, or None if it stays.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.graph_hooks.post_forward(output)
        if self._dispatch_modes and _torch.is_checkpointed_selectively():
            return _torch.outside_selective_checkpoints(self.post_forward, module, args, output)
        root = self.root
        assert root is not None, "a forward that ends has begun"
        recompute = _torch.current_backward() != -1 and (torch.is_grad_enabled() or root.iteration.in_backward)
        # A recompute within this module's own backward, which is under way, leaves the parameters to that.
        if not recompute or self.backward.stage is not Stage.RUNNING:
            self.on_real_parameters(self._leave_forward, root, module, output, recompute)
        if self._replaced_in_calls:
            self._restore_inputs()
        if self.policy.output_dtype is None:
            return None
        return cast_floating_point(self.policy.output_dtype, output)

    def _leave_forward(self, root: FSDPRoot, module: nn.Module, output: Any, recompute: bool) -> None:
        outputs = (output,) if isinstance(output, torch.Tensor) else tensors_anywhere_in(output)
        awaits_backward = torch.is_grad_enabled()
        makes_tangents = awaits_backward and _torch.forward_ad._current_level >= 0
        hidden: Unit = ()
        if awaits_backward:
            is_seen = self.backward.await_beginning(module, outputs, output, recompute)
            # No output may have a hook that notices the backward: none was found, or forward-mode AD has made graphs
            # that lead to tangents instead. The unsharded parameters are watched in their place.
            if not is_seen or makes_tangents:
                hidden = tuple(group for group in self.unit if group.is_in_graph())
                root.watched.lend(hidden)
        self.round.to_run.discard(module)
        # A method of the module that has called its forward goes on to compute with the parameters.
        computes = self.calls > 1
        for group in self.shared if not computes else ():
            group.users.discard(self)
        reshards = not self.round.to_run and not computes and self.unit and self._reshards_now()
        shows = reshards and self._shows_parameters(outputs)
        if reshards and (shows or hidden):
            root.schedule.note_stays(self)
        if reshards and not shows:
            if recompute:
                # Its backward follows if no other unit is recomputed first: resharding would only mean another gather.
                root.schedule.keep_for_backward(self.unit)
            else:
                for group in self.unit:
                    if not group.users:
                        group.reshard_after_forward(awaits_backward)
        if self.is_root and not recompute and root.iteration.in_forward:
            root.end_forward()
            if makes_tangents:  # nothing tells whether a backward comes, which would reshard the root's own
                for group in root.groups:
                    group.reshard()

    def _reshards_now(self) -> bool:
        """Whether the end of this forward frees the unsharded parameters.

        By default the root keeps its own, which the backward needs first; without gradients none can come.
        """
        if self.root is not None and self.root.watched.holds_graph:
            return False
        if self.reshard_after_forward is None:
            return not self.is_root or not torch.is_grad_enabled()
        return self.reshard_after_forward

    def forward_failed(self, module: nn.Module) -> None:
        """An exception leaves the forward of ``module``, which is (one of) this state's.

        The parameters are left as on ranks where the forward went on, so that all ranks gather the same next.
        """
        if self._replaced.containers or self._replaced.casts:  # the exception came inside of `pre_forward`
            self._replaced.take_out()
            self._replaced = Replaced()
        elif self._replaced_in_calls:
            self._restore_inputs()
        root = self.root
        if root is None or _torch.backward_is_running():
            return  # not initialized; or a recompute: checkpointing stops it early, by an exception
        if self.is_root or not root.iteration.in_forward:
            root.iteration.failed = True
            if PLACE.tells:
                PLACE.left = PLACE.phase
            root.comm.let_host_write_shards()
        self.round.to_run.discard(module)
        if self.calls > 1:
            return  # the call around this one goes on, or fails as well
        for group in self.shared:
            group.users.discard(self)
        if not self.round.to_run:
            self.leave_as_set(self.unit)

    def refuse_other_precision(self) -> None:
        """Refuse to change the dtype that its parameters are gathered in while something depends on it.

        Raises:
            FSDPRuntimeError: a pass is running, other parameters are registered (`Loan`), or gradients wait for their
                reduction.
        """
        if self.root is not None:
            recover_if_failed(self.root)
        if self.root is not None and self.root.is_running():
            raise FSDPRuntimeError("set_full_precision() must be called outside of forward and backward.")
        for group in self.own:
            group.refuse_loan("set_full_precision()")
            if group.reducer.waiting != Waiting.NOWHERE:
                raise FSDPRuntimeError(
                    f"set_full_precision() on '{group.name}', whose gradients wait for their reduction: call it after "
                    "a backward that reduces, or after zero_grad()."
                )

    # -- between iterations

    def forget_root(self) -> None:
        """End the root that its own module is. Its settings are kept here, for a root that this may become again."""
        if self.own_root is not None:
            self._root_settings, self.shared_comm = self.own_root.settings, self.own_root.shared_comm
            self.post_optim_event = self.own_root.post_optim_event
            release(self.own_root, self.own_root.states)

    def drop_iteration(self) -> None:
        """The iteration has failed: forget the backward and the round that were under way."""
        self.backward.stage = Stage.NONE
        self.round.to_run.clear()


def offer(name: str, read: Callable[[FSDPState], Any], write: Callable[[FSDPState, Any], None] | None) -> None:
    """Give states an attribute ``name``, which programs read and the engine does not.

    It is a property of the class: with a ``__getattr__``, Python would look up every attribute of a state more slowly.
    ``write`` is called when a program sets it; without ``write``, Python refuses.
    """
    assert not hasattr(FSDPState, name), f"FSDPState has '{name}' of its own"
    setattr(FSDPState, name, property(read, write))
