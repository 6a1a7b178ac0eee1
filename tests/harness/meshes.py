"""Lets what DTensor has worked out about its operators outlast the process groups of a test.

Half of the CPU time of the parity tests on 4 ranks went into working out the same again. DTensor remembers by the mesh
how an operator is sharded, meshes compare by shape, and what it remembers holds the mesh of then, with its process
groups. So here process groups are named after their ranks, and a mesh of a former test finds those of the same name of
this one.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

MOST_TESTS = 400
"""How many tests may add to what is remembered before all of it is forgotten, as it takes memory."""

MOST_GROUPS = 40
"""Of the same ranks, in one test. What was the third in a former test is the first here, if there is no third."""


class LastingMeshes:
    """What is remembered in a process that always is the same rank of a world of the same size.

    All ranks run the same tests in the same order, so what one remembers, all do.
    """

    def __init__(self) -> None:
        self._names: Counter[str] = Counter()
        self._tests = 0
        self._on_threads = False

    def install(self, world_size: int) -> None:
        """From here on process groups are named after their ranks."""
        named_by_torch, register_with_torch = c10d._process_group_name, c10d._register_process_group

        def name(ranks: Any, use_hashed_name: bool) -> Any:
            is_thread = threading.current_thread() is not threading.main_thread()
            self._on_threads |= is_thread
            if is_thread or use_hashed_name:
                return named_by_torch(ranks, use_hashed_name)
            text = "_".join(map(str, ranks or range(world_size)))
            self._names[text] += 1
            return c10d.GroupName(f"{text}.{self._names[text]}")

        def register(name: Any, group: Any) -> None:
            ranks, _, number = name.partition(".")
            if number not in ("", "1") and int(number) <= MOST_GROUPS:
                c10d._unregister_process_group(name)
            register_with_torch(name, group)
            if number == "1":
                for other in range(2, MOST_GROUPS + 1):
                    register_with_torch(c10d.GroupName(f"{ranks}.{other}"), group)

        c10d._process_group_name = name
        c10d._register_process_group = register

    def end_test(self) -> None:
        """Its process groups are destroyed: meshes that are remembered find those of the next test by name.

        Call it before what the test has left is frozen, where meshes would not be found.
        """
        self._names.clear()
        self._tests += 1
        if self._tests == MOST_TESTS or self._on_threads:  # meshes of threads are of these threads
            self._tests, self._on_threads = 0, False
            _clear_sharding_prop_cache()
        for mesh in gc.get_objects():
            if type(mesh) is DeviceMesh:
                mesh._pg_registry.clear()
