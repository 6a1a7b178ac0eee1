"""`StepTargets`: what an optimizer of `fsdp2.optim.local` steps on: plain tensors, with plain gradients and state.

There are two views of the same memory. *Outside*, to users, hooks, schedulers and checkpoints, there are sharded
parameters and a state of DTensors. *Inside*, to the optimizer's own ``step``, there are local tensors: one for each
parameter, or one for a whole `Run`. Nothing is copied between the two: a DTensor outside wraps the tensor inside, or a
slice of it. Only counters (tensors of no dims) of a run are copied out, as outside every parameter has its own.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.buffers import storage_slice
from fsdp2.core.param import fsdp_param_of
from fsdp2.core.sharding import dtensor_like
from fsdp2.errors import FSDPNotImplementedError, FSDPValueError
from fsdp2.optim.runs import Run, runs_of

State = dict[Any, Any]
"""The state of one parameter, values by name; or of all parameters, states by parameter."""

COUNTERS = ("step", "eta", "mu", "mu_product")
"""State that torch's optimizers keep in tensors of no dims: plain tensors, also if the parameter has no dims itself."""


def name_of(parameter: torch.Tensor) -> str:
    """The words by which messages name ``parameter``."""
    owner = fsdp_param_of(parameter)
    return f"'{owner.path}'" if owner is not None else f"of shape {tuple(parameter.shape)}"


# ---- one parameter -------------------------------------------------------------------------------


def refuse_partial(parameter: torch.Tensor) -> None:
    """Refuse a parameter whose local tensors are still to be summed.

    Raises:
        FSDPValueError: ``parameter`` has a Partial placement.
    """
    if isinstance(parameter, DTensor) and any(placement.is_partial() for placement in parameter.placements):
        raise FSDPValueError(
            f"parameter {name_of(parameter)} has placements {list(parameter.placements)}: what a rank holds is only a "
            "part of a sum, which cannot be stepped on. Redistribute it to Shard or Replicate placements."
        )


def _local_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The local tensor of ``gradient``, after a close look: it does not share its parameter's spec.

    Raises:
        FSDPValueError: it is no DTensor of the parameter's shape, mesh and placements.
    """
    local = _torch.local_of(parameter)
    alike = (
        isinstance(gradient, DTensor)
        and gradient.shape == parameter.shape
        and gradient.device_mesh == parameter.device_mesh  # type: ignore[attr-defined]
        and tuple(gradient.placements) == tuple(parameter.placements)  # type: ignore[attr-defined]
    )
    if not alike:
        found = f"placements {list(gradient.placements)}" if isinstance(gradient, DTensor) else "a plain tensor"
        raise FSDPValueError(
            f"the gradient of parameter {name_of(parameter)} is not sharded like it: {found} of shape "
            f"{tuple(gradient.shape)}, not {list(parameter.placements)} of {tuple(parameter.shape)}. "  # type: ignore[attr-defined]
            "Give it the parameter's placements: parameter.grad = "
            "parameter.grad.redistribute(placements=parameter.placements)."
        )
    below = _torch.wait_for_tensor(_torch.local_of(gradient))
    if below.dtype != local.dtype:
        local.grad_dtype = None  # allows a gradient of any dtype
    return below


def _inside(parameter: torch.Tensor, state: State) -> State:
    """``state`` of the sharded ``parameter``, with local tensors in place of DTensors.

    Raises:
        FSDPValueError: a tensor is not sharded like the parameter.
    """
    found = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            if tuple(value.placements) != tuple(parameter.placements) or value.shape != parameter.shape:  # type: ignore[attr-defined]
                raise FSDPValueError(
                    f"the optimizer's state '{name}' of parameter {name_of(parameter)} has placements "
                    f"{list(value.placements)}, not the parameter's {list(parameter.placements)}. "  # type: ignore[attr-defined]
                    "Load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
                )
            value = _torch.local_of(value)
        elif isinstance(value, torch.Tensor) and value.dim():
            raise FSDPValueError(
                f"the optimizer's state '{name}' of parameter {name_of(parameter)} is a plain tensor of shape "
                f"{tuple(value.shape)}, not sharded like the parameter. Load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict (full_state_dict=True if it is "
                "whole)."
            )
        found[name] = value
    return found


def _is_whole(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether ``value``, of a state inside, has an element for each of those of a tensor of ``shape``."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == shape and not is_counter(name, value)


def is_counter(name: str, value: Any) -> bool:
    """Whether ``value``, of a state, is one number for the parameter, also if the parameter has no dims."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and name in COUNTERS


