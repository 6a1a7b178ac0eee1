"""The recipes for launchers that start `examples/recipes/train.py`: Slurm, Kubernetes, and torchrun with restarts.

No cluster runs here: `tests.harness.launchers` stands in for `srun` and the operator.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness.documents import DOCS, ROOT
from tests.harness.launchers import (
    RECIPES,
    SRUN,
    environment,
    free_port,
    of_pytorchjob,
    of_sbatch,
    programs,
    run,
)

TRAIN = str(RECIPES / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STEPS, SAVE_EVERY = 400, 4
ARGUMENTS = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--width", "32", "--float64"]


def load(name: str) -> ModuleType:
    """A module of the recipes."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def final_loss(printed: str) -> float:
    """The number that rank 0 prints last."""
    return float(re.findall(r"^the loss of step \d+ is (\S+)$", printed, re.MULTILINE)[-1])


def losses(run_dir: Path) -> dict[int, set[float]]:
    """By step, all losses that were ever noted: more than one where ranks began anew with other numbers."""
    found: dict[int, set[float]] = {}
    for line in (run_dir / "losses.jsonl").read_text().splitlines():
        noted = json.loads(line)
        found.setdefault(noted["step"], set()).add(noted["loss"])
    return found


# ---- Slurm ---------------------------------------------------------------------------------------

TASK_5_OF_7 = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[017-018]",
    "SLURM_JOB_ID": "1234567",
}


def test_what_srun_sets_is_read() -> None:
    from_slurm = load("slurm").from_slurm
    assert from_slurm(TASK_5_OF_7) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu017",
        "MASTER_PORT": "34567",
    }


def test_what_is_set_already_stays() -> None:
    from_slurm = load("slurm").from_slurm
    assert from_slurm({**TASK_5_OF_7, "RANK": "0"}) == {}  # torchrun, started by srun
    assert from_slurm({}) == {}
    assert "MASTER_ADDR" not in from_slurm({**TASK_5_OF_7, "MASTER_ADDR": "10.0.0.1"})


def test_a_variable_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="SLURM_LOCALID"):
        load("slurm").from_slurm({name: value for name, value in TASK_5_OF_7.items() if name != "SLURM_LOCALID"})


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("localhost", "localhost"),
        ("gpu[007-010,012],cpu1", "gpu007"),
        ("a1,b[2-3]", "a1"),
        ("rack-3-node[9,11]", "rack-3-node9"),
        ("n[1-2]-ib", "n1-ib"),
        ("node-01.example", "node-01.example"),
    ],
)
def test_the_first_host_of_a_list(node_list: str, first: str) -> None:
    assert load("slurm").first_host(node_list) == first


