"""Which versions of torch fsdp2 was tested with, and what is said on others. Imported before everything else.

Whether the installed torch has the private names that every run needs is asked of `fsdp2._torch_names`. Owns no name.
"""

from __future__ import annotations

import warnings

import torch

from fsdp2 import _torch_names

FIRST, LAST = (2, 11), (2, 15)
"""The oldest and the newest torch that the suite was run with, both included; `pyproject.toml` says the same."""

_RANGE = f"torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
_INSTALL = f"pip install 'torch>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}'"


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version: ``"2.16.0a0+git1"`` is (2, 16)."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check(installed: str) -> None:
    """Probe torch for the names that every run needs, and say what is known of ``installed``.

    Args:
        installed: ``torch.__version__``.

    Raises:
        ImportError: torch is older than `FIRST`; or it lacks a private name without which nothing works.

    Warns:
        UserWarning: torch is newer than `LAST`, and has all these names: fsdp2 goes on, untested.
    """
    version = version_of(installed)
    if version < FIRST:
        raise ImportError(f"fsdp2 needs {_RANGE}, and torch {installed} is installed: {_INSTALL}.")
    _torch_names.require(installed, _RANGE, f"Install a newer fsdp2 if there is one, or a torch of these: {_INSTALL}.")
    if version > LAST:
        warnings.warn(
            f"fsdp2 was tested with {_RANGE}, and torch {installed} is installed. All names that it needs are there, "
            "but nothing was tested: compare a few losses with a run on an older torch, or go back to one of these: "
            f"{_INSTALL}.",
            stacklevel=2,
        )


check(torch.__version__)
