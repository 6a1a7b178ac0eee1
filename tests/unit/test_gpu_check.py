"""`python -m extras.gpu_check` without a GPU: its programs pass on CPU, complain where something is wrong, and end."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from extras.gpu_check import clock
from extras.gpu_check.batch import BATCHES, RAISED, Program, found_by, judged
from extras.gpu_check.beside_torch import difference
from extras.gpu_check.clock import run_all
from extras.gpu_check.faults import FAULTS
from extras.gpu_check.jobs import BATCH, BETWEEN, JOBS, RIGHT, TESTS, TIMES, Job, Place, chosen
from extras.gpu_check.machine import ROOT, Machine
from extras.gpu_check.programs import alignment, backend, host_time, kernels, memory, reduce_overhead
from extras.gpu_check.report import JSON, MARKDOWN, Cut, Report, Verdict, judge, skipped
from extras.gpu_check.says import COMPLAINTS, SKIPPED, WHAT, Found, said_in
from extras.gpu_check.trace import kernels_in, ranges_in
from tests.harness import others_full
from tests.unit.helpers import for_each

CPU, GPU = Place("cpu", 2), Place("cuda", 1)
PROGRAMS = {each.title: each for batch in BATCHES.values() for each in batch if not each.plants}

PLANTS = [  # a program, a fault, and what is then said
    *((each, each.plants, "races") for each in BATCHES["races"] if each.plants),
    (Program("mixed_dtypes"), "copies that cast write wrong values", "differs from the original"),
    (Program("host_waits", {"way": "plain"}), "a reduction asks the device for a number", "the host waits"),
    (Program("host_waits", {"way": "unused"}), "a reduction asks the device for a number", "the host waits"),
    (Program("graphed"), "a graph reads the inputs of its recording", "the loss of step"),
    (Program("recovery", {"what": "exception"}), "a forward does not start clean", ""),
    (Program("checkpointed"), "nothing is loaded", "differs when it is loaded"),
]
OLD_NAME, WRONG_REDUCTION = "NCCL is known by its old name only", "a reduction adds one to what it reduces"
"""Which take ranks."""


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def found_on_one_rank(program: Program, folder: Path, fault: str = "") -> Found:
    """What ``program`` finds in this process, on the CPU."""
    found = found_by(dataclasses.replace(program, plants=fault), "cpu", 0, 1, folder / "store")
    if dist.is_initialized():  # it failed inside
        dist.destroy_process_group()
    if "pool" in found.get(SKIPPED, ""):
        pytest.skip(f"this is torch {torch.__version__}, and {found[SKIPPED]}")
    return found


def machine(**differing: Any) -> Machine:
    here = {"gpus": 1, "gpu_names": ("GPU",), "gpu_gib": 80.0, "is_exclusive": False, "torch": "2.13.0", "cuda": "13.0"}
    here |= {"nccl": "2.28", "driver": "580", "commit": "abc", "python": "3.11", "cores": 16, "programs": ("pytest",)}
    return Machine(**{**here, **differing})  # type: ignore[arg-type]


# -- programs


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=title, marks=pytest.mark.full if each.name == "reduce_overhead" else ())  # 4 s
        for title, each in PROGRAMS.items()
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of what it looks at
def test_programs_have_no_complaint_on_cpu(program: Program, tmp_path: Path) -> None:
    assert found_on_one_rank(program, tmp_path)[COMPLAINTS] == []


@pytest.mark.parametrize("program, fault, says", PLANTS, ids=[f"{each.name}-{fault}" for each, fault, _ in PLANTS])
def test_a_planted_fault_is_found(program: Program, fault: str, says: str, tmp_path: Path) -> None:
    wrong = found_on_one_rank(program, tmp_path, fault)
    assert any(says in complaint for complaint in wrong[COMPLAINTS]), wrong


def test_every_fault_is_planted() -> None:
    planted = {fault for _, fault, _ in PLANTS} | {OLD_NAME, WRONG_REDUCTION}
    assert {name for name in FAULTS if not name.startswith("drops ")} <= planted <= set(FAULTS)


@pytest.mark.full  # 20 s: processes of ranks
def test_planted_faults_are_found_on_ranks() -> None:
    programs = [dataclasses.replace(Program("backend"), plants=OLD_NAME)]
    done = in_python(f"from extras.gpu_check.batch import *\nrun({programs!r}, 'cpu', 2)")
    assert "is not known as NCCL" in done.stdout and '"complaints": []' in done.stdout
    command = ["extras.gpu_check.beside_torch", "gloo", "--device", "cpu", "--plants"]
    wrong = in_python(WRONG_REDUCTION, *command)
    said = said_in(wrong.stdout)
    assert len(said) == 14
    silent = [each[WHAT] for each in said if not any("differs from torch" in text for text in each[COMPLAINTS])]
    assert all("hsdp" in what for what in silent), silent  # two replicas: nothing is scattered


def in_python(text: str, *module: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", *module, text] if module else ["-c", text]
    environment = {**os.environ, **clock.ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )


@pytest.mark.full  # 9 s
def test_after_a_program_that_raises_the_next_one_has_a_process_of_its_own() -> None:
    programs = [Program("recovery"), Program("mixed_dtypes")]  # it is not told what is to fail
    done = in_python(f"from extras.gpu_check.batch import *\nprint(run({programs!r}, 'cpu', 1))")
    first, second = said_in(done.stdout)
    assert first[COMPLAINTS] == ["KeyError: 'what'"] and second[COMPLAINTS] == []
    assert done.stdout.endswith("False\n")


def test_a_program_is_judged_by_what_all_ranks_found() -> None:
    good, bad = {COMPLAINTS: [], "speed": 1}, {COMPLAINTS: ["a race"], RAISED: True}
    plain, planted = Program("sanitized"), Program("sanitized", plants="drops READ")
    assert judged(plain, [good, good]) == good
    assert judged(plain, [good, bad])[COMPLAINTS] == ["a race"]
    assert judged(plain, [good, None])[COMPLAINTS] == ["ranks [1] died or hung"]
    assert judged(planted, [bad])[COMPLAINTS] == []
    assert judged(planted, [good])[COMPLAINTS] == ["passed, though a fault was planted: drops READ"]


def made_up_kernels(**differing: Any) -> dict[str, Any]:
    found = {"gathers": 6, "reductions": 3, "packed": 2, "communication_streams": [20, 24], "gemm_streams": [7]}
    return {
        **found,
        "kernels": {"": 80, "all_gather_copy_out": 6, "post_backward_reduce": 6},
        "nccl_kernels": {"all_gather": 6, "post_backward_reduce": 3},
        "names": {"post_backward_reduce: void at::native::chunk_cat_cuda_kernel<float, BFloat16>": 3},
        **differing,
    }


def judged_kernels(**differing: Any) -> list[str]:
    return kernels.complaints(made_up_kernels(**differing), is_alone=False)


def judged_memory(**differing: list[int]) -> list[str]:
    flat = {"allocated": [9, 9, 9] + [8] * 7, "reserved": [10] * 3 + [90] * 7, "asked": [1, 2, 2] + [5] * 7}
    return memory.complaints({**flat, "settled": 3, **differing})


def judged_reserved(more: int = 100) -> list[str]:
    return reduce_overhead.complaints({"reserved": {"default": 1000, "reduce-overhead": 1000 + more}, "shards": 400})


def judged_host_time(**differing: float) -> list[str]:
    plain = {"forward and backward": 14.0, "clip": 4.0, "AdamW foreach": 9.0, "AdamW fused": 3.0, "zero_grad": 0.2}
    torchs = {"forward and backward": 80.0, "clip": 16.0, "AdamW foreach": 34.0, "AdamW fused": 20.0, "zero_grad": 0.4}
    ours = {"forward and backward": 30.0, "clip": 4.4, "AdamW foreach": 3.0, "AdamW fused": 2.0, "zero_grad": 0.4}
    return host_time.complaints({"plain": plain, "torch": torchs, "fsdp2": {**ours, **differing}})


def judged_rows(odd: float = 60.0, rows: Sequence[int] = (1280, 48)) -> list[str]:
    speeds = {alignment.ODD: odd, alignment.ALIGNED: 100.0}
    return alignment.complaints({"gigabytes_per_second": speeds, "row_bytes": rows})


MEASURED: list[tuple[Callable[..., list[str]], dict[str, Any], str]] = [
    (judged_kernels, {"communication_streams": [7, 24]}, "share streams"),
    (judged_kernels, {"communication_streams": [20]}, "not on two"),
    (judged_kernels, {"gemm_streams": []}, "no product"),
    (judged_kernels, {"kernels": {"all_gather_copy_out": 12}}, "copy out of"),
    (judged_kernels, {"names": {}}, "pack the gradients"),
    (judged_kernels, {"nccl_kernels": {"post_backward_reduce": 3}}, "times all_gather"),
    (judged_kernels, {"nccl_kernels": {"all_gather": 6}}, "times post_backward_reduce"),
    (judged_memory, {"allocated": [8] * 6 + [9, 10, 11, 12]}, "allocated memory grows"),
    (judged_memory, {"reserved": [10] * 3 + [90] * 5 + [99, 99]}, "reserved memory grows"),
    (judged_memory, {"asked": [1, 2, 2] + [5] * 5 + [7, 7]}, "was asked for memory 2 times"),
    (judged_reserved, {"more": 400}, "bytes more in CUDA graphs"),
    (judged_host_time, {"AdamW foreach": 30.0}, "AdamW foreach takes 30.0"),
    (judged_host_time, {"clip": 9.0}, "clip takes 9.0"),
    (judged_host_time, {"forward and backward": 120.0}, "of torch's"),
    (judged_rows, {"rows": [1284]}, "a row has 1284 bytes"),
    (judged_rows, {"rows": [36]}, "a row has 36 bytes"),
    (judged_rows, {"odd": 120.0}, "GB/s with rows of any size"),
]


@for_each("judged, differing, says", MEASURED)
def test_measurements_are_judged(judged: Callable[..., list[str]], differing: dict[str, Any], says: str) -> None:
    assert judged() == []
    assert any(says in complaint for complaint in judged(**differing))


@for_each(
    "version, before, name, fuses, says",
    [
        ("2.13.0", False, "nccl", True, ""),
        ("2.15.0", False, "nccl2", False, ""),
        ("2.15.0+cu132", True, "nccl", True, ""),
        ("2.15.0", False, "nccl2", True, "launch several at once"),
        ("2.15.0", False, "other", False, "called 'other'"),
        ("2.15.0", True, "nccl2", False, "expected 'nccl'"),
    ],
)
def test_the_backend_is_known(version: str, before: bool, name: str, fuses: bool, says: str) -> None:
    environment = {"TORCH_DIST_USE_NCCL2": "0"} if before else {}
    with mock.patch.object(torch, "__version__", version), mock.patch.dict(os.environ, environment):
        said = backend.unknown(name, fuses)
    assert says in said[0] if says else not said


def test_what_differs_from_torch_is_measured() -> None:
    one, nan = torch.tensor([1.0, 4.0]), torch.tensor([math.nan, 4.0])
    assert difference([one], [one]) == 0.0
    assert difference([one], [torch.tensor([2.0, 4.0])]) == pytest.approx(0.25)
    assert difference([nan], [one]) == difference([one], [nan]) == difference([one], [one[:1]]) == math.inf


# -- jobs


def test_jobs_name_what_is_there() -> None:
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        assert importlib.util.find_spec(job.module), job.name
        assert all((ROOT / each).exists() for each in job.words if each.startswith("tests/")), job.name
    run = {job.words[1] for job in JOBS if job.module == BATCH}
    assert run == set(BATCHES)
    assert {job.kind for job in JOBS} == {RIGHT, BETWEEN, TIMES}


SELECTED = {"memcheck": 1, "compiled": 5, "tests": 60, "ranks": 40}


def test_what_jobs_of_pytest_select_is_counted() -> None:
    assert set(SELECTED) == {job.name for job in JOBS if job.module == TESTS}


@pytest.mark.parametrize("name", others_full(SELECTED, ["memcheck", "compiled"]))
def test_jobs_of_pytest_select_tests(name: str) -> None:
    """All: what the short suite leaves out of its parameters on a CPU runs on a device, whose minutes are rare."""
    (job,) = (job for job in JOBS if job.name == name)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-m", "not full"]
    done = subprocess.run(
        [*command, *job.words[1:]],
        cwd=ROOT,
        env=os.environ | {"FSDP2_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sum("::" in line for line in done.stdout.splitlines()) >= SELECTED[name], done.stdout


def test_what_cannot_run_says_why() -> None:
    by_name = {job.name: job for job in JOBS}
    right, between, memcheck, of_8b = (by_name[name] for name in ("copies", "nccl", "memcheck", "8B"))
    assert right.cannot_run(GPU, machine()) is None
    assert right.cannot_run(GPU, machine(gpus=0)) == "needs a GPU; there is none"
    assert (
        right.cannot_run(GPU, machine(programs=()))
        == "needs pytest, for the harness of the tests, and this Python has none"
    )
    assert of_8b.cannot_run(GPU, machine(programs=())) is None
    assert of_8b.cannot_run(GPU, machine(gpu_gib=24.0)) == "needs 38 GiB on each GPU, which has 24"
    assert between.cannot_run(GPU, machine()) == "needs 2 GPUs; there is 1"
    assert between.cannot_run(Place("cuda", 8), machine(gpus=8)) is None
    shared = by_name["8B-between"]
    assert "needs 86 GiB" in (shared.cannot_run(Place("cuda", 2), machine(gpus=2)) or "")
    assert shared.cannot_run(Place("cuda", 8), machine(gpus=8)) is None
    assert memcheck.cannot_run(GPU, machine()) == "needs compute-sanitizer, which is not there"
    assert "one GPU" in (by_name["gloo-2"].cannot_run(GPU, machine(is_exclusive=True)) or "")


def test_jobs_are_chosen_by_name_in_their_order() -> None:
    assert [job.name for job in chosen("8B,copies")] == ["copies", "8B"]
    assert len(chosen("")) == len(JOBS)
    with pytest.raises(SystemExit, match="unknown: wire; the jobs are copies, tests"):
        chosen("wire")


# -- what becomes of a job


def line(what: str, *complaints: str, **found: Any) -> str:
    return json.dumps({WHAT: what, COMPLAINTS: complaints, **found}) + "\n"


@dataclasses.dataclass(frozen=True)
class Does(Job):
    """A job that does what Python's ``text`` says."""

    text: str = ""

    def arguments(self, place: Place) -> list[str]:
        return [sys.executable, "-S", "-c", self.text]


