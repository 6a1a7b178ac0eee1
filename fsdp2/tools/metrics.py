"""`metrics`: what a training step costs: speed, memory, communication; as a line, as JSON, or in TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.arguments import Rule, at_least, checked, is_number
from fsdp2.core.state import states_below
from fsdp2.core.streams import Device
from fsdp2.errors import FSDPRuntimeError, FSDPValueError
from fsdp2.tools.observing.clocks import Clock, clock_for
from fsdp2.tools.observing.memory import peak_bytes
from fsdp2.tools.observing.observation import Exchange, Kind, Listener, Observation, refuse_unsharded
from fsdp2.tools.quantities import by_device_name

MIB = 2**20

PEAK_FLOPS: dict[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989.5e12,
    "H200": 989.5e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100": 125e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
    "MI250": 181e12,
}
"""Floating-point operations per second of dense bfloat16 (V100: float16) matrix products, from vendors' data sheets.
Keys are words of a device's name, longer names first. (MI250: for one of its two dies, which is what a rank has.)"""


def peak_flops_of(device: torch.device) -> float | None:
    """The peak of ``device``, by its name; None if the name is not in `PEAK_FLOPS`, and for CPUs."""
    if device.type == "cpu":
        return None
    name = str(torch.get_device_module(device).get_device_name(device))
    return by_device_name(PEAK_FLOPS, name)


