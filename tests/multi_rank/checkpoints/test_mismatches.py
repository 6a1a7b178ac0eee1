"""What does not fit is all in one message, before anything is read; what is allowed is reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn

from fsdp2 import fully_shard
from fsdp2.checkpoint import CheckpointError, CheckpointIncomplete, CheckpointMismatch, LoadReport, load, save
from tests.harness.checkpoints import Run, anew, assert_equal, begin, differences, snapshot


def make(folder: Path) -> None:
    run = begin("1d", "groups")
    run.step(0)
    save(folder / "saved", run.model, run.optimizer, step=1, shared={"epoch": 3})


class Other(nn.Module):
    """Something else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.norm = nn.LayerNorm(6, dtype=torch.bfloat16)
        self.extra = nn.Linear(2, 2, bias=False)
        self.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)


def all_differences(folder: Path) -> str:
    model = Other()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    values = {name: p.full_tensor().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    with pytest.raises(CheckpointMismatch) as raised:
        load(folder / "saved", model, optimizer, shared={"epoch": 0, "best": 1})
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), values[name])  # type: ignore[attr-defined]
    assert not optimizer.state
    return str(raised.value).replace(str(folder), "...")


def test_all_differences_are_in_one_table(tmp_path: Path) -> None:
    anew(2, make, tmp_path)
    texts = anew(2, all_differences, tmp_path)
    assert texts[0] == texts[1]
    assert_expected_inline(
        texts[0],
        """\
the checkpoint .../saved does not fit the model; nothing was loaded.
  missing (1), the model has, and there is not:
    extra.weight: torch.float32 (2, 2)
  unexpected (13), there is, and the model has not:
    blocks.0.down.bias: torch.float32 (6,)
    blocks.0.down.weight: torch.float32 (6, 10)
    blocks.0.up.bias: torch.float32 (10,)
    blocks.0.up.weight: torch.float32 (10, 6)
    blocks.1.down.bias: torch.float32 (6,)
    blocks.1.down.weight: torch.float32 (6, 10)
    blocks.1.up.bias: torch.float32 (10,)
    blocks.1.up.weight: torch.float32 (10, 6)
    counts: torch.int64 (4,)
    frozen: torch.float32 (5, 3)
    head.weight: torch.float32 (13, 6)
    scale: torch.float32 ()
    unused: torch.float32 (3, 2)
  shape (1), of another shape:
    embed.weight: (13, 6) in the checkpoint, (12, 6) in the model
  dtype (2), of another dtype:
    norm.weight: torch.float32 in the checkpoint, torch.bfloat16 in the model
    norm.bias: torch.float32 in the checkpoint, torch.bfloat16 in the model
  group (12), of the optimizer that does not fit:
    extra.weight: in no parameter group of the checkpoint
    blocks.0.down.bias: in no parameter group of the optimizer
    blocks.0.down.weight: in no parameter group of the optimizer
    blocks.0.up.bias: in no parameter group of the optimizer
    blocks.0.up.weight: in no parameter group of the optimizer
    blocks.1.down.bias: in no parameter group of the optimizer
    blocks.1.down.weight: in no parameter group of the optimizer
    blocks.1.up.bias: in no parameter group of the optimizer
    blocks.1.up.weight: in no parameter group of the optimizer
    scale: in no parameter group of the optimizer
    unused: in no parameter group of the optimizer
    group 0 is of several in the checkpoint
      of group 0: 'embed.weight'
      of group 1: 'norm.weight', 'norm.bias'
  unwritten (1), on meta, which nothing would write:
    angles: a buffer that is not persistent, torch.float32 (3,)
  value (1), of the program, which the checkpoint has not:
    shared['best']
  Remedies:
    missing: strict=False leaves what is missing as it is
    unexpected: strict=False leaves them out
    shape: build the model that was saved
    dtype: cast=True converts
    group: build the optimizer with the groups that were saved, or load the model alone
    unwritten: give them values before the load (buffers: make the module that computes them anew on the device)
    value: leave them out, or strict=False
    rename= finds what has another name""",
    )


GROUPS = {
    "one parameter moved": lambda groups: [
        {"params": groups[0]["params"] + groups[1]["params"][:1]},
        {"params": groups[1]["params"][1:]},
    ],
    "two became one": lambda groups: [{"params": groups[0]["params"] + groups[1]["params"]}],
    "one became two": lambda groups: [
        {"params": groups[0]["params"][:2]},
        {"params": groups[0]["params"][2:]},
        groups[1],
    ],
    "fewer": lambda groups: [groups[0]],
}


