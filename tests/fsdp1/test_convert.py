"""The offline converter: files of torch's FSDP1 into whole ones, into DCP's, and into flat ones for other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load as load_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from fsdp2 import FSDPValueError, fully_shard
from fsdp2.compat.fsdp1 import convert as converter
from fsdp2.compat.fsdp1.convert import Wrapping, convert, main, rank_files, units_named
from fsdp2.compat.fsdp1.flat_checkpoints import write_model
from tests.fsdp1.helpers.flat import (
    OPTIMIZERS,
    full_state_dict,
    load_local_state_dict,
    local_state_dict,
    quiet,
    tower,
    tower_units,
    train,
    wrap_with_torch,
)
from tests.harness import WorkerPools

MODEL = "tests.fsdp1.helpers.flat:meta_tower"
UNITS = "tests.fsdp1.helpers.flat:tower_units"
WRAPPING = ("--model", MODEL, "--units", UNITS, "--ignored", "ignored")


def flag(use_orig_params: bool) -> str:
    return "--use-orig-params" if use_orig_params else "--no-use-orig-params"


def torch_tower(use_orig_params: bool, seed: int = 0) -> Any:
    model = tower(seed=seed)
    return wrap_with_torch(model, tower_units(model), use_orig_params, ignored_modules=[model.ignored])


# ---- on ranks ---------------------------------------------------------------------------------------


def train_and_save(folder: Path, use_orig_params: bool) -> dict[str, Tensor]:
    """Train under torch's FSDP1, save flat files, and return the whole model."""
    model = torch_tower(use_orig_params)
    optimizer = OPTIMIZERS["amsgrad"](list(model.parameters()))
    train(model, optimizer, dist.get_rank(), range(2))
    state = {"model": local_state_dict(model), "optim": optimizer.state_dict(), "step": 2}
    with quiet():
        torch.save(state, folder / f"rank{dist.get_rank()}.pt")
    return full_state_dict(model)


def load_and_train(folder: Path, use_orig_params: bool, steps: range) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Go on under torch's FSDP1 from flat files: the model as it is loaded, and after ``steps``."""
    model = torch_tower(use_orig_params, seed=1)
    optimizer = OPTIMIZERS["amsgrad"](list(model.parameters()))
    with quiet():
        state = torch.load(folder / f"rank_{dist.get_rank()}.pt", weights_only=False)
    assert state["step"] == 2
    load_local_state_dict(model, state["model"])
    optimizer.load_state_dict(state["optim"])
    before = full_state_dict(model)
    train(model, optimizer, dist.get_rank(), steps)
    return before, full_state_dict(model)


def goes_on(use_orig_params: bool, folder: Path, steps: range) -> dict[str, Tensor]:
    """What `train_and_save` comes to if it is not interrupted."""
    model = torch_tower(use_orig_params)
    optimizer = OPTIMIZERS["amsgrad"](list(model.parameters()))
    train(model, optimizer, dist.get_rank(), steps)
    return full_state_dict(model)


