"""The loggers of the words in ``FSDP2_LOG``; `fsdp2.tools.log` tells them what the engine does."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from fsdp2.errors import FSDPValueError

VARIABLE = "FSDP2_LOG"
WORDS = ("plan", "order", "comm", "memory")
NAME = "fsdp2"


def words_asked() -> tuple[str, ...]:
    """The words in ``FSDP2_LOG``, in the order of `WORDS`.

    Raises:
        FSDPValueError: it has an unknown word.
    """
    asked = [each.strip() for each in os.environ.get(VARIABLE, "").split(",")]
    for word in asked:
        if word and word not in WORDS:
            raise FSDPValueError(
                f"{VARIABLE} takes words out of {', '.join(WORDS)}, with commas between them, got '{word}'."
            )
    return tuple(word for word in WORDS if word in asked)


def logger_of(word: str) -> logging.Logger:
    """The logger ``fsdp2.<word>``."""
    return logging.getLogger(f"{NAME}.{word}")


class _OfRank(logging.Formatter):
    """A formatter that puts the rank in front of each line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format ``record`` as ``[rank 1] fsdp2.comm: ...``."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return "\n".join(f"[rank {rank}] {line}" for line in super().format(record).splitlines())


_HANDLERS: list[logging.Handler] = []


def prepare_logger() -> None:
    """Let the loggers of the words in ``FSDP2_LOG`` show messages, on stderr if the program has no handler.

    Raises:
        FSDPValueError: ``FSDP2_LOG`` has an unknown word.
    """
    words = words_asked()
    for word in words:
        logger_of(word).setLevel(logging.INFO)
    parent = logging.getLogger(NAME)
    if words and not parent.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(_OfRank("%(name)s: %(message)s"))
        parent.addHandler(handler)
        _HANDLERS.append(handler)


def forget_logger() -> None:
    """Undo `prepare_logger`."""
    for word in WORDS:
        logger_of(word).setLevel(logging.NOTSET)
    while _HANDLERS:
        logging.getLogger(NAME).removeHandler(_HANDLERS.pop())
