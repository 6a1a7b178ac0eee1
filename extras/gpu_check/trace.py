"""Kernels in a trace of torch's profiler: on which stream, and which range of fsdp2 launched them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from extras.gpu_check.setting import Setting

KERNEL = "kernel"  # (not the copies of metadata that a kernel for many tensors sends to the device before it)
LAUNCHES = {"cuda_runtime", "cuda_driver"}
RANGE = "FSDP::"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Something that ran on the device.

    Attributes:
        range: the innermost of fsdp2's ranges around its launch, without the module's name; "" for none.
    """

    name: str
    stream: int
    range: str
    microseconds: float

    @property
    def is_nccl(self) -> bool:
        """Of communication. (With one rank NCCL copies.)"""
        return "nccl" in self.name.lower() or "onerank" in self.name.lower()


def kernels_in(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """From the ``traceEvents`` of a Chrome trace, in the order of their start."""
    events = [event for event in events if event.get("ph") == "X"]
    launches = {_id(event): event for event in events if event.get("cat") in LAUNCHES and _id(event) is not None}
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE)]
    found = []
    for event in sorted((each for each in events if each.get("cat") == KERNEL), key=lambda each: each["ts"]):
        launch = launches.get(_id(event))
        around = [each for each in ranges if launch is not None and _contains(each, launch)]
        innermost = min(around, key=lambda each: each["dur"], default=None)
        name = innermost["name"].removeprefix(RANGE).split(" ")[0] if innermost is not None else ""
        found.append(Kernel(event["name"], event["args"]["stream"], name, event["dur"]))
    return found


def _id(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _contains(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> bool:
    return outer["tid"] == inner["tid"] and outer["ts"] <= inner["ts"] and inner["ts"] <= outer["ts"] + outer["dur"]


def ranges_in(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How often each of fsdp2's ranges was entered, without modules' names."""
    ranges = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return Counter(name.removeprefix(RANGE).split(" ")[0] for name in ranges if name.startswith(RANGE))


def traced(setting: Setting, step: Callable[[], Any]) -> list[dict[str, Any]]:
    """The ``traceEvents`` of ``step``; in a rehearsal without anything on a device."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not setting.is_rehearsal)
    with profile(activities=activities, acc_events=True) as profiled:  # 2.11 warns without
        step()
        setting.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])