def load_into_fully_shard(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load a converted folder of DCP into a model under `fully_shard`, on any number of ranks."""
    model = tower(seed=1)
    for unit in tower_units(model):
        fully_shard(unit)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS["amsgrad"](trainable)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    load_dcp(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole, kept = get_state_dict(model, optimizer, options=options)
    return whole, kept.get("state", {})  # on rank 0 alone


# ---- tests ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_whole_and_dcp(pools: WorkerPools, tmp_path: Path, use_orig_params: bool, world_size: int) -> None:
    """One file of whole tensors; the same through DCP into `fully_shard` on two ranks."""
    (tmp_path / "in").mkdir()
    expected = pools[world_size].run(train_and_save, tmp_path / "in", use_orig_params)[0]
    arguments = [*WRAPPING, flag(use_orig_params)]
    main([str(tmp_path / "in"), str(tmp_path / "full.pt"), "--to", "full", *arguments])
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    assert full.keys() == {"model", "optim", "step"} and full["step"] == 2
    assert_same(full["model"], expected)
    assert full["model"]["head.weight"].data_ptr() == full["model"]["embedding.weight"].data_ptr()
    (group,) = full["optim"]["param_groups"]
    assert group["lr"] == 0.01 and set(full["optim"]["state"]) == set(group["params"]) - {"frozen.weight"}

    main([str(tmp_path / "in"), str(tmp_path / "dcp"), "--to", "dcp", *arguments])
    whole, moments = pools[2].run(load_into_fully_shard, tmp_path / "dcp")[0]
    assert_same(whole, {name: expected[name] for name in whole})
    assert_same(moments, {name: full["optim"]["state"][name] for name in moments})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "full.pt", "in"]  # no scratch is left


def assert_same(ours: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys()
        for key in expected:
            assert_same(ours[key], expected[key])
    else:
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), [(2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("forms", [(True, True), (True, False), (False, True), (False, False)])
def test_flat_files_for_other_ranks_and_forms(
    pools: WorkerPools, tmp_path: Path, source: int, target: int, forms: tuple[bool, bool]
) -> None:
    """Torch's FSDP1 loads them; on as many ranks it goes on as if it had not been interrupted, to the bit."""
    (tmp_path / "in").mkdir()
    expected = pools[source].run(train_and_save, tmp_path / "in", forms[0])[0]
    options = ["--world-size", str(target), flag(forms[0]), flag(forms[1]).replace("use", "target-use")]
    main([str(tmp_path / "in"), str(tmp_path / "out"), "--to", "local", *WRAPPING, *options])
    before, after = pools[target].run(load_and_train, tmp_path / "out", forms[1], range(2, 4))[0]
    assert_same(before, expected)
    if source == target:
        assert_same(after, pools[target].run(goes_on, forms[1], tmp_path, range(4))[0])


def test_a_whole_file_is_cut(pools: WorkerPools, tmp_path: Path) -> None:
    """A plain program's checkpoint, with its optimizer's numbers, becomes FSDP1's."""
    model = tower()
    optimizer = OPTIMIZERS["amsgrad"](list(model.parameters()))
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 2}
    torch.save(state, tmp_path / "plain.pt")
    options = ["--from", "full", "--to", "local", "--world-size", "2", "--no-use-orig-params"]
    main([str(tmp_path / "plain.pt"), str(tmp_path / "local"), *WRAPPING, *options])
    before, _ = pools[2].run(load_and_train, tmp_path / "local", False, range(0))[0]
    assert_same(before, {name: value.detach() for name, value in model.state_dict().items()})
    main([str(tmp_path / "local"), str(tmp_path / "back.pt"), "--to", "full", *WRAPPING, "--no-use-orig-params"])
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    names, kept = [name for name, _ in model.named_parameters()], optimizer.state_dict()["state"]
    assert_same(back["optim"]["state"], {names[number]: each for number, each in kept.items()})


WITHOUT_FSDP1 = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch.distributed.fsdp"):
            raise ImportError(f"{name} is gone")

import torch._dynamo, torch._dynamo.variables  # imports it for itself, when meta tensors are initialized
for name in [name for name in sys.modules if name.startswith("torch.distributed.fsdp")]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuses())
from fsdp2.compat.fsdp1.convert import main
main(sys.argv[1:])
import torch.distributed
assert not torch.distributed.is_initialized()
"""


@pytest.mark.full  # 4 s
def test_it_needs_neither_a_process_group_nor_torchs_fsdp1(pools: WorkerPools, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    expected = pools[2].run(train_and_save, tmp_path / "in", True)[0]
    # Not the tests' own function: what it imports beside imports DCP, and that imports FSDP1.
    (tmp_path / "models.py").write_text(PLAIN_MODEL)
    wrapping = ["--model", "models:Tower", "--units", "Sequential,Frozen", "--ignored", "ignored", "--use-orig-params"]
    command = [sys.executable, "-c", WITHOUT_FSDP1, "in", "full.pt", "--to", "full", *wrapping]
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    ran = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert_same(torch.load(tmp_path / "full.pt", weights_only=True)["model"], expected)


PLAIN_MODEL = """
import torch
from torch import nn

