"""Deep copies of states, and of parameters that were sharded."""

import fsdp2.plugs.states.copies.predecessors
import fsdp2.plugs.states.copies.states  # noqa: F401  these fill ports of the core
