"""`make gpu-check` without a GPU: each of its checks passes on CPU, and fails where something is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from extras.gpu_check.__main__ import CHECKS, check_all, chosen
from extras.gpu_check.check import Check, Instead, MadeUp, Plant, Verdict
from extras.gpu_check.faults import FAULTS
from extras.gpu_check.machine import Machine
from extras.gpu_check.program import found_by
from extras.gpu_check.report import JSON, MARKDOWN, Report
from extras.gpu_check.runs import COMPLAINTS, Found, Outcome, Place, Program, Run, of_tests
from extras.gpu_check.setting import Setting
from extras.gpu_check.trace import kernels_in, ranges_in


def rehearsals(kind: type[Any], *, ranks: int = 1) -> list[Any]:
    """Of all checks, those of ``kind``, and of them those on ``ranks``."""
    return [
        pytest.param(check, each, id=f"{check.name}-{getattr(each, 'fault', index)}")
        for check in CHECKS
        for index, each in enumerate(check.rehearsals)
        if isinstance(each, kind) and getattr(each, "ranks", 1) == ranks
    ]


PROGRAMS = {run.title: run for check in CHECKS for run in check.runs if isinstance(run, Program) and not run.plants}


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def found_on_one_rank(run: Program, folder: Path, fault: str = "") -> Found:
    """What ``run`` finds in this process, on the CPU."""
    with mock.patch.dict(os.environ, run.environment):
        found = found_by(run.name, Setting("cpu", 0, 1, str(folder / "store"), run.options), fault)
    if dist.is_initialized():  # it failed inside
        dist.destroy_process_group()
    if "pool" in found.get("skipped", ""):
        pytest.skip(f"this is torch {torch.__version__}, and {found['skipped']}")
    return found


def machine(**differing: Any) -> Machine:
    here = {"gpus": 1, "gpu_names": ("GPU",), "torch": "2.13.0", "cuda": "13.0", "nccl": "2.28", "driver": "580"}
    return Machine(**{**here, "commit": "abc", "python": "3.11", **differing})


# -- each check can fail


def test_they_are_in_order_each_rehearsed() -> None:
    assert [check.number for check in CHECKS] == list(range(1, 22))
    assert len({check.name for check in CHECKS}) == 21
    for check in CHECKS:
        assert check.rehearsals and check.runs, check.name
        assert bool(check.limits) == any(isinstance(each, MadeUp) for each in check.rehearsals), check.name
        assert check.gpus == (1 if check.number <= 13 else 2)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=title, marks=pytest.mark.full if run.name == "reduce_overhead" else ())  # 4 s
        for title, run in PROGRAMS.items()
        if "replicas" not in run.options
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, of what it looks at
def test_programs_have_no_complaint_on_cpu(run: Program, tmp_path: Path) -> None:
    assert found_on_one_rank(run, tmp_path)[COMPLAINTS] == []


@pytest.mark.parametrize("check, rehearsal", rehearsals(Plant))
def test_a_planted_fault_is_found(check: Check, rehearsal: Plant, tmp_path: Path) -> None:
    right = found_on_one_rank(rehearsal.program, tmp_path)
    assert right[COMPLAINTS] == []
    (tmp_path / "wrong").mkdir()
    wrong = found_on_one_rank(rehearsal.program, tmp_path / "wrong", rehearsal.fault)
    assert any(rehearsal.says in complaint for complaint in wrong[COMPLAINTS]), wrong


@pytest.mark.full  # 20 s each, and 40 for the one that hangs
@pytest.mark.parametrize("check, rehearsal", rehearsals(Plant, ranks=2))
def test_a_planted_fault_is_found_on_ranks(check: Check, rehearsal: Plant) -> None:
    place = Place("cpu", 2)
    assert rehearsal.program.run(place).complaints() == []
    planted = dataclasses.replace(rehearsal.program, plants=rehearsal.fault).run(place)
    said = dataclasses.replace(planted, plants="").complaints()
    assert any(rehearsal.says in complaint for complaint in said), said


@pytest.mark.full  # 10 s each: processes of pytest
@pytest.mark.parametrize("check, rehearsal", rehearsals(Instead))
def test_tests_that_fail_or_do_not_run_are_complained_of(check: Check, rehearsal: Instead) -> None:
    place = Place("cpu", 1)
    assert rehearsal.right.run(place).complaints() == []
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        said = rehearsal.wrong.run(place).complaints()
    assert any(rehearsal.says in complaint for complaint in said), said


@pytest.mark.parametrize("check, rehearsal", rehearsals(MadeUp))
def test_measurements_are_judged(check: Check, rehearsal: MadeUp) -> None:
    assert check.limits is not None
    assert check.limits(rehearsal.right) == []
    assert {title for title in rehearsal.right} <= {run.title for run in check.runs}
    for says, found in rehearsal.wrong.items():
        said = check.limits(found)
        assert any(says in complaint for complaint in said), (says, said)


def test_what_was_not_measured_is_not_judged() -> None:
    """A program says why; its check passes, and says so in what it found."""
    for check in CHECKS:
        if check.limits is not None:
            assert check.limits({"a program": {"skipped": "it does not fit"}}) == []


def test_every_fault_is_planted_by_a_rehearsal() -> None:
    planted = {each.fault for check in CHECKS for each in check.rehearsals if isinstance(each, Plant)}
    planted |= {run.plants for check in CHECKS for run in check.runs if run.plants}
    assert {name for name in FAULTS if not name.startswith("drops ")} <= planted <= set(FAULTS)


# -- what a check makes of its runs


@dataclasses.dataclass(frozen=True)
class Says(Run):
    """A command that does what Python's ``text`` says, and leaves what it found in a file."""

    text: str
    name: str = "says"
    limit_s: int = 60
    plants: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name

    def command(self, place: Place, results: Path) -> Sequence[str]:
        return [sys.executable, "-S", "-c", f"results = {str(results)!r}\n{self.text}"]

    def read(self, results: Path, status: int) -> Found:
        path = results / "found.json"
        return json.loads(path.read_text()) if path.exists() else {}


