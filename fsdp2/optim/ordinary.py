"""Ordinary `torch.optim` optimizers over sharded parameters step on local shards, with no line of the program changed.

torch calls the ``step`` of the optimizer's class after all hooks, with what the first hook has returned as ``self``.
That is a `_StandIn`, which behaves like the optimizer in everything but one. When ``step`` asks it for the parameter
groups (the closure has been evaluated by then), it runs that ``step`` on the optimizer itself, with local tensors in
place of parameters, gradients and state; puts everything back, whatever happens; and answers that there are no groups,
so that nothing is left to do. Hooks, closures, schedulers, gradient scalers, subclasses, profilers and state dicts see
what they always see.

Where the numbers stay the same, a run of parameters that follow each other in the memory of a group is stepped on as
one tensor, see `may_be_flat`. Each parameter still has its own state: slices of the run's.

Everything else goes through DTensor's dispatch: optimizers that are not elementwise or are derived with other
arithmetic, offloaded state, Partial parameters, tensor subclasses, gradients or state that are sharded otherwise, and
steps that `torch.compile` runs.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.arguments import checked
from fsdp2.core.param import fsdp_param_of
from fsdp2.errors import FSDPNotImplementedError, FSDPValueError
from fsdp2.optim.adapter import ELEMENTWISE
from fsdp2.optim.inside import Groups, Inside, Lent
from fsdp2.optim.offload import is_offloaded
from fsdp2.optim.step_targets import State


class _Switch:
    is_on = True


@checked()
def set_local_steps(enabled: bool) -> None:
    """Whether elementwise optimizers of `torch.optim` over sharded parameters step on local shards. They do by default.

    It holds for all optimizers of this process, from their next step on. False: each operation of a step goes through
    DTensor's dispatch, as with torch's own `fully_shard`. Steps give the same numbers either way (where neither
    ``foreach`` nor ``fused`` was chosen, torch chooses as for plain tensors, which on accelerators is ``foreach``),
    also if a program changes it between two steps. Not collective. See 'Make optimizer steps cheap' in the
    documentation.

    Raises:
        FSDPTypeError: ``enabled`` is not a bool.
    """
    _Switch.is_on = enabled


_STEPS = frozenset(_torch.without_hooks(each.step) for each in ELEMENTWISE)


def ordinary_of(optimizer: Optimizer) -> Ordinary | None:
    """How ``optimizer`` steps on local shards; None if it goes through DTensor's dispatch."""
    cls = type(optimizer)
    if _torch.without_hooks(cls.step) not in _STEPS or _computes_otherwise(cls) or is_offloaded(optimizer):
        return None
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = [parameter for parameter in params if isinstance(parameter, DTensor)]
    if not any(fsdp_param_of(parameter) is not None for parameter in sharded):
        return None
    if not _torch.only_plain_or_fake([type(_torch.local_of(each)) for each in sharded]):
        return None
    if any(placement.is_partial() for each in sharded for placement in each.placements):
        return None
    return Ordinary()


def _computes_otherwise(cls: type[Optimizer]) -> bool:
    """Whether a class that is not torch's overrides something that torch's ``step`` calls."""
    torchs = [each for each in cls.__mro__ if each.__module__.startswith("torch.optim.")]
    # torch's ``step`` calls private methods of its class, and reads these attributes of the optimizer.
    called = {name for each in torchs for name in vars(each) if name.startswith("_") and not name.startswith("__")}
    called |= {"state", "param_groups", "defaults", "__getattribute__", "__getattr__"}
    return any(called & vars(each).keys() for each in cls.__mro__ if each not in torchs and each is not object)


MANY_BREAKS = 3
"""How often the runs of an optimizer are made anew because gradients are missing or lie elsewhere; then it gets none.

Making runs anew copies their state."""


VECTORS_BYTES = 64
"""The size of full vectors on every processor. Fused CPU kernels leave less over, and split work into such parts."""


def may_be_flat(group: dict[str, Any], parameter: torch.Tensor) -> int:
    """Whether ``parameter`` of an optimizer's ``group`` gets the same bits if it is stepped on as a part of a run.

    On a CPU a run changes which elements are left over at the end of a kernel's vectors. In float32 and float64 these
    get the same bits, unless the kernel is fused. With a fused kernel a parameter must leave nothing over, nor must
    what lies before it in the run (`tests/unit/test_bits.py`). On accelerators all elements are computed alike.

    Returns:
        0 if it does not. Else an alignment: it does if the bytes from the start of the run to it are a multiple of it.
    """
    if group.get("capturable"):  # fsdp2 would not notice the replay of a graph
        return 0
    if parameter.device.type != "cpu":
        return 1
    if not group.get("fused"):
        return int(parameter.dtype in (torch.float32, torch.float64))
    local = _torch.plain_of(parameter)
    return 0 if local.numel() * local.itemsize % VECTORS_BYTES else VECTORS_BYTES


