"""Both implementations run the same programs; traces of collectives are compared."""

from tests.parity.helpers.on_threads import ON_THREADS

__all__ = ["ENVIRONMENT", "ON_THREADS"]

ENVIRONMENT = {"FSDP2_COMM": "native"}
"""Collectives as torch issues them: they are traced, and sums compared bit by bit."""
