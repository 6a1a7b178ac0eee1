"""What runs in forward and backward: groups, hooks, the order of communication, the root."""
