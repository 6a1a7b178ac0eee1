"""`fsdp2.optim.local`: any elementwise optimizer, stepping on local shards instead of DTensors.

A plain torch optimizer over sharded parameters sends each of its operations through DTensor's dispatch, which costs
more than the operations, and whose first step takes time that grows faster than the number of parameters. Elementwise
arithmetic needs none of it: an element's update depends on that element alone.

`local` makes a subclass of the optimizer class that it is given. During ``step`` its parameter groups and its state
hold local tensors, and the ``step`` of the class itself runs on them. At all other times both hold what the plain
optimizer would hold: sharded parameters, and DTensors. So hooks, schedulers, gradient scalers, `zero_grad`, state dicts
and distributed checkpoints see no difference, and a checkpoint of one can be loaded by the other.

[Note: where the state is]
Between steps the state is inside (see `fsdp2.optim.step_targets`), and the instance has no attribute ``state``. Whoever
asks for it first finds the property, which shows the state outside and caches it as an attribute, until the next step
takes it inside again. Whoever sets ``state`` (as `load_state_dict` does) makes it an attribute, too. So a step after
which nobody asks costs nothing, and no step reads through a property.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch, _torch_compiler
from fsdp2.arguments import ANYTHING, checked
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.optim.inside import Inside, step_with
from fsdp2.optim.step_targets import FlatRun, LentState, State, StepTargets, refuse_partial
from fsdp2.optim.zeroing import clear_waiting

OptimizerType = TypeVar("OptimizerType", bound=Optimizer)

ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Classes of torch that `local` takes, also with subclasses that inherit their ``step``."""

_WHY_NOT = {
    "Adafactor": "keeps sums over the rows and columns of a whole matrix",
    "LBFGS": "takes inner products over all parameters, and evaluates its closure several times",
    "Muon": "orthogonalizes whole matrices",
    "SparseAdam": "takes sparse gradients, which are never sharded",
}


@checked(optimizer_class=ANYTHING)
def local(
    optimizer_class: type[OptimizerType],
    params: Any,
    *,
    flat: bool = False,
    elementwise: bool = False,
    **arguments: Any,
) -> OptimizerType:
    """An ``optimizer_class`` over ``params`` that steps on local shards, without DTensor's dispatch.

    Its class is a subclass of ``optimizer_class``, and it is used like one. Steps give the same numbers, bit by bit, as
    the plain optimizer with the same implementation (``foreach``, ``fused``, or neither; if none is chosen, torch
    chooses as for plain tensors, which on accelerators is ``foreach``). Parameters may be on several meshes, tensor
    parallel, replicated, without rows on some ranks, or not sharded at all.

    With ``flat`` few tensors are stepped on: one for each run of parameters that follow each other in the memory of a
    `fully_shard` group, in one parameter group of the optimizer, with the same state counters. This changes which
    elements a vectorized kernel treats as its remainder, hence at most the last bit. Parameters without a gradient,
    with one that was not delivered together with others (as under tensor hooks), or with another state counter are
    stepped on one by one, and so are all while the state is offloaded. State then takes memory for padding, too: as
    much as on the first rank. Do not use it with an ``optimizer_class`` that treats matrices and vectors differently.

    Not collective, as steps are not. A closure is evaluated once, before the step.

    Args:
        optimizer_class: a class of `torch.optim`, or any other whose update of an element depends only on this element,
            its gradient and state, and the hyperparameters of its group.
        params: what ``optimizer_class`` takes: parameters, named ones, or parameter groups.
        flat: see above. Not for steps that are captured in a CUDA graph.
        elementwise: True says that an ``optimizer_class`` that is not of `torch.optim` is such a class.
        arguments: further arguments of ``optimizer_class``.

    Raises:
        FSDPTypeError: ``optimizer_class`` is no class of optimizers.
        FSDPNotImplementedError: it is not elementwise, not known to be, or is to be ``differentiable``. Raised by the
            first step: its state is not elementwise.
        FSDPValueError: a parameter is Partial. Raised by a step: a gradient, or a state that was loaded, is not sharded
            like its parameter.
        FSDPRuntimeError: raised by a step: it is captured in a CUDA graph, with ``flat``.
    """
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        raise FSDPTypeError(
            "fsdp2.optim.local takes a class of torch.optim.Optimizer and then its arguments, as in "
            f"local(torch.optim.AdamW, model.parameters(), lr=1e-3); got {optimizer_class!r}."
        )
    _refuse_others(optimizer_class, elementwise=elementwise)
    made = _local_class(_plain_class(optimizer_class), flat)(params, **arguments)  # type: ignore[arg-type]
    return made  # type: ignore[return-value]


def _refuse_others(optimizer_class: type[Optimizer], *, elementwise: bool) -> None:
    # The class that defines ``step``: a subclass of AdamW that inherits it is as elementwise as AdamW.
    stepping = next(each for each in optimizer_class.__mro__ if "step" in vars(each))
    if stepping in ELEMENTWISE or issubclass(stepping, LocalOptimizer):
        return
    name, where = stepping.__name__, stepping.__module__
    if where.split(".")[:2] == ["torch", "optim"]:
        why = _WHY_NOT.get(name, "is not known to be elementwise")
        raise FSDPNotImplementedError(
            f"{name} {why}, so it cannot step on local shards. Use torch.optim.{name} on the sharded parameters "
            "themselves, if it supports DTensors."
        )
    if not elementwise:
        raise FSDPNotImplementedError(
            f"nothing is known of {where}.{name}. If its update of an element depends only on that element, its "
            "gradient and state, and its group's hyperparameters (no norms, no factored or blockwise state, no "
            "matrices), say so with elementwise=True; else it cannot step on local shards."
        )


