"""The watchdog's thread: it answers other ranks, asks them when this one waits long, and ends waits that are in vain.

It never touches what the training thread computes with. To end a wait it lets other ranks' threads send the messages
that are waited for, as if their ranks had come to them (`release.py`). So the process group still works after all
ranks have raised.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import fsdp2
from fsdp2 import _torch
from fsdp2.core.places import PLACE, Record, label
from fsdp2.plugs.transports.gloo_p2p import LINES, Exchange, Line
from fsdp2.plugs.watchdog.orders import Comparison, orders_of_live_groups
from fsdp2.plugs.watchdog.release import Releases, first_number, is_live, key_of, live_groups
from fsdp2.plugs.watchdog.signals import was_asked
from fsdp2.plugs.watchdog.states import COLLECTIVE, Begun, LineState, State, WaitingRank
from fsdp2.plugs.watchdog.verdict import Known, Silence, Verdict, judge

LOG = logging.getLogger("fsdp2")

_PREFIX = "fsdp2_watchdog"
_TOLD = 40
"""How many exchanges of each group are told to other ranks."""
_STORE_SECONDS = 10.0
"""The timeout of the store: its answers take less."""
_COMPARE_SECONDS = 1.0
"""How often collectives without a name are compared; less often with many ranks."""
_FAILURES = 5
"""The thread gives up after this many failures in a row."""
_STOPPED_SECONDS = 3.0
"""A process on this host that is stopped this long after it was asked counts as gone."""
_CALL_SECONDS = 2.0
"""A rank that stays in one of torch's collectives this long, and begins no other, counts as waiting."""
_SILENT_SECONDS = 60.0
"""A rank on another host that does not answer this long counts as gone; on this host its process is looked at."""


