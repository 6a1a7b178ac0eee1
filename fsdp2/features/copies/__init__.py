"""Deep copies of sharded modules, of their states, and of parameters that were sharded."""

import fsdp2.features.copies.modules  # noqa: F401  with what it imports, this fills ports of the core
