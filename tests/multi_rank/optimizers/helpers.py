"""Optimizers as a program makes them, and as `fsdp2.optim.local` does, in both of its forms."""

from __future__ import annotations

import pytest
import torch

from tests.harness.shared.optimizers import local_like

FORMS = pytest.mark.parametrize("form", ["plain", "each", "flat"])


def formed(form: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer`` as it is, or what `fsdp2.optim.local` makes of it."""
    return optimizer if form == "plain" else local_like(optimizer, flat=form == "flat")
