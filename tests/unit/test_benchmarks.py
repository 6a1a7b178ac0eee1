"""The benchmarks count right: known calls and operations give known figures; tables line up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import __main__ as command
from benchmarks import checks, clip, first_step, llama_step, micro, optimizers, programs, scaling
from benchmarks import compile as compile_benchmark
from benchmarks.copies import bytes_written, is_copy
from benchmarks.counts import OperationCounter, PythonCallCounter
from benchmarks.host_time import HostTimes, Quartiles
from benchmarks.implementations import available, base_of, fake_process_group
from benchmarks.memory import LiveBytes, union_length
from benchmarks.models import LARGE_PARAMETERS, SMALL_PARAMETERS, ModelSpec, build_model
from benchmarks.step import Phase
from tests.unit.helpers import for_each

KIB = 1 << 10


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A fake process group of 4 ranks."""
    with fake_process_group(4):
        yield


# Models


@for_each(
    ("spec", "parameter_count"),
    [(SMALL_PARAMETERS, 389), (LARGE_PARAMETERS, 10), (ModelSpec("odd", 3, 5, 4, 4, bias=True), 20)],
)
def test_models_have_the_advertised_number_of_parameters(spec: ModelSpec, parameter_count: int) -> None:
    model = build_model(spec)
    assert len(list(model.parameters())) == parameter_count
    assert len(list(model.blocks[0].parameters())) == spec.params_per_block


# Counts


def _leaf() -> None:
    pass


def _two_python_calls_and_three_builtin_ones() -> None:
    _leaf()
    [].append(len("a") + abs(-1))


def test_python_calls_are_counted_exactly() -> None:
    counter = PythonCallCounter()
    with counter:
        pass
    assert counter.calls == 0
    with counter:
        _two_python_calls_and_three_builtin_ones()
    assert (counter.python_calls, counter.builtin_calls) == (2, 3)


def test_copied_bytes_are_those_written() -> None:
    source = torch.ones(256)  # 1 KiB
    destination = torch.empty(256)
    with OperationCounter() as counter:
        destination.copy_(source)
        torch._foreach_copy_([destination, destination[:128]], [source, source[128:]])
        torch.cat([source, source], out=torch.empty(512))
        source.to(torch.bfloat16)
        source.view(16, 16).t().contiguous()
        destination.add_(source)  # arithmetic, not a copy
        source.view(2, 128).chunk(2)  # no bytes move
    assert counter.counts.copied_bytes == {
        "aten::copy_": KIB,
        "aten::_foreach_copy_": KIB + KIB // 2,
        "aten::cat": 2 * KIB,
        "aten::_to_copy": KIB // 2,
        "aten::clone": KIB,
    }


def test_operations_of_torchs_fully_shard_are_copies() -> None:
    import torch.distributed.fsdp  # registers them

    copy_in = torch.ops.fsdp.all_gather_copy_in.default
    inputs, output = [torch.ones(8), torch.ones(24)], torch.empty(4 * 32)
    assert is_copy(copy_in)
    # Its schema says nothing of what it writes: the shards, into this rank's part of the output.
    assert bytes_written(copy_in, (inputs, output, [8, 24], 32, 0), {}, (output[:32], output)) == 128
    assert is_copy(torch.ops.fsdp.chunk_cat.default)
    assert not is_copy(torch.ops.aten.add_.Tensor)


def test_collectives_are_counted_by_kind(fake_group: None) -> None:
    group = dist.group.WORLD
    assert group is not None
    shard, full = torch.ones(16), torch.empty(64)
    with OperationCounter() as counter:
        group._allgather_base(full, shard).wait()
        group._allgather_base(full, shard).wait()
        group.allgather_into_tensor_coalesced([full, full], [shard, shard]).wait()
        group._reduce_scatter_base(shard, full).wait()
        group.allreduce([shard]).wait()
    found = {kind: (part.calls, part.tensors, part.nbytes) for kind, part in counter.counts.collectives.items()}
    assert found == {
        "allgather_base": (2, 2, 512),
        "allgather_into_tensor_coalesced": (1, 2, 512),
        "reduce_scatter_base": (1, 1, 256),
        "allreduce": (1, 1, 64),
    }


