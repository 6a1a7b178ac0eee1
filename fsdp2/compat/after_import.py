"""Calls a function after certain modules have been imported for the first time."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder that leaves the finding to the others, and watches the execution of some modules.

    Args:
        watched: full names.
        then: called with each of them, executed, before any importer sees it.
    """

    def __init__(self, watched: Sequence[str], then: Callable[[ModuleType], None]) -> None:
        self._watched = frozenset(watched)
        self._then = then

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
            self._then(module)

        # On the loader of this one module: a wrapper around it would hide its source from tracebacks and `inspect`.
        loader.exec_module = execute_and_tell  # type: ignore[method-assign]