class _Meter(Listener):
    """Adds up what is sent, and how long the computation waits."""

    observation: Observation

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {}
        self._waits: list[tuple[Clock, Any, Any]] = []
        self._blocking: dict[int, Any] = {}
        self._began: Any = None
        self.sent_bytes = self.exchanges = 0

    def _clock(self, device: Device) -> Clock:
        if id(device) not in self._clocks:
            self._clocks[id(device)] = clock_for(device, self.observation.devices[id(device)][1])
        return self._clocks[id(device)]

    def begin_exchange(self, exchange: Exchange, device: Device) -> None:
        """Count the exchange. Without streams its issue may block the host, so take the time."""
        self.sent_bytes += exchange.sent_bytes
        self.exchanges += 1
        if not device.has_streams:
            self._blocking[exchange.number] = self._clock(device).mark(None)

    def issued(self, exchange: Exchange, device: Device, *, is_over: bool) -> None:
        """Count the time since `begin_exchange` as a wait, if the issue has blocked."""
        begun = self._blocking.pop(exchange.number, None)
        if is_over and exchange.sent_bytes:
            clock = self._clock(device)
            self._waits.append((clock, begun, clock.mark(None)))

    def begin_wait(self, group: str, kind: Kind, device: Device) -> None:
        """Note when a wait begins."""
        self._began = self._clock(device).mark(device.current_stream())

    def end_wait(self, group: str, kind: Kind, device: Device) -> None:
        """Note when it ends."""
        clock = self._clock(device)
        self._waits.append((clock, self._began, clock.mark(device.current_stream())))

    def exposed_seconds(self) -> float:
        """The seconds of all waits since `forget`. Blocks the host until the device has come to the last one."""
        for clock in {id(each): each for each, _, _ in self._waits}.values():
            clock.settle()
        return sum(clock.between(begin, end) for clock, begin, end in self._waits)

    def forget(self) -> None:
        """Start counting anew."""
        self._waits.clear()
        self.sent_bytes = self.exchanges = 0


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What the steps since the last report have cost; ``print`` it.

    Attributes:
        step: the number of the last of these steps, from 1.
        seconds: the time of one step.
        tokens_per_second: tokens of all ranks together; None if none were counted.
        mfu: model FLOPs utilization, from 0 to 1: the operations that the model needs for the tokens, over what the
            devices could have done; None if either is not known.
        peak_memory_bytes: the most that this process has used so far.
        sent_bytes: what this rank sent in one step at least; None if nothing was observed.
        exposed_share: the share of the time in which this rank waited for communication; None likewise.
        gradient_norm: the norm that was passed.
        values: other values that were passed, by name.
    """

    step: int
    seconds: float
    tokens_per_second: float | None
    mfu: float | None
    peak_memory_bytes: int
    sent_bytes: float | None
    exposed_share: float | None
    gradient_norm: float | None
    values: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, float]:
        """Everything that is known, by name; for JSON."""
        names = [name for name in self.__slots__ if name != "values"]
        known = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"step": known.pop("step"), **self.values, **known}

    def __str__(self) -> str:
        parts = [f"step {self.step:>6}", *(f"{name} {value:.4g}" for name, value in self.values.items())]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        parts += [f"{self.seconds * 1e3:.1f} ms", f"peak {self.peak_memory_bytes / MIB:,.0f} MiB"]
        if self.sent_bytes is not None and self.exposed_share is not None:
            parts.append(f"sent {self.sent_bytes / MIB:,.1f} MiB, {self.exposed_share:.1%} exposed")
        if self.gradient_norm is not None:
            parts.append(f"gradient norm {self.gradient_norm:.4g}")
        return "  ".join(parts)


class Metrics:
    """What `metrics` returns. Call `step` at the end of each step, and `close` (or leave the context) at the end."""

    def __init__(
        self, model: nn.Module, options: _Options, meter: _Meter | None, observation: Observation | None
    ) -> None:
        self._options = options
        self._meter, self._observation = meter, observation
        self._device = states_below(model)[0].mesh.device
        self._steps = options.first_step
        self._since, self._counted, self._tokens = time.perf_counter(), 0, 0
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._write = options.write if is_first else None
        self._file = options.file.open("a", encoding="utf-8") if options.file is not None and is_first else None
        self._board = _board(options.tensorboard) if options.tensorboard is not None and is_first else None
        self._paused_exposed = 0.0

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop observing the model, and close the files. A second call does nothing."""
        if self._observation is not None and self._meter is not None:
            self._observation.end()
            self._observation = None
            del self._meter.observation
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._file = self._board = None

    @checked(tokens=at_least(0))
    def step(
        self, tokens: int = 0, *, gradient_norm: Any = None, reports: bool | None = None, **values: Any
    ) -> StepMetrics | None:
        """Count a step that has ended. Returns what the steps since the last report have cost, if a report is due.

        It waits for a device only then, to read numbers from tensors. All ranks must call it alike if
        ``gradient_norm`` or one of ``values`` is a DTensor, which is then gathered.

        Args:
            tokens: how many tokens all ranks together have trained on in this step.
            gradient_norm: a number, or a tensor of one element.
            reports: whether a report is due; None: every so many steps, as `metrics` was told.
            values: other numbers to show and write, such as ``loss=loss``.

        Raises:
            FSDPTypeError, FSDPValueError: a value is not a number.
        """
        self._steps += 1
        self._counted += 1
        self._tokens += tokens
        is_due = self._steps % self._options.every == 0 if reports is None else reports
        if not is_due:
            return None
        read = {name: _read(name, value) for name, value in values.items()}
        found = self._report(None if gradient_norm is None else _read("gradient_norm", gradient_norm), read)
        self._write_out(found)
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside (an evaluation, a checkpoint) neither the time nor what is sent counts for a step."""
        before = self._seen()  # waits until the device has done everything before the block
        began = time.perf_counter()
        try:
            yield
        finally:
            seen = self._seen()  # waits until it has done everything inside
            self._since += time.perf_counter() - began
            sent, exchanges, exposed = (after - each for after, each in zip(seen, before, strict=True))
            if self._meter is not None:
                self._meter.sent_bytes -= int(sent)
                self._meter.exchanges -= int(exchanges)
                self._paused_exposed += exposed

    def _seen(self) -> tuple[float, float, float]:
        meter = self._meter
        return (0.0, 0.0, 0.0) if meter is None else (meter.sent_bytes, meter.exchanges, meter.exposed_seconds())

    def _report(self, gradient_norm: float | None, values: dict[str, float]) -> StepMetrics:
        sent = exposed = None
        if self._meter is not None and self._meter.exchanges:
            exposed_seconds = self._meter.exposed_seconds() - self._paused_exposed
            sent = self._meter.sent_bytes / self._counted
        now = time.perf_counter()
        elapsed = max(now - self._since, 1e-9)
        if sent is not None:
            exposed = min(1.0, max(0.0, exposed_seconds / elapsed))
        speed = self._tokens / elapsed if self._tokens else None
        found = StepMetrics(
            self._steps,
            elapsed / self._counted,
            speed,
            self._utilization(speed),
            peak_bytes(self._device),
            sent,
            exposed,
            gradient_norm,
            values,
        )
        self._since, self._counted, self._tokens, self._paused_exposed = now, 0, 0, 0.0
        if self._meter is not None:
            self._meter.forget()
        return found

    def _utilization(self, tokens_per_second: float | None) -> float | None:
        peak = self._options.peak_flops
        if tokens_per_second is None or not peak:
            return None
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return tokens_per_second * self._options.flops_per_token / (peak * ranks)

    def _write_out(self, found: StepMetrics) -> None:
        if self._write is not None:
            self._write(str(found))
        if self._file is not None:
            self._file.write(json.dumps(found.to_dict()) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in found.to_dict().items():
                if name != "step":
                    self._board.add_scalar(name, value, found.step)


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of `metrics`."""

    flops_per_token: float
    peak_flops: float | None
    every: int
    first_step: int
    write: Callable[[str], object] | None
    file: Path | None
    tensorboard: Path | None


