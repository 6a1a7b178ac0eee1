"""``FSDP2_COMPAT=1``: fsdp2 in the place of torch's FSDP, in every process that inherits the variable.

Workers of Ray, processes that `torch.multiprocessing.spawn` starts, commands: a program cannot call
`fsdp2.compat.install` in processes that a library starts. torch itself calls what a package registers under the entry
point ``torch.backends``, at the end of ``import torch``, in every process; fsdp2 registers `watch`. (For backends torch
made it, but it is the one place where code may ask to run after torch, with nothing written into site-packages.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns all of it off.)

This module lies beside the package, as importing it must cost nothing where the variable is not set.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from types import ModuleType

VARIABLE = "FSDP2_COMPAT"
KEEP_FSDP1 = "keep-fsdp1"
"""Its value that leaves ``FullyShardedDataParallel`` to torch."""
_PUBLIC = "torch.distributed.fsdp"


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


def reaches_children() -> bool:
    """Whether torch will call `watch` in the processes that this one starts."""
    registered = any(each.value == f"{__name__}:watch" for each in entry_points(group="torch.backends"))
    return registered and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


def watch() -> None:
    """Install the swap as soon as ``torch.distributed.fsdp`` is imported, if ``FSDP2_COMPAT`` asks for it."""
    watched = any(isinstance(each, AfterImport) and each.then is _install for each in sys.meta_path)
    if watched or not switched_on():
        return
    if _PUBLIC in sys.modules:
        _install(sys.modules[_PUBLIC])
    else:
        AfterImport([_PUBLIC], _install).start()


def _install(module: ModuleType) -> None:
    from fsdp2.compat.swap import put_in_place

    put_in_place(fsdp1=os.environ[VARIABLE] != KEEP_FSDP1)


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
        if fullname not in self._watched:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
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
