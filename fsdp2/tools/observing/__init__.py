"""What happens to a model that trains: exchanges, waits, passes and memory, for as long as somebody listens.

`log`, `metrics` and `timeline` listen.
"""