@pytest.mark.parametrize(("counts", "tasks"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,8(x3)", [1, 8, 8, 8])])
def test_tasks_of_nodes(counts: str, tasks: list[int]) -> None:
    assert load("slurm").tasks_of_nodes(counts) == tasks


SBATCH_OPTIONS = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"([\w.-]+:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+(:\d+){0,2}",
    "output": r"[\w%./-]+",
    "open-mode": r"append|truncate",
    "requeue": r"",
}
"""Of sbatch's manual: options, and what they take."""


def sbatch_options(text: str) -> dict[str, str]:
    """Those before the first command: sbatch reads no others."""
    head = text[: re.search(r"^(?!#|\s*$)", text, re.MULTILINE).start()]  # type: ignore[union-attr]
    assert text.count("#SBATCH ") == head.count("#SBATCH ")
    return {name: value for name, value in re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", head, re.MULTILINE)}


def test_the_batch_file_has_options_that_sbatch_takes() -> None:
    text = (RECIPES / "train.sbatch").read_text()
    assert text.startswith("#!/bin/bash\n")
    options = sbatch_options(text)
    assert len(options) == text.count("#SBATCH ")
    for name, value in options.items():
        assert re.fullmatch(SBATCH_OPTIONS[name], value), name
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    subprocess.run(["bash", "-n", str(RECIPES / "train.sbatch")], check=True)


@pytest.mark.full
def test_the_batch_file_trains_and_goes_on(tmp_path: Path) -> None:
    """Two nodes of two tasks, as `srun` starts them; submitted again, it resumes. About 30 s."""
    variables = environment(
        **of_sbatch(nodes=2, tasks_per_node=2, submitted_in=tmp_path, job=free_port() % 20_000),
        PATH=programs(tmp_path / "bin", srun=SRUN.format(python=sys.executable)),
    )
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = ["bash", str(RECIPES / "train.sbatch"), "--save-every", "5", "--steps"]
    printed = run([*command, "10"], tmp_path, variables)
    assert "step 0 is where 4 ranks go on" in printed
    printed = run([*command, "20"], tmp_path, variables)
    assert "step 10 is where 4 ranks go on" in printed
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(losses(folder)) == [*range(1, 21)]
    assert final_loss(printed) < 5


# ---- Kubernetes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneOf:
    """Any of these strings."""

    values: tuple[str, ...]


POD: dict[str, Any] = {
    "spec": {
        "containers": [
            {
                "name": OneOf(("pytorch",)),
                "image": str,
                "workingDir?": str,
                "command?": [str],
                "args?": [str],
                "env?": [{"name": str, "value": str}],
                "resources?": {"limits?": dict, "requests?": dict},
                "volumeMounts?": [{"name": str, "mountPath": str, "readOnly?": bool}],
            }
        ],
        "volumes?": [
            {
                "name": str,
                "persistentVolumeClaim?": {"claimName": str, "readOnly?": bool},
                "emptyDir?": {"medium?": OneOf(("", "Memory")), "sizeLimit?": str},
            }
        ],
    }
}
REPLICAS: dict[str, Any] = {
    "replicas": int,
    "restartPolicy?": OneOf(("Always", "OnFailure", "Never", "ExitCode")),
    "template": POD,
}
PYTORCHJOB: dict[str, Any] = {
    "apiVersion": OneOf(("kubeflow.org/v1",)),
    "kind": OneOf(("PyTorchJob",)),
    "metadata": {"name": str, "namespace?": str},
    "spec": {
        "nprocPerNode?": str,
        "elasticPolicy?": {
            "rdzvBackend?": OneOf(("c10d", "etcd", "etcd-v2")),
            "minReplicas?": int,
            "maxReplicas?": int,
            "maxRestarts?": int,
        },
        "runPolicy?": {
            "cleanPodPolicy?": OneOf(("All", "Running", "None")),
            "backoffLimit?": int,
            "activeDeadlineSeconds?": int,
            "ttlSecondsAfterFinished?": int,
        },
        "pytorchReplicaSpecs": {"Master?": REPLICAS, "Worker?": REPLICAS},
    },
}
"""What version 1 of the resource takes, as far as recipes need it: types of values; ``?`` marks what may be absent."""


def mistakes(value: Any, schema: Any, place: str = "the job") -> Iterator[str]:
    """Where a value is not what the schema says."""
    if isinstance(schema, OneOf):
        if value not in schema.values:
            yield f"{place} is {value!r}, not one of {schema.values}"
    elif isinstance(schema, list):
        items = value if isinstance(value, list) and value else [None]
        for index, item in enumerate(items):
            yield from mistakes(item, schema[0], f"{place}[{index}]")
    elif isinstance(schema, dict):
        yield from mistakes_of_fields(value, schema, place)
    elif type(value) is not schema:
        yield f"{place} is {value!r}, not of type {schema.__name__}"


def mistakes_of_fields(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    """The same, of a mapping."""
    if not isinstance(value, dict):
        yield f"{place} is {value!r}, not a mapping"
        return
    fields = {name.rstrip("?"): each for name, each in schema.items()}
    yield from (f"{place} has no field {name}" for name in value if name not in fields)
    yield from (f"{place} lacks {name}" for name in schema if not name.endswith("?") and name not in value)
    for name, each in value.items():
        if name in fields:
            yield from mistakes(each, fields[name], f"{place}.{name}")


def pytorchjob() -> dict[str, Any]:
    """The file, read."""
    import yaml

    job = yaml.safe_load((RECIPES / "pytorchjob.yaml").read_text())
    assert isinstance(job, dict)
    return job


def test_the_job_is_what_its_schema_says() -> None:
    job = pytorchjob()
    assert list(mistakes(job, PYTORCHJOB)) == []
    spec = job["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert spec["elasticPolicy"]["minReplicas"] <= worker["replicas"] <= spec["elasticPolicy"]["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in worker["template"]["spec"]["volumes"]}


def test_the_schema_finds_mistakes() -> None:
    job = pytorchjob()
    job["spec"]["nprocPerNode"] = 4
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Sometimes"
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["image "] = "x"
    del job["metadata"]["name"]
    assert len(list(mistakes(job, PYTORCHJOB))) == 4


@pytest.mark.full
def test_the_job_trains_in_two_pods(tmp_path: Path) -> None:
    """Its command in two processes that have the operator's variables, on two ranks each. About 30 s."""
    job = pytorchjob()
    spec = {**job["spec"], "nprocPerNode": "2"}
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    changed = {"/runs/fsdp2": str(tmp_path / "run"), "20000": "10"}
    arguments = [changed.get(each, each) for each in container["args"]]
    assert container["command"] == ["torchrun"] and set(changed) <= set(container["args"])
    own = {each["name"]: each["value"] for each in container["env"]}
    assert own == OWN_STORE
    variables = environment(**own, **of_pytorchjob(spec, host="localhost", port=free_port()))
    pods = [
        subprocess.Popen(
            [*TORCHRUN, *arguments],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(spec["pytorchReplicaSpecs"]["Worker"]["replicas"])
    ]
    printed = [pod.communicate(timeout=600)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(printed)
    assert "step 0 is where 4 ranks go on" in "".join(printed)
    assert final_loss("\n".join(printed)) < 6


# ---- torchrun, restarted -------------------------------------------------------------------------

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it ranks that start again may read addresses of those before, and wait for each other for half an hour."""


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that a torchrun has started."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        children = [int(each) for each in found.read_text().split()]
        return [each for each in children if TRAIN in Path(f"/proc/{each}/cmdline").read_text()]
    except FileNotFoundError:  # it has ended
        return []


@contextmanager
def elastic(run_dir: Path, ranks: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command of docs/recipes/elastic.md, on a run of this test."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "50"]
    output = run_dir.with_name(f"{run_dir.name}.out")
    with output.open("a") as file:
        process = subprocess.Popen(
            [*command, TRAIN, "--run-dir", str(run_dir), *ARGUMENTS, *options],
            env=environment(**OWN_STORE),
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for pid in [process.pid, *workers_of(process)]:
                _kill(pid)
            process.wait()


def _kill(pid: int) -> bool:
    """SIGKILL; whether there was such a process."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def noted(run_dir: Path) -> int:
    """How many losses a run has noted; those of steps that were done again count again."""
    path = run_dir / "losses.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until_it_trains(process: subprocess.Popen[str], run_dir: Path, more: int) -> bool:
    """Wait for so many more losses; return whether it still runs."""
    before = noted(run_dir)
    while process.poll() is None and noted(run_dir) < before + more:
        time.sleep(0.005)
    return process.poll() is None


def newest(run_dir: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max((int(path.name.removeprefix("step-")) for path in run_dir.glob("step-*")), default=0)


def wait_until_it_has_saved(process: subprocess.Popen[str], run_dir: Path) -> bool:
    """Wait for one more complete checkpoint; return whether it still runs."""
    before = newest(run_dir)
    while process.poll() is None and newest(run_dir) <= before:
        time.sleep(0.002)
    return process.poll() is None


def wait_until_it_saves(process: subprocess.Popen[str], run_dir: Path) -> bool:
    """Wait until a checkpoint is half written; return whether it still runs."""
    while process.poll() is None and not [*run_dir.glob(".step-*.writing")]:
        time.sleep(0.0005)
    return process.poll() is None


def kill_at_random(process: subprocess.Popen[str], run_dir: Path, draw: random.Random, times: int) -> list[str]:
    """Kill a rank, ``times`` times: while it starts, in a step, while it saves. Returns in what; then lets it end."""
    killed: list[str] = []
    moments = (["step", "save", "start", "save", "step"] * times)[:times]
    draw.shuffle(moments)
    while len(killed) < times:
        moment = moments[len(killed)]
        if moment == "start":
            while not workers_of(process):
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 3))
        elif draw.random() < 0.7:  # else there is nothing new since the kill before
            wait_until_it_has_saved(process, run_dir)
        alive = {
            "start": lambda: process.poll() is None,
            "step": lambda: wait_until_it_trains(process, run_dir, draw.randint(1, 4)),
            "save": lambda: wait_until_it_saves(process, run_dir),
        }[moment]()
        assert alive, f"it ended after {killed}"
        time.sleep(draw.uniform(0, 0.02))
        workers = workers_of(process)
        if workers and _kill(draw.choice(workers)):
            killed.append(moment)
            _wait_until_gone(process, workers)
    return killed


def _wait_until_gone(process: subprocess.Popen[str], workers: list[int]) -> None:
    """Until torchrun has ended the other ranks: a second kill in the same failure would be no other."""
    while process.poll() is None and set(workers) & set(workers_of(process)):
        time.sleep(0.05)


def end_of(process: subprocess.Popen[str], run_dir: Path) -> float:
    """Wait for it; its final loss."""
    output = run_dir.with_name(f"{run_dir.name}.out")
    assert process.wait(timeout=900) == 0, output.read_text()[-8000:]
    return final_loss(output.read_text())


def resumed(run_dir: Path) -> list[int]:
    """The steps at which the starts of a run went on."""
    printed = run_dir.with_name(f"{run_dir.name}.out").read_text()
    return [int(step) for step in re.findall(r"^step (\d+) is where \d ranks go on$", printed, re.MULTILINE)]


def never_killed(folder: Path, ranks: int) -> dict[int, set[float]]:
    """The losses of a run that nothing happens to."""
    with elastic(folder / f"whole-{ranks}", ranks) as process:
        end_of(process, folder / f"whole-{ranks}")
    return losses(folder / f"whole-{ranks}")


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "times"), [(2, 10), (3, 5), (4, 5)])
def test_killed_at_random_it_ends_with_the_loss_of_the_run_that_was_not(ranks: int, times: int, tmp_path: Path) -> None:
    """Bitwise, in every step that was ever done: the same ranks add up the same numbers. About 15 s for each kill."""
    draw = random.Random(ranks)
    saves = ("--asynchronous",) if ranks != 3 else ()
    with elastic(tmp_path / "run", ranks, *saves) as process:
        killed = kill_at_random(process, tmp_path / "run", draw, times)
        found = end_of(process, tmp_path / "run")
    assert len(killed) == times and {"save", "step", "start"} == set(killed)
    assert len(set(resumed(tmp_path / "run"))) > times // 3, "hardly any start went on from a checkpoint"
    expected = never_killed(tmp_path, ranks)
    assert expected[STEPS] == {found}
    assert losses(tmp_path / "run") == expected


@pytest.mark.full
def test_it_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Killed, with torchrun itself, and started again with more and with fewer ranks. About 100 s.

    Ranks add up the rows of a batch in another order then: double precision, in which the model is here, says how far
    apart the losses may be.
    """
    draw = random.Random(0)
    run_dir = tmp_path / "run"
    for ranks in (2, 4, 3):
        with elastic(run_dir, ranks, "--asynchronous") as process:
            kill_at_random(process, run_dir, draw, 1)
            assert wait_until_it_has_saved(process, run_dir)
    with elastic(run_dir, 2, "--asynchronous") as process:
        found = end_of(process, run_dir)
    assert resumed(run_dir)[-1] > 0 and len(set(resumed(run_dir))) >= 4, "one for each number of ranks"
    (expected,) = never_killed(tmp_path, 2)[STEPS]
    assert found == pytest.approx(expected, rel=1e-9)
    assert all(max(each) - min(each) < 1e-9 for each in losses(run_dir).values())


def test_the_page_shows_the_command_that_the_test_runs() -> None:
    text = (DOCS / "recipes" / "elastic.md").read_text()
    ((setting, command),) = re.findall(r"^export (.*)\n(torchrun --standalone .*)$", text, re.MULTILINE)
    assert setting == "=".join(*OWN_STORE.items())
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "50", "examples/recipes/train.py"]
    assert shlex.split(command)[:7] == words