def _read(name: str, value: Any) -> float:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        value = value.detach()
    if not is_number(value):
        raise FSDPValueError(
            f"Metrics.step() takes numbers, or tensors of one, got a {type(value).__name__} as '{name}'."
        )
    return float(value)


def _board(path: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # late, as it imports tensorboard

    return SummaryWriter(str(path))


_COUNT = Rule("a whole number >= 1", lambda value: _is_whole(value) and value >= 1, lambda value: _is_whole(value))
_INDEX = Rule("a whole number >= 0", lambda value: _is_whole(value) and value >= 0, lambda value: _is_whole(value))
_POSITIVE = Rule(
    "a number > 0, or None",
    lambda value: value is None or (is_number(value) and 0 < float(value) < math.inf),
    lambda value: value is None or is_number(value),
)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@checked(flops_per_token=_POSITIVE, peak_flops=_POSITIVE, every=_COUNT, first_step=_INDEX)
def metrics(
    model: nn.Module,
    *,
    flops_per_token: float | None = None,
    peak_flops: float | None = None,
    every: int = 1,
    first_step: int = 0,
    write: Callable[[str], object] | None = print,
    file: str | Path | None = None,
    tensorboard: str | Path | None = None,
    observe: bool = True,
) -> Metrics:
    """Measure the steps of ``model``: tokens per second, MFU, memory, what is sent, and how long ranks wait for it.

        >>> with fsdp2.metrics(model, file="metrics.jsonl") as metrics:
        ...     for batch in batches:
        ...         loss, norm = train(batch)
        ...         metrics.step(tokens=batch.numel() * world_size, loss=loss, gradient_norm=norm)
        step      1  loss 5.54  18,230 tokens/s  71.9 ms  peak 312 MiB  sent 9.5 MiB, 12.4% exposed  gradient norm 1.9

    Every rank may call it, and `Metrics.step` in each step. Lines and files are written by the first rank, with its own
    memory, bytes and waits. Nothing is communicated. Observing the model takes about 70 more calls (of Python and C
    functions) for each gather and reduction; ``observe=False`` takes none, and bytes and waits are not known then. See
    'Measure every step' in the documentation.

    Args:
        model: a sharded model.
        flops_per_token: operations for one token, forward and backward; None: 6 for each parameter.
        peak_flops: operations per second of one rank's device; None: looked up by the device's name. If that is not
            known (a CPU), there is no MFU.
        every: how many steps one report covers.
        first_step: how many steps were done before, by the run that is resumed.
        write: called with the line of each report, on the first rank; None: not called.
        file: a path, to which each report is appended as a line of JSON, on the first rank.
        tensorboard: a folder for TensorBoard's events, on the first rank.
        observe: whether to look at what groups exchange.

    Raises:
        FSDPTypeError, FSDPValueError: nothing in ``model`` is sharded, or an argument is of another kind.
        FSDPRuntimeError: ``tensorboard`` was given, and is not installed.
    """
    model = getattr(model, "_orig_mod", model)
    refuse_unsharded(model, "metrics()")
    if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise FSDPRuntimeError(
            "metrics(tensorboard=...) needs tensorboard, which is not installed: pip install 'fsdp2[tools]', or give "
            "file=, whose lines of JSON need nothing."
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    options = _Options(
        6.0 * count if flops_per_token is None else float(flops_per_token),
        peak_flops_of(states_below(model)[0].mesh.device) if peak_flops is None else float(peak_flops),
        every,
        first_step,
        write,
        None if file is None else Path(file),
        None if tensorboard is None else Path(tensorboard),
    )
    meter = observation = None
    if observe:
        meter = _Meter()
        observation = meter.observation = Observation([model], meter, "metrics()", only_exchanges=True)
    found = Metrics(model, options, meter, observation)
    try:
        if observation is not None:
            observation.begin()
    except BaseException:
        found.close()
        raise
    return found
