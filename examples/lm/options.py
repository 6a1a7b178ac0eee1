"""The command line of `train_lm.py`: what can be set, what it means, what is refused."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from lm.errors import UserError
from lm.model import DEFAULT_SIZE, SIZES, ModelSize
from lm.run_directory import RunDirectory
from lm.tensor_parallel import check_divides

LAUNCH = "python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_lm.py"

DESCRIPTION = f"""\
Train a language model on bytes of text, its parameters, gradients and optimizer state sharded by fsdp2.
Start it with torchrun, one process for each GPU (or CPU core):

    {LAUNCH}

Without any option it trains 2.5 million parameters on the Python standard library's source code, in about
two minutes on two CPU cores. Ctrl-C saves a checkpoint and stops; the same command with --resume
goes on. A second Ctrl-C stops at once, without saving. torchrun gives the save 30 seconds (see its
--shutdown-timeout) and itself reports the signal as an error afterwards; that is expected."""

KEPT_WHEN_RESUMING = ("size", "context", "batch", "seed")
"""What a resumed run may not change: the model and which bytes it sees when."""


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a user can choose; `build_parser` says what each means."""

    size: str
    data: list[Path]
    context: int
    batch: int
    accumulate: int
    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip: float
    seed: int
    device: str
    dtype: str
    param_dtype: str
    reduce_dtype: str
    replicate: int
    tp: int
    offload: bool
    activation_checkpoint: bool
    compile: str
    run_dir: Path
    resume: bool
    checkpoint_every: int
    keep_checkpoints: int
    asynchronous_checkpoints: bool
    evaluate_every: int
    log_every: int
    prompt: str
    sample_bytes: int

    @property
    def model_size(self) -> ModelSize:
        """The row of the table of sizes that `size` names."""
        return SIZES[self.size]

    def to_json(self) -> dict[str, object]:
        """Return what a resumed run takes over: all but where the run lies and whether it is resumed."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["run_dir"], values["resume"]
        return values | {"data": [str(path.resolve()) for path in self.data]}


class OneLineParser(argparse.ArgumentParser):
    """Raises `UserError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists all options)")


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; with `--resume`, what it leaves out comes from the run that goes on.

    Raises:
        UserError: an option is unknown or has an impossible value, or there is nothing to resume.
    """
    parser = build_parser()
    options = to_options(parser.parse_args(arguments))
    if not options.resume:
        check_together(options)
        return options
    run = RunDirectory(options.run_dir)
    run.require_checkpoint()
    saved = run.read_options()
    parser.set_defaults(**saved)
    options = to_options(parser.parse_args(arguments))
    for name in KEPT_WHEN_RESUMING:
        if getattr(options, name) != saved[name]:
            raise UserError(
                f"--{name} {getattr(options, name)}: the run to resume has {saved[name]}, and must keep it; "
                "leave the option out, or start a new run without --resume"
            )
    check_together(options)
    return options


def check_together(options: Options) -> None:
    """Raise `UserError` where two options contradict each other."""
    check_divides(options.tp, options.model_size, context=options.context)
    if options.compile and options.offload:
        raise UserError("--compile contradicts --offload: what is offloaded cannot be gathered inside of a graph")
    if options.dtype == "float32" and options.param_dtype != "float32":
        raise UserError(
            f"--dtype float32 contradicts --param-dtype {options.param_dtype}: leave --dtype out (it becomes auto)"
        )


def to_options(parsed: argparse.Namespace) -> Options:
    """Turn what argparse has read into `Options`."""
    return Options(**vars(parsed) | {"data": [Path(path) for path in parsed.data]})


def build_parser() -> argparse.ArgumentParser:
    """Describe every option."""
    parser = OneLineParser(
        prog="train_lm.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser)
    add_training_options(parser)
    add_parallelism_options(parser)
    add_run_options(parser)
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What is trained, and on what."""
    group = parser.add_argument_group("model and data")
    group.add_argument(
        "--size",
        choices=tuple(SIZES),
        default=DEFAULT_SIZE,
        help="tiny has 2.5 million parameters, small 26 million, the others as many as they are named for "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts to train on, in this order; one file in 20 is held out, or the last twentieth of each "
        "if there are fewer (default: the Python standard library's source code)",
    )
    group.add_argument(
        "--context",
        type=positive_integer,
        default=128,
        metavar="BYTES",
        help="length of text the model sees at once (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=non_negative_integer,
        default=0,
        metavar="NUMBER",
        help="of the initial weights, the order of the data and the sample (default: %(default)s)",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where there is one"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="what matrices multiply in, by autocast; weights stay float32 (auto: bfloat16 on a GPU, else float32)",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """How it is trained."""
    group = parser.add_argument_group("training")
    group.add_argument(
        "--steps", type=positive_integer, default=320, help="updates of the weights in all (default: %(default)s)"
    )
    group.add_argument(
        "--batch",
        type=positive_integer,
        default=16,
        metavar="SAMPLES",
        help="samples in a step over all ranks together, whatever their number (default: %(default)s)",
    )
    group.add_argument(
        "--accumulate",
        type=positive_integer,
        default=1,
        metavar="N",
        help="cut each step's batch into N parts, one after the other, to save memory (default: %(default)s)",
    )
    group.add_argument(
        "--learning-rate",
        type=positive_number,
        default=1e-3,
        metavar="RATE",
        help="at its peak; larger models want less, 1b about 3e-4 (default: %(default)s)",
    )
    group.add_argument(
        "--warmup-steps",
        type=non_negative_integer,
        default=25,
        metavar="STEPS",
        help="rising to the peak, before the cosine falls to a twentieth of it (default: %(default)s)",
    )
    group.add_argument(
        "--weight-decay",
        type=non_negative_number,
        default=0.1,
        metavar="RATE",
        help="of matrices (default: %(default)s)",
    )
    group.add_argument(
        "--clip",
        type=positive_number,
        default=1.0,
        metavar="NORM",
        help="largest norm of all gradients together (default: %(default)s)",
    )


def add_parallelism_options(parser: argparse.ArgumentParser) -> None:
    """How model and memory are divided. A resumed run may change all of it."""
    group = parser.add_argument_group("parallelism and memory")
    group.add_argument(
        "--replicate",
        type=positive_integer,
        default=1,
        metavar="R",
        help="hybrid sharding: keep R copies of all shards, each over 1/R of the ranks (default: %(default)s)",
    )
    group.add_argument(
        "--tp",
        type=positive_integer,
        default=1,
        metavar="T",
        help="tensor parallelism: split each matrix over T neighbouring ranks, which see the same samples "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--param-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what parameters are gathered and used in; their shards stay float32 (default: %(default)s)",
    )
    group.add_argument(
        "--reduce-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what gradients are averaged over ranks in (default: %(default)s)",
    )
    group.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep shards, gradients and optimizer state in the CPU's memory",
    )
    group.add_argument(
        "--activation-checkpoint",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep only the input of each block for backward, and compute the block again there",
    )
    group.add_argument(
        "--compile",
        nargs="?",
        choices=("inductor", "aot_eager"),
        const="inductor",
        default="",
        metavar="BACKEND",
        help="train in graphs of torch.compile, communication included: one of the whole model for forward, one for "
        "backward (BACKEND: inductor, or aot_eager to trace only; default, without the option: eager)",
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What is kept and reported."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/lm"),
        metavar="DIR",
        help="where checkpoints, metrics.jsonl and pictures go; without --resume, a former run there is kept, "
        "moved to DIR.1 or the next free number. With several machines, on a file system they share "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --run-dir, on any number of ranks; options left out are "
        "those of that run",
    )
    group.add_argument(
        "--checkpoint-every",
        type=non_negative_integer,
        default=200,
        metavar="STEPS",
        help="0: none, not even at the end or on Ctrl-C (default: %(default)s)",
    )
    group.add_argument(
        "--keep-checkpoints", type=positive_integer, default=2, metavar="N", help="the newest (default: %(default)s)"
    )
    group.add_argument(
        "--asynchronous-checkpoints",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="train on while a copy of the shards is written",
    )
    group.add_argument(
        "--evaluate-every",
        type=non_negative_integer,
        default=50,
        metavar="STEPS",
        help="measure the held-out loss; 0: never, not even at the end (default: %(default)s)",
    )
    group.add_argument(
        "--log-every",
        type=positive_integer,
        default=1,
        metavar="STEPS",
        help="write metrics, and look for a Ctrl-C on any rank; more lets a GPU run further ahead of the "
        "program (default: %(default)s)",
    )
    group.add_argument(
        "--prompt", default="def ", help="what the sample at the end goes on from (default: %(default)r)"
    )
    group.add_argument(
        "--sample-bytes",
        type=non_negative_integer,
        default=300,
        metavar="BYTES",
        help="length of the sample; 0: none (default: %(default)s)",
    )


def positive_integer(text: str) -> int:
    """Parse a whole number above zero."""
    value = non_negative_integer(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is not above zero")
    return value


def non_negative_integer(text: str) -> int:
    """Parse a whole number, zero or more."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, zero or more")
    return int(text)


def positive_number(text: str) -> float:
    """Parse a finite number above zero."""
    value = non_negative_number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is not above zero")
    return value


def non_negative_number(text: str) -> float:
    """Parse a finite number, zero or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, zero or more")
    return value
