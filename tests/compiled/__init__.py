"""`torch.compile` of sharded models: graphs beside their eager twins."""

ENVIRONMENT = {"FSDP2_COMM": "native"}
"""Collectives as graphs issue them, so that sums are those of the eager twin bit by bit."""
