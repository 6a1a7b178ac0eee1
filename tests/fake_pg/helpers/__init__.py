"""What tests of simulated ranks share: stacks of layers, allocations, and what they read out of recorded steps."""
