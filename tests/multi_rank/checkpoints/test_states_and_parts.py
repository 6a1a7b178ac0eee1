"""Checkpoints where they meet optimizers that keep state of their own kind, damaged files, and a part of the ranks."""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import logging
import re
import shutil
import zlib
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.checkpoint import (
    CheckpointDamaged,
    CheckpointError,
    Checkpoints,
    SaveFailed,
    load,
    save,
    save_safetensors,
)
from fsdp2.checkpoint.reading import Reader
from fsdp2.checkpoint.whole import _States
from tests.harness import multi_rank


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return fsdp2.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def flat(model: nn.Module) -> torch.optim.Optimizer:
    return fsdp2.optim.local(torch.optim.AdamW, model.parameters(), flat=True, lr=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.full
@multi_rank(1, 2)
@pytest.mark.parametrize("make", [adamw, flat])
def test_a_run_that_goes_back_steps_as_it_did(make: Any, world_size: int, tmp_path: Path) -> None:
    """Its counters too, which all parameters of a run have in common inside."""
    model = build()
    optimizer = make(model)
    checkpoints = Checkpoints(tmp_path / "run", model, optimizer)
    train(model, optimizer, 2)
    checkpoints.save(2)
    train(model, optimizer, 3)
    expected = [parameter.full_tensor().clone() for parameter in model.parameters()]
    train(model, optimizer, 2)
    checkpoints.restore(2)
    first = next(model.parameters())
    assert optimizer.state[first]["step"] == 2
    train(model, optimizer, 3)
    assert optimizer.state[first]["step"] == 5
    for parameter, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.full_tensor(), before)


