"""Training steps on a device that only records what would run on which stream, for `tests.harness.happens_before`.

Where to look: `recorder` (the device and the trace), `memory` (which bytes an operation touches), `training` (a small
model), `scenarios` and its parts (every path of the engine), `graphs` (steps that are captured).
"""
