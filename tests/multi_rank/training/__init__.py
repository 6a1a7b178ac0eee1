"""Sharded training equals the unsharded reference: every model, and every way of running forwards and backwards."""
