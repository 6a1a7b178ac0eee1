"""`Inside`: the local tensors that one optimizer steps on, lent to it for a step, and its state between steps.

There are two views of the same memory, see `fsdp2.optim.step_targets`. *Outside* are sharded parameters and a state of
DTensors. *Inside*, while ``step`` of the optimizer's own class runs, are local tensors in their place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.optim.state_cache import StepStateCache
from fsdp2.optim.step_targets import FlatRun, State, StepTargets, known_in

Lent = list[tuple[list[torch.Tensor], list[State]]]
"""For each parameter group, the tensors that it is stepped on as, and their states."""

Groups = list[dict[str, Any]]

MayBeFlat = Callable[[dict[str, Any], torch.Tensor], int]
"""Whether a parameter of a group may be part of a run, see `fsdp2.optim.ordinary.may_be_flat`."""


def _kernel_of(group: dict[str, Any]) -> tuple[Any, Any]:
    """The options of a group that decide, beside the parameters, which may be stepped on together."""
    return group.get("fused"), group.get("capturable")


class Inside:
    """The state of one optimizer inside.

    Args:
        groups: the optimizer's parameter groups.
        outside: its state, which this takes over.
        flat: whether a parameter of a group may be part of a run; None: there are no runs.
        earlier: earlier runs, whose memory is used again where nothing has changed.

    Attributes:
        outside: the state as users see it, as of the last `show`.
        may_have_runs: whether there are runs, as soon as gradients lie side by side.

    Raises:
        FSDPValueError: a parameter is Partial, or a state is not sharded like its parameter.
    """

    def __init__(
        self, groups: Groups, outside: State, *, flat: MayBeFlat | None, earlier: list[FlatRun] | None = None
    ) -> None:
        self.outside = outside
        self._targets = []
        self._kernels = list(map(_kernel_of, groups))
        self.may_have_runs = False
        for group in groups:
            params = group["params"]
            # ``unit`` is 0 for a parameter that may be in no run, else an alignment in bytes.
            in_runs = [] if flat is None else [(each, unit) for each in params if (unit := flat(group, each))]
            self.may_have_runs = self.may_have_runs or len(in_runs) > 1
            self._targets.append(StepTargets(params, outside, flat=in_runs, earlier=earlier or []))
        self._kept = StepStateCache()
        self._others = {key: value for key, value in outside.items() if not isinstance(key, torch.Tensor)}

    def runs(self) -> list[FlatRun]:
        """The runs, each of which is stepped on as one tensor."""
        return known_in(self._targets)

    def is_laid_out_anew(self) -> bool:
        """Whether parameters of runs lie on other memory now."""
        return any(flat_run.run.is_laid_out_anew() for flat_run in self.runs())

    def is_of(self, groups: Groups) -> bool:
        """Whether it was made for the parameters of ``groups``, and for the kernels that these ask for."""
        return self._kernels == list(map(_kernel_of, groups)) and all(
            targets.is_of(group["params"]) for targets, group in zip(self._targets, groups, strict=True)
        )

    def states(self) -> list[State]:
        """The states inside, one for each tensor that is stepped on."""
        return [state for targets in self._targets for state in targets.states()]

    def show(self) -> None:
        """Bring ``outside`` up to date."""
        for targets in self._targets:
            targets.show(self.outside)

    def show_counters(self) -> None:
        """Bring only the counters ``outside`` up to date: enough if the step has made no new tensor."""
        for targets in self._targets:
            targets.show_counters()

    def has_written_counters(self) -> bool:
        """Whether anyone has written a run's counter outside since `show`."""
        return any(targets.has_written_counters() for targets in self._targets)

    def lend(self) -> Lent | None:
        """The tensors that each group is stepped on as; None if runs must be made anew. `run` takes them back.

        Raises:
            FSDPValueError: a gradient is not sharded like its parameter. Nothing is lent then.
        """
        lent: Lent = []
        try:
            for targets in self._targets:
                one = targets.swap_in()
                if one is None:
                    break
                lent.append(one)
        finally:
            # Whatever ended the loop early, also an exception: gradients are released again.
            if len(lent) < len(self._targets):
                for targets in self._targets:
                    targets.swap_out(None)
        return lent if len(lent) == len(self._targets) else None

    def run(self, optimizer: Optimizer, lent: Lent, step: Callable[..., Any]) -> None:
        """Run ``step`` of ``optimizer``'s class on what is ``lent``, in place of its parameters and state.

        Whatever it raises, ``optimizer`` has its own back afterwards. ``outside`` is not up to date then: see `show`.
        """
        tensors = lent[0][0] if len(lent) == 1 else [each for tensors, _ in lent for each in tensors]
        # Building this dict hashes every tensor, so the one of the last step is used again if it fits.
        inside = self._kept.take(tensors)
        if inside is None:
            inside = defaultdict(dict)
            for each, states in lent:
                inside.update(zip(each, states, strict=True))
        count = len(tensors)
        # An optimizer may keep values under keys that are no parameters. They are the same inside and outside.
        if self._others:
            self._others = {key: self.outside[key] for key in self._others if key in self.outside}
        inside.update(self._others)
        attributes = vars(optimizer)
        before = [attributes["state"]] if "state" in attributes else []
        # Past `__setattr__` and past the property ``state`` that optimizers made by `local` have.
        attributes["state"] = inside
        try:
            step_with([tensors for tensors, _ in lent], optimizer, step)
        finally:
            del attributes["state"]
            if before:
                attributes["state"] = before[0]
            # Also after an exception, which may have come after some groups were stepped on.
            made, start = list(inside.values()), 0
            for targets, (tensors, _) in zip(self._targets, lent, strict=True):
                targets.swap_out(made[start : start + len(tensors)])
                start += len(tensors)
            if len(inside) > count:
                self._others = dict(list(inside.items())[count:])
                self.outside.update(self._others)
        if not self._others:
            self._kept.keep(inside, optimizer.param_groups)
        for targets in self._targets:
            targets.check()


def step_with(params: Sequence[list[torch.Tensor]], optimizer: Optimizer, step: Callable[..., Any]) -> None:
    """Run ``step`` with ``params`` in place of those of the groups.

    A ``step`` that is not torch's may set ``.data`` of them: its values are then copied to the memory of before.
    """
    groups = list(optimizer.param_groups)
    outer = [group["params"] for group in groups]
    # torch's own steps write in place, and need not be looked after.
    is_torchs = step.__module__[:12] == "torch.optim."
    places = [] if is_torchs else [(each, each.detach()) for tensors in params for each in tensors]
    try:
        for group, tensors in zip(groups, params, strict=True):
            group["params"] = tensors
        step(optimizer)
    finally:
        for group, outer_params in zip(groups, outer, strict=True):
            group["params"] = outer_params
        for tensor, place in places:
            if not _torch.is_fake(tensor) and tensor.data_ptr() != place.data_ptr():
                place.copy_(tensor.detach())
                tensor.data = place
