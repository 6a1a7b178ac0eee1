"""A pytest plugin that takes one setting's effect away, here and on the ranks: ``-p tests.harness.mutant``.

``FSDP2_MUTANT`` says which: ``FSDPModule.set_custom_all_gather`` and ``share_comm_ctx`` then do nothing; of
``FSDPModule.set_requires_all_reduce(recurse)`` the argument is always True. Each call of the mutant leaves a byte in
the file ``FSDP2_MUTANT_LOG``. Ranks are forked from a server that imports what `pool.PRELOADED` names, so this as well.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import fsdp2
from tests.harness import pool


def mutate(mutant: str, log: Path) -> None:
    """Replace what ``mutant`` names; every call of the replacement is noted in ``log``."""
    name, _, argument = mutant.rstrip(")").partition("(")
    owner_name, _, attribute = name.rpartition(".")
    owner: Any = getattr(fsdp2, owner_name) if owner_name else fsdp2
    original = getattr(owner, attribute)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def mutated(*args: Any, **kwargs: Any) -> Any:
        with log.open("a") as file:
            file.write(".")
        if not argument:
            return None
        bound = signature.bind(*args, **kwargs)
        bound.arguments[argument] = True
        return original(*bound.args, **bound.kwargs)

    setattr(owner, attribute, mutated)


mutate(os.environ["FSDP2_MUTANT"], Path(os.environ["FSDP2_MUTANT_LOG"]))
pool.PRELOADED.append(__name__)
