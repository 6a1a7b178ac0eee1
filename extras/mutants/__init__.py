"""Which tests would notice a fault: planted faults, the tests that run their lines, and the smallest set that finds them.

``python -m extras.mutants`` says how.
"""