def leaves(**found: Any) -> str:
    return f"open(results + '/found.json', 'w').write({json.dumps({COMPLAINTS: [], **found})!r})"


def check_of(*runs: Run, **differing: Any) -> Check:
    words = {"asks": "Is it?", "expected": "It is.", "means": "It is not."}
    return dataclasses.replace(Check(1, "one", **words, runs=runs, rehearsals=[]), **differing)


HERE = Place("cpu", 1)


def test_a_run_without_complaint_passes_and_is_reported() -> None:
    verdict = check_of(Says(leaves(speed=3))).verdict(HERE)
    assert (verdict.status, verdict.complaints, verdict.found["says"]["speed"]) == ("passed", [], 3)


def test_a_run_that_leaves_nothing_is_reported_with_the_end_of_its_output() -> None:
    verdict = check_of(Says("print('last words'); raise SystemExit(7)")).verdict(HERE)
    assert verdict.status == "failed"
    assert "exit status 7" in verdict.complaints[0] and "last words" in verdict.complaints[0]


def test_a_run_that_hangs_is_killed_with_all_it_started() -> None:
    hangs = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    verdict = check_of(Says(hangs, limit_s=3)).verdict(HERE)
    assert verdict.status == "hung" and "not done after" in verdict.complaints[0]
    child = int(verdict.complaints[0].rsplit("child", 1)[1].split()[0])
    end = time.monotonic() + 20
    while time.monotonic() < end and is_running(child):
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_planted_fault_that_is_not_found_fails_the_check() -> None:
    assert check_of(Says(leaves(complaints=["a race"]), plants="no wait")).verdict(HERE).status == "passed"
    missed = check_of(Says(leaves(), plants="no wait")).verdict(HERE)
    assert missed.complaints == ["says: passed, though a fault was planted: no wait"]
    died = check_of(Says("raise SystemExit(1)", plants="no wait")).verdict(HERE)
    assert died.status == "failed" and "exit status 1" in died.complaints[0]


def test_limits_are_looked_at_when_all_runs_are_right() -> None:
    def limits(found: Mapping[str, Found]) -> list[str]:
        return [f"{title}: too slow" for title, each in found.items() if each["speed"] < 2]

    judged = check_of(Says(leaves(speed=1), "a"), Says(leaves(speed=2), "b"), limits=limits)
    assert judged.verdict(HERE).complaints == ["a: too slow"]
    broken = check_of(Says("raise SystemExit(1)", "a"), Says(leaves(speed=1), "b"), limits=limits)
    assert len(broken.verdict(HERE).complaints) == 1


