"""`offload_optimizer_state`: an optimizer's state stays in host memory, and is on the device only while it is used.

Between steps every tensor with dims in ``optimizer.state[parameter]`` lies on the host. During a step a mapping takes
the place of ``state``. It brings the state of a parameter to the device when it is asked for, and takes that of one
parameter group back once a parameter of another group is asked for. Optimizers need not know, no parameter is stepped
twice, and state dicts, which are read between steps, show the tensors on the host.

On a device with streams three groups are under way at a time. While one is stepped, the state of the next comes on one
stream (for parameters that had gradients when the step began), and that of the one before leaves on another stream, so
that the link carries both ways at once. All memory on the device belongs to the compute stream, which waits for both
copies before the next group is stepped.

State that somebody still holds (an optimizer may, in lists) would not be freed, so it is taken back later, at the end
of the step at the latest. The host waits once, at the end of the step, until the last copy has arrived: whoever reads
the state after a step reads all of it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch, _torch_compiler
from fsdp2.arguments import checked
from fsdp2.core.buffers import Offloading
from fsdp2.core.param import fsdp_param_of
from fsdp2.core.sharding import dtensor_over
from fsdp2.core.streams import Device, HostDevice, Wait, device_for
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError

Chooses = Callable[[torch.Tensor], bool]


def _is_moved(value: Any) -> bool:
    """Whether a value of a parameter's state goes to the host. Counters, which have no dims, stay where they are."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local``, as a DTensor if ``value`` is one."""
    return dtensor_over(local, _torch.spec_of(value)) if isinstance(value, DTensor) else local


def _is_plain(local: torch.Tensor) -> bool:
    """Whether ``local`` is no subclass, which would have its own way of being moved."""
    return type(local) in (torch.Tensor, torch.nn.Parameter)