def job(name: str = "one", text: str = "", limit_s: int = 60, **more: Any) -> Does:
    return Does(name, "Is it?", "It is not.", BATCH, limit_s, text=text, **more)


@for_each(
    "output, status, cut, became, reasons",
    [
        (line("a"), 0, Cut.NONE, "passed", []),
        (line("a") + line("b", "off by 2"), 1, Cut.NONE, "failed", ["b: off by 2"]),
        (line("a"), -11, Cut.NONE, "failed", ["exit status -11"]),
        ("", 0, Cut.NONE, "failed", ["it said nothing"]),
        (line("a", skipped="no pool") + line("b", skipped="no pool"), 0, Cut.NONE, "skipped", ["no pool"]),
        (line("a", skipped="no pool") + line("b"), 0, Cut.NONE, "passed", []),
        (line("a"), None, Cut.LIMIT, "failed", ["not done after 3 s, and killed"]),
        (line("a"), None, Cut.TIME, "skipped", ["the time for all was over; 1 parts had passed in 3 s"]),
        (line("a", "off"), None, Cut.TIME, "failed", ["a: off"]),
        (line("a") + '{"what": "b", "comp', None, Cut.LIMIT, "failed", ["not done after 3 s, and killed"]),
    ],
)
def test_a_job_is_judged(output: str, status: int | None, cut: Cut, became: str, reasons: list[str]) -> None:
    verdict = judge(job(), status, cut, 3.0, output)
    assert (verdict.status, verdict.reasons) == (became, reasons)
    assert verdict.is_for_time == (cut is Cut.TIME and became == "skipped")


