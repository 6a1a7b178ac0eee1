"""Both implementations run the same programs; traces of collectives are compared."""

ENVIRONMENT = {"FSDP2_COMM": "native"}
"""Collectives as torch issues them: they are traced, and sums compared bit by bit."""
