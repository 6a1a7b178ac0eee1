"""`fsdp2.optim.local`: any elementwise optimizer, stepping on local shards instead of DTensors.

A plain torch optimizer over sharded parameters dispatches each of its operations through DTensor, which costs more than
the operations, and whose first step takes time that grows faster than the number of parameters. Elementwise arithmetic
needs none of it: an element's update depends on that element alone.

The optimizer that `local` makes is a subclass of the one it is given. For the duration of ``step`` its parameter groups
and its state hold local tensors, and the ``step`` of the class itself runs on them. At all other times both hold what
those of the plain optimizer hold: sharded parameters, and DTensors. So hooks, schedulers, gradient scalers,
`zero_grad`, state dicts and distributed checkpoints see no difference, and checkpoints go from one to the other.

[Note: where the state is]
Between steps the state is inside (see `fsdp2.optim.step_targets`), and ``state`` is no attribute of the instance. The
first to ask for it finds the property, which shows the state outside, and makes it an attribute until the next step
takes it inside again. Whoever sets ``state`` (as `load_state_dict` does) makes it an attribute, too. Thus a step after
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
"""Those of torch that `local` takes, and classes derived from them with their ``step``."""

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

    It is a subclass of ``optimizer_class``, and is used like it. Steps give the same numbers as those of the plain
    optimizer with the same implementation (``foreach``, ``fused``, or neither; if none is chosen, torch chooses as for
    plain tensors, which on accelerators is ``foreach``), bit by bit. Parameters may be of several meshes, tensor
    parallel, replicated, without rows on some ranks, or not sharded at all.

    ``flat`` steps on few tensors: on one for each run of parameters that follow each other in the memory of a
    `fully_shard` group, in one parameter group of the optimizer, with the same state counters. What changes is which
    elements a vectorized kernel treats as its remainder, hence at most the last bit. Parameters that have no gradient,
    or one that was not delivered together with others (as under tensor hooks), or another state counter, are stepped on
    one by one, and so are all while the state is offloaded. State takes the memory of padding, too: as much as the
    first rank's. An ``optimizer_class`` that treats matrices and vectors differently must not be flat.

    Not collective, as steps are not. A closure is evaluated once, before the step.

    Args:
        optimizer_class: of `torch.optim`, or any other whose update of an element depends only on this element, its
            gradient and state, and the hyperparameters of its group.
        params: what ``optimizer_class`` takes: parameters, named ones, or parameter groups.
        flat: see above. Not for steps that are captured in a CUDA graph.
        elementwise: says of an ``optimizer_class`` that is not of `torch.optim` that it is such a one.
        arguments: of ``optimizer_class``.

    Raises:
        FSDPTypeError: ``optimizer_class`` is no class of optimizers.
        FSDPNotImplementedError: it is not elementwise, not known to be, or is to be ``differentiable``. From the first
            step: its state is not elementwise.
        FSDPValueError: a parameter is Partial. From a step: a gradient, or a state that was loaded, is not sharded like
            its parameter.
        FSDPRuntimeError: from a step: ``flat``, and it is captured.
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
    """What the optimizers that `local` makes have in common; see there."""

    _plain: type[Optimizer]
    _flat: bool
    _inside: Inside

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the plain optimizer's.

        Raises:
            FSDPValueError: a parameter is Partial.
            FSDPNotImplementedError: the group is to be ``differentiable``.
        """
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
        """Values by name, by parameter, as of the plain optimizer; see [Note: where the state is]."""
        with torch.inference_mode(False), torch.no_grad():  # whoever asks for it: it is stepped on later
            self._inside.show()
        return self._inside.outside

    @_torch_compiler.stays_outside(
        "what fsdp2.optim.local lends is a graph: the step of torch's class, on local tensors"
    )
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """As the plain optimizer's, on local shards. Returns what ``closure`` does.

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
        if isinstance(vars(self).get("state", {}), dict):
            self._step_inside(step)
        else:
            self._step_on_lent_state(step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the plain optimizer's, also where gradients of several meshes, or plain ones, are to be zeros together."""
        if set_to_none or self._plain.zero_grad is not Optimizer.zero_grad:
            super().zero_grad(set_to_none)
            return
        clear_waiting((each for group in self.param_groups for each in group["params"]), set_to_none)
        alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            gradient = parameter.grad
            if gradient is not None:
                gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
                local = _torch.plain_of(gradient)
                alike[local.device, local.dtype].append(local)
        for tensors in alike.values():
            _torch.foreach_zero(tensors)

    def _step_inside(self, step: Callable[..., Any]) -> None:
        if torch.is_inference_mode_enabled():  # its tensors could not be written to by later steps
            with torch.inference_mode(False), torch.no_grad():
                self._step_inside(step)
            return
        if self._flat and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise FSDPRuntimeError(
                "a step with flat=True cannot be captured in a CUDA graph, for its replay would not be noticed; make "
                "the optimizer with flat=False."
            )
        inside = vars(self).get("_inside")
        if inside is None or "state" in vars(self) or not inside.is_of(self.param_groups):
            inside = self._take_inside()
        lent = inside.lend()
        if lent is None:  # a gradient is missing, or lies elsewhere
            inside = self._take_inside()
            lent = inside.lend()
            assert lent is not None, "runs were made of what is there"
        inside.run(self, lent, step)

    def _take_inside(self) -> Inside:
        """Make the units anew from the state outside."""
        outside, earlier = self.state, self.runs()
        self._inside = Inside(self.param_groups, outside, flat=_always if self._flat else None, earlier=earlier)
        del self.state
        return self._inside

    def runs(self) -> list[FlatRun]:
        """Those that are stepped on as one tensor."""
        inside: Inside | None = vars(self).get("_inside")
        return [] if inside is None else inside.runs()

    def _step_on_lent_state(self, step: Callable[..., Any]) -> None:
        """With a ``state`` that is brought when it is asked for, see `offload_optimizer_state`: look at each value."""
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
        """Copied and pickled as what `local` has made of the plain class."""
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
