"""The files of `fsdp2/core`, each by itself, in one process: `test_param.py` is of `param.py`, and so on."""
