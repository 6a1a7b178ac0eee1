"""What a call of a sharded module's class makes: a plain module, initialized or not, as this thread has asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _NewModules(threading.local):
    are_initialized = True


NEW_MODULES = _NewModules()
"""Whether ``__init__`` runs. Of each thread: ranks may be threads of one process."""


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Inside, making an instance of a sharded module's class does not run ``__init__``, as unpickling must not."""
    before, NEW_MODULES.are_initialized = NEW_MODULES.are_initialized, False
    try:
        yield
    finally:
        NEW_MODULES.are_initialized = before
