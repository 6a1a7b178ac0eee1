"""`FSDPState`: what one `fully_shard` call attaches to its module(s): the hooks around forward and backward.

Decides which operation of its group runs when; the operations are the group's, the order across groups is the root's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp2 import _torch, collectives
from fsdp2.comm_context import FSDPCommContext, device_for
from fsdp2.common import FSDPRuntimeError, ParamPhase
from fsdp2.hooks import ForwardCall, after_backward_of_inputs, before_backward_of_outputs, map_tensors, tensors_in
from fsdp2.mesh import ShardMesh
from fsdp2.param_group import FSDPParamGroup
from fsdp2.plan import ModelPlan
from fsdp2.root import FSDPRoot
from fsdp2.structure import Structure

_STATE = "_fsdp_state"


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that `fully_shard` attached to ``module``, if it did."""
    state: FSDPState | None = module.__dict__.get(_STATE)
    return state


def states_below(module: nn.Module) -> list[FSDPState]:
    """The states of ``module`` and everything below it, each once, in the order of ``module.modules()``."""
    states = (state_of(each) for each in module.modules())
    return list(dict.fromkeys(state for state in states if state is not None))


class FSDPState:
    """The hooks of one module, or of a list of modules that share a group.

    Attributes:
        modules: those that `fully_shard` was called on.
        class_name: of the first of them, as the user calls it.
        group: None if they have no parameters of their own.
        root: set at lazy initialization.
        reshard_after_forward: as the user said; None: everywhere but at the root.
        reshard_after_backward: whether the end of this module's backward frees its unsharded parameters.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: FSDPParamGroup | None,
        mesh: ShardMesh,
        *,
        reshard_after_forward: bool | None,
        ignored_params: frozenset[nn.Parameter],
    ) -> None:
        self.modules = tuple(modules)
        self.class_name = type(modules[0]).__name__
        self.group = group
        self.mesh = mesh
        self.root: FSDPRoot | None = None
        self.is_root = False
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.is_last_backward = True
        self._calls: list[weakref.ref[ForwardCall]] = []
        self._in_backward = False
        self._ignored_params = ignored_params
        self._to_run: set[nn.Module] = set()
        self._states: tuple[FSDPState, ...] = ()
        self._structure = Structure(())
        for module in self.modules:
            module.__dict__[_STATE] = self
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, prepend=False)

    @property
    def name(self) -> str:
        """For messages: the group's name once the root is known, else the class of the (first) module."""
        return self.group.name if self.group is not None else self.class_name

    # -- lazy initialization

    def ensure_root(self) -> FSDPRoot:
        """The root this state belongs to; on first use, makes this state's module the root. Collective then.

        Raises:
            FSDPRuntimeError: a module below already ran as a root of its own, a parameter is not ready, was added or
                replaced, or the ranks' plans differ.
        """
        if self.root is None:
            self._become_root()
        assert self.root is not None, "lazy initialization sets the root"
        return self.root

    def _become_root(self) -> None:
        names: dict[FSDPState, str] = {}
        for module in self.modules:
            for name, each in module.named_modules():
                state = state_of(each)
                if state is not None:
                    names.setdefault(state, name)
        self._refuse_other_roots(names)
        self.take_over()
        states = tuple(names)
        groups = [state.group for state in states if state.group is not None]
        for state, name in names.items():
            if state.group is not None:
                state.group.name = name or self.class_name
                for param in state.group.params:
                    param.prefix = f"{name}." if name else ""
        self._refuse_unowned()
        self._refuse_meta_buffers()
        comm = FSDPCommContext(device_for(self.mesh.device))
        for group in groups:
            group.prepare(comm)
        self._refuse_disagreement(groups)
        root = FSDPRoot(self.class_name, comm, groups)
        root.is_last_backward = self.is_last_backward
        root.on_backward_end = self._end_backward
        root.on_failure = self._drop_iteration
        for state in states:
            state.root = root
        self.is_root = True
        self._states = states

    def _refuse_other_roots(self, names: dict[FSDPState, str]) -> None:
        for state, name in names.items():
            if state.root is not None and state.root.has_run:
                raise FSDPRuntimeError(
                    f"{self.class_name} runs as a root now, but its submodule '{name}' ({state.class_name}) ran before "
                    "it and became the root of its own part. Run the forward of the outermost sharded module first. To "
                    f"recover now, call reset_iter_state() on the {self.class_name}: it takes over from its submodules."
                )

    def _refuse_unowned(self) -> None:
        """Refuse parameters that no group owns."""
        states = states_below_all(self.modules)
        ignored = {parameter for state in states for parameter in state._ignored_params}
        owned = {
            (module, name)
            for state in states
            if state.group is not None
            for param in state.group.params
            for module, name in param.uses
        }
        for root in self.modules:
            for prefix, module in root.named_modules():
                for name, parameter in module._parameters.items():
                    if parameter is None or parameter in ignored or (module, name) in owned:
                        continue
                    raise FSDPRuntimeError(
                        f"parameter '{prefix + '.' + name if prefix else name}' of {self.class_name} was added after "
                        "fully_shard and belongs to no group: its gradient would not be reduced. Add parameters before "
                        "calling fully_shard, or call fully_shard on the module that holds it, or pass it in "
                        "ignored_params."
                    )
        self._structure = Structure(self.modules)

    def _refuse_meta_buffers(self) -> None:
        found = [name for module in self.modules for name, buffer in module.named_buffers() if buffer.is_meta]
        if found:
            raise FSDPRuntimeError(
                f"buffers of {self.class_name} are still on the meta device: {', '.join(found)}. Materialize the model "
                "before its first forward: model.to_empty(device=...), then initialize it or load a state dict."
            )

    def _refuse_disagreement(self, groups: Sequence[FSDPParamGroup]) -> None:
        plan = ModelPlan(tuple(group.plan for group in groups if group.plan is not None))
        difference = collectives.disagreement(plan.fingerprint(), str(plan), self.mesh.group, self.mesh.device)
        if difference is not None:
            raise FSDPRuntimeError(
                "the ranks have different plans, so their collectives would not match; every rank must build the same "
                f"model and shard it alike. Difference:\n{difference}"
            )

    def settle(self) -> None:
        """Bring the parameters to rest, sharded, before the user's code looks at them or replaces them."""
        if self.root is not None:
            self.root.recover_if_failed()
        if self.group is not None:
            self.group.reshard()

    def take_over(self) -> None:
        """Make this state's module the root, in place of submodules that ran before it."""
        for state in states_below_all(self.modules):
            if state.root is not None:
                state.root.reset()
                state.root, state.is_root, state._states = None, False, ()

    # -- forward

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        root = self.root or self.ensure_root()
        recompute = _torch.backward_is_running()
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        if recompute:
            if self._in_backward:
                return None  # its parameters are there, and its own hooks are in place
            if self.group is not None:
                root.gather_for_recompute(self.group)
        else:
            inputs = self._enter_forward(root, args, kwargs)
        begins = self._begins_round(module)
        if begins and self.group is not None and torch.is_grad_enabled():
            args, kwargs = inputs or (args, kwargs)
            return after_backward_of_inputs(self._new_call(), args, kwargs) or inputs
        return inputs

    def _enter_forward(
        self, root: FSDPRoot, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        root.recover_if_failed()
        if self.is_root:
            if not root.iteration.in_forward:
                root.begin_forward()
                self._refuse_structure_change()
        elif not root.iteration.in_forward:
            root.join()
        if self.group is not None:
            root.gather_for_forward(self.group)
        if self.is_root and self.mesh.device.type != "cpu":
            device = self.mesh.device
            return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))  # type: ignore[no-any-return]
        return None

    def _refuse_structure_change(self) -> None:
        if self._structure.has_changed():
            self._refuse_unowned()

    def _new_call(self) -> ForwardCall:
        call = ForwardCall(self._end_call)
        # A call lives as long as its graph, and is forgotten with it.
        self._calls = [each for each in self._calls if each() is not None]
        self._calls.append(weakref.ref(call))
        return call

    def _begins_round(self, module: nn.Module) -> bool:
        """Whether this call is the first of a round over the modules of the list; always, for a single module."""
        if len(self.modules) == 1:
            return True
        begins = not self._to_run
        if begins:
            self._to_run.update(self.modules)
        return begins

    def _shows_parameters(self, output: Any) -> bool:
        """Whether ``output`` holds a parameter, or a view of one: it then stays unsharded until the backward is over.

        (Or, without gradients, until the next call.)
        """
        assert self.group is not None, "there are parameters"
        return any(self.group.lies_on_unsharded(tensor) for tensor in tensors_in(output))

    def _end_round_early(self) -> None:
        """The root's forward is over, and not all modules of the list were called in it."""
        self._to_run.clear()
        if self.group is not None and self._reshards_now():
            self.group.reshard()

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        root = self.root
        assert root is not None, "a forward that ends has begun"
        recompute = _torch.backward_is_running()
        if recompute and self._in_backward:
            return
        if torch.is_grad_enabled():
            before_backward_of_outputs(self._pre_backward, output)
        self._to_run.discard(module)
        if not self._to_run and self.group is not None and self._reshards_now() and not self._shows_parameters(output):
            if recompute:
                root.keep(self.group)
            else:
                self.group.reshard()
        if self.is_root and not recompute and root.iteration.in_forward:
            for state in self._states:
                if state._to_run:
                    state._end_round_early()
            root.end_forward()

    def _reshards_now(self) -> bool:
        """Whether the end of this forward frees the unsharded parameters.

        By default the root's are kept for the backward, which needs them first; not if none can come.
        """
        if self.reshard_after_forward is None:
            return not self.is_root or not torch.is_grad_enabled()
        return self.reshard_after_forward

    def forward_failed(self) -> None:
        """An exception leaves the forward of (one of) this state's module(s)."""
        if self.root is None or _torch.backward_is_running():
            return  # not initialized; or a recompute, whose early stop is an exception too
        if self.is_root or not self.root.iteration.in_forward:
            self.root.iteration.failed = True

    # -- backward

    def _pre_backward(self, gradient: torch.Tensor) -> None:
        root = self.root
        assert root is not None, "a backward follows a forward"
        root.begin_backward()
        if self._in_backward:
            return
        self._in_backward = True
        if self.group is not None:
            root.gather_for_backward(self.group)

    def _end_call(self) -> None:
        """The backward of one forward call is done: reduce, unless the same backward comes to another call.

        Autograd adds up the gradients of all calls before any of them shows.
        """
        calls = (reference() for reference in self._calls)
        self._end_module_backward(reduces=not any(call is not None and call.is_pending() for call in calls))

    def _end_module_backward(self, *, reduces: bool) -> None:
        """Reshard and reduce, as the settings say. Nothing here depends on which gradients this rank has."""
        self._in_backward = False
        group = self.group
        if group is None:
            return
        if self.reshard_after_backward:
            group.reshard()
        if not reduces or not group.is_trainable:
            return
        if group.requires_gradient_sync:
            assert self.root is not None, "a backward follows a forward"
            self.root.reduce(group)
        else:
            group.accumulated = True

    def _end_backward(self) -> None:
        """The whole backward is done: finish the modules whose own end could not be noticed.

        Such are modules whose inputs need no gradient, that hold gradients from microbatches without communication, or
        whose gradients came by another way than their outputs (a loss that a module keeps as an attribute).
        """
        for state in self._states:
            group = state.group
            if state._in_backward:
                state._end_module_backward(reduces=True)
            elif group is not None:
                has_gradients = group.accumulated or group.has_gradients()
                if has_gradients or group.phase is ParamPhase.UNSHARDED:
                    state._end_module_backward(reduces=has_gradients)

    def _drop_iteration(self) -> None:
        for state in self._states:
            state._in_backward = False
            state._to_run.clear()


def states_below_all(modules: Sequence[nn.Module]) -> list[FSDPState]:
    """`states_below` for several modules, each state once."""
    return list(dict.fromkeys(state for module in modules for state in states_below(module)))
