"""How a job tells what it found: each part in a line of JSON on its output, as soon as it is known."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

Found = Mapping[str, Any]

WHAT, COMPLAINTS, SKIPPED = "what", "complaints", "skipped"
"""What a line is about; what is wrong with it; why it was not done, if it was not."""


def say(what: str, found: Found) -> None:
    """One line, about ``what``."""
    sys.stdout.write(json.dumps({WHAT: what, COMPLAINTS: [], **found}) + "\n")  # at once: ranks share the output
    sys.stdout.flush()


def said_in(output: str) -> list[dict[str, Any]]:
    """The lines of an output, which may have been cut off in the last."""
    found = []
    for line in output.splitlines():
        if line.startswith('{"' + WHAT) and line.endswith("}"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # cut off, or two processes wrote at once
    return found
