"""Check `train_lm.py`: does sharded training have the losses of the same training without sharding?

Runs the same steps twice, from the same initial weights and on the same global batches, in float32:

- with torchrun, in two microbatches a step: `train_lm.py` as a user runs it;
- here, in one process: the plain model, no `fsdp2`, no process group, each global batch in one piece.

Options other than those below go to `train_lm.py`: `--ranks 4 --replicate 2` checks hybrid sharding, `--ranks 4 --tp 2`
tensor parallelism.

The exit status is 1 if any step's loss, or the norm of its gradients, differs by more than a relative 1e-4.
The norm is compared too because clipping and AdamW both undo a gradient that is wrong by a factor, such as a
sum over the ranks in place of their mean, so that no loss would show it. The two runs add up the same numbers
in another order, which moves a float32 loss by about 1e-7, and more over many steps, since AdamW divides by the
root of tiny second moments.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.batches import BatchLayout, ShuffledWindows
from lm.build import build_unsharded
from lm.data import load_corpus
from lm.errors import UserError
from lm.model import next_byte_loss
from lm.optimization import CosineSchedule, clip_gradients, make_optimizer, set_learning_rate
from lm.options import Options, parse_options, positive_integer
from lm.run_directory import RunDirectory

TOLERANCE = 1e-4
MICROBATCHES = 2
SHOWN_EVERY = 5


@dataclass(frozen=True, slots=True)
class Step:
    """What is compared of one step: its mean loss in nats per byte, and the norm of all gradients."""

    loss: float
    gradient_norm: float


def main(arguments: Sequence[str]) -> int:
    """Run both trainings and compare; return 0 where they agree, 1 where not, 2 where one could not run."""
    parser = argparse.ArgumentParser(
        prog="train_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive_integer, default=30, help="to compare (default: %(default)s)")
    parser.add_argument("--ranks", type=positive_integer, default=2, help="to shard over (default: %(default)s)")
    check, others = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        command_line = [*training_arguments(check.steps, Path(folder) / "run"), *others]
        try:
            options = parse_options(command_line)
            print(f"training {check.steps} steps sharded over {check.ranks} ranks ...", flush=True)
            sharded = train_sharded(command_line, ranks=check.ranks)
            print(f"training {check.steps} steps unsharded in one process ...\n", flush=True)
            reference = train_unsharded(options)
        except UserError as error:
            print(f"train_check.py: error: {error}", file=sys.stderr)
            return 2
    return report(reference, sharded)


def training_arguments(steps: int, run_dir: Path) -> list[str]:
    """Return the options of both trainings: the defaults, but in float32 on the CPU, and nothing but training."""
    return [
        *("--steps", str(steps), "--accumulate", str(MICROBATCHES), "--log-every", "1"),
        *("--device", "cpu", "--dtype", "float32"),
        *("--checkpoint-every", "0", "--evaluate-every", "0", "--sample-bytes", "0"),
        *("--run-dir", str(run_dir)),
    ]


def train_sharded(command_line: Sequence[str], *, ranks: int) -> list[Step]:
    """Run `train_lm.py` on `ranks` processes of this machine; return every step it logged.

    Raises:
        UserError: it failed; its messages have been printed.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = Path(__file__).with_name("train_lm.py")
    # Several ranks share this machine's cores: with one thread each they do not get in one another's way.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    command = [*launch, str(script), *command_line]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout)
        raise UserError(f"the sharded training failed with exit status {done.returncode}; its messages are above")
    metrics = RunDirectory(parse_options(command_line).run_dir).read_metrics()
    return [Step(line["loss"], line["gradient_norm"]) for line in metrics if "loss" in line]


def train_unsharded(options: Options) -> list[Step]:
    """Train the plain model in this process; return every step."""
    corpus = load_corpus(options.data, context=options.context)
    windows = ShuffledWindows(corpus.train, context=options.context, seed=options.seed)
    layout = BatchLayout(batch=options.batch, accumulate=1, rank=0, world_size=1)
    schedule = CosineSchedule(peak=options.learning_rate, warmup_steps=options.warmup_steps, total_steps=options.steps)
    model = build_unsharded(options.model_size, seed=options.seed)
    optimizer = make_optimizer(model, weight_decay=options.weight_decay)
    steps = []
    for step in range(options.steps):
        inputs, targets = windows.batch(layout.samples(step, microbatch=0))
        loss = next_byte_loss(model, inputs, targets)
        loss.backward()
        gradient_norm = clip_gradients(model, max_norm=options.clip)
        set_learning_rate(optimizer, schedule(step))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(loss.item(), gradient_norm.item()))
    return steps


def report(reference: Sequence[Step], sharded: Sequence[Step]) -> int:
    """Print both trainings side by side, and the verdict; return the exit status."""
    if len(reference) != len(sharded):
        print(f"FAILED: {len(reference)} steps unsharded, but {len(sharded)} sharded")
        return 1
    differences = [relative_difference(*pair) for pair in zip(reference, sharded, strict=True)]
    failed = [index for index, each in enumerate(differences) if max(each.loss, each.gradient_norm) > TOLERANCE]
    print(f"{'step':>5}{'unsharded loss':>17}{'sharded loss':>15}{'difference':>13}{'of gradient norm':>18}")
    for index, each in enumerate(differences):
        if index == 0 or (index + 1) % SHOWN_EVERY == 0 or index in failed:
            losses = f"{reference[index].loss:>17.7f}{sharded[index].loss:>15.7f}"
            print(f"{index + 1:>5}{losses}{each.loss:>13.1e}{each.gradient_norm:>18.1e}")
    worst = Step(max(each.loss for each in differences), max(each.gradient_norm for each in differences))
    print(f"\nworst relative difference: {worst.loss:.1e} in loss, {worst.gradient_norm:.1e} in gradient norm")
    if failed:
        print(f"FAILED at step {failed[0] + 1}, the first of {len(failed)} that differ by more than {TOLERANCE:.0e}")
        return 1
    print(f"passed: all {len(differences)} steps agree within {TOLERANCE:.0e}")
    return 0


def relative_difference(expected: Step, found: Step) -> Step:
    """Return by how much `found` differs from `expected`, as fractions of it; infinite where not finite."""

    def relative(reference: float, value: float) -> float:
        if not (math.isfinite(reference) and math.isfinite(value)):
            return math.inf
        return abs(value - reference) / abs(reference)

    return Step(relative(expected.loss, found.loss), relative(expected.gradient_norm, found.gradient_norm))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