class LocalOptimizer(Optimizer):
    """The part that all optimizers made by `local` have in common; see there."""

    _plain: type[Optimizer]
    _flat: bool
    _inside: Inside

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as the plain optimizer does.

        Raises:
            FSDPValueError: a parameter is Partial.
            FSDPNotImplementedError: the group is to be ``differentiable``.
        """
        # The plain class checks and completes the group; one that is refused here is taken out again.
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if added.get("differentiable"):
            del self.param_groups[-1]
            raise FSDPNotImplementedError(
                "differentiable=True records the step in autograd's graph, which ends at local shards: use "
                f"torch.optim.{self._plain.__name__} on the sharded parameters themselves."
            )
        try:
            for parameter in added["params"]:
                refuse_partial(parameter)
        except FSDPValueError:
            del self.param_groups[-1]
            raise

    @functools.cached_property
    def state(self) -> State:  # type: ignore[override]
        """The state as the plain optimizer has it, a dict for each parameter; see [Note: where the state is]."""
        with torch.inference_mode(False), torch.no_grad():  # later steps write it, whatever mode the reader is in
            self._inside.show()
        return self._inside.outside

    @_torch_compiler.stays_outside(
        "what fsdp2.optim.local lends is a graph: the step of torch's class, on local tensors"
    )
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step as the plain optimizer does, but on local shards. Returns what ``closure`` returns.

        Raises:
            FSDPValueError: a gradient, or the state, is not sharded like its parameter. Nothing has been stepped then.
            FSDPNotImplementedError: after the first step: the state that it made is not elementwise.
            FSDPRuntimeError: the step is captured in a CUDA graph, with ``flat``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step = _torch.without_hooks(self._plain.step)
        # A mapping that is no dict brings offloaded state to the device when it is asked for.
        if isinstance(vars(self).get("state", {}), dict):
            self._step_inside(step)
        else:
            self._step_on_lent_state(step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as the plain optimizer does. Making zeros works for any mix of meshes and plain gradients."""
        if set_to_none or self._plain.zero_grad is not Optimizer.zero_grad:
            super().zero_grad(set_to_none)
            return
        clear_waiting((each for group in self.param_groups for each in group["params"]), set_to_none)
        alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            gradient = parameter.grad
            if gradient is not None:
                # Like torch: a gradient that has a graph leaves it first.
                gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
                local = _torch.plain_of(gradient)
                alike[local.device, local.dtype].append(local)
        for tensors in alike.values():
            _torch.foreach_zero(tensors)

    def _step_inside(self, step: Callable[..., Any]) -> None:
        if torch.is_inference_mode_enabled():  # state made in that mode could not be written by later steps
            with torch.inference_mode(False), torch.no_grad():
                self._step_inside(step)
            return
        if self._flat and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise FSDPRuntimeError(
                "a step with flat=True cannot be captured in a CUDA graph, for its replay would not be noticed; make "
                "the optimizer with flat=False."
            )
        inside = vars(self).get("_inside")
        # With the attribute ``state`` somebody has asked for the state outside, and may have written or replaced it.
        if inside is None or "state" in vars(self) or not inside.is_of(self.param_groups):
            inside = self._take_inside()
        lent = inside.lend()
        if lent is None:  # a gradient is missing, or lies elsewhere, or the parameters do
            inside = self._take_inside()
            lent = inside.lend()
            assert lent is not None, "runs were made of what is there"
        inside.run(self, lent, step)

    def _take_inside(self) -> Inside:
        """Make the tensors to step on anew, from the state outside."""
        outside, earlier = self.state, self.runs()
        self._inside = Inside(self.param_groups, outside, flat=_always if self._flat else None, earlier=earlier)
        # The attribute goes: whoever asks next finds the property, which shows what steps have made.
        del self.state
        return self._inside

    def runs(self) -> list[FlatRun]:
        """The runs, each of which is stepped on as one tensor."""
        inside: Inside | None = vars(self).get("_inside")
        return [] if inside is None else inside.runs()

    def _step_on_lent_state(self, step: Callable[..., Any]) -> None:
        """Step with offloaded state (`offload_optimizer_state`), which is brought when the step asks for it."""
        lending: Any = vars(self)["state"]
        vars(self).pop("_inside", None)  # it holds the state as it was, on the device
        every = [StepTargets(group["params"], {}, flat=[], earlier=[]) for group in self.param_groups]
        try:
            lent = [targets.swap_in() for targets in every]
            tensors = [one[0] for one in lent if one is not None]
            vars(self)["state"] = LentState(
                lending, [each for targets in every for each in targets.in_lending_order()], tensors
            )
            step_with(tensors, self, step)
        finally:
            vars(self)["state"] = lending
            for targets in every:
                targets.swap_out(None)

    def __reduce__(self) -> Any:
        """Copy and pickle it as what `local` makes of the plain class, which a pickle can name."""
        return _restored, (self._plain, self._flat), self.__getstate__()


def _always(group: dict[str, Any], parameter: torch.Tensor) -> int:
    return 1


@functools.cache
def _local_class(plain: type[Optimizer], flat: bool) -> type[LocalOptimizer]:
    return type(
        f"Local{plain.__name__}", (LocalOptimizer, plain), {"_plain": plain, "_flat": flat, "__doc__": plain.__doc__}
    )


def _plain_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    return optimizer_class._plain if issubclass(optimizer_class, LocalOptimizer) else optimizer_class


def _restored(plain: type[Optimizer], flat: bool) -> LocalOptimizer:
    made = _local_class(plain, flat)  # type: ignore[arg-type]
    return made.__new__(made)
