"""`StreamDevice`: streams and events are those of the mesh's device, whichever device is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2 import FSDPNotImplementedError
from fsdp2.core.buffers import moved_to
from fsdp2.core.mesh import device_of
from fsdp2.core.streams import HostDevice, StreamDevice, device_for


class Module:
    """What ``torch.cuda`` is to the engine; device 0 is the current one."""

    class Stream:
        """Of some device."""

        def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
            self.device, self.priority = device or torch.device("cuda", 0), priority

    @classmethod
    def current_stream(cls, device: torch.device | None = None) -> Any:
        return cls.Stream(device)

    @staticmethod
    def stream(stream: Any) -> Any:
        return stream


def test_streams_are_of_the_device_of_the_mesh_and_not_of_the_current_one() -> None:
    device = torch.device("cuda", 1)
    with mock.patch.object(torch, "get_device_module", lambda device: Module):
        streams = device_for(device)
    assert type(streams) is StreamDevice
    assert streams.new_stream().device == streams.current_stream().device == device
    assert streams.new_stream().priority == -1 and not streams.is_capturing()


@pytest.mark.parametrize("captures_on", [0, 1])
def test_a_capture_is_one_of_the_device_of_the_mesh(captures_on: int) -> None:
    class Capturing(Module):
        current = 0

        @classmethod
        def current_device(cls) -> int:
            return cls.current

        @classmethod
        @contextmanager
        def device(cls, device: torch.device) -> Iterator[None]:
            before, cls.current = cls.current, device.index
            yield
            cls.current = before

        @classmethod
        def is_current_stream_capturing(cls) -> bool:
            return cls.current == captures_on

    with mock.patch.object(torch, "get_device_module", lambda device: Capturing):
        asked = [device_for(torch.device("cuda", index)).is_capturing() for index in (0, 1)]
    assert asked == [captures_on == 0, captures_on == 1] and Capturing.current == 0


def test_a_device_without_streams_is_refused_by_name() -> None:
    assert type(device_for(torch.device("cpu"))) is HostDevice
    mesh: Any = SimpleNamespace(device_type="mps", size=lambda: 4)
    with (
        mock.patch.object(torch, "mps", SimpleNamespace(is_available=lambda: True)),
        pytest.raises(FSDPNotImplementedError, match=r"torch\.mps has none.*init_device_mesh\('cpu', \(4,\)\)"),
    ):
        device_of(mesh)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_batch_that_is_refilled_after_forward_has_been_read(is_pinned: bool) -> None:
    tensor = mock.Mock(**{"is_pinned.return_value": is_pinned})
    moved_to(torch.device("cuda", 0), tensor)
    tensor.to.assert_called_once_with(torch.device("cuda", 0), non_blocking=not is_pinned)


def test_an_input_that_is_there_is_not_moved() -> None:
    tensor = mock.Mock(device=torch.device("cuda", 0))
    assert moved_to(torch.device("cuda", 0), tensor) is tensor
    tensor.is_pinned.assert_not_called()
