"""`python -m benchmarks.peers`: this package beside others that train on several ranks, in one run.

    python -m benchmarks.peers                                    all of them, about 20 minutes, most of it probes
    python -m benchmarks.peers --impl torch,torch-again,ddp,fsdp2
    python -m benchmarks.peers --plot peers.png --json peers.json

Each contender is first tried in processes of its own, where it has to train as one process does (losses of the first
steps), and where everything is counted that does not depend on load. What is not installed, fails, trains something
else or takes too long is named below the table, and the run goes on without it. All others then train beside each
other in the same processes, one gloo rank of one thread each, step by step in an order that rotates.

`make bench-peers` installs what is compared. DeepSpeed compiles one operation when it is first imported (g++).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.implementations import AGAIN, NAMES_HELP, UNSHARDED, ShardingOptions, available, base_of
from benchmarks.models import ModelSpec
from benchmarks.peers.facts import TOLERANCE, Facts, difference, measure_facts, own_bytes, reference_losses
from benchmarks.peers.plot import draw
from benchmarks.peers.table import Contender, table_of
from benchmarks.results import Environment
from benchmarks.samples import write_json
from benchmarks.throughput import ABOUT_30M, REFERENCE, Interval, Samples, measure
from benchmarks.training import PACKAGES, PEERS

CONTENDERS = (
    f"{UNSHARDED}",
    f"{UNSHARDED}-whole",
    "ddp",
    "fsdp1-flat",
    "fsdp1",
    REFERENCE,
    f"{REFERENCE}{AGAIN}",
    f"{REFERENCE}-zero2",
    f"{REFERENCE}-blocks",
    "simplefsdp",
    "simplefsdp-whole",
    "deepspeed",
    "megatron",
    "megatron-experimental",
    "fsdp2",
    "fsdp2-zero2",
    "fsdp2-blocks",
    "fsdp2-whole",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    given = _parse(arguments)
    spec = replace(
        ABOUT_30M,
        blocks=given.blocks,
        dim=given.width,
        hidden_dim=given.width * ABOUT_30M.hidden_dim // ABOUT_30M.dim,
        batch_rows=given.rows,
    )
    options = ShardingOptions(world_size=given.ranks, backend=given.backend)
    facts, missing = probe(given.impl, spec, options, given.timeout)
    names = [name for name in given.impl if name in facts]
    if not names:
        raise SystemExit("no contender is left:\n" + "\n".join(missing))
    samples = measure(
        names, repetitions=given.repetitions, options=options, spec=spec, timeout=given.timeout * len(names)
    )
    contenders = [
        Contender(name, samples[name], facts[name], own_bytes(name, spec, options.world_size)) for name in names
    ]
    _print(contenders, missing, spec, options, given.repetitions)
    write_json(given.json, contenders=[asdict(each) for each in contenders], missing=missing)
    for file in given.plot:
        draw(contenders, file)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--impl",
        type=lambda text: text.split(","),
        default=list(CONTENDERS),
        metavar="NAMES",
        help=f"comma-separated: {', '.join(PEERS)}, {NAMES_HELP} (default: {','.join(CONTENDERS)})",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--repetitions", type=int, default=20, help="interleaved timed steps (default: 20)")
    parser.add_argument("--blocks", type=int, default=ABOUT_30M.blocks, help=f"default: {ABOUT_30M.blocks}")
    parser.add_argument("--width", type=int, default=ABOUT_30M.dim, help=f"of the model (default: {ABOUT_30M.dim})")
    parser.add_argument("--rows", type=int, default=ABOUT_30M.batch_rows, help="of a rank's batch (default: 128)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each contender (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--plot", type=Path, action="append", default=[], metavar="FILE", help="draw bars, PNG or SVG")
    given = parser.parse_args(arguments)
    for name in given.impl:
        try:
            is_known = base_of(name) in PEERS or available(name)
        except ValueError as failure:
            parser.error(str(failure))
        assert is_known
    return given


def probe(
    names: Sequence[str], spec: ModelSpec, options: ShardingOptions, timeout: float
) -> tuple[dict[str, Facts], list[str]]:
    """Tries each in processes of its own; the facts of those that train right, and a line for each other one.

    A second instance of one is not tried again.
    """
    expected = reference_losses(spec, options.world_size)
    facts: dict[str, Facts] = {}
    missing: list[str] = []
    for name in names:
        first = name.removesuffix(AGAIN)
        if first != name and first in facts:
            facts[name] = facts[first]
            continue
        if not _is_installed(name):
            missing.append(_line(name, "left out"))
            continue
        begun = time.perf_counter()
        try:
            found = measure_facts(name, spec, options, timeout)
        except Exception as failure:  # whatever another package raises
            missing.append(_line(name, _cause(failure)))
        else:
            off = 0.0 if base_of(name) == UNSHARDED else difference(found.losses, expected)
            if off <= TOLERANCE:
                facts[name] = found
            else:
                losses = ", ".join(f"{each:.6g}" for each in found.losses)
                missing.append(_line(name, f"trains something else: losses {losses}, {off:.0e} from the reference"))
        verdict = "ready" if name in facts else missing[-1]
        print(f"{name}: {verdict} ({time.perf_counter() - begun:.0f} s)", file=sys.stderr, flush=True)
    return facts, missing


def _line(name: str, what: str) -> str:
    return f"{name} ({version_of(name)}): {what}"


def version_of(name: str) -> str:
    """The package that has implementation `name`, and which version is installed."""
    package = PACKAGES.get(base_of(name), "torch")
    if not _is_installed(name):
        return f"{package} is not installed"
    return f"{package} {importlib.metadata.version(package)}"


def _is_installed(name: str) -> bool:
    package = PACKAGES.get(base_of(name), "torch")
    return any(True for _ in importlib.metadata.distributions(name=package))


def _cause(failure: Exception) -> str:
    """The last line of what a rank raised that says something."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[-1] if lines else type(failure).__name__


def _print(
    contenders: list[Contender], missing: list[str], spec: ModelSpec, options: ShardingOptions, repetitions: int
) -> None:
    machine = Environment.current()
    load = " ".join(f"{value:.1f}" for value in machine.load_average)
    versions = ", ".join(dict.fromkeys(version_of(each.name) for each in contenders))
    print(f"{versions}; {machine.cpu}, {machine.cores} cores, load average {load}")
    print(f"$ {' '.join(sys.orig_argv)}\n")
    title = (
        f"Training step, {spec.name if spec == ABOUT_30M else 'a model of another size'}, {options.world_size} gloo "
        f"ranks, fp32, AdamW foreach: {repetitions} interleaved steps"
    )
    print(table_of(contenders, title, tuple(_controls({each.name: each.times for each in contenders}))).render())
    if missing:
        print("\nNot in the table:")
        for line in missing:
            print(f"  {line}")


def _controls(samples: dict[str, Samples]) -> list[str]:
    """What second instances say about the run."""
    lines = []
    for name in samples:
        first = name.removesuffix(AGAIN)
        if name != first and first in samples:
            itself = Interval.of(samples[name].wall, samples[first].wall)
            verdict = "quiet" if itself.is_quiet else "the machine is not quiet: wall times are inconclusive"
            lines.append(f"{name} is a second {first}: {verdict}")
    return lines


if __name__ == "__main__":
    main()