class Ordinary:
    """The steps of one optimizer. It holds neither the optimizer nor state that the optimizer has given up."""

    __slots__ = ("__weakref__", "_breaks", "_kept", "_made", "_shown", "_watches")

    def __init__(self) -> None:
        self._breaks = 0
        self._kept: list[Inside] = []  # what the last step ran on; empty if the next one must begin anew
        self._made: list[Any] = []  # the values of its states inside
        self._shown: list[int] = []  # identities of all that was shown outside
        self._watches: list[weakref.ref[Any]] = []  # to the DTensors that were shown

    def stand_in(self, optimizer: Optimizer) -> Any | None:
        """What ``step`` of the class gets in place of ``optimizer``; None: the step goes through DTensor's dispatch."""
        if not _Switch.is_on or any(group.get("differentiable") for group in optimizer.param_groups):
            self.forget()
            return None
        return _StandIn(optimizer, self)

    def forget(self) -> None:
        """Forget the state inside, as DTensor's dispatch writes the one outside; the next step begins with that."""
        self._kept.clear()
        self._made, self._shown, self._watches = [], [], []

    def step(self, optimizer: Optimizer) -> None:
        """Do one step of ``optimizer``'s class, without a closure."""
        if torch.is_inference_mode_enabled():  # state made in that mode could not be written by later steps
            with torch.inference_mode(False), torch.no_grad():
                self.step(optimizer)
            return
        step = _torch.without_hooks(type(optimizer).step)
        outside: Any = optimizer.state
        # Another kind of mapping: the state was offloaded after the optimizer was looked through.
        lent = self._lent(optimizer, outside) if type(outside) in (defaultdict, dict) else None
        if lent is None:
            self.forget()
            step(optimizer)
            return
        inside = lent[0]
        try:
            inside.run(optimizer, lent[1], step)
        except FSDPNotImplementedError:  # the new state is not elementwise, and cannot be shown as DTensors
            raise
        except BaseException:  # groups before the one that raised have been stepped on
            self._show(inside)
            raise
        self._show(inside)

    def _lent(self, optimizer: Optimizer, outside: State) -> tuple[Inside, Lent] | None:
        """Lend local tensors; None if something is sharded otherwise, which DTensor's dispatch does, or refuses."""
        inside = self._kept[0] if self._kept else None
        groups = optimizer.param_groups
        try:
            if inside is None or not self._knows(inside, groups, outside) or self._tries_again(inside):
                inside = self._anew(groups, outside, inside)
            inside.outside = outside
            lent = inside.lend()
            if lent is None:  # a gradient is missing, or lies elsewhere, or the parameters do
                # Parameters that were laid out anew say nothing about how their gradients come.
                self._breaks += not inside.is_laid_out_anew()
                inside = self._anew(groups, outside, inside)
                lent = inside.lend()
        except FSDPValueError:
            return None
        assert lent is not None, "runs were made of what is there"
        return inside, lent

    def _knows(self, inside: Inside, groups: Groups, outside: State) -> bool:
        """Whether parameters and state are still those that ``inside`` has shown."""
        return inside.is_of(groups) and self._shown == _identities(outside) and not inside.has_written_counters()

    def _tries_again(self, inside: Inside) -> bool:
        """Whether to look for runs again after there were none: earlier gradients may not have been delivered ones."""
        if not inside.may_have_runs or self._breaks > MANY_BREAKS or inside.runs():
            return False
        self._breaks += 1
        return True

    def _anew(self, groups: Groups, outside: State, before: Inside | None) -> Inside:
        self.forget()
        flat = may_be_flat if self._breaks <= MANY_BREAKS else None
        return Inside(groups, outside, flat=flat, earlier=None if before is None else before.runs())

    def _show(self, inside: Inside) -> None:
        """Show outside what the step has made or replaced."""
        made = list(chain.from_iterable(map(dict.values, inside.states())))
        # In most steps the optimizer makes no new tensor, so the DTensors outside are right already.
        if self._kept and len(made) == len(self._made) and all(map(operator.is_, made, self._made)):
            inside.show_counters()
        else:
            self.forget()
            inside.show()
            self._kept.append(inside)
            self._made, self._shown = made, _identities(inside.outside)
            # Once a DTensor of the state is dropped, another object may get its `id`, so everything is forgotten then.
            whole = {id(each): each for state in inside.outside.values() for each in _values(state)}
            self._watches = [weakref.ref(each, self._dropped) for each in whole.values() if isinstance(each, DTensor)]
        inside.outside = {}  # else state that a program drops (clears, or loads anew) would live on until the next step

    def _dropped(self, _: Any) -> None:
        self.forget()


def _values(state: Any) -> Any:
    return state.values() if isinstance(state, dict) else ()


def _identities(outside: Any) -> list[int]:
    """Identities of all parameters and all values of their states. `_watches` tells of deaths, so none is reused."""
    try:
        return list(map(id, chain(outside, chain.from_iterable(map(dict.values, outside.values())))))
    except TypeError:  # some states are no dicts
        others = (each for each in outside.values() if not isinstance(each, dict))
        return list(map(id, chain(outside, others, chain.from_iterable(map(_values, outside.values())))))


class _StandIn:
    """The optimizer as ``step`` of its class sees it; see the top of this file. Hooks may be given it, too."""

    __slots__ = ("_optimizer", "_ordinary", "_raised", "_to_do")

    def __init__(self, optimizer: Optimizer, ordinary: Ordinary) -> None:
        self._optimizer = optimizer
        self._ordinary = ordinary
        self._to_do = True
        self._raised: AttributeError | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """None for ``step``, as they have been stepped on by then; the optimizer's groups for everyone else."""
        # Hooks and profilers want the groups; only ``step`` of the class is told that there are none.
        if sys._getframe(1).f_code.co_name != "step":
            return self._optimizer.param_groups
        if self._to_do:
            self._to_do = False
            try:
                self._ordinary.step(self._optimizer)
            except AttributeError as error:  # Python would call `__getattr__` next, which raises this one again
                self._raised = error
                raise
        return []

    def __getattr__(self, name: str) -> Any:
        if self._raised is not None:
            raise self._raised
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
