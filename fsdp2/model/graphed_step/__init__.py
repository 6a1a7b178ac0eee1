"""`make_graphed_step`: a whole training step as one graph of the device.

`recording` is how a device records and replays, `fixed` what a recorded step has taken from the host for good, and
`step` what users call.
"""
