"""``python -m extras.faults [NAMES]``: run the cases under torch and fsdp2, and print a table of what came of them."""

from __future__ import annotations

import argparse
import importlib
from collections import Counter

from extras.faults.divergence import WAYS, case_of
from extras.faults.outcomes import WORDS, word_of
from extras.torch_gaps.api import IMPLEMENTATIONS
from extras.torch_gaps.run import run_ranks

LOSES = {"its process is killed": 1, "its process is stopped": 1}


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names of cases, or parts of them; all if none")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, action="append", help="whose fully_shard runs")
    arguments = parser.parse_args()
    implementations = arguments.implementation or list(IMPLEMENTATIONS)
    for each in implementations:  # before any rank is forked, so that no rank spends its time importing
        importlib.import_module("fsdp2" if each == "fsdp2" else "torch.distributed.fsdp")
    importlib.import_module("torch._dynamo")
    names = [name for name in WAYS if not arguments.only or any(part in name for part in arguments.only)]
    counts: dict[str, Counter[str]] = {each: Counter() for each in implementations}
    print(f"| rank 1 | {' | '.join(implementations)} |\n|---|{'---|' * len(implementations)}", flush=True)
    for name in names:
        words = []
        for each in implementations:
            ran = run_ranks(case_of(name), each, max_message=400)
            word = word_of(ran, loses=LOSES.get(name, 0))
            counts[each][word] += 1
            words.append(word)
            if word not in ("right", "named"):
                said = "; ".join(f"rank {report.rank} {report.outcome}" for report in ran.reports)
                print(f"<!-- {each}: {ran.verdict} | {said} -->", flush=True)
        print(f"| {name} | {' | '.join(words)} |", flush=True)
    for each in implementations:
        print(f"{each}: " + ", ".join(f"{counts[each][word]} {word}" for word in WORDS if counts[each][word]))


if __name__ == "__main__":
    main()
