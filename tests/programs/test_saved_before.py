"""Files that an earlier fsdp2 wrote are read by this one: see `tests.fixtures.saved`."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.saved import FOLDER, RANKS
from tests.programs.launching import output_of


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch may not read DTensors of this one")
def test_they_are_read() -> None:
    """In processes of their own: pickled tensors name process groups, which new processes call by the same names."""
    printed = output_of("-m", "tests.fixtures", "read", str(FOLDER), ranks=RANKS)
    assert printed.count(f"has read {FOLDER.name}") == RANKS
