"""Words shared by every layer: errors, and the phases of parameters.

Owns no tensor and knows nothing of groups; imports nothing from the package.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager


class FSDPError(Exception):
    """Base of every error that fsdp2 raises for a mistake its user can correct.

    The concrete classes also derive from the built-in exception that fits (``ValueError``, ``TypeError``,
    ``RuntimeError``), so existing ``except`` clauses keep working.
    """


class FSDPValueError(FSDPError, ValueError):
    """An argument, module or parameter has a value that cannot be sharded."""


class FSDPTypeError(FSDPError, TypeError):
    """An argument has the wrong type."""


class FSDPRuntimeError(FSDPError, RuntimeError):
    """The program did something at a time, or in an order, at which it cannot work."""


class FSDPNotImplementedError(FSDPError, NotImplementedError):
    """A combination that this version does not support; the message names what does work."""


@contextmanager
def named(what: str) -> Iterator[None]:
    """What is raised inside, by a function of the user's, says below its message which function that was."""
    try:
        yield
    except BaseException as error:
        vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), f"(raised by {what})"]  # Python 3.11 shows it
        raise


class ParamPhase(enum.Enum):
    """Where the parameters of a group stand.

    ==================== ============================ =====================================
    phase                registered in the modules    unsharded buffer
    ==================== ============================ =====================================
    SHARDED              sharded parameters           free [1]_
    UNSHARDING           sharded (or post-forward)    being gathered into [2]_
    UNSHARDED            unsharded parameters         holds the full parameters
    SHARDED_POST_FORWARD post-forward parameters      free [1]_; larger parts rest on fewer ranks
    ==================== ============================ =====================================

    .. [1] Unless the user keeps its memory, or a recorded graph may still read it (`FSDPParamGroup.rest_in_place`).
    .. [2] If everything travels packed it gets its memory only when the staging buffer is copied out.
    """

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a Python function

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    SHARDED_POST_FORWARD = "sharded post forward"


# The only transitions there are; `FSDPParamGroup` asserts each one against this table.
PARAM_TRANSITIONS = frozenset(
    {
        (ParamPhase.SHARDED, ParamPhase.UNSHARDING),
        (ParamPhase.UNSHARDING, ParamPhase.UNSHARDED),
        (ParamPhase.SHARDED, ParamPhase.UNSHARDED),  # it rested in place
        (ParamPhase.UNSHARDED, ParamPhase.SHARDED),
        (ParamPhase.UNSHARDING, ParamPhase.SHARDED),  # a prefetch that nobody used
        (ParamPhase.UNSHARDED, ParamPhase.SHARDED_POST_FORWARD),
        (ParamPhase.SHARDED_POST_FORWARD, ParamPhase.UNSHARDING),
        (ParamPhase.SHARDED_POST_FORWARD, ParamPhase.SHARDED),
    }
)