class Frozen(nn.Linear):
    pass

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.scale = nn.Parameter(torch.rand(5, 3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2))
        self.frozen = Frozen(5, 5, bias=False).requires_grad_(False)
        self.ignored = nn.Linear(5, 5)
        self.register_buffer("shift", torch.rand(5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
"""


@pytest.mark.full  # 8 s
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and tells glibc to give memory back")
def test_no_more_than_one_unit_is_in_memory(tmp_path: Path) -> None:
    """A model of 32 MiB in units of two, in a process of its own: not the model, nor a rank's half of it."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    peaks = {to: int(peak) / 2**20 for to, peak in (line.split() for line in ran.stdout.splitlines())}
    assert peaks.keys() == {"full", "dcp", "local"}

    assert max(peaks.values()) < 8, peaks  # a unit, its copy, and what writing a file takes


MEASURED = """
import sys, threading, warnings
from pathlib import Path
import torch
from torch import nn
from fsdp2.compat.fsdp1.convert import Wrapping, convert
from fsdp2.compat.fsdp1.flat_checkpoints import write_model

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def write(folder, model):
    wrapping = Wrapping(model, [*model])
    folder.mkdir()
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for rank in range(2):
        torch.save(write_model(wrapping.layout(False, 2), state, rank), folder / f"{rank}.pt")
    return wrapping

def model(width):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))

folder = Path(sys.argv[1])
small, large = write(folder / "small", model(8)), write(folder / "large", model(724))
for to in ("full", "dcp", "local"):
    convert([folder / "small"], folder / f"small_{to}", to, small, use_orig_params=False)  # imports what it needs
    before, highest, done = anonymous(), 0, threading.Event()

    def watch():
        global highest
        while not done.wait(0.0005):
            highest = max(highest, anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    convert([folder / "large"], folder / f"large_{to}", to, large, use_orig_params=False)
    done.set()
    thread.join()
    print(to, highest)
"""


def test_which_files_are_of_which_rank(tmp_path: Path) -> None:
    for name in ("model_1_rank10.bin", *(f"model_1_rank{rank}.bin" for rank in range(10))):
        (tmp_path / name).touch()
    assert [path.name for path in rank_files([tmp_path])][9:] == ["model_1_rank9.bin", "model_1_rank10.bin"]
    (tmp_path / "model_1_rank3.bin").unlink()
    with pytest.raises(FSDPValueError, match=r"files of the ranks \[0, 1, 2, 4,.*give those of all ranks from 0 on"):
        rank_files([tmp_path])
    (tmp_path / "optim_rank0.bin").touch()
    with pytest.raises(FSDPValueError, match=r"files of several kinds, \['model_1_rank\*\.bin', 'optim_rank\*\.bin'\]"):
        rank_files([tmp_path])
    assert rank_files([tmp_path / "optim_rank0.bin"]) == [tmp_path / "optim_rank0.bin"]
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FSDPValueError, match=r"notes\.txt has no number in its name"):
        rank_files([tmp_path])
    with pytest.raises(FSDPValueError, match=r"there is no file .*gone1\.pt"):
        rank_files([tmp_path / "gone1.pt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FSDPValueError, match="empty: no files"):
        rank_files([tmp_path / "empty"])


def save_all(folder: Path, *states: Any) -> Path:
    folder.mkdir()
    for rank, state in enumerate(states):
        torch.save(state, folder / f"rank{rank}.pt")
    return folder


def test_what_differs_between_ranks_must_be_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapping = Wrapping(model, [model])
    layout = wrapping.layout(False, 2)
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    states = [
        {"model": write_model(layout, weights, rank), "rng": {"cpu": torch.tensor([rank])}, "epoch": [1, {"at": 2}]}
        for rank in range(2)
    ]
    folder = save_all(tmp_path / "in", *states)
    with pytest.raises(FSDPValueError, match=r"'rng\.cpu' differs between rank 0 and rank 1.*--skip rng\.cpu"):
        convert([folder], tmp_path / "out.pt", "full", wrapping, use_orig_params=False)
    assert not (tmp_path / "out.pt").exists() and [path.name for path in tmp_path.iterdir()] == ["in"]
    convert([folder], tmp_path / "out.pt", "full", wrapping, use_orig_params=False, skip=["rng"])
    whole = torch.load(tmp_path / "out.pt", weights_only=True)
    assert whole["epoch"] == [1, {"at": 2}] and whole.keys() == {"model", "epoch"}
    assert_same(whole["model"], weights)
    other = save_all(tmp_path / "other", states[0], {"model": states[1]["model"]})
    with pytest.raises(FSDPValueError, match=r"the files of rank 0 and rank 1 differ at ''"):
        convert([other], tmp_path / "out2.pt", "full", wrapping, use_orig_params=False)


def two_groups(model: nn.Module) -> list[str]:
    """Weights, then biases."""
    return sorted((name for name, _ in model.named_parameters()), key=lambda name: name.endswith("bias"))


def test_groups_need_an_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tower()
    model.frozen.requires_grad_(True)
    names = two_groups(model)
    by_name = dict(model.named_parameters())
    halves = [[by_name[n] for n in names if n.endswith("bias") is bias] for bias in (False, True)]
    optimizer = torch.optim.SGD([{"params": halves[0]}, {"params": halves[1], "lr": 0.5}], lr=0.1, momentum=0.9)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    options = [str(tmp_path / "optim.pt"), str(tmp_path / "local"), "--from", "full", "--to", "local"]
    options += ["--world-size", "3", "--use-orig-params", *WRAPPING]
    with pytest.raises(SystemExit) as exit:
        main(options)
    assert "has 2 parameter groups" in str(exit.value) and "--optimizer-order" in str(exit.value)
    order = ["--optimizer-order", f"{__name__}:two_groups"]
    main([*options, *order])
    back = [str(tmp_path / "local"), str(tmp_path / "back.pt"), "--to", "full", "--use-orig-params", *WRAPPING, *order]
    main(back)
    whole = torch.load(tmp_path / "back.pt", weights_only=True)
    assert [group["params"] for group in whole["param_groups"]] == [
        [name for name in names if name.endswith("bias") is bias] for bias in (False, True)
    ]
    kept = optimizer.state_dict()["state"]
    assert_same(whole["state"], {name: kept[number] for number, name in enumerate(names)})


def test_classes_name_units() -> None:
    model = tower()
    assert units_named(model, "Sequential") == [model, *model.blocks]
    assert units_named(model, "") == [model]
    assert units_named(model, UNITS) == [*model.blocks, model.frozen, model]
    with pytest.raises(FSDPValueError, match=r"no module is a Block; there are \['Embedding', 'Linear'"):
        units_named(model, "Sequential,Block")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--model", "nowhere:model"], "'nowhere:model' is not there"),
        (["--model", "models"], "'models' is not of the form package.module:function"),
        (["--model", f"{__name__}:two_groups_of_nothing"], "is not there"),
        (["--model", f"{__name__}:flag_of_none"], "returned a str, not a module"),
        ([*WRAPPING, "--ignored", "nothing"], "--ignored nothing is the name of no parameter"),
        ([*WRAPPING, "--dtype", "float7"], "torch has no dtype float7"),
        ([*WRAPPING], "give --use-orig-params or --no-use-orig-params"),
        (
            [*WRAPPING, "--use-orig-params"],
            "neither a state dict of Tower nor one of an optimizer; their keys are",
        ),
        ([*WRAPPING, "--from", "full"], "the file is whole already"),
        ([*WRAPPING, "--from", "full", "--to", "local"], "--to local needs --world-size, and --use-orig-params"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: list[str], text: str) -> None:
    torch.save({"x": 1}, tmp_path / "rank0.pt")
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path / "rank0.pt"), str(tmp_path / "out"), "--to", "full", *options])
    assert text in str(exit.value)
    assert not (tmp_path / "out").exists()