def _check_made(parameter: torch.Tensor, state: State, shape: torch.Size) -> None:
    """Check the ``state`` that the optimizer has made for a tensor of ``shape``.

    Raises:
        FSDPNotImplementedError: it is not elementwise.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
            raise FSDPNotImplementedError(
                f"the optimizer keeps a state '{name}' of shape {tuple(value.shape)} for parameter "
                f"{name_of(parameter)}, of which this rank holds {tuple(shape)}: it is not elementwise, and steps on "
                "shards wrongly. Use it without fsdp2.optim.local."
            )


def _update_outside(parameter: torch.Tensor, inside: State, outside: State) -> None:
    """Bring the state ``outside`` up to date. A DTensor that wraps the same tensor as before stays the same object."""
    shape = _torch.local_of(parameter).shape
    for name in [name for name in outside if name not in inside]:
        del outside[name]
    for name, value in inside.items():
        if not _is_whole(name, value, shape):
            outside[name] = value
        else:
            known = outside.get(name)
            if not isinstance(known, DTensor) or _torch.local_of(known) is not value:
                outside[name] = dtensor_like(parameter, value)


# ---- a run ---------------------------------------------------------------------------------------


class _Counters:
    """One counter of every parameter of several runs: each parameter has its own, and all are written at once.

    Args:
        values: the counter () of each run.
        counts: how many parameters each run has.

    Attributes:
        each: the counter () of each parameter, run by run.
    """

    __slots__ = ("_all", "_bytes", "_counts", "_memory", "_run_of", "_version", "each")

    def __init__(self, values: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        self._counts = counts
        self._run_of: torch.Tensor | None = None
        # Copies, not views of the runs' counters: a fake tensor with a view forgets its value when it is written, and
        # optimizers ask for the value.
        self._all = torch.cat([value.detach().repeat(count) for value, count in zip(values, counts, strict=True)])
        self.each = self._all.unbind()
        is_seen = self._all.device.type == "cpu" and not _torch.is_fake(self._all)
        self._memory = _torch.memory_of(self._all) if is_seen else None
        self._note()

    def _note(self) -> None:
        self._version = _torch.version_of(self._all)
        self._bytes = b"" if self._memory is None else self._memory.raw

    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Write, for the parameters of each run, the counter that ``values`` has for it."""
        if self._run_of is None:  # made late, as this waits for a device, and many counters are never written
            numbers = [index for index, count in enumerate(self._counts) for _ in range(count)]
            self._run_of = torch.tensor(numbers, device=self._all.device)
        with torch.no_grad():
            torch.index_select(torch.stack(tuple(values)), 0, self._run_of, out=self._all)
        self._note()

    def were_written(self, start: int, count: int) -> bool:
        """Whether anyone else has written one of the ``count`` counters from ``start`` on.

        In host memory the bytes are compared, which shows writes that no version counts, without waiting for a device.
        Elsewhere the answer is whether any counter was written, as all of them are views that share one version.
        """
        if self._memory is None:
            return _torch.version_of(self._all) != self._version
        part = slice(start * self._all.itemsize, (start + count) * self._all.itemsize)
        return self._memory.raw[part] != self._bytes[part]


