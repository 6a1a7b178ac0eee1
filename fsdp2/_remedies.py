"""What messages of several files say alike: the pages of the documentation that they name, and a remedy.

An installed package has no files of ``docs/``. So a message names a page by its title, as the documentation's
navigation and search show it. Owns words alone; imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FAILURES: Final = "'When ranks fail, or differ' in the documentation"
DIVERGENCE: Final = "'Ranks that run different modules on purpose' in the documentation"
TOOLS: Final = "'What tools can read' in the documentation"

PAGES: Final[Mapping[str, str]] = {
    "failures.md": FAILURES,
    "divergence.md": DIVERGENCE,
    "tools.md": TOOLS,
}
"""The files of ``docs/`` that these pages are written in."""

RUN_ALIKE: Final = (
    "All ranks must run the same sharded modules in the same order, and equally often, with the same settings. Where a "
    "rank skips modules or batches on purpose, call set_divergence('join') on one root that contains all of these "
    "modules and whose forward every rank runs, and join_step() on a rank that has nothing to run: "
    f"{DIVERGENCE}. Where exceptions make ranks differ, let the ranks agree first: {FAILURES}."
)
"""What to do where ranks ran different modules, in another order, or another number of them."""

FEWER: Final = (
    "If that rank only had fewer batches, let it call join_step() meanwhile, after set_divergence('join') on the root: "
    f"{DIVERGENCE}."
)
"""What to do where a rank has left, and may have left for want of batches."""
