"""Train a language model, sharded by `fsdp2`. `--help` explains the options; `lm/` holds the parts.

python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_lm.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from lm.batches import cut_windows
from lm.bigram import BigramTable
from lm.data import Corpus, load_corpus
from lm.distributed import Ranks, choose_device, is_first_on_machine, launched_by_torchrun, process_group
from lm.errors import UserError
from lm.evaluation import spread_windows
from lm.generation import generate
from lm.interruption import StopRequest
from lm.options import LAUNCH, Options, parse_options
from lm.plotting import plot_loss, plot_metrics
from lm.reporting import Reporter
from lm.run_directory import RunDirectory
from lm.trainer import Trainer

FINAL_WINDOWS = 1024
"""How many windows of the held-out text the last evaluation looks at, the model's and the bigram table's."""


def main(arguments: Sequence[str]) -> int:
    """Run the program; return its exit status: 0 also where Ctrl-C stopped it, 2 where the user erred."""
    try:
        options = parse_options(arguments)
        with StopRequest() as stop:
            corpus = load_corpus(options.data, context=options.context)
            with process_group(choose_device(options.device)) as ranks:
                run(options, corpus, ranks, stop)
    except UserError as error:
        if is_first_on_machine():
            print(f"train_lm.py: error: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun ends every rank as soon as one has failed: leave the one that prints time for it.
            time.sleep(2)
        return 2
    return 0


def run(options: Options, corpus: Corpus, ranks: Ranks, stop: StopRequest) -> None:
    """Train, then measure, plot and sample. Every rank calls it."""
    started = time.perf_counter()
    ranks.require_equal(corpus.fingerprint(), what="the text")
    directory = RunDirectory(options.run_dir)
    trainer = Trainer(options, ranks, corpus, directory)
    first_step = trainer.step
    prepare(directory, options, ranks, first_step)
    with Reporter(
        directory.metrics, first_step=first_step, total_steps=options.steps, enabled=ranks.is_main
    ) as reporter:
        introduce(trainer, options, corpus, ranks, reporter)
        if not trainer.train(stop, reporter):
            reporter.say(stopped_message(options, trainer.step))
            return
        bigram_bits = None
        if options.evaluate_every:
            bigram_bits = compare_with_bigram(trainer, options, corpus, ranks, reporter)
        if ranks.is_main:
            plot_loss(directory.picture, directory.read_metrics(), bigram_bits=bigram_bits)
            plot_metrics(directory.costs, directory.read_metrics())
        if options.sample_bytes:
            show_sample(trainer, options, ranks, reporter)
        reporter.say(
            f"{trainer.step - first_step} steps and all else in {time.perf_counter() - started:.0f} s. "
            f"Metrics, {directory.picture.name}, {directory.costs.name} and checkpoints: {directory.path}"
        )


def prepare(directory: RunDirectory, options: Options, ranks: Ranks, first_step: int) -> None:
    """Make the run's folder ready, on rank 0; a former run there is moved aside, with a message."""
    if not ranks.is_main:
        return
    if options.resume:
        directory.resume(options.to_json(), step=first_step)
        return
    former = directory.start_new(options.to_json())
    if former is not None:
        print(f"The run that was in {directory.path} is now in {former} (--resume would have continued it).")


def introduce(trainer: Trainer, options: Options, corpus: Corpus, ranks: Ranks, reporter: Reporter) -> None:
    """Say what is about to be trained, on what, and where."""
    if not launched_by_torchrun():
        reporter.say(f"Started without torchrun: one process, so nothing is really sharded. For two:\n    {LAUNCH}")
    parameter_count = sum(parameter.numel() for parameter in trainer.model.parameters())
    arranged = trainer.arrangement.describe()
    reporter.say(f"{options.size}: {parameter_count:,} parameters {arranged} ({ranks.device.type})")
    reporter.say(corpus.description)
    if trainer.step:
        reporter.say(f"resumed after step {trainer.step} of {options.steps}")


def stopped_message(options: Options, step: int) -> str:
    """Say where a run stopped that a signal interrupted, and how it goes on."""
    if options.checkpoint_every == 0:
        return f"Stopped after step {step}; nothing is saved, because of --checkpoint-every 0."
    message = (
        f"Stopped after step {step} of {options.steps}, and saved. To go on, give the same command with\n"
        f"    --resume --run-dir {options.run_dir}"
    )
    if launched_by_torchrun():
        message += "\nIf torchrun got the signal, it now reports it as an error of its own; nothing is lost."
    return message


def compare_with_bigram(
    trainer: Trainer, options: Options, corpus: Corpus, ranks: Ranks, reporter: Reporter
) -> float | None:
    """Report the held-out loss beside a bigram table's on the same bytes; rank 0 returns the table's bits."""
    loss = trainer.held_out_loss(FINAL_WINDOWS)
    reporter.held_out(trainer.step, loss)
    if not ranks.is_main:
        return None
    starts = spread_windows(corpus.held_out, context=options.context, count=FINAL_WINDOWS)
    inputs, targets = cut_windows(corpus.held_out, starts, context=options.context)
    bigram_bits = BigramTable.fit(corpus.train).bits_per_byte(inputs.numpy(), targets.numpy())
    reporter.say(
        f"\nheld-out text ({targets.numel():,} bytes, none of them trained on):\n"
        f"    model         {loss / math.log(2):.3f} bits per byte\n"
        f"    bigram table  {bigram_bits:.3f} bits per byte (add-one, fitted on the same training text)\n"
    )
    return bigram_bits


def show_sample(trainer: Trainer, options: Options, ranks: Ranks, reporter: Reporter) -> None:
    """Print text the model goes on with after the prompt. Every rank calls it."""
    text = generate(
        trainer.model,
        options.prompt.encode(),
        byte_count=options.sample_bytes,
        context=options.context,
        seed=options.seed,
        ranks=ranks,
    )
    indented = "\n".join("    | " + line for line in text.decode(errors="replace").splitlines())
    reporter.say(f"sample, after {options.prompt!r}:\n{indented}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
