"""Functions on a sharded model, above the API."""