def became(*jobs: Job, seconds: float = 60.0, place: Place = GPU) -> tuple[dict[str, Verdict], float]:
    """Of each, and the seconds that all took."""
    found: dict[str, Verdict] = {}
    began = time.monotonic()
    run_all(jobs, place, machine(), began + seconds, lambda each, verdict: found.update({each.name: verdict}))
    return found, time.monotonic() - began


def says(what: str = "a", *, seconds: float = 0.0) -> str:
    return f"import time; time.sleep({seconds}); print({line(what).strip()!r}, flush=True)"


@pytest.mark.full
def test_a_job_that_hangs_or_dies_loses_nothing_of_the_others() -> None:
    hangs = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    dies = says() + "; import os; os.kill(os.getpid(), 9)"
    found, _ = became(job("hangs", hangs, 3), job("dies", dies), job("good", says()))
    assert {name: verdict.status for name, verdict in found.items()} == {
        **{"hangs": "failed", "dies": "failed", "good": "passed"}
    }
    assert "not done after 3 s" in found["hangs"].reasons[0] and found["dies"].reasons == ["exit status -9"]
    child = int(found["hangs"].output.rsplit("child", 1)[1].split()[0])
    end = time.monotonic() + 20
    while time.monotonic() < end and is_running(child):
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
def test_it_ends_before_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(clock, "SECONDS_TO_WRITE", 1.0)
    long = says() + "; time.sleep(1000)"
    found, seconds = became(job("long", long), job("late", says(), kind=TIMES), seconds=5.0)
    assert seconds < 5
    assert found["long"].reasons[0].startswith("the time for all was over; 1 parts had passed")
    assert found["late"].reasons == ["no time was left"] and found["late"].is_for_time


