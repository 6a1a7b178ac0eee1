"""Deep copies of states, and of parameters that were sharded."""

import fsdp2.features.copies.predecessors
import fsdp2.features.copies.states  # noqa: F401  these fill ports of the core