@multi_rank(1)
def test_state_in_lists_and_dicts_comes_back_as_it_was(tmp_path: Path) -> None:
    """L-BFGS has lists of tensors, others dicts."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    models = [nn.Linear(4, 4) for _ in range(2)]
    made = [torch.optim.LBFGS(each.parameters(), max_iter=2) for each in models]
    model, optimizer = models[0], made[0]
    for _ in range(2):
        optimizer.step(closure)
    first = next(model.parameters())
    optimizer.state[first]["factors"] = {"left": {"q": torch.ones(2)}, "right": [torch.zeros(3), torch.ones(1)]}
    optimizer.state[first]["of other dtypes"] = {"index": [torch.arange(3)], "half": torch.ones(2).bfloat16()}
    save(tmp_path / "c", model, optimizer)
    load(tmp_path / "c", models[1], made[1])
    before, after = optimizer.state_dict()["state"][0], made[1].state_dict()["state"][0]
    assert before.keys() == after.keys()
    assert [each.tolist() for each in before["old_dirs"]] == [each.tolist() for each in after["old_dirs"]]
    assert after["factors"]["left"]["q"].tolist() == [1.0, 1.0] and after["factors"]["right"][1].tolist() == [1.0]
    others = after["of other dtypes"]
    assert others["index"][0].tolist() == [0, 1, 2] and others["index"][0].dtype is torch.int64
    assert others["half"].dtype is torch.bfloat16
    del optimizer.state[first]["factors"], made[1].state[next(models[1].parameters())]["factors"]
    losses = [optimizer.step(closure)]
    model, optimizer = models[1], made[1]
    losses.append(optimizer.step(closure))
    assert losses[0].item() == losses[1].item()


@multi_rank(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_removed_does_not_keep_a_run_from_saving(asynchronous: bool, tmp_path: Path) -> None:
    """The log says so. What is in the way of the folder that is written fails the save, on all ranks."""
    model, run = build(), tmp_path / "run"
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp2").addHandler(handler)
    odd = run / ".step-00000009.removing"
    with Checkpoints(run, model) as checkpoints:
        checkpoints.save(1)
        if dist.get_rank() == 0:
            odd.touch()  # no folder, as it would be
        dist.barrier()
        checkpoints.save(2, asynchronous=asynchronous)
        checkpoints.wait()
        assert odd.exists() and checkpoints.steps() == [1, 2]
        dist.barrier()
        if dist.get_rank() == 0:
            (run / ".step-00000003.writing").touch()
        dist.barrier()
        with pytest.raises(SaveFailed, match="rank 0"):
            checkpoints.save(3, asynchronous=asynchronous)
            checkpoints.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            (run / ".step-00000003.writing").unlink()
        dist.barrier()
        checkpoints.save(3, asynchronous=asynchronous)
    logging.getLogger("fsdp2").removeHandler(handler)
    told = [line for line in lines if f"{odd} is left, and could not be removed" in line]
    assert len(told) == (3 if dist.get_rank() == 0 else 0)
    assert Checkpoints(run, model).restore() == 3


@multi_rank(2)
def test_steps_that_are_symbolic_links_are_removed_as_links(tmp_path: Path) -> None:
    """What they point to, as a program has moved it to other disks, stays."""
    model, run, kept = build(), tmp_path / "run", tmp_path / "other disk"
    with Checkpoints(run, model, keep_last=1) as checkpoints:
        checkpoints.save(1)
        dist.barrier()
        if dist.get_rank() == 0:
            (run / "step-00000001").rename(kept)
            (run / "step-00000001").symlink_to(kept)
            for name in (".step-00000007.removing", ".step-00000008.writing", ".step-00000002.writing"):
                (run / name).symlink_to(kept)
        dist.barrier()
        for step in (2, 3):
            checkpoints.save(step)
    dist.barrier()
    assert [each.name for each in run.iterdir()] == ["step-00000003"]
    load(kept, model)


def flip(folder: Path, tensor: torch.Tensor) -> None:
    """One bit of what the files have of ``tensor``."""
    content = tensor.numpy().tobytes()
    for file in folder.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        at = data.find(content)
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("it is in no file")


@multi_rank(1, 2)
def test_a_damaged_tensor_is_not_exported(world_size: int, tmp_path: Path) -> None:
    """On all ranks, though one alone has read it; nothing is left of the folder."""
    pytest.importorskip("safetensors")
    model = build()
    save(tmp_path / "c", model)
    if dist.get_rank() == 0:
        flip(tmp_path / "c", model[1].weight.to_local().detach())
    dist.barrier()
    with pytest.raises((SaveFailed, CheckpointDamaged), match="its checksum is "):
        save_safetensors(tmp_path / "c", tmp_path / "out", max_file_bytes=256)
    dist.barrier()
    assert not list(tmp_path.glob("*out*"))


@multi_rank(1)
def test_a_damaged_hyperparameter_is_not_loaded(tmp_path: Path) -> None:
    model = build()
    rate = torch.tensor([0.1234567, 0.7654321])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["rates"] = rate
    save(tmp_path / "c", model, optimizer)
    load(tmp_path / "c", model, optimizer)
    flip(tmp_path / "c", rate)
    with pytest.raises(CheckpointDamaged, match="its checksum is"):
        load(tmp_path / "c", model, optimizer)


@multi_rank(4)
def test_a_part_of_the_ranks_saves_beside_the_program(world_size: int, tmp_path: Path) -> None:
    """Each half by itself, in the background; process groups that all ranks make have the same names as before."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "dp"))["dp"]
    torch.manual_seed(mine)
    model = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
    run = tmp_path / f"run{mine}"
    for _ in range(2):
        with Checkpoints(run, model, process_group=halves[mine]) as checkpoints:
            checkpoints.save(1, asynchronous=True)
    if mine:
        with Checkpoints(run, model, process_group=halves[mine]) as checkpoints:
            checkpoints.save(2, asynchronous=True)
    everyone = dist.new_group([0, 1, 2, 3])
    total = torch.ones(1)
    dist.all_reduce(total, group=everyone)
    assert total.item() == 4
    before = model.weight.full_tensor().clone()
    with torch.no_grad():
        model.weight.zero_()
    assert Checkpoints(run, model, process_group=halves[mine]).restore() == 1 + mine
    assert torch.equal(model.weight.full_tensor(), before)


