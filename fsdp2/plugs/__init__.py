"""What the engine is built with: each file fills ports of the core. All are loaded here."""

import fsdp2.plugs.memory.host_accumulation
import fsdp2.plugs.memory.memory_pool
import fsdp2.plugs.memory.packing
import fsdp2.plugs.memory.reshard_to_fewer
import fsdp2.plugs.parameters.owned
import fsdp2.plugs.parameters.row_blocks
import fsdp2.plugs.parameters.tensor_extensions
import fsdp2.plugs.parameters.uninitialized
import fsdp2.plugs.parameters.whole_operators
import fsdp2.plugs.parameters.whole_tensors
import fsdp2.plugs.parameters.written_views
import fsdp2.plugs.schedules.asked_gradients
import fsdp2.plugs.schedules.divergence
import fsdp2.plugs.states.copies.predecessors
import fsdp2.plugs.states.copies.states
import fsdp2.plugs.states.whole_states
import fsdp2.plugs.transports.announce
import fsdp2.plugs.transports.custom_collectives
import fsdp2.plugs.transports.gloo_p2p
import fsdp2.plugs.watchdog.public  # noqa: F401
