"""``python -m extras.torch_gaps``: run the cases, print the outcomes, record them."""

from __future__ import annotations

import argparse
import importlib

import torch

from extras.torch_gaps import record
from extras.torch_gaps.api import IMPLEMENTATIONS
from extras.torch_gaps.registry import all_cases
from extras.torch_gaps.run import run


def main() -> None:
    """Runs what the command line says."""
    arguments = _arguments()
    cases = all_cases()
    chosen = {name: case for name, case in cases.items() if not arguments.only or name in arguments.only}
    unknown = set(arguments.only) - set(cases)
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; the cases are {', '.join(cases)}")
    version = str(torch.__version__).split("+")[0]
    # Before any rank is forked, so that no rank spends its time importing.
    importlib.import_module("fsdp2" if arguments.implementation == "fsdp2" else "torch.distributed.fsdp")
    for name, case in chosen.items():
        outcome = run(case, arguments.implementation)
        print(f"{name}: {outcome}", flush=True)
        if not arguments.dry:
            key = record.key_of(arguments.implementation, version)
            record.write(record.merged(record.read(), cases, key, {name: outcome}), cases)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names of cases; all if none")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="torch", help="whose fully_shard runs")
    parser.add_argument("--dry", action="store_true", help="print only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
