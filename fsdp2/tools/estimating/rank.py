"""`Rank`: one simulated rank, which trains a few steps on tensors without memory while everything is recorded."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.param import fsdp_param_of
from fsdp2.core.several_roots import roots_of
from fsdp2.core.state import states_below
from fsdp2.core.streams import FSDPCommContext
from fsdp2.errors import FSDPRuntimeError, FSDPValueError
from fsdp2.model.accumulation import accumulate
from fsdp2.tools.estimating.memory import MemoryLog, Phase, Use, resizes_seen
from fsdp2.tools.estimating.observing import Observer
from fsdp2.tools.estimating.refused import refused_batch
from fsdp2.tools.estimating.request import Request
from fsdp2.tools.estimating.simulation import SimulatedDevice, simulated_world
from fsdp2.tools.estimating.subject import blocks_of, checkpoint_as, made, sharded, stand_in
from fsdp2.tools.estimating.traffic import Observed, Traffic, transports_observed

SIMULATED_MICROBATCHES = 3
"""How many microbatches of a step are simulated at most: the first, one in the middle, the last."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one rank did in a step.

    Attributes:
        model: the name of its class before it was sharded.
        log: the memory of the step.
        traffic: the collectives of the step.
        kept: bytes that a forward kept for backward.
        parameters: elements of the model.
        offloaded: elements that are kept in host memory, on devices that have their own memory.
        groups: how many groups there are.
        loss: what was differentiated, in words.
    """

    model: str
    log: MemoryLog
    traffic: Traffic
    kept: int
    parameters: int
    offloaded: int
    groups: int
    loss: str


def observe(request: Request, caller: str) -> Observation:
    """Simulate two steps of rank 0 in the world of ``request``, and observe the second.

    Args:
        request: what is to be estimated.
        caller: the function that the user has called, for messages.

    Raises:
        FSDPRuntimeError: a process group exists, or the forward needs values.
        FSDPTypeError: what `subject.made` and `Request.local_batch` raise.
        FSDPValueError: what these raise; or the forward refuses the batch.
    """
    with ExitStack() as stack:
        stack.enter_context(simulated_world(request.ranks, caller))
        stack.enter_context(_garbage_collector_off())
        stack.enter_context(warnings.catch_warnings())
        # The engine compares addresses, which are all 0 without memory. torch warns of that once.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        mesh = init_device_mesh("cpu", request.mesh_shape, mesh_dim_names=request.mesh_dim_names)
        mode = stack.enter_context(_torch.fake_tensors())
        rank = Rank(request, mode)
        stack.enter_context(resizes_seen(rank.log))
        stack.enter_context(transports_observed(rank.traffic, moves=not request.hardware.has_streams))
        stack.enter_context(rank.observer)
        rank.build(mesh)
        return rank.observe()


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Turn the garbage collector off: it would free tensors at moments that a run does not repeat."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Rank:
    """Rank 0 of a simulated world.

    Args:
        request: what it is to do.
        mode: the fake tensor mode.

    Attributes:
        log: its allocations.
        traffic: its exchanges.
        observer: the dispatch mode that sees its operators.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    def __init__(self, request: Request, mode: Any) -> None:
        self._request = request
        self._has_streams = request.hardware.has_streams
        self.log = MemoryLog()
        self.traffic = Traffic(request.hardware, self.log)
        self.observer = Observer(mode, self.log, self.traffic.add, counts_workspaces=not self._has_streams)
        self._computes = request.activation_bytes is None
        self._hooked: set[int] = set()
        self._loss_said = "none: nothing is computed"

    def build(self, mesh: DeviceMesh) -> None:
        """Make the model, shard it over ``mesh``, make the optimizer and the batch."""
        request = self._request
        model = made(request.make_model)
        self._name = type(model).__name__
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise FSDPValueError(
                f"nothing of {self._name} is trained: it has no parameter that requires a gradient. An estimate is of "
                "training steps."
            )
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        if self._computes and request.checkpointing != "none":
            for block in blocks_of(model, request):
                checkpoint_as(request.checkpointing, block)
        self.model = sharded(model, mesh, request)
        if not self._computes:
            stand_in(self.model)
        if self._has_streams:
            comm = FSDPCommContext(SimulatedDevice())
            for state in states_below(self.model):
                state.compute_through(comm)  # so it runs as on a device with streams
        self._know(self.model.parameters(), Use.SHARDS)
        self.optimizer = None if request.optimizer is None else request.optimizer(list(self.model.parameters()))
        if self.optimizer is not None and self._has_streams and not self._offloaded():
            _step_as_on_devices(self.optimizer)
        self._args, self._kwargs = request.local_batch()
        if not self._computes:
            self._args, self._kwargs = (torch.empty((), requires_grad=True),), {}  # the input of `stand_in`

    # -- steps

    def observe(self) -> Observation:
        """Run steps, in the first of which all buffers are made and the order is learned; observe the last one."""
        self._step()
        orders = None
        while orders != self._orders():
            orders = self._orders()
            self._know_unsharded()
            self.log.marks.clear()
            self.traffic.reset()
            self._step()
        return Observation(
            model=self._name,
            log=self.log,
            traffic=self.traffic,
            kept=sum(self.log.at_end_of(Phase.FORWARD, lambda use: use is Use.ACTIVATIONS).values()),
            parameters=self._parameters,
            offloaded=sum(parameter.numel() for parameter in self._offloaded()),
            groups=sum(len(state.unit) for state in states_below(self.model)),
            loss=self._loss_said,
        )

    def _orders(self) -> list[Any]:
        """The orders in which every root runs its groups."""
        return [(root.learned.forward, root.learned.backward) for root in roots_of(states_below(self.model))]

    def _step(self) -> None:
        request, count = self._request, self._request.accumulation
        # Microbatches between the second and the last do what the second does.
        simulated = range(count) if count <= SIMULATED_MICROBATCHES else (0, 1, count - 1)
        for index in simulated:
            is_last = index == count - 1
            since = self.traffic.snapshot()
            with accumulate(self.model, last=is_last, kept=request.kept) if count > 1 else nullcontext():
                self._microbatch()
            if index == 1 and not is_last:
                self.traffic.repeat(since, count - len(simulated))  # (memory has the same peaks each time)
        if self.optimizer is not None:
            self._step_optimizer(self.optimizer)
        self.model.zero_grad()

    def _microbatch(self) -> None:
        with self.observer.during(Phase.FORWARD):
            loss = self._loss()
        self._hook_gradients()
        with self.observer.during(Phase.BACKWARD):
            loss.backward()  # type: ignore[no-untyped-call]
            self.traffic.settle()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._know([parameter.grad], Use.GRADIENTS, of=parameter)

    def _loss(self) -> torch.Tensor:
        try:
            output = self._output()
            if not self._computes:
                return default_loss(output)[0]
            if self._request.loss is None:
                found, self._loss_said = default_loss(output)
                return found
            self._loss_said = f"given ({name_of_function(self._request.loss)})"
            return self._request.loss(output, *self._args, **self._kwargs)
        except _torch.unsupported_without_memory() as error:
            raise FSDPRuntimeError(
                f"the forward of {self._name} depends on values, and an estimate runs it on tensors that have none: "
                f"{_first_line(error)} (where that is: see the exception before this one). Either let that part depend "
                "on shapes only, or measure the bytes that one forward keeps for backward, and pass them as "
                "activation_bytes=; the engine's memory is then estimated without running the model."
            ) from error

    def _output(self) -> Any:
        try:
            return self.model(*self._args, **self._kwargs)
        except Exception as error:
            refused = refused_batch(error, self._name, self._request.batch) if self._computes else None
            if refused is None or isinstance(error, _torch.unsupported_without_memory()):
                raise
            raise refused from error

    # -- what memory is for

    def _know(self, tensors: Iterable[torch.Tensor], use: Use, *, of: torch.Tensor | None = None) -> None:
        """Note what ``tensors`` are used for. ``of``: the parameter that they belong to; None: they are parameters."""
        for tensor in tensors:
            on_host = self._is_on_host(tensor if of is None else of)
            self.log.use(_local(tensor).untyped_storage(), use, on_host=on_host)

    def _is_on_host(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is offloaded. (On CPUs there is no other memory, so nothing is.)"""
        owner = fsdp_param_of(parameter)
        is_offloaded = owner is not None and owner.group is not None and owner.group.storage.offloading.is_host
        return is_offloaded and self._has_streams

    def _offloaded(self) -> list[torch.Tensor]:
        return [each for each in self.model.parameters() if self._is_on_host(each)]

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the parameters on the device, and apart from them those in host memory."""
        offloaded = set(map(id, self._offloaded()))
        gradients = [(each, each.grad) for each in self.model.parameters()]
        for on_host in sorted({id(each) in offloaded for each, _ in gradients}):
            for each, gradient in gradients:
                each.grad = gradient if (id(each) in offloaded) is on_host else None
            with self.observer.during(Phase.OPTIMIZER, on_host=on_host):
                optimizer.step()
        for each, gradient in gradients:
            each.grad = gradient
        for parameter, state in optimizer.state.items():
            tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
            self._know(tensors, Use.OPTIMIZER_STATE, of=parameter)

    def _know_unsharded(self) -> None:
        for state in states_below(self.model):
            for group in state.unit:
                self._know_place(group)
                for buffers in group.storage.buffers:
                    if buffers.lies_in_place:
                        continue
                    self.log.use(buffers.unsharded.storage, Use.UNSHARDED)

    def _know_place(self, group: FSDPParamGroup) -> None:
        offloads = group.storage.offloading.is_host and self._has_streams
        for way in (group.transport, group.reducer.transport):
            if isinstance(way, Observed):
                way.offloads = offloads

    def _hook_gradients(self) -> None:
        """Note autograd's gradients of unsharded parameters as soon as they arrive."""
        for state in states_below(self.model):
            for group in state.unit:
                for param in group.params:
                    whole = param.unsharded
                    if whole is not None and whole.requires_grad and whole.is_leaf and id(whole) not in self._hooked:
                        self._hooked.add(id(whole))
                        whole.register_post_accumulate_grad_hook(self._know_gradient)

    def _know_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._know([parameter.grad], Use.UNSHARDED_GRADIENTS)


def _step_as_on_devices(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer`` use foreach kernels, which torch chooses by itself on devices, but not on CPUs."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def name_of_function(function: Any) -> str:
    """The name of ``function`` in the program, or of its class."""
    return str(getattr(function, "__qualname__", type(function).__name__)).rpartition("<locals>.")[2]


def default_loss(output: Any) -> tuple[torch.Tensor, str]:
    """The loss if the user gives none: ``output.loss``, or the sum of the first tensor of it; and which, in words."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss, "output.loss (default)"
    found = output
    while isinstance(found, (tuple, list)) and found:
        found = found[0]
    if isinstance(found, dict) or not isinstance(found, torch.Tensor):
        found = getattr(output, "logits", None)
    if not isinstance(found, torch.Tensor):
        raise FSDPRuntimeError(
            f"the model returned a {type(output).__name__}, of which nobody knows what to differentiate; pass loss=, a "
            "function of the output and the batch that returns a tensor of one element."
        )
    return found.sum(), "sum of the output (default)"
