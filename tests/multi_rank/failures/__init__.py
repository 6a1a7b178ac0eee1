"""Mistakes and exceptions: one clear error on every rank, and training that goes on."""
