"""Files that an earlier fsdp2 wrote are read by this one: see `tests.fixtures.saved`."""

from __future__ import annotations

import pytest

from tests.fixtures.saved import FOLDER, RANKS
from tests.harness.launching import output_of


@pytest.mark.full  # 10 s
def test_files_of_an_earlier_version_are_read() -> None:
    """The checkpoint on every torch, all else on that which wrote it: pickled DTensors have torch's own meshes in them.

    In processes of their own: they name process groups, which new processes call by the same names.
    """
    printed = output_of("-m", "tests.fixtures", "read", str(FOLDER), ranks=RANKS)
    assert printed.count(f"has read {FOLDER.name}") == RANKS
