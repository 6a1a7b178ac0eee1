"""Copies and pickles of sharded modules, of their states and meshes, and of parameters that were sharded."""

import fsdp2.features.copies.meshes
import fsdp2.features.copies.modules  # noqa: F401  with what they import, these fill ports of the core
