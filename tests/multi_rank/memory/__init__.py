"""What is kept elsewhere than in the device's own allocations: gradients, optimizer state, memory in a pool."""
