"""`Recording`: how a device records what a step launches, and launches all of it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """One graph. Another may share its memory, if the two are never replayed at the same time."""

    pool: Any
    """Where memory that is allocated while it records comes from: what `OF_DEVICES` takes."""

    def warm_up(self) -> AbstractContextManager[object]:
        """What runs inside, runs as it will when it is recorded: on the same stream."""

    def record(self, run: Callable[[], None]) -> None:
        """Record what ``run`` launches. Nothing of it is executed."""

    def replay(self) -> None:
        """Launch it on the current stream."""

    def close(self) -> None:
        """Let go of what was recorded, if anything was: it is not replayed any more."""


class CudaRecording:
    """A CUDA graph, of a side stream."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self) -> AbstractContextManager[object]:
        """On the side stream, after and before what the current one does."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        block = ExitStack()
        block.callback(current.wait_stream, self._stream)
        block.enter_context(torch.cuda.stream(self._stream))
        return block

    def record(self, run: Callable[[], None]) -> None:
        """Other threads, such as a loader's, may go on: what they do is not recorded, and no error."""
        graph = torch.cuda.graph(self._graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                with graph:
                    run()
            finally:
                torch.cuda.set_stream(current)  # which torch leaves undone where the end of a recording fails

    def replay(self) -> None:
        """On the current stream of the device."""
        with torch.cuda.device(self._device):
            self._graph.replay()

    def close(self) -> None:
        """NCCL does not end a communicator before all graphs are gone that hold a collective of it."""
        with torch.cuda.device(self._device):
            self._graph.reset()


OF_DEVICES: dict[str, Callable[[torch.device, Any], Recording]] = {"cuda": CudaRecording}
"""By types of devices: makes a `Recording` on a device, with the memory of an earlier one or None."""
