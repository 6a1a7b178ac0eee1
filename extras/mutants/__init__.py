"""Which tests would notice a fault: faults are planted, and the tests that run their lines are run until one fails.

``python -m extras.mutants`` says how.
"""
