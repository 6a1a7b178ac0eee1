"""One run on a GPU: jobs with a limit each. Those that only ask right or wrong run beside each other, times alone.

What ended is written at once. A job that hangs is killed with all that it started, and nothing outlives this.

    python3 HERE/call.py first --seconds 330 --out $OUT        (from the repository's root)
    python3 HERE/call.py second --seconds 370 --out $OUT
    python3 HERE/call.py first --only fake,training --device cpu --seconds 60 --out /tmp/out     the rehearsal
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).resolve().parent, Path.cwd()
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "--maxfail=12"]
RANKS, BATCH, LLAMA = ([PYTHON, str(HERE / name)] for name in ("ranks_on_one_gpu.py", "batch.py", "llama_step.py"))
ALONE, BESIDE = "alone", "beside"
CUDA, COMPILE = "tests/gpu/test_cuda.py", "tests/gpu/test_compile_cuda.py"

# name -> (way, seconds at most, command). In the order of what they are worth: those at the end may find no time.
FIRST: dict[str, tuple[str, int, list[str]]] = {
    "smoke": (ALONE, 75, [*BATCH, "smoke"]),
    "fake": (BESIDE, 150, [*RANKS, "fake"]),
    "native": (BESIDE, 170, [*PYTEST, CUDA, "-k", "native and not depends"]),
    "training": (BESIDE, 120, [*BATCH, "training"]),
    "races": (BESIDE, 90, [*BATCH, "races"]),
    "jitter": (BESIDE, 150, [*BATCH, "jitter"]),
    "gloo2": (BESIDE, 120, [*RANKS, "gloo", "--ranks", "2"]),
    "graphs": (BESIDE, 60, [*BATCH, "graphs"]),
    "failures": (BESIDE, 60, [*BATCH, "failures"]),
    "alone-tests": (BESIDE, 150, [*PYTEST, CUDA, "tests/gpu/test_timeline_cuda.py", "-k", "alone and not depends"]),
    "compiled": (BESIDE, 90, [*PYTEST, COMPILE, "-k", "alone and (transformer or blocks or optimizer)"]),
    "gloo4": (BESIDE, 90, [*RANKS, "gloo", "--ranks", "4", "--cases", "fp32,bf16/fp32,hsdp bf16/fp32,reshard to 2"]),
    "doctor": (BESIDE, 60, [PYTHON, "-m", "fsdp2", "doctor", "--gpu"]),
    "measured": (ALONE, 80, [*BATCH, "alone"]),
    "8B of 8": (
        ALONE,
        130,
        [
            *LLAMA,
            "--shape",
            "8B",
            "--world",
            "8",
            "--seq",
            "8192",
            "--ac",
            "--steps",
            "4",
            "--json",
            "{out}/bench.jsonl",
        ],
    ),
}
W1 = ["--world", "1", "--json", "{out}/bench.jsonl"]
SECOND: dict[str, tuple[str, int, list[str]]] = {
    "1B alone": (
        ALONE,
        100,
        [*LLAMA, "--shape", "1B", *W1, "--batch", "4", "--impl", "unsharded,torch,fsdp2,fsdp2-native,torch-again"],
    ),
    "8B wire": (
        ALONE,
        130,
        [
            *LLAMA,
            "--shape",
            "8B",
            "--world",
            "8",
            "--seq",
            "8192",
            "--ac",
            "--gbps",
            "150",
            "--json",
            "{out}/bench.jsonl",
        ],
    ),
    "1B traced": (
        ALONE,
        60,
        [
            *LLAMA,
            "--shape",
            "1B",
            "--world",
            "8",
            "--seq",
            "4096",
            "--batch",
            "2",
            "--impl",
            "torch,fsdp2",
            "--trace",
            "{out}",
            "--json",
            "{out}/bench.jsonl",
        ],
    ),
    "1B host-bound": (
        ALONE,
        60,
        [*LLAMA, "--shape", "1B", "--world", "8", "--seq", "64", "--steps", "20", "--json", "{out}/bench.jsonl"],
    ),
    "1B offloaded": (
        ALONE,
        120,
        [*LLAMA, "--shape", "1B", *W1, "--batch", "4", "--offload", "--impl", "torch,fsdp2", "--steps", "4"],
    ),
    "1B compiled": (
        ALONE,
        150,
        [
            *LLAMA,
            "--shape",
            "1B",
            *W1,
            "--batch",
            "4",
            "--compile",
            "--impl",
            "torch,fsdp2,fsdp2-hooks",
            "--limit",
            "60",
        ],
    ),
    "memcheck": (
        ALONE,
        100,
        [
            "compute-sanitizer",
            "--tool",
            "memcheck",
            "--target-processes",
            "all",
            *PYTEST,
            CUDA,
            "-k",
            "native-transformer and reference",
        ],
    ),
    "compiled": (BESIDE, 200, [*PYTEST, COMPILE, "-k", "alone and (mlp or tied or conv or frozen or partly)"]),
    "native depends": (BESIDE, 120, [*PYTEST, CUDA, "-k", "native and depends"]),
}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "4",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
    "PYTHONWARNINGS": "",
}
OWN = {"1B offloaded": {"OMP_NUM_THREADS": "16"}, "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
LANES = 6


class Job:
    def __init__(self, name: str, limit: float, command: list[str], given: Any) -> None:
        self.name, self.limit, self.began = name, limit, time.monotonic()
        self.log = given.out / "logs" / f"{name.replace(' ', '_').replace(',', '')}.txt"
        command = [each.format(out=given.out) for each in command]
        if given.device == "cpu" and command[1].startswith(str(HERE)):
            command += ["--device", "cpu"]
        self.file = open(self.log, "w")  # noqa: SIM115 (until it ends)
        environment = {**os.environ, **ENVIRONMENT, **OWN.get(name, {})}
        self.process = subprocess.Popen(
            command, stdout=self.file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        self.status: int | str | None = None

    def poll(self, deadline: float) -> bool:
        code, now = self.process.poll(), time.monotonic()
        if code is None and now - self.began < self.limit and now < deadline:
            return False
        self.status = code if code is not None else "killed at its limit"
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.file.close()
        self.seconds = round(now - self.began, 1)
        return True

    def said(self) -> dict[str, Any]:
        text = self.log.read_text(errors="replace")
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        bad = [
            each
            for each in lines
            if each.get("good") is False
            or "error" in each
            or each.get("of_torch", 0) > 2e-2
            or each.get("jittered", 0) > 0
        ]
        tests = re.findall(r"^(?:FAILED|ERROR) (.*)$", text, re.M)
        counts = re.findall(r"^.*\d+ (?:passed|failed|error).*$", text, re.M)
        return {
            "status": self.status,
            "seconds": self.seconds,
            "lines": lines,
            "bad": bad,
            "tests": tests,
            "counts": counts[-1:],
            "tail": text[-3000:],
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=["first", "second"])
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    begin = time.monotonic()
    deadline = begin + given.seconds - 8
    (given.out / "logs").mkdir(parents=True, exist_ok=True)
    table = FIRST if given.which == "first" else SECOND
    waiting = [(name, *job) for name, job in table.items() if not given.only or name in given.only]
    running: list[Job] = []
    found: dict[str, Any] = {}

    def write() -> None:
        (given.out / "results.json").write_text(json.dumps(found, indent=1))

    while waiting or running:
        for job in [each for each in running if each.poll(deadline)]:
            running.remove(job)
            found[job.name] = job.said()
            each = found[job.name]
            print(
                f"{time.monotonic() - begin:5.0f} s  {job.name}: {each['status']}, {each['seconds']} s, "
                f"{len(each['lines'])} lines, {len(each['bad'])} bad, {each['counts']} {each['tests'][:4]}",
                flush=True,
            )
            write()
        now = time.monotonic()
        while waiting:
            name, way, limit, command = waiting[0]
            is_alone_now = any(each.name in table and table[each.name][0] == ALONE for each in running)
            if (way == ALONE and running) or (way == BESIDE and (is_alone_now or len(running) >= LANES)):
                break
            waiting.pop(0)
            if now + 15 > deadline:
                found[name] = {
                    "status": "no time",
                    "seconds": 0,
                    "lines": [],
                    "bad": [],
                    "tests": [],
                    "counts": [],
                    "tail": "",
                }
                continue
            running.append(Job(name, min(limit, deadline - now), command, given))
        time.sleep(0.1)
    write()
    with open(given.out / "logs.txt", "w") as file:  # one file: eight come back
        for path in sorted((given.out / "logs").glob("*.txt")):
            file.write(f"===== {path.stem}\n{path.read_text(errors='replace')[-400_000:]}\n")
    import shutil

    shutil.rmtree(given.out / "logs")
    print("===== bad")
    for name, each in found.items():
        if each["bad"] or each["tests"] or each["status"] not in (0, "no time"):
            print(
                name,
                each["status"],
                json.dumps(each["bad"])[:700],
                each["tests"][:6],
                "" if each["bad"] or each["tests"] else each["tail"][-500:],
            )
    for name, each in found.items():
        if "# " in each["tail"]:
            print("=====", name, each["tail"][each["tail"].rfind("\n# ") :][:1500])


if __name__ == "__main__":
    main()