def test_what_cannot_run_says_why() -> None:
    several = dataclasses.replace(check_of(Says("")), gpus=2, torch=(2, 15))
    assert several.cannot_run(machine(gpus=0)) == "needs 2 GPUs; there are none"
    assert several.cannot_run(machine()) == "needs 2 GPUs; there is 1"
    assert "torch 2.15 and later; here is 2.13.0" in (several.cannot_run(machine(gpus=2)) or "")
    assert several.cannot_run(machine(gpus=8, torch="2.15.1+cu132")) is None


def test_reports_of_pytest_are_read() -> None:
    report = """<testsuites><testsuite>
    <testcase classname="t" name="a"/><testcase classname="t" name="b"><skipped/></testcase>
    <testcase classname="t" name="c"><failure message="1 != 2"/></testcase>
    <testcase classname="t" name="d"><error message="no fixture"/></testcase></testsuite></testsuites>"""
    found = of_tests(report)
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 1, 2)
    assert found[COMPLAINTS] == ["t::c: 1 != 2", "t::d: no fixture"]


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
    kernels = kernels_in(events)
    assert [(each.name, each.range, each.stream) for each in kernels] == [
        ("gemm", "", 7),
        ("copy", "pre_forward", 7),
        ("ncclDevKernel_AllGather", "all_gather", 20),
    ]
    assert [each.is_nccl for each in kernels] == [False, False, True]
    assert ranges_in(events) == {"pre_forward": 1, "all_gather": 1}


# -- the report


def test_a_report_says_everything_and_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = check_of(Says(leaves(speed=3)))
    fails = dataclasses.replace(check_of(Says("raise SystemExit(4)")), number=2, name="two")
    cannot = dataclasses.replace(passes, number=3, name="three", gpus=8)
    checks = [passes, fails, cannot]

    report = Report(tmp_path, machine(), checks)
    assert not report.resume()
    check_all(checks[:1], report, machine(), again=False)
    assert "not run yet" in (tmp_path / MARKDOWN).read_text()

    report = Report(tmp_path, machine(), checks)
    assert report.resume()
    check_all(checks, report, machine(), again=False)
    assert "1 one: passed before" in capsys.readouterr().out
    text = (tmp_path / MARKDOWN).read_text()
    assert "1 x GPU; torch 2.13.0, CUDA 13.0, NCCL 2.28, driver 580, Python 3.11; commit abc" in text
    assert "| 1 | one | Is it? | passed, " in text
    assert "| 2 | two | Is it? | failed, " in text
    assert "| 3 | three | Is it? | cannot run: needs 8 GPUs; there is 1 |" in text
    assert "exit status 4" in text and "It means: It is not." in text
    assert '- says: `{"speed": 3, "seconds": ' in text
    found = json.loads((tmp_path / JSON).read_text())
    assert {name: each["status"] for name, each in found["checks"].items()} == {
        "one": "passed",
        "two": "failed",
        "three": "cannot run",
    }
    assert (report.count("passed"), report.count("failed", "hung"), report.count("cannot run")) == (1, 1, 1)

    check_all(checks[:1], report, machine(), again=True)
    assert "1 one: passed, " in capsys.readouterr().out


def test_the_shortest_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [dataclasses.replace(check_of(Says("", limit_s=each)), number=each, gpus=8) for each in (30, 10, 20)]
    check_all(checks, Report(tmp_path, machine(), checks), machine(), again=False)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["10", "20", "30"]


@pytest.mark.parametrize("differing", [{"commit": "def"}, {"torch": "2.15.0"}, {"gpus": 2}])
def test_a_report_of_something_else_is_not_gone_on_with(differing: dict[str, Any], tmp_path: Path) -> None:
    Report(tmp_path, machine(), CHECKS).add(CHECKS[0], Verdict("passed"))
    assert Report(tmp_path, machine(), CHECKS).resume()
    assert not Report(tmp_path, machine(**differing), CHECKS).resume()


def test_checks_are_chosen_by_name_or_number_in_their_order() -> None:
    assert [check.name for check in chosen(["kernels", "2"])] == ["training", "kernels"]
    assert len(chosen([])) == 21
    with pytest.raises(SystemExit, match="unknown: wire; the checks are 1 suite, 2 training"):
        chosen(["wire"])


def test_this_machine_is_described() -> None:
    here = Machine.current()
    assert here.torch_release >= (2, 11) and here.gpus == len(here.gpu_names)
    assert Outcome("a", "", None, 3.0, {}, "").hung