def groups_differ(folder: Path, how: str) -> str:
    run = begin("1d", "groups", seed=1)
    optimizer = torch.optim.AdamW(GROUPS[how](run.optimizer.param_groups))
    with pytest.raises(CheckpointMismatch) as raised:
        load(folder / "saved", run.model, optimizer)
    return str(raised.value).replace(str(folder), "...")


def test_groups_that_do_not_match_are_named_by_their_parameters(tmp_path: Path) -> None:
    anew(2, make, tmp_path)
    found = "\n".join(anew(1, groups_differ, tmp_path, how)[0] for how in GROUPS)
    assert_expected_inline(
        found,
        """\
the checkpoint .../saved does not fit the model; nothing was loaded.
  group (1), of the optimizer that does not fit:
    group 0 is of several in the checkpoint
      of group 0: 'unused', 'embed.weight', 'blocks.0.up.weight' and 3 more
      of group 1: 'scale'
  Remedies:
    group: build the optimizer with the groups that were saved, or load the model alone
the checkpoint .../saved does not fit the model; nothing was loaded.
  group (1), of the optimizer that does not fit:
    group 0 is of several in the checkpoint
      of group 0: 'unused', 'embed.weight', 'blocks.0.up.weight' and 3 more
      of group 1: 'scale', 'blocks.0.up.bias', 'blocks.0.down.bias' and 4 more
  Remedies:
    group: build the optimizer with the groups that were saved, or load the model alone
the checkpoint .../saved does not fit the model; nothing was loaded.
  group (1), of the optimizer that does not fit:
    two groups are one in the checkpoint, its group 0
      group 0: 'unused', 'embed.weight'
      group 1: 'blocks.0.up.weight', 'blocks.0.down.weight', 'blocks.1.up.weight' and 1 more
  Remedies:
    group: build the optimizer with the groups that were saved, or load the model alone
the checkpoint .../saved does not fit the model; nothing was loaded.
  group (7), of the optimizer that does not fit:
    blocks.0.down.bias: in no parameter group of the optimizer
    blocks.0.up.bias: in no parameter group of the optimizer
    blocks.1.down.bias: in no parameter group of the optimizer
    blocks.1.up.bias: in no parameter group of the optimizer
    norm.bias: in no parameter group of the optimizer
    norm.weight: in no parameter group of the optimizer
    scale: in no parameter group of the optimizer
  Remedies:
    group: build the optimizer with the groups that were saved, or load the model alone""",
    )


# ---- what is allowed -----------------------------------------------------------------------------


def loads(folder: Path, blocks: int, arguments: dict[str, Any]) -> tuple[LoadReport, dict[str, Any], dict[str, Any]]:
    run = begin("1d", "groups", seed=1, blocks=blocks)
    run.step(0)
    before = snapshot(run)
    report = load(folder / "saved", run.model, run.optimizer, **arguments)
    after = snapshot(run)
    run.step(1)
    return report, before, after


@pytest.mark.full  # 13 s
def test_not_strict_and_only(tmp_path: Path) -> None:
    anew(2, make, tmp_path)
    saved = anew(2, whole_of, tmp_path)[0]
    report, before, after = anew(2, loads, tmp_path, 3, {"strict": False})[0]
    assert report.missing[:2] == ("blocks.2.up.weight", "blocks.2.up.bias") and not report.unexpected
    new = {name for name in after if name.startswith("blocks.2.")}
    assert_equal(
        {n: v for n, v in after.items() if n in new and not n.endswith("hyper")},
        {n: before[n] for n in new if not n.endswith("hyper")},
    )
    assert_equal({n: v for n, v in after.items() if n not in new}, saved)

    report, _, after = anew(2, loads, tmp_path, 1, {"strict": False})[0]
    assert report.unexpected[:2] == ("blocks.1.down.bias", "blocks.1.down.weight") and not report.missing
    assert_equal(after, {n: saved[n] for n in after})

    report, before, after = anew(2, loads, tmp_path, 2, {"only": "blocks.0.*"})[0]
    assert sorted(report.loaded) == [f"blocks.0.{n}" for n in ("down.bias", "down.weight", "up.bias", "up.weight")]
    taken = {n for n in after if n.startswith("blocks.0.") and not n.endswith("hyper")}
    assert_equal(after, {**before, **{n: saved[n] for n in taken}})
    assert not differences({n: saved[n] for n in taken}, {n: after[n] for n in taken})