class Watchdog:
    """Watches this rank as long as the default process group stays the same.

    Args:
        seconds: how long a rank waits before the others are asked.
        before: the watchdog that has watched the same ranks until now.
        dump: called with a line that says where this rank is, if a signal asks for it.
    """

    def __init__(self, seconds: float, before: Watchdog | None, dump: Callable[[str], None]) -> None:
        self.seconds = seconds
        self._dump = dump
        self._world = dist.group.WORLD
        self._rank, self.world_size = dist.get_rank(), dist.get_world_size()
        is_same = before is not None and before._world is self._world
        self._has_own_store: bool = before is not None and is_same and before._has_own_store
        # The program's connection to the store, until the thread has one of its own.
        self._store: Any
        self._prefix: str
        if before is not None and is_same:
            self._store, self._prefix = before._store, before._prefix
        else:
            # An elastic launcher's store outlives a restart, with what ranks have said before it.
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store, self._prefix = _torch.shared_store(f"{_PREFIX}/{start}")
        self._ends = threading.Event()
        self._lock = threading.Lock()  # the training thread, too, may tell others that it has left a step
        self._abandoned = (-1, -1)
        self._main = threading.main_thread().ident
        self._waiting: Any = None
        self._since = self._alarmed = self._asked = 0.0
        self._seen_running: set[int] = set()  # ranks whose processes ran at some time since they were asked
        self._round = 0  # the number of this rank's own question; 0: it has none
        self._told = ""
        self._store.set(f"here/{self._rank}", json.dumps([_host(), os.getpid()]))
        # An alarm is a question to all ranks. A watchdog that starts now does not answer those of before.
        self._answered = self._store.add("alarm", 0)
        self._epoch: int = before._epoch if before is not None and is_same else self._store.add("epoch", 0)
        self._comparison = Comparison(self._store, self._rank)
        self._compared = 0.0
        self._releases: Releases | None = before._releases if before is not None and is_same else None
        self._thread = threading.Thread(target=self._run, name="fsdp2-watchdog", daemon=True)
        self._thread.start()

    def is_for(self, world: dist.ProcessGroup | None) -> bool:
        """Whether it watches the ranks of ``world``, and its thread runs."""
        return world is self._world and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread, and wait until it has ended."""
        self._ends.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread

    def _run(self) -> None:
        period = max(min(0.5, self.seconds / 4), self.world_size / 2000)
        failures = 0
        # A connection is locked while one thread waits for an answer, so this thread needs one of its own.
        if not self._has_own_store:
            try:
                store = _torch.own_store(self._prefix)
            except (RuntimeError, ValueError):  # the process group is gone already
                return
            store.set_timeout(timedelta(seconds=_STORE_SECONDS))
            self._store, self._has_own_store = store, True
            self._comparison = Comparison(store, self._rank)
        while not self._ends.wait(period):
            if not dist.is_initialized() or dist.group.WORLD is not self._world:
                return
            try:
                if was_asked():
                    self._dump(self.state(0).describe())
                with self._lock:
                    self._tick(time.monotonic())
                failures = 0
            except (RuntimeError, ValueError, KeyError) as failure:  # the store's rank is gone, or a group is
                failures += 1
                LOG.debug("fsdp2's watchdog: %r", failure)
                if failures == _FAILURES:
                    return

    def _tick(self, now: float) -> None:
        store = self._store
        waiting = self._waits_for()
        if waiting != self._waiting:
            self._waiting, self._since, self._round, self._told = waiting, now, 0, ""
        if PLACE.tells and self._has_left():
            self._abandon()
        alarm = store.add("alarm", 0)
        if waiting is not None and not PLACE.stopped and now - max(self._since, self._alarmed) >= self.seconds:
            alarm = store.add("alarm", 1)
            self._alarmed = now
            # The first question of this wait: silence is measured from here, although later alarms ask again.
            if not self._round:
                self._asked = now
                self._seen_running.clear()
            self._round = alarm
        if alarm > self._answered:
            store.set(f"state/{self._rank}", self.state(alarm).to_json())
            self._answered = alarm
        if self._round:
            self._look(now)
        if now - self._compared >= max(_COMPARE_SECONDS, self.world_size / 200) and not PLACE.stopped:
            self._compared = now
            self._compare()
        if self._answered:
            self._follow(now)
        if self._releases is not None and not self._releases.go_on(now):
            self._releases = None

    # -- what is told

    def _trains(self) -> int | None:
        """The number of the thread that runs forwards: the main thread, until a forward has run in another one."""
        return self._main if PLACE.thread is None else PLACE.thread

    def _frame(self) -> FrameType | None:
        """The frame that the training thread is in."""
        return sys._current_frames().get(self._trains() or 0)

    def _waits_for(self) -> Any:
        """A value that identifies what this rank waits for, but does not keep it alive: the engine needs the memory."""
        if PLACE.waiting is not None:
            return id(PLACE.waiting), getattr(PLACE.waiting, "number", -1)
        call, group = _call_of(self._frame())
        return (call, group and id(group), *_torch.begun_over_groups().values()) if call else None

    def state(self, round: int) -> State:
        """Describe where this rank is, in answer to question ``round``."""
        frame = self._frame()
        at, (call, group) = _line_of(frame), _call_of(frame)
        seconds = time.monotonic() - self._since if self._waits_for() == self._waiting else 0.0
        waiting = PLACE.waiting
        told = None
        if waiting is not None:
            is_numbered = isinstance(waiting, Exchange) and is_live(waiting.group)
            told = WaitingRank(
                key_of(waiting.group) if is_numbered else "",
                waiting.number if is_numbered else None,
                waiting.label.text,
                waiting.label.bits,
                seconds,
                () if is_numbered else _ranks_of(orders_of_live_groups()),
            )
        elif call and seconds >= min(self.seconds / 2, _CALL_SECONDS):
            ranks = _ranks_of(_torch.begun_over_groups() if group is None else [group])
            bits = label(call, "" if group is None else key_of(group)).bits
            told = WaitingRank(COLLECTIVE, None, call, bits, seconds, ranks)
        lines = {key_of(each): _line_state(each, LINES[each]) for each in live_groups()}
        place = (self._rank, round, PLACE.step, PLACE.phase)
        return State(*place, at, PLACE.failure, told, bool(PLACE.stopped), lines)

    # -- what is asked

    def _look(self, now: float) -> None:
        known = self._known(now)
        state = known[self._rank]
        if not isinstance(state, State) or state.waiting is None:
            return
        verdict = judge(self._rank, known)
        if verdict.raises:
            waits = {rank: each.waiting for rank, each in known.items() if isinstance(each, State)}
            calls = [rank for rank, waiting in waits.items() if waiting is not None and waiting.line == COLLECTIVE]
            self._publish({"text": verdict.text, "gone": verdict.gone, "calls": calls})
            self._round = 0
        elif verdict.complete:
            self._tell(verdict)
            self._round = 0

    def _compare(self) -> None:
        """Compare the collectives that carry no name, and publish a difference as a verdict."""
        found = self._comparison.look(self._epoch)
        if found:
            LOG.error("%s", found)  # also here: a rank may hang on a device, where nothing can raise
            self._publish({"text": found, "gone": [], "calls": [], "ends": True})
            self._answered = self._store.add("alarm", 1)

    def _tell(self, verdict: Verdict) -> None:
        first = verdict.text.splitlines()[0].rpartition(" for ")[0]
        if first != self._told:  # once for each wait, not every few seconds
            self._told = first
            LOG.warning("%s", verdict.text)

    def _known(self, now: float) -> Known:
        known: dict[int, State | Silence] = {self._rank: self.state(self._round)}
        queue: list[int] = [self._rank]
        while queue:
            state = known[queue.pop()]
            if not isinstance(state, State):
                continue
            for other in _concerned(state):
                if other not in known:
                    known[other] = self._answer_of(other, now)
                    queue.append(other)
        return known

    def _answer_of(self, rank: int, now: float) -> State | Silence:
        store, key = self._store, f"state/{rank}"
        if store.check([key]):
            state = State.from_json(store.get(key).decode())
            # An answer to an earlier question may be out of date: that rank may have gone on since.
            if state.round >= self._round:
                return state
        if not store.check([f"here/{rank}"]):
            return Silence.NOT_STARTED
        silent = now - self._asked
        host, pid = json.loads(store.get(f"here/{rank}"))
        if host == _host():
            if not _runs(pid, _GONE):
                return Silence.GONE
            if _runs(pid):  # a profiler or debugger stops a process only for moments
                self._seen_running.add(rank)
        if silent < max(1.0, min(self.seconds, _STOPPED_SECONDS)):
            return Silence.NOT_YET
        if host == _host():
            return Silence.BUSY if rank in self._seen_running else Silence.GONE
        return Silence.GONE if silent > _SILENT_SECONDS else Silence.BUSY

    # -- what follows

    def _publish(self, verdict: dict[str, Any]) -> None:
        """Publish a verdict for all ranks to carry out. If two ranks find one at a time, the first counts."""
        text = json.dumps(verdict)
        if self._store.compare_set(f"verdict/{self._epoch}", "", text).decode() == text:
            self._store.add("epoch", 1)  # ranks that start later begin with this epoch

    def look_for_verdict(self) -> None:
        """After a failed wait, see whether a verdict of another rank has ended it. Called by the training thread."""
        with self._lock:
            self._follow(time.monotonic())

    def _follow(self, now: float) -> None:
        key = f"verdict/{self._epoch}"
        if not PLACE.stopped and self._store.check([key]):
            self._carry_out(json.loads(self._store.get(key)), now)

    def _has_left(self) -> bool:
        """Whether an exception has left the pass that this rank was in."""
        if PLACE.left:
            return True
        step, phase = PLACE.step, PLACE.phase
        if not phase.startswith("backward of "):
            return False
        # In any thread, as a forward may run in another thread than its backward. And several times: threads go on
        # while their frames are read, and a generator's frame that yields then has lost its caller.
        if any(_runs_backward(frame) for _ in range(_LOOKS) for frame in sys._current_frames().values()):
            return False
        return (step, phase) == (PLACE.step, PLACE.phase)  # the backward has not ended meanwhile, and no other begun

    def abandon(self) -> None:
        """Let all ranks leave the step that an exception has left on this one. Called by the training thread.

        Nothing happens if they were told before, or are leaving the step for another reason.
        """
        with self._lock:
            self._abandon()

    def _abandon(self) -> None:
        place = (PLACE.step, PLACE.restarts)
        if PLACE.stopped or place == self._abandoned:
            return
        self._abandoned = place
        text = (
            f"an exception has left step {PLACE.step} on rank {self._rank}, {PLACE.left or PLACE.phase}, and all ranks "
            "leave that step (set_recovery(abort_together=True)). See what that rank said. To go on, catch this, clear "
            "the gradients and run the next batch, on all ranks. (If this rank had ended that step, and its optimizer "
            "has stepped, the ranks' parameters are of different steps: load a checkpoint.)"
        )
        self._publish({"text": text, "gone": [], "calls": []})
        self._answered = self._store.add("alarm", 1)
        self._carry_out(json.loads(self._store.get(f"verdict/{self._epoch}")), time.monotonic())

    def _carry_out(self, verdict: dict[str, Any], now: float) -> None:
        self._epoch += 1
        self._round = 0
        ends = verdict.get("ends", False)
        self._releases = Releases(self._store, self._epoch, self._rank, verdict["gone"], now, ends=ends)
        PLACE.stopped = verdict["text"]
        self._releases.go_on(now)
        call, group = _call_of(self._frame())
        if self._rank in verdict["calls"] and call and PLACE.waiting is None:
            LOG.error("%s\nThis rank is in %s, which is ended.", verdict["text"], call)
            self._releases.to_close = list(_torch.begun_over_groups()) if group is None else [group]
            self._releases.told_first = verdict["calls"]

    def restart(self) -> None:
        """Number exchanges anew, the same way on all ranks. Called by the training thread."""
        for group in live_groups():
            LINES[group].begun = self.first_number
            LINES[group].broken.clear()
        for order in orders_of_live_groups().values():
            order.restart()

    @property
    def first_number(self) -> int:
        """The number of the first exchange over any group since the last verdict."""
        return first_number(self._epoch)

    def gone_among(self, ranks: Iterable[int], *, or_stopped: bool) -> list[int]:
        """The ranks among ``ranks`` whose processes on this host are gone; ``or_stopped``: or stopped."""
        here = [(rank, f"here/{rank}") for rank in ranks if rank != self._rank]
        places = [(rank, *json.loads(self._store.get(key))) for rank, key in here if self._store.check([key])]
        ends = _STOPPED + _GONE if or_stopped else _GONE
        for _ in range(_LOOKS):
            if found := [rank for rank, host, pid in places if host == _host() and not _runs(pid, ends)]:
                return found
            time.sleep(0.1)  # a killed process closes its connections before it has ended
        return []


_LOOKS = 5


def _runs_backward(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _torch.BACKWARD_FUNCTION:
            return True
        frame = frame.f_back
    return False


def _line_state(group: dist.ProcessGroup, line: Line) -> LineState:
    ranks = tuple(dist.get_process_group_ranks(group))
    return LineState(ranks, line.begun, tuple(line.broken), told(line.recent)[-_TOLD:])


def told(recent: Iterable[Record]) -> tuple[Begun, ...]:
    """Copies of records that the training thread appends to, for other threads and ranks."""
    found = list(recent)
    return tuple(Begun(each.number, each.label.text, each.label.bits, each.step, each.phase) for each in found)


def _concerned(state: State) -> Iterable[int]:
    """The ranks that ``state`` may be waiting for."""
    if state.waiting is None:
        return ()
    line = state.lines.get(state.waiting.line)
    return state.waiting.ranks if line is None else line.ranks


def _ranks_of(groups: Iterable[dist.ProcessGroup]) -> tuple[int, ...]:
    """The ranks of all ``groups``, sorted."""
    return tuple(sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)}))


_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_OF_FSDP2 = os.path.dirname(fsdp2.__file__) + os.sep
_LIBRARIES = f"{os.sep}lib{os.sep}python"
_COLLECTIVES = os.path.join(_OF_TORCH, "distributed", "distributed_c10d.py")
_OF_TENSORS = os.path.join(_OF_TORCH, "distributed", "_functional_collectives.py")
_OF_OPERATORS = (_torch.__file__, os.path.join(_OF_FSDP2, "plugs", "parameters", "written_views.py"))
"""Files of ours that run inside of torch's operators on DTensors."""


