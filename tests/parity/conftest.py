"""Lets torch's own warnings about views pass; all others are errors here as in the rest of the suite."""

from __future__ import annotations

import pytest

# torch's `fully_shard` warns of any output that is a view, and full backward hooks of a forward without a
# differentiable input: CommDebugMode makes both.
TOLERATED = (
    "ignore:FSDP2-wrapped module:UserWarning",
    "ignore:Full backward hook is firing:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the filters to the tests of this folder; the ranks get them from pytest."""
    for item in items:
        if "tests/parity/" in item.nodeid:
            for warning in TOLERATED:
                item.add_marker(pytest.mark.filterwarnings(warning))
