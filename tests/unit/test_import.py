"""What ``import fsdp2`` imports: not the tools, which are imported when they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fsdp2
from fsdp2.tools.explaining import explain

PROGRAM = """
import json, sys
import torch.distributed.tensor
before = set(sys.modules)
import fsdp2
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.full
def test_tools_are_not_imported_with_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    tools = ("estimating", "explaining", "facts", "timeline", "metrics", "doctor", "commands", "progress")
    assert "fsdp2.api.module" in imported
    assert not [name for name in imported if name.startswith(tuple(f"fsdp2.tools.{each}" for each in tools))]
    others = {name.partition(".")[0] for name in imported} - {"fsdp2", "torch"}
    assert not others & {"rich", "yaml", "matplotlib", "http", "urllib"}, others


def test_names_of_tools_are_there() -> None:
    assert fsdp2.explain is explain and "estimate" in dir(fsdp2)
    assert all(getattr(fsdp2, name) is not None for name in fsdp2.__all__)
    with pytest.raises(AttributeError, match=r"module 'fsdp2' has no attribute 'estimat'\. Did you mean 'estimate'"):
        fsdp2.estimat  # noqa: B018
    assert not hasattr(fsdp2, "_nothing")
