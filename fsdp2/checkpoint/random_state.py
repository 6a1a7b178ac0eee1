"""`RandomState`: all random generators of a process, as one thing to save."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """Python's, NumPy's (if the program has imported it) and torch's generators, those of its devices included.

    For ``per_rank={"rng": RandomState()}``. It holds nothing itself: it reads and sets the generators of the process.
    """

    def state_dict(self) -> dict[str, Any]:
        """Where the generators are."""
        found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            found["numpy"] = (kind, keys.tolist(), *rest)
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            module = torch.get_device_module(device)
            found[device.type] = [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the generators there. What was saved of other devices than there are is left out."""
        kind, keys, rest = state["python"]
        random.setstate((kind, tuple(keys), rest))
        torch.set_rng_state(state["torch"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            kind, keys, *rest = state["numpy"]
            numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            module = torch.get_device_module(device)
            for index, each in enumerate(state.get(device.type, [])[: torch.accelerator.device_count()]):
                module.set_rng_state(each, index)
