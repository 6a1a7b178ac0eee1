"""Stand-ins for launchers that this machine has not: `srun` and Kubernetes' operator set these variables.

Written from what their manuals and sources say, not from what the recipes read.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
OTHERS = ("SLURM_", "PET_", "TORCHELASTIC_", "MASTER_", "KUBERNETES_")
"""How variables begin that a launcher sets, and which a test must not inherit."""

SRUN = """\
#!{python}
# A stand-in for srun: starts the job's tasks on this machine, and says to each what srun says.
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
nodes, per_node = int(os.environ["SLURM_JOB_NUM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = nodes * per_node
shared = dict(
    SLURM_STEP_ID="0",
    SLURM_STEP_NODELIST=os.environ["SLURM_JOB_NODELIST"],
    SLURM_STEP_NUM_NODES=str(nodes),
    SLURM_STEP_NUM_TASKS=str(tasks),
    SLURM_STEP_TASKS_PER_NODE=f"{{per_node}}(x{{nodes}})" if nodes > 1 else str(per_node),
    SLURM_NTASKS=str(tasks),
    SLURM_NPROCS=str(tasks),
)
processes = [
    subprocess.Popen(
        command,
        env=os.environ
        | shared
        | dict(
            SLURM_PROCID=str(task),
            SLURM_LOCALID=str(task % per_node),
            SLURM_NODEID=str(task // per_node),
            SLURM_TASK_PID="1",
        ),
    )
    for task in range(tasks)
]
codes = [each.wait() for each in processes]
sys.exit(max(abs(code) for code in codes))
"""


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without those of launchers, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        kept.pop(name, None)
    paths = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


def programs(folder: Path, **texts: str) -> str:
    """Write executables into ``folder``; return a PATH that finds them, and this Python as ``python``, first."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


def of_sbatch(*, nodes: int, tasks_per_node: int, submitted_in: Path, job: int = 4711) -> dict[str, str]:
    """What a batch script finds on a machine that is all nodes of its job."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NAME": "fsdp2",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_TASKS_PER_NODE": f"{tasks_per_node}(x{nodes})",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": str(submitted_in),
        "SLURM_PROCID": "0",  # also in the batch script itself
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }


def of_pytorchjob(spec: Mapping[str, object], *, host: str, port: int) -> dict[str, str]:
    """What Kubeflow's training operator sets in the pods of a job with an elastic policy; the same in each."""
    policy = spec["elasticPolicy"]
    assert isinstance(policy, Mapping)
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": f"{host}:{port}",
        "PET_RDZV_BACKEND": str(policy.get("rdzvBackend", "c10d")),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": str(spec["nprocPerNode"]),
    }


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(command: Sequence[str], folder: Path, variables: Mapping[str, str], timeout: float = 600) -> str:
    """Run to the end; return what it printed. The test fails with all messages where the program fails."""
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
