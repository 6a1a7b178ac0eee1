"""`make_graphed_step`: a full training step as one graph of the device.

`recording` is how a device records and replays a graph. `fixed` holds what a recorded step has read on the host once
and for all. `step` is what users call.
"""
