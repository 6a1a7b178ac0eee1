"""Parameters and their memory: the sharded and the unsharded form, flat buffers, gradients, extensions."""
