"""`set_watchdog` and `flight_record`, and the functions that start and stop the thread."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from fsdp2 import _torch
from fsdp2._remedies import FEWER
from fsdp2.arguments import at_least, checked
from fsdp2.core.failure import ABANDON, Abandon
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.places import FAILED, PLACE, RECORDED, RESTARTED
from fsdp2.core.transport import among, is_alone
from fsdp2.errors import FSDPNotImplementedError
from fsdp2.plugs.transports import gloo_p2p
from fsdp2.plugs.transports.gloo_p2p import LINES, Exchange, Lost
from fsdp2.plugs.watchdog.orders import orders_of_live_groups
from fsdp2.plugs.watchdog.release import key_of, live_groups
from fsdp2.plugs.watchdog.signals import listen
from fsdp2.plugs.watchdog.states import Begun
from fsdp2.plugs.watchdog.thread import LOG, Watchdog, told


class _Chosen:
    seconds = 10.0
    watchdog: Watchdog | None = None


_CHOSEN = _Chosen()


@checked(seconds=at_least(0))
def set_watchdog(seconds: float = 10.0, *, dump_signal: int | None = None) -> None:
    """Let ranks that wait for others longer than ``seconds`` find out why. 0 turns that off: they wait as torch's do.

    A thread of each rank, which the first `fully_shard` over several ranks starts, answers through the process group's
    store. If the ranks can never meet (they run different modules, or in another order; a process is gone, or stopped),
    all of them raise the same FSDPRuntimeError. It names the ranks, the modules and the lines of the program that they
    are in. (A rank that waits in a collective of torch's logs it, and gets its backend's error.) If a rank is only
    slow, in the program's own code, the logger ``fsdp2`` warns once, and nothing is raised however long it takes.

    Ranks may set different values; only those that wait ask. Where ranks exchange by NCCL, or more than 64 by gloo,
    collectives are torch's own and carry no name, so the threads compare once a second what ranks have begun. If that
    differs, all ranks raise at their next exchange. If one hangs on a device, the logger tells of it, and torch's own
    timeout ends it.

    Args:
        seconds: how long a rank waits before it asks the others.
        dump_signal: the number of a signal (``signal.SIGUSR2``). When it comes, this rank prints where it is and its
            `flight_record` to stderr, also while it waits for others. None: no signal.

    Raises:
        FSDPTypeError, FSDPValueError: ``seconds`` is not a number >= 0, or there is no such signal.
        FSDPRuntimeError: a signal was given outside of the main thread, or another library listens to signals.
    """
    listen(dump_signal)
    _CHOSEN.seconds = float(seconds)
    if _CHOSEN.watchdog is not None:
        stop()
        start()


def start() -> None:
    """Start the thread, unless it runs already, or there is nothing to watch."""
    if not _CHOSEN.seconds or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    world = dist.group.WORLD
    if _CHOSEN.watchdog is not None and _CHOSEN.watchdog.is_for(world):
        return
    names = _torch.backend_names(world)
    if names and "fake" not in names:
        _CHOSEN.watchdog = Watchdog(_CHOSEN.seconds, _CHOSEN.watchdog, _dump)
        gloo_p2p.LOST = _OfWatchdog()


def stop() -> None:
    """Stop the thread, if there is one."""
    if _CHOSEN.watchdog is not None:
        _CHOSEN.watchdog.stop()


def _end() -> None:
    watchdog = _CHOSEN.watchdog
    if watchdog is None:
        return
    watchdog.stop()
    if isinstance(getattr(sys, "last_value", None), RuntimeError):  # a backend's error names addresses, not ranks
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store is gone as well
            if gone := watchdog.gone_among(range(watchdog.world_size), or_stopped=False):
                LOG.error("This error may come of it that the processes of the ranks %s are gone.", gone)


atexit.register(_end)  # a thread that uses the store while Python shuts down would end the process


def _refuse_if_alone(groups: Iterable[FSDPParamGroup]) -> None:
    # Others cannot end a rank's wait in a collective that carries no name (NCCL's, or gloo's of more than 64 ranks).
    over = {
        (ranks, each.mesh.device) for each in groups for ranks in (each.mesh.shard_group, each.mesh.replicate_group)
    }
    has_names = "gloo" in _torch.backend_names(dist.group.WORLD) and not any(
        among(ranks, device).is_ordered for ranks, device in over if ranks is not None and not is_alone(ranks)
    )
    if _CHOSEN.watchdog is None or not has_names or not _CHOSEN.watchdog.is_for(dist.group.WORLD):
        raise FSDPNotImplementedError(
            "set_recovery(abort_together=True) needs the watchdog, by which ranks tell each other: it runs where "
            "ranks exchange by gloo, 64 at most, unless set_watchdog(0) was called. Elsewhere let ranks agree, by an "
            "all-reduce of a flag before each backward."
        )


def _tell() -> None:
    """Tell the other ranks that this one leaves its step, unless they know. This rank does not raise."""
    if _CHOSEN.watchdog is not None:
        _CHOSEN.watchdog.abandon()
        PLACE.restart()


ABANDON.fill(Abandon(_refuse_if_alone, _tell))


def _restart() -> None:
    if _CHOSEN.watchdog is not None:
        _CHOSEN.watchdog.restart()


def _ask_why() -> None:
    if _CHOSEN.watchdog is not None:
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store is gone as well
            _CHOSEN.watchdog.look_for_verdict()


RESTARTED.append(_restart)
FAILED.append(_ask_why)


def gone_among(ranks: Iterable[int]) -> list[int]:
    """The ranks among ``ranks`` whose processes on this host are gone, not only stopped; [] without a watchdog."""
    return [] if _CHOSEN.watchdog is None else _CHOSEN.watchdog.gone_among(ranks, or_stopped=False)


class _OfWatchdog(Lost):
    """Describes a message that failed with what the watchdog knows of lost ranks."""

    def text(self, exchange: Exchange, failure: Exception) -> str:
        """The text of the error. It names the rank whose process is gone, which need not be the one waited for."""
        found = super().text(exchange, failure)
        watchdog = _CHOSEN.watchdog
        if watchdog is None:
            return found
        try:
            gone = watchdog.gone_among(dist.get_process_group_ranks(exchange.group), or_stopped=True)
        except RuntimeError:  # the rank that keeps the store is gone as well
            return found
        if not gone:
            return found
        names = " and ".join(map(str, gone))
        return (
            f"the process of rank {names} is gone, or stopped: {exchange.label.text} failed, {PLACE.phase}. See what "
            f"that rank said. {FEWER} ({failure})"
        )

    def first_number(self, group: dist.ProcessGroup) -> int:
        """The first number since the last verdict."""
        return 0 if _CHOSEN.watchdog is None else _CHOSEN.watchdog.first_number


def _dump(place: str) -> None:
    print(f"fsdp2: asked by a signal. {place}\n{flight_record()}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The last exchanges of this rank, by process group. ``str()`` is a table, ``to_json()`` a text for programs.

    Attributes:
        rank: the rank of this process; None without a process group.
        groups: the exchanges over each group: number, label, step and pass. Keys name the ranks.
    """

    rank: int | None
    groups: dict[str, tuple[Begun, ...]]

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: step {PLACE.step}, {PLACE.phase}"]
        for key, begun in self.groups.items():
            ranks = key.rpartition(":")[2]
            lines.append(f"  over ranks {ranks}:")
            lines += [f"    {each.number:>6}  step {each.step:<5} {each.phase:<32} {each.label}" for each in begun]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of this as JSON."""
        return json.dumps(asdict(self))


@checked()
def flight_record() -> FlightRecord:
    """The last 200 exchanges of this rank, over each process group. No communication."""
    groups = {key_of(group): told(LINES[group].recent) for group in live_groups()}
    for group, order in orders_of_live_groups().items():
        groups[key_of(group)] = (*groups.get(key_of(group), ()), *told(list(order.recent)[-RECORDED:]))
    return FlightRecord(dist.get_rank() if dist.is_initialized() else None, groups)
