"""Which versions of torch fsdp2 was tested with, and what is said on others. Imported before everything else.

Private names of torch are in `fsdp2._torch` and `fsdp2._torch_compiler` alone, so importing these two tells at once
whether a newer torch still has all of them. Owns no name of torch.
"""

from __future__ import annotations

import importlib
import warnings

import torch

FIRST, LAST = (2, 11), (2, 15)
"""The oldest and the newest torch that the suite was run with, both included; `pyproject.toml` says the same."""

_PRIVATE = ("fsdp2._torch", "fsdp2._torch_compiler")
_RANGE = f"torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version: ``"2.16.0a0+git1"`` is (2, 16)."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check(installed: str) -> None:
    """Import what depends on the version of torch, and say what is known of ``installed``.

    Args:
        installed: ``torch.__version__``.

    Raises:
        ImportError: torch is older than `FIRST`; or it is newer than `LAST`, and lacks a private name that is needed.

    Warns:
        UserWarning: torch is newer than `LAST`, and has all names: fsdp2 goes on, untested.
    """
    version = version_of(installed)
    if version < FIRST:
        raise ImportError(f"fsdp2 needs {_RANGE}, and torch {installed} is installed: pip install 'torch>=2.11,<2.16'.")
    try:
        for name in _PRIVATE:
            importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        if version <= LAST:
            raise
        raise ImportError(
            f"fsdp2 was tested with {_RANGE}, and torch {installed}, which is installed, lacks a name that it needs "
            f"({error}). Install a newer fsdp2 if there is one, or an older torch: pip install 'torch>=2.11,<2.16'."
        ) from error
    if version > LAST:
        warnings.warn(
            f"fsdp2 was tested with {_RANGE}, and torch {installed} is installed. All names that it needs are there, "
            "but nothing was tested: compare a few losses with a run on an older torch, or install 'torch<2.16'.",
            stacklevel=2,
        )


check(torch.__version__)