def _line_of(frame: FrameType | None) -> str:
    """The innermost line of the program: neither torch's, nor ours, nor another library's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OF_TORCH, _OF_FSDP2, "<")) and _LIBRARIES not in file:
            return f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


_NAMES = ("barrier", "monitored", "all_", "reduce", "broadcast", "gather", "scatter")
"""How names of collectives begin. (A rank may leave some before others come, such as a broadcast, but then at once.)"""


def _call_of(frame: FrameType | None) -> tuple[str, dist.ProcessGroup | None]:
    """The name of torch's collective that runs, as the program has called it, and its group; None in a DTensor's."""
    call, group, of_tensors = "", None, False
    while frame is not None and frame.f_code.co_filename.startswith((_OF_TORCH, "<", *_OF_OPERATORS)):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        of_tensors = of_tensors or (file == _OF_TENSORS and name == "wait_tensor")
        if file == _COLLECTIVES and name.startswith(_NAMES):
            given = frame.f_locals.get("group")
            call, group = f"torch.distributed.{name}()", dist.group.WORLD if given is None else given
        elif of_tensors and file.startswith(_OF_TORCH) and not name.startswith(("_", "wrap")):
            call = f"torch's {name}()"
        frame = frame.f_back
    is_counted = group is None or group in _torch.begun_over_groups()  # without a count, two calls look like one
    return (call, group) if is_counted else ("", None)


def _host() -> str:
    """A name for where process numbers are unique: host, its last boot, and container."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # these files exist on Linux only
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


_STOPPED, _GONE = "Tt", "ZX"
"""Process states: stopped by a signal or a debugger, which may let it go on; and ended."""


def _runs(pid: int, ends: str = _STOPPED + _GONE) -> bool:
    """Whether process ``pid`` exists on this host, and is in none of the states ``ends``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ends
    except OSError:
        if os.path.isdir("/proc/self"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