@pytest.mark.full
def test_right_or_wrong_runs_beside_each_other_and_what_is_measured_alone(tmp_path: Path) -> None:
    def notes(name: str) -> str:
        text = f"f = open({str(tmp_path / 'order')!r}, 'a'); f.write('+{name} '); f.flush(); {says(seconds=1.0)}"
        return f"{text}; f.write('-{name} ')"

    jobs = [job("a", notes("a")), job("b", notes("b")), job("c", notes("c"), kind=TIMES), job("d", notes("d"))]
    found, _ = became(*jobs)
    assert all(verdict.status == "passed" for verdict in found.values())
    order = (tmp_path / "order").read_text().split()
    assert {*order[:2]} == {"+a", "+b"} and order[4:] == ["+c", "-c", "+d", "-d"]


# -- traces


def test_kernels_are_attributed_to_the_innermost_range_around_their_launch() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("user_annotation", "FSDP::pre_forward (block)", 0, 100),
        event("user_annotation", "FSDP::all_gather (block)", 10, 20),
        event("user_annotation", "somebody's own", 12, 2),
        event("cuda_runtime", "cudaLaunchKernel", 13, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 50, 1, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 55, 1, correlation=4),
        event("cuda_runtime", "cudaLaunchKernel", 13, 1, tid=2, correlation=3),
        event("kernel", "ncclDevKernel_AllGather", 300, 5, tid=20, correlation=1, stream=20),
        event("kernel", "copy", 200, 5, tid=7, correlation=2, stream=7),
        event("gpu_memcpy", "Memcpy HtoD", 190, 5, tid=7, correlation=4, stream=7),
        event("kernel", "gemm", 100, 5, tid=7, correlation=3, stream=7),
        {"ph": "M", "name": "process_name"},
    ]
    found = kernels_in(events)
    assert [(each.name, each.range, each.stream) for each in found] == [
        ("gemm", "", 7),
        ("copy", "pre_forward", 7),
        ("ncclDevKernel_AllGather", "all_gather", 20),
    ]
    assert [each.is_nccl for each in found] == [False, False, True]
    assert ranges_in(events) == {"pre_forward": 1, "all_gather": 1}


