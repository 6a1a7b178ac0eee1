"""``python -m extras.gpu_check.batch NAME``: programs of `programs/` one after the other, in one process for each rank.

A program has ``run(setting)``, which returns what it measured, and raises, or lists as complaints, what is wrong. One
that raises, dies or hangs ends its processes, as the device and other ranks may be in any state: the next one has new
ones. Where a fault is planted, a complaint is what is expected.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from extras.gpu_check import ranks as processes
from extras.gpu_check.says import COMPLAINTS, Found, say

LONGEST_S = 50.0
"""Of one program."""

RAISED = "raised"
NATIVE = {"FSDP2_COMM": "native"}
"""One rank has NCCL's collectives with itself. (Else it copies.)"""

LEGACY = {"TORCH_DIST_USE_NCCL2": "0"}
"""The backend for NCCL before torch 2.15."""


@dataclass(frozen=True, slots=True)
class Program:
    """``programs/<name>.py``, what it is told, and the fault that is planted."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: NATIVE)
    plants: str = ""

    @property
    def title(self) -> str:
        """With the options, the environment and the fault."""
        told = [f"{key}={value}" for key, value in {**self.options, **self.environment}.items()]
        told += [f"planted: {self.plants}"] * bool(self.plants)
        return f"{self.name} ({', '.join(told)})" if told else self.name


NEEDED = ("GATHERED", "GRADIENTS_READY", "REDUCED")
"""Waits whose removal torch's detector of races must report."""

BOTH_BACKENDS = "cpu:gloo,cuda:nccl"
ASYNCHRONOUS: tuple[Mapping[str, str], ...] = ({}, {"async": "yes"})
RECOVERY = [Program("recovery", {"what": what}) for what in ("out of memory", "exception", "interrupt")]
BATCHES: dict[str, list[Program]] = {
    "training": [
        Program("mixed_dtypes"),
        *(Program("host_waits", {"way": way}) for way in ("plain", "unused", "offload", "pool")),
        Program("checkpointed"),
        Program("backend"),
        *(Program("groups", {"backend": each, **way}) for each in ("nccl", BOTH_BACKENDS) for way in ASYNCHRONOUS),
    ],
    "races": [Program("sanitized"), *(Program("sanitized", plants=f"drops {why}") for why in NEEDED)],
    "graphs": [Program("replayed"), Program("graphed"), Program("graphed", environment={})],
    "failures": RECOVERY,
    "alone": [Program("kernels"), *(Program("memory", {"pool": pool}) for pool in ("off", "on")), Program("host_time")],
    "memory": [Program("memory", {"pool": pool}) for pool in ("off", "on")],
    "shards": [Program("reduce_overhead")],
    "between": [
        *(
            Program("groups", {**backend, **binds, **way}, environment={})
            for way in ASYNCHRONOUS
            for binds in ({}, {"binds": "yes"})
            for backend in ({}, {"backend": "nccl"}, {"backend": BOTH_BACKENDS})
        ),
        *RECOVERY,
        Program("checkpointed"),
        *(Program("own_memory", {"of": of}) for of in ("group", "symmetric")),
        *(Program("backend", environment=environment) for environment in ({}, LEGACY)),
        Program("replayed"),
    ],
    "links": [*(Program("kernels", environment=environment) for environment in ({}, LEGACY)), Program("alignment")],
}


def found_by(program: Program, device: str, rank: int, ranks: int, store: Path) -> Found:
    """What it measures on this rank, with complaints; an exception is one."""
    from extras.gpu_check.faults import planted
    from extras.gpu_check.setting import Setting

    before = dict(os.environ)
    os.environ.update(program.environment)
    setting = Setting(device, rank, ranks, str(store), program.options)
    module = importlib.import_module(f"extras.gpu_check.programs.{program.name}")
    try:
        with planted(program.plants):
            return {COMPLAINTS: [], **module.run(setting)}
    except Exception as failure:
        traceback.print_exc()
        return {COMPLAINTS: [f"{type(failure).__name__}: {failure}"[:2000]], RAISED: True}
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank(rank: int, programs: Sequence[Program], device: str, ranks: int, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for index, program in enumerate(programs):
        found = found_by(program, device, rank, ranks, folder / f"store{index}")
        beside = folder / f"{index}.{rank}.new"
        beside.write_text(json.dumps(found))
        beside.rename(_file(folder, index, rank))
        if RAISED in found:
            break
        if device == "cuda":
            torch.cuda.empty_cache()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an exit may wait for what other ranks will not do


def _file(folder: Path, index: int, rank: int) -> Path:
    return folder / f"{index}.{rank}.json"


def _collected(folder: Path, index: int, running: Sequence[BaseProcess], limit_s: float) -> list[Found | None]:
    """What each rank left of program ``index``; None of a rank that died, or has not ended in time."""
    end = time.monotonic() + limit_s
    files = [_file(folder, index, rank) for rank in range(len(running))]
    while not all(file.exists() for file in files) and time.monotonic() < end:
        alone = any(not process.is_alive() for process in running)
        if alone:  # the others cannot go on
            end = min(end, time.monotonic() + processes.SECONDS_TO_END * (len(running) > 1))
        time.sleep(0.02)
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def judged(program: Program, found: Sequence[Found | None]) -> Found:
    """What the first rank found, with the complaints of all; the fault that was planted is to be complained of."""
    lost = [rank for rank, each in enumerate(found) if each is None]
    complaints = list(dict.fromkeys(text for each in found if each is not None for text in each[COMPLAINTS]))
    if program.plants:
        wrong = [] if complaints else [f"passed, though a fault was planted: {program.plants}"]
        return {"complained": complaints[:3], COMPLAINTS: wrong}
    if lost and not complaints:
        complaints = [f"ranks {lost} died or hung"]
    return {**(found[0] or {}), COMPLAINTS: complaints}


def run(programs: Sequence[Program], device: str, ranks: int, limit_s: float = LONGEST_S) -> bool:
    """All of them, each said as it ends; whether none was complained of."""
    good, first = True, 0
    while first < len(programs):
        with tempfile.TemporaryDirectory() as folder:
            running = processes.start(_rank, ranks, programs[first:], device, ranks, Path(folder))
            for index, program in enumerate(programs[first:]):
                began = time.monotonic()
                found = _collected(Path(folder), index, running, limit_s)
                result = dict(judged(program, found))
                ended = result.pop(RAISED, False) or any(each is None or RAISED in each for each in found)
                good = good and not result[COMPLAINTS]
                say(program.title, {**result, "seconds": round(time.monotonic() - began, 2)})
                first += 1
                if ended:
                    break
            processes.kill(running)
    return good


def main() -> None:
    """Runs what the command line says; the exit status is 1 if something is complained of."""
    parser = argparse.ArgumentParser(prog="python -m extras.gpu_check.batch", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(BATCHES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    sys.exit(not run(BATCHES[given.name], given.device, given.ranks))


if __name__ == "__main__":
    main()