class FlatRun:
    """The parameters of a `Run`, stepped on as one tensor of one dim.

    Attributes:
        run: the run.
        state: its state inside.
    """

    def __init__(self, run: Run, states: Sequence[State]) -> None:
        """Copy ``states`` of the parameters, whose counters agree, into one state."""
        self.run = run
        self.state: State = {}
        self._shown: list[dict[str, Callable[[], Any]]] = []
        self._counters: list[tuple[_Counters, int]] = []
        for name, value in states[0].items():
            if isinstance(value, DTensor):
                local = _torch.local_of(value)
                # Zeros, as the state of padding must stay harmless: [Note: padding that is stepped on] in `runs`.
                flat = local.new_zeros(run.numel)
                for parameter, offset, state in zip(run.params, run.offsets, states, strict=True):
                    self._slice(flat, offset, parameter).copy_(_torch.local_of(state[name]))
                value = flat
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            self.state[name] = value

    @staticmethod
    def _slice(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
        local = _torch.local_of(parameter)
        return storage_slice(flat, int(flat.storage_offset()) + offset, local.shape, local.stride())

    def check(self) -> None:
        """Check the state that the optimizer has made.

        Raises:
            FSDPNotImplementedError: it is not elementwise.
        """
        _check_made(self.run.params[0], self.state, torch.Size((self.run.numel,)))

    def counters(self) -> dict[str, torch.Tensor]:
        """The values that are one number for all parameters, by name."""
        shape = torch.Size((self.run.numel,))
        return {
            name: value
            for name, value in self.state.items()
            if isinstance(value, torch.Tensor) and not _is_whole(name, value, shape)
        }

    def show(self, outside: State, counters: dict[str, tuple[_Counters, int]]) -> None:
        """Put the state of every parameter into ``outside``.

        Args:
            counters: for each name, the counters, and the index of the first parameter's among them.
        """
        self._counters = list(counters.values())
        self._shown = []
        for index, (parameter, offset) in enumerate(zip(self.run.params, self.run.offsets, strict=True)):
            shown: State = outside.get(parameter, {})
            made: State = {}
            for name, value in self.state.items():
                if name in counters:
                    among, first = counters[name]
                    value = among.each[first + index]
                elif isinstance(value, torch.Tensor):
                    value = _shown_on(parameter, self._slice(value, offset, parameter), shown.get(name))
                made[name] = value
            _become(shown, made)
            self._shown.append({name: _weakly(value) for name, value in shown.items()})

    def has_written_counters(self) -> bool:
        """Whether anyone has written a counter outside."""
        count = len(self.run.params)
        return any(counters.were_written(first, count) for counters, first in self._counters)

    def is_unchanged(self, outside: State) -> bool:
        """Whether ``outside`` still has what `show` has put there."""
        return (
            bool(self._shown)
            and not self.has_written_counters()
            and all(
                _is_unchanged(outside.get(parameter, {}), shown)
                for parameter, shown in zip(self.run.params, self._shown, strict=True)
            )
        )

    def is_of(self, run: Run) -> bool:
        """Whether ``run`` has the same parameters at the same offsets."""
        return (run.offsets, run.numel) == (self.run.offsets, self.run.numel) and all(
            map(operator.is_, run.params, self.run.params)
        )


COUNTERS_TOGETHER = 256
"""How many counters share memory at most, beside those of one run: whoever pickles one counter pickles all of them."""


class ShownRuns:
    """Runs whose state is shown outside, with their counters side by side in memory.

    Args:
        runs: the runs.
        outside: the mapping into which the state of each of their parameters is put.
    """

    def __init__(self, runs: Sequence[FlatRun], outside: State) -> None:
        alike: dict[Any, list[list[FlatRun]]] = {}
        for each in runs:
            for name, value in each.counters().items():
                # Counters of one name, dtype and device lie side by side, so that a step updates them by one operation.
                together = alike.setdefault((name, value.dtype, value.device), [[]])
                if sum(len(other.run.params) for other in (*together[-1], each)) > COUNTERS_TOGETHER:
                    together.append([])
                together[-1].append(each)
        self._counters: list[tuple[str, list[FlatRun], _Counters]] = []
        shown: dict[int, dict[str, tuple[_Counters, int]]] = {id(each): {} for each in runs}
        for name, members in ((name, members) for (name, *_), lists in alike.items() for members in lists if members):
            counts = [len(each.run.params) for each in members]
            counters = _Counters([each.state[name] for each in members], counts)
            self._counters.append((name, members, counters))
            for each, first in zip(members, itertools.accumulate(counts, initial=0), strict=False):
                shown[id(each)][name] = counters, first
        for each in runs:
            each.show(outside, shown[id(each)])

    def show_counters(self) -> None:
        """Bring the counters outside up to date. Nothing else may have been made or replaced since."""
        for name, members, counters in self._counters:
            counters.write([each.state[name] for each in members])

    def has_written_counters(self) -> bool:
        """Whether anyone has written a counter outside."""
        return any(counters.were_written(0, len(counters.each)) for _, _, counters in self._counters)


def _become(shown: State, made: State) -> None:
    """Make ``shown`` equal to ``made``. New values come before old ones go: Ctrl-C in between loses none."""
    shown.update(made)
    for name in shown.keys() - made.keys():
        del shown[name]
    if list(shown) != list(made):
        shown.clear()
        shown.update(made)


def _shown_on(parameter: torch.Tensor, local: torch.Tensor, known: object) -> DTensor:
    """The DTensor over ``local`` in the state of ``parameter``: ``known``, if it is alike, as programs may hold it."""
    if isinstance(known, DTensor) and type(known) is DTensor and known.dtype == local.dtype:
        spec, own = _torch.spec_of(known), _torch.spec_of(parameter)
        if (spec.mesh, tuple(spec.placements), known.shape) == (own.mesh, tuple(own.placements), parameter.shape):
            _torch.set_local(known, local)
            return known
    return dtensor_like(parameter, local)


def _leave_runs(params: Sequence[torch.Tensor], outside: State, earlier: Sequence[FlatRun]) -> None:
    """Copy the state of ``params`` that have left a run of ``earlier``, while other parameters of it stay in runs.

    Without a copy it would keep the memory of the whole earlier run alive.
    """
    before = {id(parameter) for flat_run in earlier for parameter in flat_run.run.params}
    for parameter in params:
        for value in outside.get(parameter, {}).values() if id(parameter) in before else ():
            if isinstance(value, DTensor):
                _torch.set_local(value, _torch.local_of(value).clone())


def _weakly(value: Any) -> Callable[[], Any]:
    """A function that returns ``value``, without keeping a tensor alive that was dropped outside."""
    return weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: value


def _is_unchanged(state: State, shown: dict[str, Callable[[], Any]]) -> bool:
    return state.keys() == shown.keys() and all(state[name] is known() for name, known in shown.items())


def _agreement(state: State) -> object:
    """A value that is equal for parameters whose states may become one. Reads counters from the device."""
    found: list[object] = []
    for name, value in sorted(state.items()):
        if isinstance(value, DTensor):
            found.append((name, value.dtype, _torch.local_of(value).device))
        elif isinstance(value, torch.Tensor):
            has_value = value.numel() == 1 and not _torch.is_fake(value)
            found.append((name, value.dtype, value.device, value.item() if has_value else value.shape))
        else:
            found.append((name, value if isinstance(value, (int, float, bool, str, type(None))) else id(value)))
    return tuple(found)


# ---- a parameter group ---------------------------------------------------------------------------


class StepTargets:
    """The tensors that one parameter group is stepped on as.

    Attributes:
        flats: its runs.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        outside: State,
        *,
        flat: Sequence[tuple[torch.Tensor, int]],
        earlier: list[FlatRun],
    ) -> None:
        """Take over the state ``outside``.

        Args:
            params: the parameters of the group, sharded or not.
            outside: the state of all parameters of the optimizer.
            flat: parameters to be stepped on in runs, if they form any now; see `runs_of`.
            earlier: earlier runs, whose memory is used again where nothing has changed.
        """
        self._params = list(params)
        self._unchecked = True
        self.flats: list[FlatRun] = []
        self._shown_runs = ShownRuns([], outside)
        for parameter in params:
            refuse_partial(parameter)
        unchanged = {
            id(each): flat_run for flat_run in earlier if flat_run.is_unchanged(outside) for each in flat_run.run.params
        }

        def agreement(parameter: torch.Tensor) -> object:
            flat_run = unchanged.get(id(parameter))  # counters of an unchanged run need not be read from the device
            return _agreement(outside.get(parameter, {})) if flat_run is None else id(flat_run)

        runs = runs_of(flat, agreement)
        for run in runs:
            known = unchanged.get(id(run.params[0]))
            if known is not None and known.is_of(run):
                known.run = run
            else:
                known = FlatRun(run, [_checked(each, outside.get(each, {})) for each in run.params])
                if known.state:
                    ShownRuns([known], outside)  # frees the copied state before the next run is made
            self.flats.append(known)
        in_runs = {id(parameter) for run in runs for parameter in run.params}
        rest = [parameter for parameter in params if id(parameter) not in in_runs]
        _leave_runs(rest, outside, [each for each in earlier if any(id(p) in in_runs for p in each.run.params)])
        # `swap_in` lends the tensors in this order: runs, single sharded parameters, plain ones.
        self._sharded = [parameter for parameter in rest if isinstance(parameter, DTensor)]
        self._plain = [parameter for parameter in rest if not isinstance(parameter, DTensor)]
        self._specs = list(map(_torch.spec_of, self._sharded))
        self._lent: list[torch.Tensor] = []
        self._states = [_inside(each, outside.get(each, {})) for each in self._sharded]
        self._states += [outside.get(each, {}) for each in self._plain]

    def is_of(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether this was made of ``params``."""
        return len(params) == len(self._params) and all(map(operator.is_, params, self._params))

    def show_counters(self) -> None:
        """Bring only the counters outside up to date: enough if the step has made no new tensor."""
        self._shown_runs.show_counters()

    def has_written_counters(self) -> bool:
        """Whether anyone has written a run's counter outside since `show`."""
        return self._shown_runs.has_written_counters()

    def swap_in(self) -> tuple[list[torch.Tensor], list[State]] | None:
        """The tensors to step on, with their gradients, and their states; None if a run is no run any more.

        Gradients are held until `swap_out`.

        Raises:
            FSDPValueError: a gradient is not sharded like its parameter. Call `swap_out` then as well.
        """
        self._lent = tensors = []
        with _torch.plain_attributes():
            for flat_run in self.flats:
                found = flat_run.run.tensors()
                if found is None:
                    return None
                # The optimizer sees one tensor with one gradient.
                found[0].grad = found[1]
                tensors.append(found[0])
        states = [flat_run.state for flat_run in self.flats]
        locals_ = list(map(_torch.local_of, self._sharded))
        tensors += locals_
        with _torch.plain_attributes():
            gradients = [parameter.grad for parameter in self._sharded]
        for local, gradient in zip(locals_, self._local_gradients(gradients), strict=True):
            local.grad = gradient
        return tensors + self._plain, states + self._states

    def _local_gradients(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The local tensors of ``gradients``.

        Raises:
            FSDPValueError: a gradient is not sharded like its parameter.
        """
        try:  # the usual case, in loops of C: all have gradients, which share their parameters' specs
            if all(map(operator.is_, map(_torch.spec_of, gradients), self._specs)):  # type: ignore[arg-type]
                below = list(map(_torch.local_of, gradients))  # type: ignore[arg-type]
                if set(map(type, below)) <= {torch.Tensor}:
                    return below  # type: ignore[return-value]
        except AttributeError:  # None or a plain tensor has no spec
            pass
        return [
            None if gradient is None else _local_gradient(parameter, gradient)
            for parameter, gradient in zip(self._sharded, gradients, strict=True)
        ]

    def in_lending_order(self) -> list[torch.Tensor]:
        """The parameters in the order in which `swap_in` lends their tensors, without runs."""
        return [*self._sharded, *self._plain]

    def swap_out(self, states: Sequence[State] | None) -> None:
        """Release the gradients. ``states``: those of the lent tensors after the step; None: nothing was stepped."""
        for local in self._lent:
            local.grad = None
        self._lent = []
        if states is not None:
            for flat_run, state in zip(self.flats, states, strict=False):
                flat_run.state = state
            self._states = list(states[len(self.flats) :])

    def states(self) -> list[State]:
        """The states of all tensors that are stepped on, in the order of `swap_in`."""
        return [flat_run.state for flat_run in self.flats] + self._states

    def check(self) -> None:
        """Check the state that the optimizer has made, the first time that there is some.

        Raises:
            FSDPNotImplementedError: it is not elementwise.
        """
        if self._unchecked:
            for flat_run in self.flats:
                flat_run.check()
            for parameter, state in zip(self._sharded, self._states, strict=False):
                _check_made(parameter, state, _torch.local_of(parameter).shape)
            self._unchecked = not any(self._states) and not any(flat_run.state for flat_run in self.flats)

    def show(self, outside: State) -> None:
        """Put the states of all parameters into ``outside``, as a plain optimizer on the sharded parameters has them.

        New ones come in the order of the parameters, the same on all ranks: gathering a state walks through it.
        """
        made = {id(parameter) for flat_run in self.flats if flat_run.state for parameter in flat_run.run.params}
        rest = [*self._sharded, *self._plain]
        made.update(id(parameter) for parameter, state in zip(rest, self._states, strict=True) if state)
        for parameter in self._params:
            if id(parameter) in made:
                outside.setdefault(parameter, {})
        self._shown_runs = ShownRuns(self.flats, outside)
        for parameter, state in zip(self._sharded, self._states, strict=False):
            if parameter in outside:
                _update_outside(parameter, state, outside[parameter])
        for plain, state in zip(self._plain, self._states[len(self._sharded) :], strict=True):
            if plain in outside:
                outside[plain] = state


class _Through(MutableMapping[Any, Any]):
    """The state of a sharded parameter as seen from inside. It reads the one outside, and holds none of its tensors."""

    def __init__(self, parameter: torch.Tensor, outside: State) -> None:
        self._parameter = parameter
        self._outside = outside

    def __getitem__(self, name: Any) -> Any:
        return _torch.plain_of(self._outside[name])

    def __setitem__(self, name: Any, value: Any) -> None:
        shape = _torch.local_of(self._parameter).shape
        _check_made(self._parameter, {name: value}, shape)
        self._outside[name] = dtensor_like(self._parameter, value) if _is_whole(name, value, shape) else value

    def __delitem__(self, name: Any) -> None:
        del self._outside[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._outside)

    def __len__(self) -> int:
        return len(self._outside)


class LentState(MutableMapping[Any, Any]):
    """Stands for the state inside, over a mapping outside that brings a state to the device when it is asked for.

    Args:
        outside: that mapping.
        params: the parameters outside.
        tensors: the tensors that they are stepped on as, by parameter group.
    """

    def __init__(self, outside: Any, params: Sequence[torch.Tensor], tensors: Sequence[list[torch.Tensor]]) -> None:
        self._outside = outside
        self._outer = dict(zip([each for group in tensors for each in group], params, strict=True))

    def __getitem__(self, key: Any) -> Any:
        parameter = self._outer.get(key, key)
        state = self._outside[parameter]
        return _Through(parameter, state) if isinstance(parameter, DTensor) else state

    def __setitem__(self, key: Any, state: Any) -> None:
        parameter = self._outer.get(key, key)
        self._outside[parameter] = {} if isinstance(parameter, DTensor) else state
        # `_Through` turns the values into DTensors.
        if isinstance(parameter, DTensor):
            self[key].update(state)

    def __delitem__(self, key: Any) -> None:
        del self._outside[self._outer.get(key, key)]

    def __contains__(self, key: object) -> bool:
        return self._outer.get(key, key) in self._outside  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:
        inner = {outer: tensor for tensor, outer in self._outer.items()}
        return (inner.get(key, key) for key in self._outside)

    def __len__(self) -> int:
        return len(self._outside)


def _checked(parameter: torch.Tensor, state: State) -> State:
    _inside(parameter, state)
    return state


def known_in(targets: Iterable[StepTargets]) -> list[FlatRun]:
    """The runs of all ``targets``."""
    return [flat for each in targets for flat in each.flats]
