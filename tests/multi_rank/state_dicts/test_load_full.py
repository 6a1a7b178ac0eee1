"""`load_full`: whole tensors, and DTensors that lie anyhow, into a sharded model, beside the unsharded one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fsdp2.checkpoint.whole
from fsdp2 import FSDPRuntimeError, FSDPValueError, MixedPrecisionPolicy, Owned, RowBlocks, full_parameters, fully_shard
from fsdp2.checkpoint import CheckpointMismatch, LoadReport, iter_full_parameters, load_full
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPTypeError
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_same, gather
from tests.harness.models import TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.multi_rank import others_full
from tests.harness.shared.odd_parameters import ODD
from tests.harness.shared.training import shard as shard_case
from tests.harness.shared.whole_weights import LAYOUTS, QUICK, TENSOR_PARALLEL, Net, build, peak_bytes, shard

SOURCES: list[str | int] = ["every rank", 1]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of ``model``, whole, each name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: gather(each.detach()) for name, each in named}


def given(state: dict[str, Tensor], source: str | int) -> dict[str, Tensor] | None:
    """What this rank passes."""
    return state if source in ("every rank", dist.get_rank()) else None


def on_meta() -> Net:
    with torch.device("meta"):
        return build()


def outputs_of(model: nn.Module) -> Tensor:
    return model(torch.arange(12).view(3, 4)).detach()


# ---- values --------------------------------------------------------------------------------------


@multi_rank(2, full=(4,))
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", others_full([*LAYOUTS, TENSOR_PARALLEL], QUICK))
def test_all_layouts_and_sources(layout: str, source: str | int, world_size: int) -> None:
    model, plain = shard(build(), layout), build(seed=1)
    state = plain.state_dict()
    for budget in (64, 1 << 20):
        report = load_full(model, given(state, source), source=source, budget_bytes=budget)
        expected = whole_state(plain)
        expected |= {name: each for name, each in whole_state(build()).items() if "frequencies" in name}
        assert_same("state", whole_state(model), expected)
        assert set(report.loaded) == set(state) - {"head.weight"} and not (report.missing or report.unexpected)
        for value in state.values():
            value.copy_(value + 1)
    assert model.head.weight is model.embedding.weight


@pytest.mark.full
@multi_rank(2, full=(4,))
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", [TRANSFORMER, ODD], ids=str)
def test_training_goes_on_as_of_the_reference(case: ModelCase, source: str | int, world_size: int) -> None:
    """What was gathered before is stale: the model has run, and is loaded between two steps."""
    model = shard_case(model=case.build(seed=5), case=case)
    case.loss(model, case.batch(0, 0, dist.get_rank())).backward()
    model.zero_grad()
    with torch.no_grad():
        case.loss(model, case.batch(0, 0, dist.get_rank()))
    load_full(model, given(case.build().state_dict(), source), source=source)
    optimizer = adamw([each for each in model.parameters() if each.requires_grad])
    reference = Reference(case, world_size=world_size)
    assert_trains_like(reference, model, optimizer, steps=3, tolerance=tolerance_for(world_size))


@pytest.mark.full
@multi_rank(2)
def test_a_cached_cast_of_the_shards_is_made_again() -> None:
    half, case = MixedPrecisionPolicy(torch.bfloat16, torch.float32), UNEVEN_MLP
    cached, again = dataclasses.replace(half, cache_shards=True), fully_shard(case.build(), mp_policy=half)
    model, inputs = fully_shard(case.build(), mp_policy=cached), case.batch(0, 0, 0).inputs
    for _ in range(2):
        model(inputs).sum().backward()
    for each in (model, again):
        load_full(each, case.build(seed=2).state_dict())
    assert torch.equal(model(inputs), again(inputs))


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("budget", [64, 1 << 20])
def test_dtensors_of_other_meshes_and_placements(budget: int) -> None:
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plain = build(seed=1)
    others = [
        (flat, [Shard(0)]),
        (flat, [Replicate()]),
        (square, [Shard(0), Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Replicate()]),
    ]
    for layout in ("zero3", "owned", TENSOR_PARALLEL):
        model, state = shard(build(), layout), {}
        for index, (name, value) in enumerate(plain.state_dict().items()):
            mesh, placements = others[index % len(others)]
            if value.dim() == 2 and index % 2:
                placements = [Shard(1)] * mesh.ndim
            if not value.dim():
                placements = [Replicate()] * mesh.ndim
            state[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)
        load_full(model, state, budget_bytes=budget)
        whole = whole_state(model)
        assert_same("state", {name: whole[name] for name in state}, plain.state_dict())


@multi_rank(2, full=(4,))
@pytest.mark.parametrize("of", others_full([*LAYOUTS, TENSOR_PARALLEL], QUICK))
def test_state_dicts_of_models_that_are_sharded_otherwise(of: str, world_size: int) -> None:
    plain = build(seed=1)
    source = shard(build(seed=1), of)
    for layout in ("zero3", "row blocks", "last dim"):
        model = shard(build(), layout)
        load_full(model, source.state_dict(), budget_bytes=100)
        whole = whole_state(model)
        assert_same("state", {name: whole[name] for name in plain.state_dict()}, plain.state_dict())
    load_full(plain, source.state_dict())  # into one that nothing shards


@pytest.mark.full
@multi_rank(2)
def test_casts_where_it_is_told_to() -> None:
    model, plain = shard(build(), "zero3"), build(seed=1).bfloat16()
    with pytest.raises(CheckpointMismatch, match=r"dtype \(1\d\), of another dtype:\n.*bfloat16 in the state dict"):
        load_full(model, plain.state_dict())
    report = load_full(model, plain.state_dict(), cast=True)
    assert report.cast["blocks.0.up.weight"] == "torch.bfloat16 -> torch.float32" and "blocks.0.seen" not in report.cast
    whole = whole_state(model)
    expected = {name: each.to(whole[name].dtype) for name, each in plain.state_dict().items()}
    assert_same("state", {name: whole[name] for name in expected}, expected)


# ---- memory --------------------------------------------------------------------------------------

MIB = 1 << 20


@multi_rank(2, full=(4,))
@pytest.mark.parametrize("source", SOURCES)
def test_peaks(source: str | int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1024, 1025), nn.Linear(512, 511), nn.Linear(511, 64), nn.LayerNorm(64))
    state = {name: each.clone() for name, each in plain.state_dict().items()}
    for placement in (None, lambda p: Shard(p.dim() - 1), lambda p: Owned(0), lambda p: RowBlocks(16)):
        model = nn.Sequential(nn.Linear(1024, 1025), nn.Linear(512, 511), nn.Linear(511, 64), nn.LayerNorm(64))
        fully_shard(model, shard_placement_fn=placement)
        passed = given(state, source)
        peak = peak_bytes(lambda: load_full(model, passed, source=source, budget_bytes=MIB))  # noqa: B023
        assert peak <= (1 << 10 if source == "every rank" else MIB), peak
        assert_same("state", whole_state(model), state)


# ---- meta ----------------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2, full=(4,))
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", ["zero3", "hybrid", "offload", "owned", "last dim", TENSOR_PARALLEL])
def test_models_on_meta(layout: str, source: str | int, world_size: int) -> None:
    plain = build(seed=1)
    model = shard(on_meta(), layout)
    state = whole_state(plain)  # the buffers that are not persistent, too
    load_full(model, given(state, source), source=source)
    assert_same("state", whole_state(model), state)
    assert model.head.weight is model.embedding.weight
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        assert local.device.type == "cpu"
    if layout != TENSOR_PARALLEL:
        assert torch.allclose(outputs_of(model), outputs_of(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("source", SOURCES)
def test_a_rank_without_memory_is_told_of_by_all(source: str | int) -> None:
    model, state = shard(on_meta(), "zero3"), whole_state(build(seed=1))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def full(*_: Any) -> None:
                raise MemoryError("no memory")

            patch.setattr(fsdp2.checkpoint.whole, "materialize", full)
        with pytest.raises(MemoryError, match="rank 1: no memory"):
            load_full(model, given(state, source), source=source)
    load_full(model, given(state, source), source=source)
    assert_same("state", whole_state(model), state)


@multi_rank(2)
def test_what_nothing_would_write_is_named_before_anything_is_written() -> None:
    model = shard(on_meta(), "zero3")
    state = build().state_dict()
    with pytest.raises(CheckpointMismatch) as caught:
        load_full(model, state)
    assert str(caught.value) == (
        "load_full(): the state dict does not fit the model; nothing was loaded.\n"
        "  unwritten (2), on meta, which nothing would write:\n"
        "    blocks.0.frequencies: (4,) torch.float32, a buffer that is not persistent\n"
        "    blocks.1.frequencies: (4,) torch.float32, a buffer that is not persistent\n"
        "  Remedies:\n"
        "    unwritten: give them values before the load "
        "(buffers: make the module that computes them anew on the device)"
    )
    assert all(each.is_meta for each in [*model.parameters(), *model.buffers()])
    report = load_full(model, state, strict=False)
    assert report.unwritten == ("blocks.0.frequencies", "blocks.1.frequencies")
    for block in model.blocks:
        assert block.frequencies.is_meta and not block.mean.is_meta
        block.frequencies = torch.ones(4)
    plain = build()
    for block in plain.blocks:
        block.frequencies = torch.ones(4)
    assert torch.equal(outputs_of(model), outputs_of(plain))


@pytest.mark.full
@multi_rank(2)
def test_a_part_of_a_group_is_loaded_and_the_rest_later() -> None:
    plain, model = build(seed=1), shard(on_meta(), "zero3")
    state = whole_state(plain)
    first = {name: each for name, each in state.items() if "up" in name or "frequencies" in name}
    report = load_full(model, first, strict=False)
    assert set(report.loaded) == set(first) and "blocks.0.down.weight" in report.unwritten
    assert model.blocks[0].down.weight.is_meta and not model.blocks[0].up.weight.is_meta
    rest = {name: each for name, each in state.items() if name not in first}
    report = load_full(model, rest, strict=False)
    assert not report.unwritten and set(report.missing) == {name for name in first if "frequencies" not in name}
    assert_same("state", whole_state(model), state)
    reference_optimizer, optimizer = (
        torch.optim.SGD([each for each in which.parameters() if each.requires_grad], lr=0.1) for which in (plain, model)
    )
    for which, each in ((plain, reference_optimizer), (model, optimizer)):
        which(torch.arange(12).view(3, 4)).sum().backward()
        each.step()
    assert_same("state", whole_state(model), whole_state(plain))


@pytest.mark.full
@multi_rank(2)
def test_a_part_of_a_sharded_model_on_meta() -> None:
    """Whose parameters belong to groups of what is above."""
    plain, model = build(seed=1), shard(on_meta(), "zero3")
    state = whole_state(plain)
    for prefix in ("blocks.0.up.", "blocks.0.", "blocks.1.", ""):
        part = model.get_submodule(prefix[:-1]) if prefix else model
        load_full(part, {name[len(prefix) :]: each for name, each in state.items() if name.startswith(prefix)})
    assert_same("state", whole_state(model), state)
    assert torch.equal(outputs_of(model), outputs_of(plain))


@pytest.mark.full
@multi_rank(2)
def test_a_plain_model_on_meta_keeps_its_ties() -> None:
    plain, model = build(seed=1), on_meta()
    state = whole_state(plain)
    state.pop("embedding.weight")
    load_full(model, state)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(outputs_of(model), outputs_of(plain))


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("source", SOURCES)
def test_the_names_of_a_ddp_program_are_told_how_to_fit(source: str | int) -> None:
    model, plain = shard(build(), "zero3"), build(seed=1)
    state = {f"module.{name}": value for name, value in whole_state(plain).items()}
    with pytest.raises(CheckpointMismatch) as caught:
        load_full(model, given(state, source), source=source)
    line = str(caught.value).splitlines()[-1]
    assert re.fullmatch(r"    \d+ names fit without their 'module\.': rename=lambda name: (.*)", line), line
    load_full(model, given(state, source), source=source, rename=eval(line.partition("rename=")[2]))
    assert_same("state", whole_state(model), whole_state(plain))


@multi_rank(2)
@pytest.mark.parametrize("source", SOURCES)
def test_a_rename_that_cannot_be_is_said_on_all_ranks(source: str | int) -> None:
    model, state = shard(build(), "zero3"), build().state_dict()
    with pytest.raises(FSDPValueError, match=r"rename calls both '[\w.]+' and '[\w.]+' 'one'"):
        load_full(model, given(state, source), source=source, rename=lambda name: "one")
    with pytest.raises(FSDPRuntimeError, match="rename raised KeyError on 'extra'"):
        load_full(model, given(state, source), source=source, rename={}.__getitem__)
    with pytest.raises(FSDPRuntimeError, match="rename takes a function that returns names"):
        load_full(model, given(state, source), source=source, rename=len)
    with pytest.raises(FSDPValueError, match="a function, or None as 'rename'"):
        load_full(model, given(state, source), source=source, rename="module.")  # type: ignore[arg-type]


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_missing_and_unexpected_is_reported(source: str | int) -> None:
    model, plain = shard(build(), "zero3"), build(seed=1)
    state = plain.state_dict()
    state["more"] = state.pop("blocks.0.up.bias")
    del state["embedding.weight"]  # the other name is enough
    report = load_full(model, given(state, source), source=source, strict=False)
    assert isinstance(report, LoadReport)
    assert (report.missing, report.unexpected) == (("blocks.0.up.bias",), ("more",))
    whole = whole_state(model)
    assert torch.equal(whole["head.weight"], plain.head.weight)
    assert torch.equal(whole["blocks.0.up.bias"], build().blocks[0].up.bias)


@pytest.mark.full
@multi_rank(2)
def test_a_long_table_is_shortened() -> None:
    model = fully_shard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(30))))
    with pytest.raises(CheckpointMismatch, match=r"missing \(60\)") as caught:
        load_full(model, {})
    assert str(caught.value).count("torch.float32") == 20 and "and 40 more" in str(caught.value)


@multi_rank(2, full=(4,))
@pytest.mark.parametrize("problem", ["missing", "shape", "no tensor"])
def test_a_state_dict_that_differs_on_one_rank_is_an_error_on_all(problem: str) -> None:
    model, state = shard(build(), "zero3"), build(seed=1).state_dict()
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        state["blocks.0.mean"] = {"missing": state["blocks.0.mean"], "shape": torch.ones(2), "no tensor": "text"}[
            problem
        ]
        if problem == "missing":
            del state["blocks.0.mean"]
    kind = FSDPTypeError if problem == "no tensor" else CheckpointMismatch
    with pytest.raises(kind, match=f"rank {last}: load_full"):
        load_full(model, state)
    assert_same("state", whole_state(model), whole_state(build()))


@multi_rank(2)
def test_none_where_every_rank_is_to_have_it() -> None:
    """What is to be said on all ranks is said, as of the rank that has none."""
    model = shard_case(UNEVEN_MLP)
    state = UNEVEN_MLP.build().state_dict() if dist.get_rank() == 0 else None
    with pytest.raises(FSDPValueError, match=r"rank 1: load_full\(\) was given None.*source=0"):
        load_full(model, state)
    load_full(model, state, source=0)


class Unreadable(dict[str, Tensor]):
    """A mapping that reads its tensors when it is asked for them, and cannot."""

    def items(self) -> Any:
        raise OSError("no such disk")


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("source", SOURCES)
def test_a_state_dict_that_cannot_be_read_is_an_error_on_all_ranks(source: str | int) -> None:
    model, state = shard(build(), "zero3"), whole_state(build(seed=1))
    with pytest.raises(OSError, match="no such disk"):
        load_full(model, given(Unreadable(state), source), source=source)
    with pytest.raises(AttributeError, match="'int' object"):
        load_full(model, given({**state, 3: torch.ones(1)}, source), source=source)  # type: ignore[dict-item]
    load_full(model, given(state, source), source=source)
    assert_same("state", whole_state(model), state)


@multi_rank(2)
def test_what_is_refused() -> None:
    model, state = shard(build(), "zero3"), build(seed=1).state_dict()
    mine = given(state, 0)
    with pytest.raises(FSDPRuntimeError, match=r"the ranks differ in what load_full\(\) is to do"):
        load_full(model, mine, source=dist.get_rank())
    with pytest.raises(FSDPValueError, match=r"source=5, and the model is on the ranks \[0, 1\]"):
        load_full(model, mine, source=5)
    with pytest.raises(FSDPValueError, match="takes 'every rank', or a rank >= 0 as 'source'"):
        load_full(model, mine, source="rank 0")
    with pytest.raises(FSDPTypeError, match=r"'blocks\.0\.mean' is a int"):
        load_full(model, given({**state, "blocks.0.mean": 3}, 0), source=0)
    with full_parameters(model), pytest.raises(FSDPRuntimeError, match="inside of full_parameters"):
        load_full(model, state)
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(state["blocks.0.mean"], mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(FSDPValueError, match="of which this rank has a part"):
        load_full(model, given({**state, "blocks.0.mean": cut}, 0), source=0)
    partial = DTensor.from_local(state["blocks.0.mean"], mesh, [Partial()])
    with pytest.raises(FSDPNotImplementedError, match=re.escape("full_tensor()")):
        load_full(model, {**state, "blocks.0.mean": partial})
    assert_same("state", whole_state(model), whole_state(build()))


@multi_rank(4)
@pytest.mark.parametrize("dims", ["one", "two"])
def test_models_on_some_of_the_ranks(dims: str) -> None:
    """As the stages of a pipeline: what the two halves of the ranks do differs."""
    names = ("stage", "replicate", "shard")
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    mesh, stage = (whole["shard"] if dims == "one" else whole["replicate", "shard"]), dist.get_rank() // 2
    plain = nn.Sequential(*(nn.Linear(5 + stage, 5 + stage) for _ in range(2 + stage)))
    state = {name: torch.full_like(each, stage + 2.0) for name, each in plain.state_dict().items()}
    model = fully_shard(nn.Sequential(*(nn.Linear(5 + stage, 5 + stage) for _ in range(2 + stage))), mesh=mesh)
    for source in ("every rank", 2 * stage + 1):
        load_full(model, given(state, source), source=source)
        assert_same("state", dict(iter_full_parameters(model)), state)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    with pytest.raises(FSDPValueError, match=rf"source={3 - 2 * stage}, and the model is on the ranks"):
        load_full(model, state, source=3 - 2 * stage)
    found = dict(iter_full_parameters(model, rank=2 * stage))
    assert len(found) == (0 if dist.get_rank() % 2 else len(state))
    with pytest.raises(FSDPValueError, match="as well, which do not hold the model"):
        outside = distribute_tensor(torch.ones(5 + stage), init_device_mesh("cpu", (4,)), [Shard(0)])
        load_full(model, {**state, "0.bias": outside})


@multi_rank(2)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_not_inside_of_a_pass(place: str) -> None:
    model = shard_case(UNEVEN_MLP)

    def load(*_: Any) -> None:
        load_full(model, UNEVEN_MLP.build().state_dict())

    if place == "forward":
        model[0].register_forward_hook(load)
    else:
        model[2].register_full_backward_hook(load)
    with pytest.raises(FSDPRuntimeError, match=f"inside of a {place}"):
        UNEVEN_MLP.loss(model, UNEVEN_MLP.batch(0, 0, 0)).backward()


def test_one_process_without_a_group() -> None:
    model, plain = on_meta(), build(seed=1)
    load_full(model, whole_state(plain), source=0)
    assert torch.equal(outputs_of(model), outputs_of(plain))


@multi_rank(2)
@pytest.mark.parametrize("how", ["load_full", "load_state_dict"])
def test_what_one_rank_has_saved_alone_is_refused_on_the_others(how: str, tmp_path: Path) -> None:
    """Its rows would become those of every rank, without a word."""
    model = nn.Linear(4, 8)
    fully_shard(model)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), tmp_path / "saved.pt")
    dist.barrier()
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)
    before = [each.to_local().clone() for each in model.parameters()]
    says = "is a DTensor that rank 0 has saved, with the rows of that rank; those of rank 1 are not in the file"
    if how == "load_full":
        with pytest.raises(FSDPError, match=says):
            load_full(model, saved)
    elif dist.get_rank() == 1:
        with pytest.raises(FSDPError, match=says):
            model.load_state_dict(saved)
    else:
        model.load_state_dict(saved)
    assert all(torch.equal(each.to_local(), value) for each, value in zip(model.parameters(), before, strict=True))
