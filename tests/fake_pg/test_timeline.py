"""The timeline and the metrics in one process: what they count beside what tests count, their cost, what they leave."""

from __future__ import annotations

import ast
import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, FSDPValueError, fully_shard
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.prefetch import Schedule
from fsdp2.core.reduce import GradientReducer
from fsdp2.core.root import FSDPRoot
from fsdp2.core.state import FSDPState, states_below
from fsdp2.core.streams import FSDPCommContext
from fsdp2.core.transport import Transport
from fsdp2.tools.observing.observation import TAPPED
from fsdp2.tools.observing.taps import Tap
from tests.harness import FakeWorlds
from tests.harness.counting import Collectives, python_calls
from tests.harness.internals import groups_of

WORLD_SIZE = 4


class Model(nn.Module):
    """Three blocks; ``checkpointed``: computed again in backward, all together."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.checkpointed = checkpointed

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


def sharded(checkpointed: bool = False, **options: Any) -> Any:
    model = Model(checkpointed)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step(model: Any) -> None:
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()


def engine_of(model: Any) -> list[Any]:
    """All objects of the engine that are tapped."""
    groups = groups_of(model)
    found: list[Any] = [*states_below(model), *groups, *(group.reducer for group in groups)]
    found += [group._transport for group in groups] + [group.reducer._transport for group in groups]
    return [*found, *{group.comm for group in groups}, states_below(model)[0].root]


def taps_in(model: Any) -> list[str]:
    return [name for each in engine_of(model) for name, value in vars(each).items() if isinstance(value, Tap)]


# ---- what is counted, beside what tests count --------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy()}])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_exchanges_are_those_that_go_to_the_process_group(
    options: dict[str, Any], checkpointed: bool, simulate: FakeWorlds
) -> None:
    simulate(WORLD_SIZE)
    model = sharded(checkpointed, **options)
    step(model)
    with fsdp2.timeline(model) as timeline, Collectives() as counted:
        step(model)
        step(model)
    (record,) = timeline.report.records
    seen: dict[str, int] = {}
    for span in record.spans:
        if span.collectives:
            seen[span.what] = seen.get(span.what, 0) + span.collectives
    gathers = sum(count for name, count in counted.counts.items() if "gather" in name)
    scatters = sum(count for name, count in counted.counts.items() if "scatter" in name)
    assert (seen["all-gather"], seen["reduce-scatter"]) == (gathers, scatters)
    assert scatters == 2 * 3


def test_bytes_are_those_of_the_buffers(simulate: FakeWorlds) -> None:
    """Over 4 ranks a block of 8 x 8 + 8 has rows of 2 and 2 on each: 18 elements, padded to 20 (16 bytes)."""
    simulate(WORLD_SIZE)
    model = sharded()
    step(model)
    with fsdp2.timeline(model) as timeline:
        step(model)
    (record,) = timeline.report.records
    whole = WORLD_SIZE * 20 * 4
    gathers = [each for each in record.spans if each.what == "all-gather"]
    assert {each.nbytes for each in gathers} == {whole}
    assert {each.sent_bytes for each in gathers} == {whole * (WORLD_SIZE - 1) // WORLD_SIZE}
    one = 4 * (8 * 8 + 8)
    assert max(each.unsharded_bytes for each in record.memory) == one
    most = max(each.unsharded_bytes + each.staged_bytes for each in record.memory)
    assert most == one + whole, "one computes, the next is in its staging buffer"
    assert record.memory[-1].unsharded_bytes == record.memory[-1].staged_bytes == 0
    assert record.memory[-1].reducing_bytes == 0


# ---- nothing is left, nothing costs -------------------------------------------------------------------


def test_the_engine_has_what_is_tapped() -> None:
    classes = (FSDPState, FSDPRoot, Schedule, FSDPCommContext, FSDPParamGroup, GradientReducer, Transport)
    for each in classes:
        assert not hasattr(each, "__slots__") or "__dict__" in dir(each), "where a tap would have no place"
        for name in TAPPED[each.__name__]:
            assert callable(vars(each)[name]), f"{each.__name__}.{name}"
    assert {each.__name__ for each in classes} == set(TAPPED)


def calls(model: Any) -> int:
    """Of a step. (Every 32 exchanges the engine makes one more.)"""
    return min(python_calls(lambda: step(model)) for _ in range(3))


def test_a_step_makes_the_same_calls_before_and_after(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    step(model)
    before = calls(model)
    names = [sorted(vars(each)) for each in engine_of(model)]
    with fsdp2.metrics(model, write=None), fsdp2.timeline(model):
        assert taps_in(model)
        during = calls(model)
    assert not taps_in(model)
    assert [sorted(vars(each)) for each in engine_of(model)] == names
    assert calls(model) == before < during


def test_what_metrics_cost(simulate: FakeWorlds) -> None:
    """Calls of Python, beyond those of a step, for each gather and reduction: docs/metrics.md says how many."""
    simulate(WORLD_SIZE)
    model = sharded()
    step(model)
    before = calls(model)
    with fsdp2.metrics(model, write=None, observe=False):
        assert calls(model) == before
    with fsdp2.metrics(model, write=None):
        during = calls(model)
    exchanges = 3 * (2 + 1)
    assert (during - before) / exchanges <= 75


def test_nothing_keeps_the_model(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    step(model)
    with fsdp2.timeline(model) as timeline, fsdp2.metrics(model, write=None) as metrics:
        step(model)
        metrics.step()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and timeline.groups
    metrics.close()  # again


def test_no_tensor_is_kept(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    step(model)
    step(model)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    before = tensors()
    with fsdp2.timeline(model), fsdp2.metrics(model, write=None):
        step(model)
        assert tensors() == before


# ---- seams -----------------------------------------------------------------------------------------


def test_an_exception_in_a_forward_closes_what_was_open(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    step(model)
    calls = []

    def fails_once(module: nn.Module, args: Any) -> None:
        calls.append(None)
        if len(calls) == 1:
            raise ValueError("once")

    handle = model.blocks[1].register_forward_pre_hook(fails_once)
    with fsdp2.timeline(model) as timeline:
        with pytest.raises(ValueError, match="once"):
            step(model)
        step(model)
    handle.remove()
    (record,) = timeline.report.records
    assert not record.failure, "it was handled inside"
    forwards = [each for each in record.spans if each.what == "forward" and each.name == "blocks.1"]
    assert len(forwards) == 2 and forwards[0].end <= record.forwards[1]


@pytest.mark.parametrize("world_size", [1, WORLD_SIZE])
def test_a_forward_alone_is_a_step(world_size: int, simulate: FakeWorlds) -> None:
    simulate(world_size)
    model = sharded()
    with torch.no_grad(), fsdp2.timeline(model) as timeline:
        for _ in range(3):
            model(torch.ones(2, 8))
    assert len(timeline.report.steps) == 3
    assert not timeline.ranks[0].exposed_reduce_seconds
    if world_size == 1:
        assert timeline.ranks[0].sent_bytes == 0 and timeline.slowest is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
def test_what_is_in_graphs_is_said(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 8)).sum().backward()
    with fsdp2.timeline(compiled) as timeline, torch._dynamo.config.patch(error_on_recompile=True):
        compiled(torch.ones(2, 8)).sum().backward()
    assert timeline.report.in_graphs == ("blocks.0", "blocks.1", "blocks.2")
    assert "is part of graphs of torch.compile and not shown" in str(timeline)
    with fsdp2.metrics(compiled, write=None) as metrics:
        compiled(torch.ones(2, 8)).sum().backward()
        found = metrics.step(tokens=4)
    assert found is not None and found.sent_bytes is None and found.exposed_share is None
    torch.compiler.reset()


# ---- what is written, and refused ----------------------------------------------------------------------


def test_the_trace_is_what_perfetto_reads(simulate: FakeWorlds, tmp_path: Path) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    with fsdp2.timeline(model) as timeline:
        step(model)
        step(model)
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X", "C"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each in events:
        if each["ph"] == "X":
            assert each["dur"] >= 0
            tracks.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for places in tracks.values():
        places.sort()
        ends = [end for _, end in places]
        assert all(end <= begin + 1e-3 for end, (begin, _) in zip(ends, places[1:], strict=False)), "none overlaps"
    names = {each["name"] for each in events}
    assert {"forward blocks.0", "backward blocks.2", "all-gather blocks.1", "reduce-scatter blocks.1"} <= names
    assert json.loads(timeline.to_json())["steps"] == 2


def test_the_picture_is_one(simulate: FakeWorlds, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    simulate(WORLD_SIZE)
    model = sharded()
    with fsdp2.timeline(model) as timeline:
        step(model)
    timeline.save(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_cannot_be_saved(simulate: FakeWorlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    timeline = fsdp2.timeline(model)
    with pytest.raises(FSDPRuntimeError, match="read it after the with block"):
        timeline.save(tmp_path / "x.json")
    with timeline:
        pass
    with pytest.raises(FSDPValueError, match=r"writes \.json, \.png, by the ending of the path; got 'x\.svg'"):
        timeline.save(tmp_path / "x.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FSDPRuntimeError, match=r"pip install 'fsdp2\[tools\]'"):
        timeline.save(tmp_path / "x.png")
    timeline.save(tmp_path / "x.json")  # of a context in which nothing ran
    with pytest.raises(FSDPRuntimeError, match="entered once"):
        timeline.__enter__()


def test_what_is_not_sharded_is_refused(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    for call in (fsdp2.timeline, fsdp2.metrics):
        with pytest.raises(FSDPValueError, match="nothing in Linear is sharded: call fully_shard"):
            call(nn.Linear(2, 2))
    with pytest.raises(FSDPValueError, match="empty list"):
        fsdp2.timeline([])


# ---- metrics -----------------------------------------------------------------------------------------


def test_utilization_is_worked_out(simulate: FakeWorlds) -> None:
    """3 x (8 x 8 + 8) parameters, 6 operations each: 1,296 for a token; of 4 ranks with 1e6 a second each."""
    simulate(WORLD_SIZE)
    model = sharded()
    with fsdp2.metrics(model, peak_flops=1e6, write=None) as metrics:
        step(model)
        found = metrics.step(tokens=100)
    assert found is not None and found.tokens_per_second is not None
    assert found.tokens_per_second == pytest.approx(100 / found.seconds)
    assert found.mfu == pytest.approx(found.tokens_per_second * 1296 / 4e6)
    with fsdp2.metrics(model, flops_per_token=10.0, write=None) as metrics:
        found = metrics.step(tokens=100)
    assert found is not None and found.mfu is None, "nobody knows what this processor can do"


def test_reports_are_of_several_steps(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    lines: list[str] = []
    with fsdp2.metrics(model, every=2, first_step=10, write=lines.append) as metrics:
        found = []
        for _ in range(4):
            step(model)
            found.append(metrics.step(tokens=5, loss=torch.tensor(1.0, requires_grad=True)))
        assert metrics.step(reports=True) is not None
    assert [each is not None for each in found] == [False, True, False, True]
    assert found[1] is not None and (found[1].step, found[1].values) == (12, {"loss": 1.0})
    gathered = 3 * 2 * 3 * 20 * 4  # blocks, passes, to three others
    assert found[1].sent_bytes is not None and found[1].sent_bytes > gathered
    assert [line[:11] for line in lines] == ["step     12", "step     14", "step     15"]


def test_what_is_no_number_is_refused(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    with fsdp2.metrics(model, write=None) as metrics:
        with pytest.raises(FSDPValueError, match="takes numbers, or tensors of one, got a str as 'loss'"):
            metrics.step(loss="low")
        with pytest.raises(FSDPValueError, match="got a Tensor as 'gradient_norm'"):
            metrics.step(gradient_norm=torch.ones(2))


def test_tensorboard_reads_what_is_written(simulate: FakeWorlds, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="of the extra fsdp2[tools]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    simulate(WORLD_SIZE)
    model = sharded()
    with fsdp2.metrics(model, tensorboard=tmp_path, write=None) as metrics:
        for loss in (2.0, 1.0):
            step(model)
            metrics.step(tokens=4, loss=loss)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert "tokens_per_second" in found.Tags()["scalars"]


# ---- programs ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # what tracing an optimizer imports
def test_a_compiled_optimizer_step_is_seen_and_not_compiled_again(simulate: FakeWorlds) -> None:
    simulate(WORLD_SIZE)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(optimizer.step, backend="aot_eager")

    def train() -> None:
        model(torch.ones(2, 8)).sum().backward()
        compiled()
        optimizer.zero_grad()

    train()
    train()
    with torch._dynamo.config.patch(error_on_recompile=True):
        with fsdp2.timeline(model) as timeline:
            train()
        train()
    assert len(timeline.report.records[0].updates) == 1
    torch.compiler.reset()


@pytest.mark.parametrize("page", ["timeline.md", "metrics.md"])
def test_the_programs_of_the_pages_run(
    page: str, simulate: FakeWorlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="a picture is drawn")
    text = (Path(fsdp2.__file__).parents[1] / "docs" / page).read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    simulate(WORLD_SIZE)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "world_size": WORLD_SIZE,
        "batches": [torch.ones(2, 8)] * 4,
        "train": lambda batch: step(model),
    }
    exec(compile(program, page, "exec"), names)
    assert sorted(each.suffix for each in tmp_path.iterdir()) == (
        [".json", ".png"] if page == "timeline.md" else [".jsonl"]
    )


def test_what_tools_show_more_with_is_imported_when_it_is_used() -> None:
    """`import fsdp2` imports the tools, and must not import these, or fail without them."""
    extras = {"matplotlib", "tensorboard", "rich", "yaml"}
    for path in (Path(fsdp2.__file__).parent / "tools").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not extras.intersection(name.partition(".")[0] for name in names), path.name
