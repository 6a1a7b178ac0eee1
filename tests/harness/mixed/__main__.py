"""Runs one mixed program by hand, printed, and finds the smallest that fails like it.

`python -m tests.harness.mixed 17` runs the program of seed 17; `plain "hooks: multi all" "mesh: replicas"` the plain
program with these options; `--without "hooks: multi*" "state: *"` leaves options out of the drawing; `--minimize`
replaces options by plain ones as long as it fails. `--many 0 500` runs these seeds and says which fail, minimized.
"""

from __future__ import annotations

import argparse
import sys

from tests.harness.mixed.programs import EXCLUDED, PLAIN, RULES, Mix, draw, is_legal, printed, ranks_of, simpler
from tests.harness.mixed.training import run
from tests.harness.pool import WorkerPool, WorkerPools
from tests.harness.report import RanksFailed


def failure(pools: WorkerPools, mix: Mix, timeout: float = 20.0) -> str | None:
    """What goes wrong on its ranks."""
    pool: WorkerPool = pools[ranks_of(mix)]
    try:
        pool.run(run, dict(mix), timeout=timeout)
    except RanksFailed as failed:
        return str(failed)
    return None


def minimized(pools: WorkerPools, mix: Mix) -> tuple[Mix, str]:
    """The program with the fewest special options that still fails, found greedily."""
    reason = failure(pools, mix) or "does not fail again"
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in simpler(mix):
            found = failure(pools, candidate)
            if found is not None:
                mix, reason, is_smaller = candidate, found, True
                break
    return mix, reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="*", help="a seed, or: plain, and options")
    parser.add_argument("--many", nargs=2, type=int, metavar=("FIRST", "LAST"))
    parser.add_argument("--without", nargs="*", default=[], metavar="PATTERN", help='such as "outputs: s*"')
    parser.add_argument("--known", action="store_true", help="draws what is known to fail, too")
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--lines", type=int, default=60, help="how much of a failure is shown")
    options = parser.parse_args()
    pools, failed = WorkerPools(), 0
    try:
        for mix in _asked(options):
            reason = failure(pools, mix)
            if reason is None:
                if not options.many:
                    print(printed(mix), "\nis as the plain model")
                continue
            failed += 1
            print(f"seed {mix['seed']} fails: {reason.splitlines()[0]}", flush=True)
            if options.minimize:
                mix, reason = minimized(pools, mix)
            print(printed(mix), "\n".join(reason.splitlines()[: options.lines]), sep="\n", flush=True)
    finally:
        pools.stop()
    return failed


def _asked(options: argparse.Namespace) -> list[Mix]:
    rules = (EXCLUDED if options.known else RULES) + tuple((pattern, "*", "asked") for pattern in options.without)
    if options.many:
        return [draw(seed, rules) for seed in range(*options.many)]
    if options.program[0] != "plain":
        return [draw(int(options.program[0]), rules)]
    mix = {**PLAIN, **dict(option.split(": ", 1) for option in options.program[1:])}
    assert is_legal(mix), "these options exclude each other"
    return [mix]


if __name__ == "__main__":
    sys.exit(main())