# Memory


def test_peak_bytes_see_temporaries_and_storage_resizes() -> None:
    tracker = LiveBytes()
    with tracker:
        kept = torch.ones(256)  # 1 KiB
        temporary = kept * 2
        del temporary
        total = kept + 1
    assert tracker.peak == 2 * KIB
    assert tracker.live() == 2 * KIB
    total.untyped_storage().resize_(0)
    assert tracker.live() == KIB
    tracker.reset_peak()
    with tracker:
        total.untyped_storage().resize_(4 * KIB)
        kept.mul_(1.0)
        total.untyped_storage().resize_(0)
        kept.mul_(1.0)
    assert tracker.peak == 5 * KIB
    del kept
    assert tracker.live() == 0


def test_bytes_that_only_autograd_keeps_are_alive() -> None:
    tracker = LiveBytes()
    leaf = torch.ones(256, requires_grad=True)
    with tracker:
        result = leaf.exp().sum()
    before_backward = tracker.live()
    del result
    assert before_backward - tracker.live() == KIB + 4


def test_overlapping_storages_count_once() -> None:
    tracker = LiveBytes()
    with tracker:
        flat = torch.ones(256)
        part = torch.empty(0).set_(flat.untyped_storage()[512:768], 0, (64,), (1,))
        part.mul_(2.0)
    assert part.untyped_storage().data_ptr() == flat.data_ptr() + 512
    assert tracker.live() == KIB
    assert union_length([(20, 21), (0, 10), (5, 12), (6, 7)]) == 13


# Summaries and the command


def test_ratios_are_paired_within_a_repetition() -> None:
    def phases(forward: list[float]) -> dict[Phase, list[float]]:
        return {phase: forward if phase is Phase.FORWARD else [0.0] * 3 for phase in Phase}

    seconds = {
        "unsharded": phases([1e-6, 2e-6, 3e-6]),
        "torch": phases([5e-6, 10e-6, 15e-6]),
        "fsdp2": phases([2e-6, 4e-6, 6e-6]),
    }
    times = HostTimes(seconds, parameter_count=2)
    assert times.per_parameter_us("torch", (Phase.FORWARD,)) == Quartiles(3.75, 5.0, 6.25)
    # Whatever the load, fsdp2 took 0.4 of torch's time in every repetition, and a quarter over unsharded.
    assert times.ratio("fsdp2", "torch", (Phase.FORWARD,)).median == pytest.approx(0.4)
    assert times.over_ratio("fsdp2", "torch").high == pytest.approx(0.25)
    assert times.over_unsharded_us("fsdp2").median == pytest.approx(1.0)


def test_unknown_implementation_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown implementation 'fdsp2'"):
        available("fdsp2")
    with pytest.raises(ValueError, match="unknown implementation 'torch-pooled'"):
        available("torch-pooled")
    assert base_of("fsdp2-pooled-again") == base_of("fsdp2-no-prefetch") == "fsdp2"
    assert all(map(available, ("fsdp2-pooled", "fsdp2-cached", "fsdp2-no-prefetch", "torch-again")))


@pytest.mark.full  # 6 s
def test_command_prints_tables_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command.main(
        ["--impl", "unsharded,torch,torch-again", "--repetitions", "2", "--blocks", "1"]
        + ["--params-per-block", "2", "--world-size", "4", "--json", str(file)]
    )
    printed = capsys.readouterr().out
    assert "torch-again/torch" in printed
    figures = json.loads(file.read_text())
    small, large_fp32, _ = (step["implementations"] for step in figures["steps"])
    assert small["unsharded"]["counts"]["collectives"]["forward"] == {}
    # Blocks are gathered in both phases, the root only in forward; each group is reduced once.
    collectives = large_fp32["torch"]["counts"]["collectives"]
    assert collectives["forward"]["allgather_base"]["calls"] == 5
    assert collectives["backward"]["allgather_base"]["calls"] == 4
    assert collectives["backward"]["reduce_scatter_base"]["calls"] == 5
    assert large_fp32["torch"] == large_fp32["torch-again"]