def flag_of_none() -> str:
    return ""


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    torch.save({"x": 1}, tmp_path / "rank0.pt")
    with pytest.raises(SystemExit, match="out exists already"):
        main([str(tmp_path / "rank0.pt"), str(tmp_path / "out"), "--to", "full", *WRAPPING, "--use-orig-params"])


def test_what_is_made_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of files, and what the system refuses is a line."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(opened: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{opened}"))
        fsync(opened)

    def renamed(path: Path, to: Path) -> Path:
        done.append(f"{path.name} -> {to.name}")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    torch.save({"model": tower().state_dict()}, tmp_path / "plain.pt")
    options = ["--from", "full", "--to", "local", "--world-size", "2", "--no-use-orig-params", *WRAPPING]
    main([str(tmp_path / "plain.pt"), str(tmp_path / "out"), *options])
    at = done.index("made -> out")
    assert {Path(each).name for each in done[:at]} == {"made", "rank_0.pt", "rank_1.pt"}
    assert done[at + 1 :] == [str(tmp_path)]
    with pytest.raises(SystemExit, match=r"fsdp1\.convert: .*No such file or directory: '.*absent\.pt'"):
        main([str(tmp_path / "absent.pt"), str(tmp_path / "other"), *options])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match=r"No space left on device"):
        main([str(tmp_path / "plain.pt"), str(tmp_path / "other"), *options])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "plain.pt"]


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for action in converter.parser()._actions:
        assert all(option in text for option in action.option_strings)
