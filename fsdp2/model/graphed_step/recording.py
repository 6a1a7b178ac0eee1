"""`Recording`: how a device records what a step launches, and launches all of it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """One graph. Another one may use its memory, if the two are never replayed at the same time."""

    pool: Any
    """The pool of the memory that is allocated during recording; `OF_DEVICES` takes it for another graph."""

    def warm_up(self) -> AbstractContextManager[object]:
        """Inside, run things as they run while a graph is recorded: on the same stream."""

    def record(self, run: Callable[[], None]) -> None:
        """Record what ``run`` launches. Nothing of it is executed."""

    def replay(self) -> None:
        """Launch the graph on the current stream."""

    def close(self) -> None:
        """Free the graph, if one was recorded: it is not replayed any more."""


class CudaRecording:
    """A CUDA graph, recorded on a side stream."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self) -> AbstractContextManager[object]:
        """Inside, the side stream is current. It waits for the present stream first, which waits for it at the end."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        block = ExitStack()
        block.callback(current.wait_stream, self._stream)
        block.enter_context(torch.cuda.stream(self._stream))
        return block

    def record(self, run: Callable[[], None]) -> None:
        """Record in the mode "thread_local": other threads, such as a loader's, may go on, and are not recorded."""
        graph = torch.cuda.graph(self._graph, pool=self.pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                with graph:
                    run()
            finally:
                torch.cuda.set_stream(current)  # torch does not, if the end of a recording fails

    def replay(self) -> None:
        """Launch the graph on the current stream of its device."""
        with torch.cuda.device(self._device):
            self._graph.replay()

    def close(self) -> None:
        """Free the graph: NCCL does not end a communicator while a graph holds a collective of it."""
        with torch.cuda.device(self._device):
            self._graph.reset()


OF_DEVICES: dict[str, Callable[[torch.device, Any], Recording]] = {"cuda": CudaRecording}
"""For each type of device, what makes a `Recording` on it, with the memory of an earlier one or None."""
