"""Programs of extras/gpu_check one after the other in ONE process: an import and a CUDA context once, not 2 x 25 times.

    PYTHONPATH=. python3 batch.py --device cuda training      (from the repository's root; names of BATCHES)

One JSON line for each as it ends, with its complaints; a program that raises does not end the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from extras.gpu_check.faults import drops
from extras.gpu_check.program import found_by
from extras.gpu_check.runs import COMPLAINTS
from extras.gpu_check.setting import Setting
from fsdp2.core.streams import Wait

NATIVE = {"FSDP2_COMM": "native"}
Job = tuple[str, dict[str, str], dict[str, str], str]


def jobs(*programs: Any, env: dict[str, str] = NATIVE, plants: str = "") -> list[Job]:
    return [(each, {}, env, plants) if isinstance(each, str) else (each[0], each[1], env, plants) for each in programs]


NEEDED = (Wait.GATHERED, Wait.GRADIENTS_READY, Wait.REDUCED)
BATCHES: dict[str, list[Job]] = {
    "smoke": jobs(("beside_torch", {})),
    "training": jobs(
        "mixed_dtypes",
        *(
            ("beside_torch", each)
            for each in (
                {},
                {"dtype": "bf16"},
                {"dtype": "fp16"},
                {"factor": "3"},
                {"accumulates": "with sync"},
                {"accumulates": "without sync"},
            )
        ),
        *(("host_waits", {"way": way}) for way in ("plain", "unused", "offload")),
        "checkpointed",
        "backend",
        *(
            ("groups", {"backend": backend, **more})
            for backend in ("nccl", "cpu:gloo,cuda:nccl")
            for more in ({}, {"async": "yes"})
        ),
    ),
    "graphs": jobs("replayed", "graphed") + jobs("graphed", env={}),
    "races": jobs("sanitized") + [job for why in NEEDED for job in jobs("sanitized", plants=drops(why))],
    "jitter": jobs(("jittered", {"seeds": "25"}))
    + [job for why in NEEDED for job in jobs(("jittered", {"seeds": "6"}), plants=drops(why))],
    "failures": jobs(*(("recovery", {"what": what}) for what in ("out of memory", "exception", "interrupt"))),
    "alone": jobs("kernels", ("memory", {"pool": "off"}), "host_time"),
}


def run(job: Job, device: str) -> None:
    name, options, environment, plants = job
    before = dict(os.environ)
    os.environ.update(environment)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = dict(found_by(name, Setting(device, 0, 1, str(Path(folder) / "store"), options), plants))
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    complaints = found.pop(COMPLAINTS)
    good = bool(complaints) if plants else not complaints
    said = {"program": name, "options": options, "env": environment, "plants": plants, "good": good}
    print(
        json.dumps(
            {**said, "seconds": round(time.perf_counter() - began, 2), "complaints": complaints, "found": found}
        ),
        flush=True,
    )
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=list(BATCHES))
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    for each in given.names:
        for job in BATCHES[each]:
            run(job, given.device)
