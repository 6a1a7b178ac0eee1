"""Programs in which ranks diverge several times, drawn from seeds: each time all is right, or named, and they go on.

``python -m extras.faults.drawn 1000`` (``make soak``) runs so many on 2 and 4 ranks, and says which seeds went wrong.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter

import torch.distributed as dist

import fsdp2
from extras.faults.divergence import ENDS, WAYS
from extras.faults.model import Trained
from extras.torch_gaps.api import Api
from extras.torch_gaps.registry import Case, Trial
from extras.torch_gaps.run import run_ranks

LASTING = ("while training", "frozen", "converted", "slow", "unshard()")
"""Parts of the names of ways that change the model for good, or take long."""
EVENTS = 3
REPLICAS = ({0, 1}, {2, 3})
"""One that leaves out a backward as a whole is a batch behind the other from then on, and its next gradients meet the
others' former ones: an average of two batches, as it should be, but not of those that a reference takes."""


def run_drawn(seed: int, trial: Trial) -> list[str]:
    """Train, and let some ranks diverge in a drawn way, several times; what became of each: "right" or "named".

    Raises:
        Wrong: gradients were not those of the plain model.
        Exception: what is not an error that names ranks.
    """
    drawn = random.Random(seed)
    ways = [name for name in WAYS if name not in ENDS and not any(part in name for part in LASTING)]
    size = trial.world_size
    hybrid = size == 4 and drawn.random() < 0.5
    trained = Trained(trial, hybrid=hybrid)
    trained.train()
    said = []
    for _ in range(EVENTS):
        name = drawn.choice(ways)
        others = drawn.sample(range(size), drawn.randint(1, size - 1))
        if hybrid and set(others) in REPLICAS:
            others = others[:1]
        word = "right"
        try:
            WAYS[name][0](trained, trial.rank in others)
            trained.train()  # who was through meets the others here
        except fsdp2.FSDPRuntimeError as error:
            if not re.search(r"rank \d", str(error)):
                raise
            word = "named"
        said.append(word)
        trained.expect_right_gradients()
        trained.model.zero_grad()
    return said


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.count):

        def program(trial: Trial, seed: int = seed) -> None:
            fsdp2.set_watchdog(1)
            run_drawn(seed, trial)

        verdict = run_ranks(Case("drawn", "", "", (), (2, 4)[seed % 2], program), "fsdp2").verdict
        counts[verdict.kind] += 1
        if verdict.kind != "works":
            print(f"seed {seed}: {verdict}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


def run_here(seed: int) -> list[str]:
    """`run_drawn` on the ranks of the process group that there is."""
    return run_drawn(seed, Trial(Api("fsdp2"), dist.get_rank(), dist.get_world_size()))


if __name__ == "__main__":
    main()
