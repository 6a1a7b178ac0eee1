"""``python -m fsdp2`` and the command ``fsdp2``: `main`, and a module for each command, imported when it is called."""

from fsdp2.tools.commands.entry import main

__all__ = ["main"]