# -- the report


def test_a_report_says_everything(tmp_path: Path) -> None:
    jobs = [job("good"), job("bad"), job("not"), job("later")]
    report = Report(tmp_path, machine(), GPU, jobs)
    cases = line("a", of_torch=0.0, jittered=0.0) + line("b", of_torch=1e-7, jittered=0.0)
    steps = line("8B: torch", ms=1073.0, tokens_per_s=7635.0, mfu=0.397) + line("8B: fsdp2", ms=1044.0)
    report.add(jobs[0], judge(jobs[0], 0, Cut.NONE, 3.0, cases + steps + line("memory", speed=3, seconds=1)))
    report.add(jobs[1], judge(jobs[1], 4, Cut.NONE, 3.0, "last words"))
    report.add(jobs[2], skipped("needs 8 GPUs; there is 1"))
    text = (tmp_path / MARKDOWN).read_text()
    assert "1 x GPU; torch 2.13.0, CUDA 13.0, NCCL 2.28, driver 580, Python 3.11, 16 cores; commit abc" in text
    assert "1 passed, 1 failed, 1 skipped, 1 not ended yet" in text
    assert "| good | Is it? | passed, 5 parts | 3 |" in text
    assert "| not | Is it? | skipped: needs 8 GPUs; there is 1 |" in text
    assert "It means: It is not." in text and "- exit status 4" in text and "last words" in text
    assert "- 1 of 2 cases equal torch's to the bit; 2 of 2 are the same with delays" in text
    assert "- b: off by 1e-07" in text and '- memory: `{"speed": 3}`' in text
    assert "| 8B: torch | 1073 | 7635 | 0.397 |" in text
    found = json.loads((tmp_path / JSON).read_text())
    assert {name: each["status"] for name, each in found["jobs"].items()} == {
        **{"good": "passed", "bad": "failed", "not": "skipped"}
    }


