"""The parts of `examples/train_lm.py` that need no process group: data, batches, schedule, options, sizes."""

from __future__ import annotations

import math
import signal
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_check
from lm.batches import BatchLayout, ShuffledWindows, cut_windows
from lm.build import build_on_meta, build_unsharded, initial_value
from lm.data import HELD_OUT_EVERY, load_corpus, split
from lm.errors import UserError
from lm.interruption import StopRequest
from lm.model import DEFAULT_SIZE, SIZES, ModelSize
from lm.optimization import CosineSchedule
from lm.options import parse_options
from lm.parallelism import Arrangement
from lm.run_directory import RunDirectory
from lm.tensor_parallel import check_divides, tensor_parallel_plan
from lm.trainer import choose_precision

from tests.unit.helpers import for_each

TOY = ModelSize(width=16, layer_count=2, head_count=4, kv_head_count=2, hidden_width=24)


def text_of(byte_count: int) -> np.ndarray:
    """Return a text whose every window of four bytes is different."""
    return np.random.default_rng(0).integers(0, 256, byte_count, dtype=np.uint8)


# Batches


@for_each("accumulate", [1, 2, 4])
@for_each("world_size", [1, 2, 4])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(world_size: int, accumulate: int) -> None:
    layouts = [BatchLayout(batch=16, accumulate=accumulate, rank=r, world_size=world_size) for r in range(world_size)]
    seen = [layout.samples(3, microbatch) for microbatch in range(accumulate) for layout in layouts]
    assert np.concatenate(seen).tolist() == list(range(48, 64))


def test_a_batch_that_does_not_divide_names_sizes_that_do() -> None:
    with pytest.raises(UserError, match=r"--batch 18 .* 4 ranks .* --accumulate 2: use --batch 16 or 24"):
        BatchLayout(batch=18, accumulate=2, rank=0, world_size=4)
    with pytest.raises(UserError, match="use --batch 8,"):
        BatchLayout(batch=2, accumulate=1, rank=0, world_size=8)


def test_each_epoch_visits_every_window_once_in_an_order_of_its_own() -> None:
    windows = ShuffledWindows(text_of(101), context=10, seed=0)
    first, second = windows.starts(np.arange(10)), windows.starts(np.arange(10, 20))
    assert sorted(first) == sorted(second) == list(range(0, 100, 10))
    assert first.tolist() != second.tolist()


def test_the_order_depends_on_seed_and_sample_alone() -> None:
    def starts(seed: int, samples: list[int]) -> list[int]:
        return ShuffledWindows(text_of(1001), context=10, seed=seed).starts(np.array(samples)).tolist()

    assert starts(5, [250, 3, 7]) == starts(5, [250]) + starts(5, [3, 7])
    assert starts(5, list(range(20))) != starts(6, list(range(20)))


def test_targets_are_the_inputs_one_byte_on() -> None:
    text = text_of(30)
    inputs, targets = cut_windows(text, np.array([0, 24]), context=5)
    assert inputs.shape == targets.shape == (2, 5)
    assert inputs[1].tolist() == text[24:29].tolist()
    assert targets[1].tolist() == text[25:30].tolist()


# Meshes