Ema = namedtuple("Ema", "weights decay")


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("torchs", [False, True])
def test_ranks_that_open_different_checkpoints_load_none(torchs: bool, tmp_path: Path) -> None:
    """As on nodes with folders of their own, one of which has an older copy."""
    for node in range(2):
        model, folder = build(seed=node), tmp_path / f"node{node}" / "c"
        if torchs:
            torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
        else:
            save(folder, model)
    own = tmp_path / f"node{dist.get_rank()}" / "c"
    before = [parameter.full_tensor() for parameter in model.parameters()]
    says = r"(?s)the ranks differ in what the load .*-the checkpoint with \.metadata \w+.*\+the checkpoint with "
    with pytest.raises(CheckpointError, match=says):
        load(own, model)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    if dist.get_rank():
        shutil.rmtree(own)
        shutil.copytree(tmp_path / "node0" / "c", own)
    load(own, model)


@multi_rank(2)
@pytest.mark.parametrize("node", [0, 1])
def test_what_one_rank_alone_has_read_wrongly_is_noticed(node: int, tmp_path: Path) -> None:
    """Of what nothing shards all read the same, each its own: from the folder of its node."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    save(tmp_path / "c", model)
    own = tmp_path / f"node{dist.get_rank()}" / "c"
    shutil.copytree(tmp_path / "c", own)
    content = ctypes.string_at(model.weight.data_ptr(), model.weight.nbytes)
    for path in own.glob("*.distcp") if dist.get_rank() == node else ():
        path.write_bytes(path.read_bytes().replace(content, content[:-1] + b"\0"))
    with pytest.raises(CheckpointDamaged, match=r"'model\.weight': "):
        load(own, model)


@multi_rank(2)
def test_sharded_tensors_in_other_containers_are_refused(tmp_path: Path) -> None:
    """They would be pickled with the rows of one rank."""
    model = build()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=r"shared\['ema'\] holds a sharded tensor inside of a Ema.*use lists"):
        save(tmp_path / "c", model, shared={"ema": Ema(weights, 0.9)})
    save(tmp_path / "d", model, shared={"ema": {"weights": weights, "more": Ema([torch.ones(2)], 0.9)}})


class Extra(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self, extra: Any) -> None:
        super().__init__(8, 8)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@multi_rank(1, 2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_extra_state_that_is_a_stream_comes_back_as_one(asynchronous: bool, tmp_path: Path) -> None:
    """As those of layers in eight bits."""
    model = fsdp2.fully_shard(nn.Sequential(Extra(io.BytesIO(b"scales"))))
    with Checkpoints(tmp_path / "run", model) as checkpoints:
        checkpoints.save(1, asynchronous=asynchronous)
    model[0].extra = io.BytesIO()  # type: ignore[attr-defined]
    assert checkpoints.restore(verify="first") == 1
    assert model[0].extra.getvalue() == b"scales"  # type: ignore[attr-defined]


@multi_rank(2)
def test_a_sharded_tensor_in_an_extra_state_is_refused(tmp_path: Path) -> None:
    """It would be pickled with the rows of one rank."""
    model: Any = fsdp2.fully_shard(nn.Sequential(Extra(None)))
    model[0].extra = {"ema": [model[0].weight.detach().clone()]}
    with pytest.raises(SaveFailed, match=r"'0\._extra_state', which get_extra_state\(\) returns, holds a sharded"):
        save(tmp_path / "c", model)
    model[0].extra = {"ema": [torch.ones(2)]}
    save(tmp_path / "c", model)


@multi_rank(1)
def test_state_that_is_asked_for_in_inference_mode_goes_on() -> None:
    model = build()
    optimizer = flat(model)
    train(model, optimizer, 2)
    with torch.inference_mode():
        assert optimizer.state_dict()["state"]
    train(model, optimizer, 1)
    model[0].bias.requires_grad_(False)
    train(model, optimizer, 1)
    assert optimizer.state[model[1].weight]["step"] == 4


@pytest.mark.full
@multi_rank(1, 2)
def test_values_of_another_dtype_take_the_place_of_those_that_are_there(tmp_path: Path) -> None:
    """A write would cut what was saved to the dtype that the program begins with."""
    model = build()
    best, counts = torch.tensor(0.93), torch.arange(3.0) / 2
    values = {"meters": {"best": best, "list": [counts], "same": torch.ones(2)}, "alone": torch.tensor(0.5)}
    mine = {"meters": {"best": torch.tensor(0.25)}}
    save(tmp_path / "c", model, shared=values, per_rank=mine)
    same = torch.zeros(2)
    found: dict[str, Any] = {
        "meters": {"best": torch.tensor(0), "list": [torch.zeros(3).long()], "same": same},
        "alone": torch.tensor(0),
    }
    own: dict[str, Any] = {"meters": {"best": torch.tensor(0)}}
    load(tmp_path / "c", model, shared=found, per_rank=own)
    meters = found["meters"]
    assert torch.equal(meters["best"], best) and torch.equal(meters["list"][0], counts)
    assert meters["same"] is same and same.tolist() == [1.0, 1.0]
    assert found["alone"].item() == 0.5 and own["meters"]["best"].item() == 0.25


Pair = namedtuple("Pair", "one two")


@multi_rank(2)
def test_state_that_each_rank_has_for_itself_is_refused(tmp_path: Path) -> None:
    """One rank's would be saved, and be everybody's."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model[0].weight
    own = first.detach().to_local().clone()
    refused = [
        (
            {"m": own},
            r"state 'm' of '0\.weight' is a plain tensor of shape \(4, 8\), and the parameter, of shape \(8, 8\)",
        ),
        ({"m": {"a": [own]}}, r"state 'm\.a\.0' of '0\.weight' is a plain tensor"),
        ({"m": (own, 1)}, r"state 'm' of '0\.weight' is a plain tensor of shape \(4, 8\).*pass it in per_rank"),
        ({"m": (first.detach(), 1)}, r"state 'm' of '0\.weight' holds a sharded tensor inside of a tuple"),
        ({"m": Pair(first.detach(), 1)}, r"holds a sharded tensor inside of a Pair"),
        ({"m": {0: first.detach()}}, r"inside of a dict.*use lists, and dicts whose keys are strings"),
        ({0: first.detach()}, r"the optimizer keeps the state 0 of '0\.weight'"),
    ]
    for state, says in refused:
        optimizer.state[first] = state
        mine = state if dist.get_rank() else {}
        for each in (state, mine):  # found on all ranks, or on one
            optimizer.state[first] = each
            with pytest.raises(SaveFailed, match=says):
                save(tmp_path / "c", model, optimizer)
    state = {
        "step": torch.tensor(3.0),
        "one": torch.ones(1),
        "like": torch.zeros_like(first),
        "whole": torch.ones(8, 8),
    }
    optimizer.state[first] = {**state, "by place": {0: 1.5, 2: (2, 3)}, "nested": {"a": [torch.zeros_like(first)]}}
    save(tmp_path / "c", model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    load(tmp_path / "c", model, other)
    assert other.state[first]["by place"] == {0: 1.5, 2: (2, 3)}
    assert other.state[first]["whole"].sum() == 64 and other.state[first]["one"].tolist() == [1.0]


@multi_rank(1, 2)
def test_state_by_numbers_comes_back_by_numbers(tmp_path: Path) -> None:
    """Of a parameter that nothing shards, whatever it is."""
    model = nn.Linear(4, 4)
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    made[0].state[model.weight] = {"by place": {0: torch.ones(2), 3: torch.zeros(3).long()}, "own": torch.arange(3)}
    save(tmp_path / "c", model, made[0])
    load(tmp_path / "c", model, made[1])
    found = made[1].state[model.weight]
    assert found["by place"][0].tolist() == [1.0, 1.0] and found["by place"][3].dtype is torch.int64
    assert list(found["by place"]) == [0, 3] and found["own"].tolist() == [0, 1, 2]


class Mixture(nn.Module):
    """Experts of which each rank of expert parallelism has its own, and what all have."""

    def __init__(self, seed: int, ep: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        torch.manual_seed(seed + 1 + ep)
        self.experts = nn.Linear(4, 6)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("whole", [False, True])
def test_experts_of_one_name_are_refused_where_one_would_be_kept(whole: bool, tmp_path: Path) -> None:
    """`whole`: the router is sharded over all ranks; else over those of its experts, as beside tensor parallelism."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    ep = mesh.get_local_rank("ep")
    everyone = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    info = fsdp2.FSDPMeshInfo(mesh["edp"], 0)

    def shard(model: Mixture) -> Any:
        own = set(model.experts.parameters())
        place = (lambda p: fsdp2.ShardPlacementResult(None, info) if p in own else None) if whole else None
        return fsdp2.fully_shard(model, mesh=everyone if whole else mesh["edp"], shard_placement_fn=place)

    model = shard(Mixture(0, ep))
    says = r"'experts\.(weight|bias)' is on no mesh of all ranks, and rank 2 has other values in it than rank 0"
    with pytest.raises(SaveFailed, match=says):
        save(tmp_path / "c", model)
    assert not (tmp_path / "c").exists()
    with pytest.raises(SaveFailed, match=says), Checkpoints(tmp_path / "run", model) as checkpoints:
        checkpoints.save(1, asynchronous=True)
    part = mesh["edp"].get_group()
    save(tmp_path / f"of{ep}", model.experts, process_group=part)
    before = [parameter.full_tensor().clone() for parameter in model.experts.parameters()]
    with torch.no_grad():
        for parameter in model.experts.parameters():
            parameter.zero_()
    save(tmp_path / "same", model)  # copies
    load(tmp_path / f"of{ep}", model.experts, process_group=part)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.experts.parameters(), before, strict=True))


@multi_rank(4)
def test_copies_beside_tensor_parallelism_may_have_been_rounded_otherwise(tmp_path: Path) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build()
    other = nn.Sequential(nn.Linear(8, 8))
    fsdp2.fully_shard(other, mesh=mesh["dp"])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 1e-4 * mesh.get_local_rank("tp"))
    save(tmp_path / "c", other)
    save(tmp_path / "d", model)
    with torch.no_grad():
        other[0].weight.mul_(1 + mesh.get_local_rank("tp"))
    with pytest.raises(SaveFailed, match=r"'0\.weight' is on no mesh of all ranks"):
        save(tmp_path / "e", other)


@multi_rank(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_experts_that_nothing_shards_are_refused_where_one_would_be_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """Those that are the same on all ranks are saved, whatever is in them, and roundings apart."""
    rank = dist.get_rank()
    model = Mixture(0, rank)
    for parameter in model.experts.parameters():
        parameter.requires_grad_(False).copy_(parameter * 100)
        parameter.data = parameter.to(dtype)
    fsdp2.fully_shard(model, ignored_params=set(model.experts.parameters()))
    says = r"'experts\.weight' is on no mesh of all ranks, and rank 1 has other values in it than rank 0"
    with pytest.raises(SaveFailed, match=says):
        save(tmp_path / "c", model)
    with pytest.raises(fsdp2.FSDPRuntimeError, match=says):
        fsdp2.checkpoint.iter_full_parameters(model)
    with pytest.raises(fsdp2.FSDPRuntimeError, match=says):
        save_safetensors(model, tmp_path / "st")
    own = [dist.new_group([each]) for each in range(2)][rank]
    save(tmp_path / f"of{rank}", model.experts, process_group=own)
    before = [parameter.clone() for parameter in model.experts.parameters()]
    with torch.no_grad():
        for parameter in model.experts.parameters():
            parameter.fill_(1)
            if dtype.is_floating_point:
                parameter.view(-1)[0] = float("nan")
                parameter.view(-1)[1] += rank * 1e-4
    save(tmp_path / "same", model)
    load(tmp_path / f"of{rank}", model.experts, process_group=own)
    assert all(torch.equal(*each) for each in zip(model.experts.parameters(), before, strict=True))


@pytest.mark.full
@multi_rank(2)
def test_a_clock_that_was_put_back_does_not_make_a_checkpoint_old(tmp_path: Path) -> None:
    model, run = build(), tmp_path / "run"
    checkpoints = Checkpoints(run, model, keep_last=1)
    checkpoints.save(1)
    if dist.get_rank() == 0:
        path = run / "step-00000001" / "manifest.json"
        body, _ = path.read_text().split('\n"crc32"')
        body = re.sub(r'"time": "\d+', '"time": "2999', body)  # as if written by a clock that is ahead
        path.write_text(f'{body}\n"crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n')
    dist.barrier()
    assert checkpoints.restore() == 1
    for step in (2, 3):
        checkpoints.save(step)
        dist.barrier()
        assert checkpoints.steps() == [step]
    assert checkpoints.restore() == 3


@pytest.mark.full
@multi_rank(2)
def test_a_checkpoint_whose_manifest_cannot_be_read_is_neither_old_nor_removed(tmp_path: Path) -> None:
    model, run = build(), tmp_path / "run"
    for step in (1, 2):
        Checkpoints(run, model).save(step)
    opens = Path.open

    def fails(path: Path, *args: Any, **named: Any) -> Any:
        if path == run / "step-00000002" / "manifest.json":
            raise OSError(errno.EIO, "Input/output error")
        return opens(path, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", fails)
        assert Checkpoints(run, model).steps() == [1, 2]
        Checkpoints(run, model, keep_last=1).save(3)
        dist.barrier()
        assert Checkpoints(run, model).steps() == [2, 3]


@multi_rank(2)
@pytest.mark.parametrize("where", ["manifest.json", "__1_0.distcp", "stat"])
def test_what_the_system_refuses_is_no_damage(where: str, tmp_path: Path) -> None:
    """Nothing is wrong with the checkpoint, so the one before is not what is wanted."""
    model, run = build(), tmp_path / "run"
    for step in (1, 2):
        save(run / f"step-0000000{step}", model)
    calls = {name: getattr(Path, name) for name in ("open", "stat")}

    def fails(name: str, path: Path, *args: Any, **named: Any) -> Any:
        if path.parent.name == "step-00000002" and (path.name == where or (where == name and "distcp" in path.name)):
            raise OSError(errno.EMFILE, "Too many open files")
        return calls[name](path, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("stat",) if where == "stat" else ("open",):
            patch.setattr(
                Path, name, functools.partialmethod(lambda path, name, *a, **n: fails(name, path, *a, **n), name)
            )
        checkpoints = Checkpoints(run, model)
        with pytest.raises(CheckpointError, match=r"step-00000002.*cannot be read: .*Too many open files") as raised:
            checkpoints.restore(on_damage="previous")
        assert not isinstance(raised.value, CheckpointDamaged)
        with pytest.raises(CheckpointError, match="Too many"):
            checkpoints.restore(on_damage="previous", verify="first")
    assert checkpoints.restore() == 2


class Gone:
    """A class that the process which restores may not have."""


@multi_rank(1, 2)
def test_a_value_of_a_class_that_is_not_here_is_no_damage(tmp_path: Path) -> None:
    model, values = build(), {"value": Gone()}
    for step in (1, 2):
        Checkpoints(tmp_path / "run", model, shared=values).save(step)
    for verify in ("reading", "no"):
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(globals(), "Gone")
            with pytest.raises(
                CheckpointError, match=r"'shared\.value' .* is what was written, and cannot be"
            ) as raised:
                Checkpoints(tmp_path / "run", model, shared=values).restore(on_damage="previous", verify=verify)
        assert not isinstance(raised.value, CheckpointDamaged)


@multi_rank(1, 2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_program_without_checksums_of_its_own_has_those_of_checkpoints(asynchronous: bool, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        model = build()
        optimizer = adamw(model)
        train(model, optimizer, 1)
        with Checkpoints(tmp_path / "run", model, optimizer, shared={"a": 1}) as checkpoints:
            checkpoints.save(1, asynchronous=asynchronous)
        assert torch.serialization.get_crc32_options() is False
        assert checkpoints.restore() == 1 and checkpoints.restore(verify="first") == 1
        dist.barrier() if dist.is_initialized() else None
        torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torchs")
        names = {name for name, _ in model.named_parameters()}
        for how in ("reading", "first"):  # it has none to compare
            assert set(load(tmp_path / "torchs", model, verify=how).unverified) == names  # type: ignore[arg-type]
        assert not load(tmp_path / "run" / "step-00000001", model, verify="first").unverified
    finally:
        torch.serialization.set_crc32_options(before)


@multi_rank(1, 2)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_every_part_of_what_was_written_in_part_refuses_to_run(stop: type[BaseException], tmp_path: Path) -> None:
    """Whichever was passed, until it is loaded, alone or with what it is a part of."""
    model = nn.ModuleDict({"g": build(), "d": build(1)})
    whole_g = {name: p.full_tensor() for name, p in model["g"].named_parameters()}  # type: ignore[operator]
    save(tmp_path / "all", model)
    save(tmp_path / "g", model["g"])

    def failing(module: nn.Module, *, whole: bool = False) -> None:
        read, write = Reader.read, _States.write

        def stopped(*arguments: Any) -> None:
            (write if whole else read)(*arguments)  # type: ignore[operator]
            raise stop()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*((_States, "write", stopped) if whole else (Reader, "read", stopped)))
            with pytest.raises((stop, CheckpointError)):
                fsdp2.checkpoint.load_full(module, whole_g) if whole else load(tmp_path / "all", module)

    def refuses(*parts: Any) -> None:
        for part in parts:
            with pytest.raises(CheckpointDamaged, match="half-way"):
                part(torch.ones(2, 8))

    g, d = model["g"], model["d"]
    failing(model)
    refuses(g, d, g[0], d[1])  # type: ignore[index]
    load(tmp_path / "g", g)
    g(torch.ones(2, 8))
    refuses(d)
    load(tmp_path / "all", model)
    d(torch.ones(2, 8))
    failing(g, whole=True)
    refuses(g, g[0])  # type: ignore[index]
    load(tmp_path / "all", model)
    g(torch.ones(2, 8))


@multi_rank(1, 2)
def test_values_that_are_not_to_be_verified_are_not(tmp_path: Path) -> None:
    model = build()
    save(tmp_path / "c", model, shared={"text": "a text that is saved"})
    if not dist.is_initialized() or dist.get_rank() == 0:
        path = tmp_path / "c" / "__0_0.distcp"
        data = path.read_bytes()
        path.write_bytes(data.replace(b"a text that is saved", b"a text that is soved"))
        assert path.read_bytes() != data
    dist.barrier() if dist.is_initialized() else None
    values = {"text": ""}
    with pytest.raises(CheckpointDamaged, match="checksum"):
        load(tmp_path / "c", model, shared=values)
    load(tmp_path / "c", model, shared=values, verify="no")
    assert values["text"] == "a text that is soved"


@multi_rank(1, 2)
def test_tensors_that_are_conjugated_or_negated_lazily(tmp_path: Path) -> None:
    def make(sign: int) -> nn.Module:
        model = build()
        model.register_buffer("plain", sign * torch.tensor([1 + 2j, 3 - 1j]))
        model.register_buffer("conj", (sign * torch.tensor([1 + 2j, 3 - 1j])).conj())
        model.register_buffer("imag", (sign * torch.tensor([1 + 2j, 3 - 1j])).conj().imag)
        return model

    model, other = make(1), make(-2)
    assert model.conj.is_conj() and model.imag.is_neg()
    save(tmp_path / "c", model)
    load(tmp_path / "c", other)
    for name in ("plain", "conj", "imag"):
        assert torch.equal(getattr(other, name), getattr(model, name)), name
    other.plain, other.conj = other.conj, other.plain
    save(tmp_path / "d", other)
    other.plain.zero_()
    load(tmp_path / "d", other)
    load(tmp_path / "c", other)
    for name in ("plain", "conj", "imag"):
        assert torch.equal(getattr(other, name), getattr(model, name)), name


class Tied(nn.Module):
    """One weight by two names, in either order."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(6, 4))
        for name in names:
            setattr(self, name, nn.Linear(4, 6, bias=False))
            getattr(self, name).weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


@multi_rank(1, 2)
def test_state_of_a_tied_weight_whose_first_name_is_another(tmp_path: Path) -> None:
    models = [fsdp2.fully_shard(Tied(names)) for names in (("a", "b"), ("b", "a"))]
    made = [adamw(model) for model in models]
    models[0](torch.ones(2, 4)).square().sum().backward()
    made[0].step()
    save(tmp_path / "c", models[0], made[0])
    for rename in (None, lambda name: name):
        made[1].state.clear()
        report = load(tmp_path / "c", models[1], made[1], rename=rename)
        assert report.optimizer == ("b.weight",)
        (before,), (after,) = ([*each.state.values()] for each in made)
        assert torch.equal(before["exp_avg"].full_tensor(), after["exp_avg"].full_tensor())
        assert after["step"] == 1


@multi_rank(1, 2)
def test_any_name_of_a_tied_weight_takes_it(tmp_path: Path) -> None:
    models = [fsdp2.fully_shard(Tied(("a", "b"))) for _ in range(2)]
    made = [adamw(model) for model in models]
    models[0](torch.ones(2, 4)).square().sum().backward()
    made[0].step()
    save(tmp_path / "c", models[0], made[0])
    for only in ("b.*", "a.*", ["c.*", "b.*"][1:], lambda name: name.endswith("weight")):
        with torch.no_grad():
            models[1].a.weight.zero_()
        made[1].state.clear()
        report = load(tmp_path / "c", models[1], made[1], only=only)
        assert report.loaded == report.optimizer == ("a.weight",)
        assert torch.equal(models[1].a.weight.full_tensor(), models[0].a.weight.full_tensor())
        assert made[1].state[models[1].a.weight]["step"] == 1
    for strict in (True, False):
        for excludes in (lambda name: False, lambda name: not name.startswith("a.")):  # a function must take all names
            with pytest.raises(CheckpointError, match=r"only=.* takes nothing of the model"):
                load(tmp_path / "c", models[1], only=excludes, strict=strict)


@multi_rank(1, 2)
def test_hyperparameters_that_are_tensors_stay_the_programs(tmp_path: Path) -> None:
    """Where they are: a graph, a compiled step, or a schedule reads them there."""
    model = build()
    rate, shared = torch.tensor(0.5), torch.tensor(0.25)
    groups = [{"params": [p]} for p in model.parameters()]

    def make(values: list[Any]) -> torch.optim.Optimizer:
        pairs = zip(groups, values, strict=True)
        return torch.optim.AdamW([{**group, "lr": value} for group, value in pairs], foreach=False)

    save(tmp_path / "c", model, make([rate, shared, shared, torch.tensor(0.125)]))
    mine = [torch.tensor(0.0), torch.tensor(0.0), torch.zeros(1), torch.tensor(0.0)]
    mine[3] = mine[1]  # which cannot have two values
    other = make(mine)
    load(tmp_path / "c", model, other)
    rates = [group["lr"] for group in other.param_groups]
    assert [each.item() for each in rates] == [0.5, 0.25, 0.25, 0.125]
    assert rates[0] is mine[0] and rates[1] is mine[1] and rates[3] is not mine[1]
    plain = make([0.1] * 4)
    load(tmp_path / "c", model, plain)
    assert [group["lr"].item() for group in plain.param_groups] == [0.5, 0.25, 0.25, 0.125]
    save(tmp_path / "d", model, make([0.1] * 4))
    load(tmp_path / "d", model, other)
    assert [group["lr"] for group in other.param_groups] == [0.1] * 4