# -- the whole


@pytest.mark.full
def test_failures_of_pytest_are_said(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    done = in_python(str(tmp_path / "test_it.py"), "extras.gpu_check.tests")
    bad, counts = said_in(done.stdout)
    assert "test_bad" in bad[WHAT] and "assert 1 == 2" in bad[COMPLAINTS][0]
    assert counts == {WHAT: "tests", COMPLAINTS: [], "passed": 1, "failed": 1} and done.returncode == 1


@pytest.mark.full  # 40 s
def test_the_rehearsal(tmp_path: Path) -> None:
    """Its short form: on a busy machine some of it finds no time."""
    names = ("copies", "failures", "1B", "nccl")
    began = time.monotonic()
    arguments = ["--device", "cpu", "--minutes", "0.9", "--only", ",".join(names), "--out", str(tmp_path)]
    done = in_python(arguments[-1], "extras.gpu_check", *arguments[:-1])
    assert time.monotonic() - began < 57
    assert done.returncode in (0, 2), done.stdout + done.stderr
    found = json.loads((tmp_path / JSON).read_text())["jobs"]
    assert set(found) == set(names)
    for name, each in found.items():
        assert each["status"] == "passed" or each["reasons"], (name, each)
    assert found["nccl"]["reasons"] == ["on the CPU gloo-2 is the same"]
    assert "a rehearsal on the CPU" in (tmp_path / MARKDOWN).read_text()
