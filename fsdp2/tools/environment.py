"""The ``FSDP2_*`` variables of the environment: their names, values and meanings. Other files read them.

Importing `fsdp2` warns of variables with this prefix that nothing reads, as they are misspelled.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdp2.arguments import nearest

PREFIX = "FSDP2_"
OF_TESTS = tuple(f"{PREFIX}{word}" for word in ("TEST_", "DRAWN", "MIXED", "MUTANT", "PARITY"))
"""How variables begin that the test suite of the repository reads."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable.

    Attributes:
        name: its name.
        takes: its values, in words.
        means: what it does, in a sentence.
        accepts: whether a value is one of these.
    """

    name: str
    takes: str
    means: str
    accepts: Callable[[str], bool]


_LOG_WORDS = frozenset({"plan", "order", "comm", "memory"})


def _are_log_words(value: str) -> bool:
    return all(word.strip() in {*_LOG_WORDS, ""} for word in value.split(","))


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "FSDP2_COMPAT",
        "1, keep-fsdp1, or 0",
        "Programs that were written for torch's fully_shard and FullyShardedDataParallel run on fsdp2; with keep-fsdp1 "
        "FullyShardedDataParallel stays torch's. `fsdp2 run` sets it for the processes that a program starts.",
        lambda value: value in ("", "0", "1", "keep-fsdp1"),
    ),
    Variable(
        "FSDP2_COMM",
        "native",
        "Ranks exchange by torch.distributed's own collectives on every backend, also in a world of one rank. Every "
        "rank must set the same.",
        lambda value: value in ("", "native"),
    ),
    Variable(
        "FSDP2_LOG",
        "plan, order, comm, memory, with commas between them",
        "The logger 'fsdp2' says what is sharded how at the first step (plan), in which order groups are gathered "
        "(order), every exchange (comm), and the memory of each step (memory).",
        _are_log_words,
    ),
)


def of_ours(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with our prefix that are set, without those of the tests."""
    found = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(found.items())
        if name.startswith(PREFIX) and not name.startswith(OF_TESTS)
    }


def unknown(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """For each variable with our prefix that fsdp2 does not read, a sentence about it, by its name."""
    known = [variable.name for variable in VARIABLES]
    return {
        name: f"{name} is set, and fsdp2 reads no variable of this name.{nearest(name, known)} There are: "
        f"{', '.join(known)}."
        for name in of_ours(environment)
        if name not in known
    }


def warn_of_unknown() -> None:
    """Warn on the first rank of variables that nothing reads. `import fsdp2` calls it."""
    if os.environ.get("RANK", "0") == "0":
        for sentence in unknown().values():
            warnings.warn(sentence, stacklevel=3)