@pytest.mark.full
def test_clipping_is_measured_beside_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    clip.main(["--parameters", "6", "--repetitions", "2", "--world-size", "4"])
    printed = capsys.readouterr().out
    assert "Clipping 6 parameters of (16, 16) sharded over 4 ranks" in printed
    assert printed.splitlines()[-1].split() == ["collectives", "1", "1", "1.000"]


@pytest.mark.full
def test_programs_are_measured_beside_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    programs.main(["--only", "AdamW", "clip_grad_norm_", "--world-size", "2", "--repetitions", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[0] for row in rows] == ["AdamW", "clip_grad_norm_"]
    for _, torchs, ours, *_ in rows:
        assert 0 < int(ours) < int(torchs)


@pytest.mark.full  # 6 s
def test_optimizers_are_measured_beside_plain_tensors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    small = ["--blocks", "1", "--repetitions", "2", "--world-size", "4", "--first-steps", "1,2"]
    optimizers.main([*small, "--json", str(file)])
    samples = json.loads(file.read_text())["seconds"]
    assert [len(contenders) for contenders in samples.values()] == [5, 5, 4]
    assert all(len(seconds) == 2 for contenders in samples.values() for seconds in contenders.values())
    shown = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert {"parameters", "17", "29"} <= rows.keys()
    operations = {name: int(cells[-1]) for name, cells in rows.items() if ", " in name and cells[-1].isdigit()}
    assert len(operations) == 14
    for kind in ("AdamW foreach", "AdamW fused"):
        assert operations[f"{kind}, fsdp2 local"] == operations[f"{kind}, plain tensors"]
    more = operations["AdamW fused, fsdp2"] - operations["AdamW fused, plain tensors"]
    assert more == 4, "a slice of the gradients of each of two runs, and two operations for all counters"
    assert operations["AdamW foreach, fsdp2"] < operations["AdamW foreach, plain tensors"], "it steps on runs"


@pytest.mark.full
def test_single_operations_are_measured_beside_torchs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    micro.main(["--parameters", "3", "--repetitions", "2", "--world-size", "4", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "One group of 3 parameters of (16, 16) over 4 ranks" in printed and "fsdp2/torch" in printed
    figures = json.loads(file.read_text())
    for operation in micro.OPERATIONS:
        names = ["unsharded", "torch", "fsdp2"] if operation == micro.REDUCE else ["torch", "fsdp2"]
        assert sorted(figures["seconds"][operation]) == sorted(names)
        assert all(len(samples) == 2 for samples in figures["seconds"][operation].values())
        calls = figures["python_calls"][operation]
        assert 0 < calls["fsdp2"] < calls["torch"]


@pytest.mark.full
def test_the_first_step_is_measured_in_new_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    first_step.main(["--blocks", "1", "--repetitions", "1", "--world-size", "4", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "First step, 1 blocks of 12 small parameters over 4 ranks" in printed and "fsdp2/torch" in printed
    seconds = json.loads(file.read_text())["seconds"]
    assert tuple(seconds) == first_step.PARTS
    assert all(set(part) == {"unsharded", "torch", "fsdp2"} for part in seconds.values())
    assert all(samples[0] > 0 for part in seconds.values() for samples in part.values())
    few = ["--blocks", "1", "--repetitions", "1", "--world-size", "4", "--impl", "torch,fsdp2"]
    first_step.main([*few, "--no-optimizer"])
    assert "AdamW" not in capsys.readouterr().out


@pytest.mark.full  # 9 s
def test_each_check_of_a_step_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Its names are the engine's, and no step without a check fails."""
    checks.main(["--repetitions", "1"])
    printed = capsys.readouterr().out
    for name in (*checks.CHECKS, checks.ALL):
        assert f"check: {name}" in printed
    assert checks.HOOKS_ALONE in printed


@pytest.mark.full  # it compiles on two ranks: 30 s
def test_compiled_steps_are_measured_beside_eager_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    names = "torch,fsdp2,fsdp2-whole"
    compile_benchmark.main(
        ["--impl", names, "--blocks", "1", "--backend", "aot_eager", "--repetitions", "2", "--json", str(file)]
    )
    samples = json.loads(file.read_text())["samples"]
    assert list(samples) == names.split(",") and all(len(each["cpu"]) == 2 for each in samples.values())
    assert "fsdp2-whole" in capsys.readouterr().out


@pytest.mark.full  # 10 seconds
def test_growth_is_measured_in_rounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    scaling.main(
        ["--impl", "unsharded,torch,fsdp2", "--worlds", "2,4", "--columns", "1", "--blocks", "1,2"]
        + ["--params-per-block", "1", "--repetitions", "1", "--rounds", "2", "--json", str(file)]
    )
    text = capsys.readouterr().out
    assert text.count("W 4 / 2") == 2 and text.count("blocks 2 / 1") == 1
    assert text.count("fsdp2: forward + backward") == text.count("torch: fully_shard") == 4
    assert text.count("fsdp2 / torch, over unsharded") == 4
    assert "unsharded: fully_shard" not in text
    for table in json.loads(file.read_text())["microseconds_per_parameter"].values():
        for by_name in table.values():
            assert all(len(rounds) == 2 for by_size in by_name.values() for rounds in by_size.values())


def test_an_unknown_way_to_compile_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compile_benchmark.main(["--impl", "torch-whole"])
    assert "unknown: torch-whole; there are unsharded-whole" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("name", ["torch", "fsdp2"])
def test_the_llama_step_is_rehearsed_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire is slower than the host: it is what a step lasts."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    words = "--device cpu --shape tiny --seq 8 --steps 1 --world 4 --gbps 0.004"
    given = llama_step.parsed(words.split())
    found = llama_step.measured(name, given, 0, str(tmp_path / "store"))
    # Gathered in bf16 at least once, reduced in fp32: 3 of 4 ranks' parts.
    assert found["ms"] >= 3 / 4 * found["parameters"] * (2 + 4) / 4e6 * 1e3 * 0.95
    assert len(found["losses"]) == llama_step.WARM + 1


def test_what_is_worse_than_torchs_step_is_complained_of() -> None:
    torchs = {"ms": 100.0, "losses": [5.0, 4.0], "allocated_gib": 10.0, "reserved_gib": 12.0}
    good = {"torch": torchs, "torch-again": {**torchs, "ms": 102.0}, "fsdp2": {**torchs, "ms": 104.0}}
    assert llama_step.complaints(good, is_rehearsal=False) == []
    for differing, says in (
        ({"ms": 110.0}, "110.0 ms a step"),
        ({"allocated_gib": 10.2}, "allocated_gib 10.20"),
        ({"reserved_gib": 13.0}, "reserved_gib 13.00"),
        ({"losses": [6.0, 5.0]}, "the first loss"),
        ({"losses": [5.0, math.nan]}, "losses are"),
    ):
        said = llama_step.complaints({**good, "fsdp2": {**torchs, **differing}}, is_rehearsal=False)
        assert len(said) == 1 and says in said[0], said
    failed = {**good, "torch": {"error": "out of memory"}}
    assert llama_step.complaints(failed, is_rehearsal=False) == ["torch: out of memory"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_llama_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        llama_step.main([])
    assert "no GPU is available" in capsys.readouterr().err
