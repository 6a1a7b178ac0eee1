"""``python -m fsdp2.checkpoint``: look at checkpoints, and take care of them. See `commands.py`."""

import sys

from fsdp2.checkpoint.commands import main

if __name__ == "__main__":
    sys.exit(main())
