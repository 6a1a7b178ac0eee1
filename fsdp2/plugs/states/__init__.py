"""What state dicts and copies of sharded modules hold."""