def _on_device(value: torch.Tensor, device: torch.device, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """``value`` on ``device``. Its values arrive by the (destination, source) that this may add to ``copies``."""
    local = _torch.plain_of(value)
    if not _is_plain(local):
        return _like(value, local.to(device, non_blocking=True))
    room = torch.empty_like(local, device=device, pin_memory=False)
    copies.append((room, local))
    return _like(value, room)


def _on_host(value: torch.Tensor, earlier: torch.Tensor | None, *, pin_memory: bool) -> torch.Tensor:
    """A copy of ``value`` on the host, in the memory of ``earlier`` if that is alike."""
    local = _torch.plain_of(value)
    if not _is_plain(local):
        return _like(value, local.to("cpu"))
    # The host memory of before is used again: to pin memory anew in each step would be slow.
    if earlier is not None:
        host = _torch.plain_of(earlier)
        if (host.dtype, host.shape, host.stride()) == (local.dtype, local.shape, local.stride()):
            host.copy_(local, non_blocking=True)
            return earlier
    pinned = pin_memory and local.device.type != "cpu"
    host = torch.empty_like(local, device="cpu", pin_memory=pinned)
    return _like(value, host.copy_(local, non_blocking=True))


def _holders(state: dict[Any, Any], key: Any) -> list[int]:
    """How many references there are to the tensor at ``key``, to what it wraps, and to its memory."""
    value = state[key]
    local = _torch.plain_of(value)
    counts = [sys.getrefcount(value), sys.getrefcount(local)]
    if _is_plain(local):
        counts.append(_torch.storage_use_count(local.untyped_storage()))
    return counts


@functools.cache
def _sole_holder_of_a_tensor() -> list[int]:
    return _holders({"": torch.empty(1)}, "")


def _is_held(state: dict[Any, Any], key: Any) -> bool:
    """Whether anybody but ``state`` holds the tensor at ``key``, or a view of it."""
    sole = _sole_holder_of_a_tensor()
    # In `_holders` a plain tensor is both ``value`` and ``local``. A DTensor is not its local tensor, so each of these
    # two has one reference less.
    if isinstance(state[key], DTensor):
        sole = [sole[0] - 1, sole[1] - 1, *sole[2:]]
    return any(count > alone for count, alone in zip(_holders(state, key), sole, strict=False))


class _Lanes:
    """Two streams of copies, one each way, beside the current stream, where compute is. On CPU there are none.

    Attributes:
        goes_both_ways: whether there are such streams.
        up: the stream to the device.
        down: the stream to the host.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.goes_both_ways = device.has_streams
        self.up, self.down = device.new_stream(), device.new_stream()
        self._under_way: list[tuple[Any, list[torch.Tensor]]] = []

    @contextmanager
    def on(self, stream: Any) -> Iterator[list[torch.Tensor]]:
        """Run copies inside on ``stream``, after compute. Tensors that are added to the list live until `join`."""
        device, held = self.device, list[torch.Tensor]()
        device.wait(stream, device.record(device.current_stream()), Wait.STATE_USED)
        try:
            with device.use(stream):
                yield held
        finally:  # copies that had begun before an exception are waited for as well
            if self.goes_both_ways:
                self._under_way.append((device.record(stream), held))

    def join(self) -> None:
        """Let compute wait for all copies, and drop the tensors that they used."""
        compute = self.device.current_stream()
        for event, _ in self._under_way:
            self.device.wait(compute, event, Wait.STATE_COPIED)
        self._under_way.clear()


class _OnDeviceState(MutableMapping[Any, Any]):
    """Takes the place of ``optimizer.state`` during a step.

    Attributes:
        kept: the state itself.
    """

    def __init__(
        self, kept: Any, groups: Sequence[dict[str, Any]], chooses: Chooses, lanes: _Lanes, *, pin_memory: bool
    ) -> None:
        self.kept = kept
        self._chooses = chooses
        self._lanes = lanes
        self._pin_memory = pin_memory
        self._group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}
        self._group: int | None = None
        # For each parameter whose state is on the device, the tensors on the host that it was copied from.
        self._lent: dict[torch.Tensor, dict[Any, torch.Tensor]] = {}
        self._ahead: set[torch.Tensor] = set()  # parameters among these whose state was not asked for yet
        # Only parameters with a gradient are stepped; the others' state would make the way in vain.
        self._wanted: list[list[torch.Tensor]] = [[] for _ in groups]
        for parameter, index in self._group_of.items() if lanes.goes_both_ways else ():
            if parameter.grad is not None and parameter in kept and chooses(parameter):
                self._wanted[index].append(parameter)

    def __getitem__(self, parameter: Any) -> Any:
        state = self.kept[parameter]
        is_here = parameter in self._lent and parameter not in self._ahead
        if is_here or parameter not in self._group_of or not self._chooses(parameter):
            return state
        if self._group_of[parameter] != self._group:
            self._go_to(self._group_of[parameter])
        if parameter not in self._lent:
            self._lend([parameter])
            self._lanes.join()
        self._ahead.discard(parameter)
        return state

    def _go_to(self, group: int) -> None:
        """``group`` is stepped next: take back the state of others, and begin to bring that of the group after it."""
        # In this order: compute waits, in `take_back`, for what this group needs, and for earlier copies. The next
        # group's copies begin after that, and run while this one is stepped.
        self._lend(self._wanted[group])
        self.take_back(also_held=False, but=group)
        self._group = group
        for following in self._wanted[group + 1 : group + 2]:
            self._lend(following)
            self._ahead.update(following)

    def _lend(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begin to bring the state of ``parameters``, unless it is here. Compute must `join` before it reads it."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        brought: list[tuple[torch.Tensor, dict[Any, torch.Tensor], dict[Any, Any]]] = []
        with _torch.without_grad():
            for parameter in parameters:
                if parameter not in self._lent:
                    lent = {key: value for key, value in self.kept[parameter].items() if _is_moved(value)}
                    here = {key: _on_device(value, parameter.device, copies) for key, value in lent.items()}
                    brought.append((parameter, lent, here))
            if copies:
                # The room is held until `join`: it is compute's memory, which compute could reuse once it is dropped.
                with self._lanes.on(self._lanes.up) as held:
                    for room, local in copies:
                        held.append(room.copy_(local, non_blocking=True))
        for parameter, lent, here in brought:  # last: if memory runs out above, the state stays on the host
            self._lent[parameter] = lent
            self.kept[parameter].update(here)

    def take_back(self, *, also_held: bool, but: int | None = None) -> None:
        """Copy state to the host, except that of group ``but``; ``also_held``: also tensors that others hold."""
        self._lanes.join()
        with _torch.without_grad(), self._lanes.on(self._lanes.down) as leaving:
            for parameter in list(self._lent):
                if self._group_of.get(parameter) == but:
                    continue
                state = self.kept.get(parameter, {})
                if parameter in self._ahead:  # nobody has asked for it, so nobody has written it: the host's is valid
                    self._ahead.remove(parameter)
                    state.update(self._lent.pop(parameter))
                    continue
                moved = [key for key in state if _is_moved(state[key])]
                if also_held or not any(_is_held(state, key) for key in moved):
                    earlier = self._lent.pop(parameter)
                    for key in moved:
                        # Like the room in `_lend`, the device memory lives until compute has joined.
                        leaving.append(state[key])
                        state[key] = _on_host(state[key], earlier.get(key), pin_memory=self._pin_memory)

    def finish(self) -> None:
        """Bring all state to the host, and let compute wait for it."""
        self.take_back(also_held=True)
        self._lanes.join()

    def __setitem__(self, parameter: Any, state: Any) -> None:
        # The optimizer makes a state in its first step: it is on the device, and has no copy on the host to go back to.
        self.kept[parameter] = state
        self._ahead.discard(parameter)
        if parameter in self._group_of and self._chooses(parameter):
            self._lent.setdefault(parameter, {})

    def __delitem__(self, parameter: Any) -> None:
        del self.kept[parameter]
        self._lent.pop(parameter, None)
        self._ahead.discard(parameter)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.kept

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """Like ``dict.get``: a missing state is not made, although ``kept`` may be a ``defaultdict``."""
        if parameter not in self.kept:
            return default
        return self[parameter]

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        """Like ``dict.setdefault``."""
        if parameter not in self.kept:
            self[parameter] = default
        return self[parameter]


class OptimizerStateOffload:
    """The offloading of one optimizer's state, as `offload_optimizer_state` returns it."""

    def __init__(self, optimizer: Optimizer, chooses: Chooses, *, pin_memory: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._chooses = chooses
        self._pin_memory = pin_memory
        self._devices: set[torch.device] = set()
        self._lanes = _Lanes(HostDevice())
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            # State dicts are read and loaded while everything is on the host.
            optimizer.register_state_dict_pre_hook(self.settle),
            optimizer.register_load_state_dict_post_hook(self.settle),
        ]
        _OFFLOADED[optimizer] = self
        self.settle(optimizer)

    def remove(self) -> None:
        """Bring the state back to the device, for good. A second call does nothing."""
        optimizer = self._optimizer()
        if optimizer is None or not self._handles:
            return
        self.settle(optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        del _OFFLOADED[optimizer]
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        with _torch.without_grad():
            for parameter, state in self._states(optimizer):
                moved = {key: value for key, value in state.items() if _is_moved(value)}
                here = {key: _on_device(value, parameter.device, copies) for key, value in moved.items()}
                # One parameter after the other, so that only one state is in both memories at a time.
                for room, local in copies:
                    room.copy_(local, non_blocking=True)
                copies.clear()
                state.update(here)

    def settle(self, optimizer: Optimizer) -> None:
        """Bring to the host what a step that raised, or the loading of a state dict, has left on the device."""
        if isinstance(optimizer.state, _OnDeviceState):
            self._after_step(optimizer, (), {})
        with _torch.without_grad():
            for _, state in self._states(optimizer):
                for key, value in state.items():
                    if _is_moved(value) and not self._is_at_rest(value):
                        state[key] = _on_host(value, None, pin_memory=self._pin_memory)
        self._finish_copies(optimizer)

    def _states(self, optimizer: Optimizer) -> list[tuple[torch.Tensor, dict[Any, Any]]]:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        state = optimizer.state
        return [(each, state[each]) for each in parameters if each in state and self._chooses(each)]

    def _is_at_rest(self, value: torch.Tensor) -> bool:
        local = _torch.plain_of(value)
        return local.device.type == "cpu" and (not self._pin_memory or local.is_pinned() or not _has_accelerator(value))

    @_torch_compiler.stays_outside("the state of an optimizer that is offloaded is brought outside of graphs")
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer.state, _OnDeviceState):  # the previous step raised
            self.settle(optimizer)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise FSDPRuntimeError(
                "an optimizer whose state is offloaded cannot be captured in a CUDA graph: its state is at other "
                "addresses in each step. Call remove() on what offload_optimizer_state returned."
            )
        if _torch_compiler.frame_callback():
            raise FSDPNotImplementedError(
                "a compiled step of an optimizer whose state is offloaded (by offload_optimizer_state, or by the "
                "offload_policy of its parameters): graphs refer to state tensors, and these are others in every step. "
                "Call its step() without torch.compile, or leave the state on the device."
            )
        devices = {parameter.device for parameter, _ in self._states(optimizer)}
        if devices != self._devices:  # with several devices copies run on the current streams
            self._devices = devices
            self._lanes = _Lanes(device_for(next(iter(devices))) if len(devices) == 1 else HostDevice())
        optimizer.state = _OnDeviceState(  # type: ignore[assignment]
            optimizer.state, optimizer.param_groups, self._chooses, self._lanes, pin_memory=self._pin_memory
        )

    @_torch_compiler.stays_outside("the state of an optimizer that is offloaded is taken back outside of graphs")
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        state: Any = optimizer.state
        if isinstance(state, _OnDeviceState):
            state.finish()
            optimizer.state = state.kept
            self._finish_copies(optimizer)

    @staticmethod
    def _finish_copies(optimizer: Optimizer) -> None:
        """Block the host until everything has arrived that was copied to it."""
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for device in map(device_for, {parameter.device for parameter in params if not parameter.is_meta}):
            device.block_host(device.record(device.current_stream()))


_OFFLOADED: weakref.WeakKeyDictionary[Optimizer, OptimizerStateOffload] = weakref.WeakKeyDictionary()


def _has_accelerator(value: torch.Tensor) -> bool:
    """Whether ``value`` is copied to another device than the host."""
    return isinstance(value, DTensor) and value.device_mesh.device_type != "cpu"


def _offloading_of(parameter: torch.Tensor) -> Offloading | None:
    owner = fsdp_param_of(parameter)
    return None if owner is None or owner.group is None else owner.group.storage.offloading  # type: ignore[no-any-return]


def _is_on_device(parameter: torch.Tensor) -> bool:
    offloading = _offloading_of(parameter)
    return offloading is None or not offloading.is_host


def _is_to_rest_on_host(parameter: torch.Tensor) -> bool:
    offloading = _offloading_of(parameter)
    return offloading is not None and offloading.state_on_host


def offload_as_policies_ask(optimizer: Optimizer) -> None:
    """Offload the state of parameters whose ``offload_policy`` says so, unless that of ``optimizer`` is offloaded."""
    if not is_offloaded(optimizer):
        every = [_offloading_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        asking = [offloading for offloading in every if offloading is not None and offloading.state_on_host]
        if asking:
            OptimizerStateOffload(optimizer, _is_to_rest_on_host, pin_memory=all(each.pins for each in asking))


def is_offloaded(optimizer: Optimizer) -> bool:
    """Whether the state of ``optimizer`` is offloaded."""
    return optimizer in _OFFLOADED


@checked()
def offload_optimizer_state(optimizer: Optimizer, *, pin_memory: bool = True) -> OptimizerStateOffload:
    """Keep the state of ``optimizer`` in host memory between its steps; parameters and gradients stay where they are.

    During a step the state of three parameter groups is on the device: of the one that is stepped, and of those that
    come and leave meanwhile (on a CPU, of one group). With several groups (say, one per block) that is little. The
    optimizer steps on the device as before. It may be any that keeps tensors in ``optimizer.state[parameter]``; tensors
    of no dims (step counters), and what lies deeper, stay where they are. ``state_dict`` shows the tensors on the host,
    and ``load_state_dict`` leaves them there. A copy or a pickle of the optimizer is not offloaded until this is called
    with it. On a CPU the same copies are made, within its memory.

    Streams: copies to the device have one stream of their own, copies to the host another. The stream that is current
    during the step waits for both, and the host waits for them at its end.

    Args:
        optimizer: an optimizer of sharded or plain parameters, before or after its first step. Not collective.
        pin_memory: whether the host memory is pinned, which makes the copies fast.

    Returns:
        An object whose ``remove()`` brings the state back to the device.

    Raises:
        FSDPTypeError: ``optimizer`` is no torch optimizer.
        FSDPValueError: its parameters are in host memory, and so is its state.
        FSDPRuntimeError: its state is offloaded already.
    """
    if is_offloaded(optimizer):
        raise FSDPRuntimeError(
            "the state of this optimizer is offloaded already (by an earlier call, or by the offload_policy of its "
            "parameters); call remove() on what the earlier call returned to change how."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if parameters and not any(map(_is_on_device, parameters)):
        raise FSDPValueError(
            "the parameters of this optimizer are offloaded, so it steps on the host and its state is there: to step "
            "on the device, shard with CPUOffloadPolicy(parameters=False, optimizer_state=True) instead."
        )
    return OptimizerStateOffload(optimizer, _is_on_device, pin_memory=pin_memory)
