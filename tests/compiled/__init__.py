"""`torch.compile` of sharded models: graphs beside their eager twins."""
