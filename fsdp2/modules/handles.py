"""What the asynchronous methods of `FSDPModule` return, to be waited for."""

from __future__ import annotations

from fsdp2.common import FSDPRuntimeError
from fsdp2.runtime.root import FSDPRoot, Unit


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, unit: Unit = ()) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters. Calling it again does nothing.

        Streams: the current stream waits; on CPU the host does.
        """
        for group in self._unit:
            group.wait_for_unshard()
        self._unit = ()


class GradientReductionHandle:
    """What `FSDPModule.finalize_backward(async_op=True)` returns."""

    def __init__(self, root: FSDPRoot | None = None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait for the gradient reductions, and deliver the gradients. Calling it again does nothing.

        Raises:
            FSDPRuntimeError: `FSDPModule.reset_iter_state` dropped them in the meantime.
        """
        root, self._root = self._root, None
        if root is None:
            return
        if not root.comm.is_unfinished(root):
            raise FSDPRuntimeError(
                "this handle was invalidated by reset_iter_state(), which dropped the gradients it stood for."
            )
        root.comm.end_handle()
        root.wait_for_finalization()
