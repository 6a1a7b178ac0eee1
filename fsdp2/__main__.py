"""``python -m fsdp2``, and the console script ``fsdp2``: see `fsdp2.tools.commands`."""

from __future__ import annotations

import sys

from fsdp2.tools.commands import main


def run() -> None:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