def whole_of(folder: Path) -> dict[str, Any]:
    run = begin("1d", "groups", seed=1)
    load(folder / "saved", run.model, run.optimizer)
    return snapshot(run)


def renamed(folder: Path) -> None:
    run = begin("1d", "groups", seed=1)
    model = nn.ModuleDict({"inner": run.model})
    optimizer = torch.optim.AdamW([{"params": list(g["params"])} for g in run.optimizer.param_groups])
    table = {name: f"inner.{name}" for name in run.model.state_dict()}  # it is asked for these names alone
    report = load(folder / "saved", model, optimizer, rename=table.__getitem__)
    assert not report.missing and not report.unexpected and "inner.scale" in report.loaded
    found = Run(run.model, optimizer, "groups")
    assert_equal(snapshot(found), whole_of(folder))
    with pytest.raises(CheckpointMismatch, match=r"missing \("):
        load(folder / "saved", model, optimizer)


@pytest.mark.full
def test_names_may_be_others(tmp_path: Path) -> None:
    anew(2, make, tmp_path)
    anew(2, renamed, tmp_path)


def cast(folder: Path) -> None:
    run = begin("1d", "groups", seed=1)
    half = run.model.to(torch.bfloat16)
    with pytest.raises(CheckpointMismatch, match=r"torch\.float32 in the checkpoint, torch\.bfloat16 in the model"):
        load(folder / "saved", half)
    report = load(folder / "saved", half, cast=True)
    assert report.cast["scale"] == "torch.float32 -> torch.bfloat16"
    wanted = whole_of(folder)
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter.full_tensor(), wanted[name].bfloat16()), name  # type: ignore[attr-defined]


@pytest.mark.full
def test_another_dtype_is_said_and_cast_if_asked(tmp_path: Path) -> None:
    anew(2, make, tmp_path)
    anew(2, cast, tmp_path)


def unused_state(folder: Path) -> None:
    """State that does not exist is not made up; gradients do not matter; nor whether there was a step."""
    run = begin("1d", "adamw", seed=1)
    unused = run.model.unused
    run.backward(5, dist.get_rank())
    load(folder / "saved", run.model, run.optimizer)
    assert unused not in run.optimizer.state or not run.optimizer.state[unused]
    assert all(p.grad is not None for p in [run.model.scale]), "gradients stay"
    run.model.unused.grad = torch.zeros_like(run.model.unused)
    run.optimizer.step()
    assert run.optimizer.state[unused]["step"] == 1 and run.optimizer.state[run.model.scale]["step"] == 2
    for how in ({"only": "unused"}, {"only": ["unused", "scale"]}, {"strict": False}):
        run.optimizer.zero_grad()
        run.model.unused.grad = torch.zeros_like(run.model.unused)
        run.optimizer.step()
        others = {p for p in run.optimizer.state if p is not unused}
        report = load(folder / "saved", run.model, run.optimizer, **how)  # type: ignore[arg-type]
        assert not run.optimizer.state.get(unused) and "unused" not in report.optimizer
        assert {p for p in run.optimizer.state if p is not unused} == others, "what was not taken stays"


def make_adamw(folder: Path) -> None:
    run = begin("1d")
    run.step(0)
    assert run.model.unused not in run.optimizer.state
    save(folder / "saved", run.model, run.optimizer)


def test_state_that_there_is_not(tmp_path: Path) -> None:
    anew(2, make_adamw, tmp_path)
    anew(2, unused_state, tmp_path)


def nothing_there(folder: Path) -> None:
    run = begin("1d")
    with pytest.raises(CheckpointIncomplete, match=r"there is no checkpoint .*: no such folder"):
        load(folder / "nowhere", run.model)


@pytest.mark.full
def test_no_checkpoint(tmp_path: Path) -> None:
    anew(2, nothing_there, tmp_path)


def found_by_some(folder: Path, failing: int) -> str:
    run = begin("1d", "groups", seed=1)

    def rename(name: str) -> str:
        if dist.get_rank() < failing:
            raise KeyError(name)
        return name

    with pytest.raises(CheckpointError) as raised:
        load(folder / "saved", run.model, rename=rename)
    return str(raised.value)


@pytest.mark.full
def test_an_error_says_whether_all_ranks_have_found_it(tmp_path: Path) -> None:
    anew(2, make, tmp_path)
    for failing, start in ((1, "rank 0: "), (2, "")):
        texts = anew(2, found_by_some, tmp_path, failing)
        assert texts[0] == texts[1]
        assert re.fullmatch(rf"{start}rename raised KeyError on '([\w.]+)': '\1'", texts[0]), texts[0]
