"""How processes that a program starts have the swap: by what they inherit of their environment.

Workers of Ray, processes that `torch.multiprocessing.spawn` starts, commands: a program cannot call
`fsdp2.compat.install` in processes that a library starts. ``python -m fsdp2.compat`` puts the folder ``children`` on
their ``PYTHONPATH`` instead. Python imports the `sitecustomize` in it as it starts, which loads this file by its path,
and watches for torch. Processes that do not import torch notice nothing. (With ``-E``, ``-I`` or ``-S`` Python looks at
no ``PYTHONPATH``, or imports no `sitecustomize`.)

This file imports nothing of fsdp2, which would import torch.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "FSDP2_COMPAT"
KEEP_FSDP1 = "keep-fsdp1"
"""Its value that leaves ``FullyShardedDataParallel`` to torch."""
CHILDREN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "children")
"""The folder that is put on ``PYTHONPATH``."""


def switched_on() -> bool:
    """Whether ``FSDP2_COMPAT`` asks for the swap.

    Raises:
        ValueError: it is neither 0 nor 1, nor `KEEP_FSDP1`.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1", KEEP_FSDP1):
        raise ValueError(
            f"{VARIABLE} must be 1 (fsdp2 in the place of torch.distributed.fsdp), {KEEP_FSDP1} (of its fully_shard "
            f"alone) or 0, got {value!r}."
        )
    return value in ("1", KEEP_FSDP1)


def reach_children(*, fsdp1: bool) -> None:
    """Let the processes that this one starts from now on have the swap, and those that they start."""
    os.environ[VARIABLE] = "1" if fsdp1 else KEEP_FSDP1
    if not _is_on_path():
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{CHILDREN}{os.pathsep}{before}" if before else CHILDREN


def reaches_children() -> bool:
    """Whether `reach_children` was called here, or where this process comes from."""
    return _is_on_path() and switched_on()


def _is_on_path() -> bool:
    return CHILDREN in os.environ.get("PYTHONPATH", "").split(os.pathsep)


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder that leaves the finding to the others, and watches the execution of some modules.

    Args:
        watched: full names.
        then: called with each of them, executed, before any importer sees it.
    """

    def __init__(self, watched: Sequence[str], then: Callable[[ModuleType], None]) -> None:
        self._watched = frozenset(watched)
        self.then = then

    def start(self) -> None:
        """Watch imports from now on."""
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch no more. Calling it again does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Import's question to every finder in turn."""
        if fullname not in self._watched or self not in sys.meta_path:
            return None
        # Those after this one: the others have been asked. (Two that watch one module would ask each other for ever.)
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        # On the loader of this one module: a wrapper around it would hide its source from tracebacks and `inspect`.
        loader.exec_module = execute_and_tell  # type: ignore[method-assign]
