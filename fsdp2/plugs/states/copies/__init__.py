"""Deep copies of sharded modules, and of parameters that sharded ones have replaced."""

import fsdp2.plugs.states.copies.predecessors
import fsdp2.plugs.states.copies.states  # noqa: F401  these fill ports of the core