def test_the_ranks_of_a_tensor_parallel_group_share_a_batch() -> None:
    arrangement = Arrangement(replicate=2, tp=2, world_size=8)
    assert arrangement.shard == 2
    assert arrangement.data_world_size == 4
    assert [arrangement.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_mesh_that_does_not_fit_the_ranks_names_the_numbers() -> None:
    with pytest.raises(
        UserError, match="--replicate 2 and --tp 4 need a multiple of 8 ranks, and there are 12: start 16"
    ):
        Arrangement(replicate=2, tp=4, world_size=12)


def test_the_plan_splits_every_module_that_has_parameters() -> None:
    plan = tensor_parallel_plan()
    modules = dict(build_on_meta(TOY, torch.float32).named_modules())
    matched = {name for name in modules for pattern in plan if fnmatchcase(name, pattern)}
    assert {name for name, module in modules.items() if module._parameters} <= matched
    assert all(any(fnmatchcase(name, pattern) for name in modules) for pattern in plan)


@for_each(
    ("tp", "context", "message"),
    [
        (3, 30, "--tp 3 does not divide the 4 attention heads"),
        (4, 32, "--tp 4 does not divide the 2 heads of keys and values"),
        (2, 31, "--tp 2 does not divide the 31 bytes of --context"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(tp: int, context: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_divides(tp, TOY, context=context)


@for_each(
    ("device", "arguments", "expected"),
    [
        ("cpu", [], (torch.float32, torch.float32, torch.float32)),
        ("cuda", [], (torch.bfloat16, torch.float32, torch.float32)),
        ("cuda", ["--param-dtype", "bfloat16"], (torch.float32, torch.bfloat16, torch.float32)),
        ("cpu", ["--dtype", "bfloat16", "--reduce-dtype", "bfloat16"], (torch.bfloat16, torch.float32, torch.bfloat16)),
    ],
)
def test_dtypes(device: str, arguments: list[str], expected: tuple[torch.dtype, ...]) -> None:
    precision = choose_precision(parse_options(arguments), torch.device(device))
    assert (precision.compute, precision.param, precision.reduce) == expected


# Data


def test_no_file_is_both_trained_on_and_held_out_not_even_as_a_copy() -> None:
    texts = [f"<file {number}>".encode() for number in range(3 * HELD_OUT_EVERY)]
    train, held_out = (part.tobytes().split(b"\x00") for part in split(texts + texts[::-1]))
    assert len(held_out) == 3
    assert sorted(train + held_out) == sorted(texts)


def test_of_few_files_the_ends_are_held_out() -> None:
    train, held_out = split([b"a" * 95 + b"b" * 5, b"c" * 38 + b"d" * 2])
    assert train.tobytes() == b"a" * 95 + b"\x00" + b"c" * 38
    assert held_out.tobytes() == b"b" * 5 + b"\x00" + b"d" * 2


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("missing.txt", None, "missing.txt cannot be read: No such file or directory"),
        ("short.txt", b"x" * 50, "the training text has 48 bytes, fewer than --context 128"),
        ("one.txt", b"x" * 1000, "the held-out text has 50 bytes, fewer than --context 128"),
        ("", None, "is a folder: name files"),
    ],
)
def test_unusable_data_is_refused(tmp_path: Path, name: str, contents: bytes | None, message: str) -> None:
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=message):
        load_corpus([tmp_path / name], context=128)


# Baseline, schedule, plot


def test_the_learning_rate_rises_then_falls_to_a_twentieth() -> None:
    schedule = CosineSchedule(peak=2.0, warmup_steps=4, total_steps=24)
    assert [schedule(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert schedule(4) == 2.0
    assert schedule(14) == pytest.approx(1.05)
    assert schedule(24) == pytest.approx(0.1)
    assert schedule(1000) == pytest.approx(0.1)
    assert CosineSchedule(peak=2.0, warmup_steps=0, total_steps=1)(0) == 2.0


# Model


@pytest.mark.full
def test_the_sizes_have_the_parameter_counts_they_are_named_for() -> None:
    counts = {
        name: sum(parameter.numel() for parameter in build_on_meta(size, torch.float32).parameters())
        for name, size in SIZES.items()
    }
    assert counts[DEFAULT_SIZE] == 2_541_312
    named_for = {"tiny": 2.5e6, "small": 26e6, "125m": 125e6, "350m": 350e6, "1b": 1e9, "3b": 3e9, "8b": 8e9}
    assert counts == pytest.approx(named_for, rel=0.1)


def test_initial_weights_depend_on_name_and_seed_alone() -> None:
    model = build_unsharded(TOY, seed=3)
    name = "blocks.1.feed_forward.down.weight"
    weight = model.get_parameter(name)
    torch.manual_seed(99)
    assert torch.equal(weight, initial_value(name, weight.shape, layer_count=TOY.layer_count, seed=3))
    assert not torch.equal(weight, initial_value(name, weight.shape, layer_count=TOY.layer_count, seed=4))
    assert not torch.equal(weight, model.blocks[0].feed_forward.down.weight)


def test_no_position_sees_what_comes_after_it() -> None:
    model = build_unsharded(TOY, seed=0)
    text = torch.from_numpy(text_of(12).astype(np.int64)).unsqueeze(0)
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    difference = (model(text) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


# The check against unsharded training


def test_the_check_passes_equal_steps(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [train_check.Step(loss=5.0, gradient_norm=2.0), train_check.Step(loss=4.0, gradient_norm=1.0)]
    nearly = [train_check.Step(loss=5.0001, gradient_norm=2.0), train_check.Step(loss=4.0, gradient_norm=0.9999999)]
    assert train_check.report(steps, nearly) == 0
    assert "passed: all 2 steps agree within 1e-04" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        train_check.Step(loss=4.001, gradient_norm=1.0),
        train_check.Step(loss=4.0, gradient_norm=2.0),
        train_check.Step(loss=math.nan, gradient_norm=1.0),
    ],
)
def test_the_check_names_the_first_wrong_step(wrong: train_check.Step, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [train_check.Step(loss=4.0, gradient_norm=1.0)] * 4
    assert train_check.report(steps, [*steps[:2], wrong, wrong]) == 1
    assert "FAILED at step 3, the first of 2" in capsys.readouterr().out
    assert train_check.report(steps, steps[:3]) == 1


# Options, run folder, Ctrl-C


@for_each(
    ("arguments", "message"),
    [
        (["--size", "huge"], "argument --size: invalid choice: 'huge'"),
        (["--steps", "0"], "argument --steps: 0 is not above zero"),
        (["--batch", "-4"], "argument --batch: '-4' is not a whole number"),
        (["--learning-rate", "nan"], "argument --learning-rate: 'nan' is not a number"),
        (["--stepps", "3"], "unrecognized arguments: --stepps"),
        (["--data"], "argument --data: expected at least one argument"),
        (["--tp", "3"], "--tp 3 does not divide the 4 attention heads"),
        (["--dtype", "float32", "--param-dtype", "bfloat16"], "--dtype float32 contradicts --param-dtype bfloat16"),
    ],
)
def test_wrong_arguments_give_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint under"):
        parse_options(["--resume", "--run-dir", str(tmp_path)])


@pytest.fixture
def started(tmp_path: Path) -> RunDirectory:
    """A run that was started with options of its own, and has one complete and one broken checkpoint."""
    text = tmp_path / "text"
    text.touch()
    run = RunDirectory(tmp_path / "run")
    run.start_new(parse_options(["--steps", "7", "--seed", "4", "--data", str(text)]).to_json())
    for step in (5, 6):
        (run.checkpoints / f"step-{step:08d}").mkdir()
    (run.checkpoints / "step-00000005" / "manifest.json").touch()
    return run


def test_a_resumed_run_keeps_its_options_but_for_those_given(started: RunDirectory) -> None:
    options = parse_options(["--resume", "--run-dir", str(started.path), "--steps", "9"])
    assert (options.steps, options.seed, options.resume) == (9, 4, True)
    assert options.data == [started.path.parent / "text"]
    assert not options.offload
    assert parse_options(["--resume", "--run-dir", str(started.path), "--replicate", "2", "--offload"]).offload
    with pytest.raises(UserError, match="--seed 5: the run to resume has 4"):
        parse_options(["--resume", "--run-dir", str(started.path), "--seed", "5"])


def test_only_complete_checkpoints_count(started: RunDirectory) -> None:
    started.require_checkpoint()
    (started.checkpoints / "step-00000005" / "manifest.json").unlink()
    with pytest.raises(UserError, match="there is no checkpoint under"):
        started.require_checkpoint()


def test_resuming_drops_the_metrics_of_steps_that_will_be_done_again(started: RunDirectory) -> None:
    started.metrics.write_text('{"step": 4, "loss": 1.5}\n{"step": 5, "loss": 1.25}\n{"step": 6, "loss": 1.0}\n{"st')
    started.resume({}, step=5)
    assert started.read_metrics() == [{"step": 4, "loss": 1.5}, {"step": 5, "loss": 1.25}]


def test_a_former_run_is_moved_aside_and_anything_else_is_left_alone(started: RunDirectory) -> None:
    assert started.start_new({}) == started.path.with_name("run.1")
    assert started.start_new({}) == started.path.with_name("run.2")
    assert started.path.with_name("run.1").joinpath("checkpoints", "step-00000005").is_dir()
    foreign = started.path.parent / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds no run of this program"):
        RunDirectory(foreign).start_new({})


def test_the_first_signal_is_noted_and_the_second_left_to_the_system() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
