"""What Slurm's `srun` says to a process, in the words that torchrun says it in. Nothing here imports torch.

`fully_shard` makes its process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as `init_process_group` does.
`srun` says the same with variables of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FIRST_PORT, PORTS = 20_000, 20_000


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in a process that `srun` has started; nothing where torchrun's are set already.

    Raises:
        KeyError: `srun` has not set a variable that it always sets, which the error names.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    tasks = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(environment["SLURM_NODEID"])]),
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        # Two jobs on one node get two ports, and all tasks of a job the same one.
        "MASTER_PORT": str(FIRST_PORT + int(environment["SLURM_JOB_ID"]) % PORTS),
    }
    return {name: value for name, value in variables.items() if name not in environment}


def first_host(node_list: str) -> str:
    """Return the first host of a list as Slurm writes it: of ``gpu[007-010,012],cpu1`` it is ``gpu007``."""
    name = r"[^,\[\]]*"
    found = re.match(rf"({name})(?:\[([^,\-\]]+)[^\]]*\]({name}))?", node_list)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def tasks_of_nodes(counts: str) -> list[int]:
    """Return how many tasks each node has: ``4(x2),3`` are two nodes with four, and one with three."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
