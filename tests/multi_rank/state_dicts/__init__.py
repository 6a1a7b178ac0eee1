"""State dicts and distributed checkpoints, sharded and full."""
