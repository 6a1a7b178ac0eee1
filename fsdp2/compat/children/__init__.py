"""A folder for the ``PYTHONPATH`` of processes that a program starts: see `fsdp2.compat.switch`."""
