"""Copies and pickles of sharded modules, their states and their meshes."""

import fsdp2.features.copies.modules  # noqa: F401  with the two others, these fill ports of the core
