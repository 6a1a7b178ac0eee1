"""`python -m fsdp2.checkpoint`: each command on the checkpoints of a real run, in one process without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.checkpoint import Checkpoints, save, save_safetensors
from fsdp2.checkpoint.commands import main
from tests.harness.checkpoints import anew, begin, snapshot


def make(folder: Path) -> dict[str, torch.Tensor]:
    run = begin("1d", "groups")
    with Checkpoints(folder, run.model, run.optimizer, shared={"epoch": 7}) as checkpoints:
        for index in range(3):
            run.step(index)
            checkpoints.save(10 * index + 10)
    return snapshot(run)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    run = tmp_path_factory.mktemp("runs") / "run"
    return run, anew(2, make, run)[0]


def said(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main([str(each) for each in arguments]) == status
    found = capsys.readouterr()
    return found.out + found.err


@pytest.mark.full
def test_list_and_show(made: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = made
    (run / ".step-00000099.writing").mkdir()
    text = said(capsys, "list", run)
    (run / ".step-00000099.writing").rmdir()
    assert [line.split()[0] for line in text.splitlines()[1:4]] == [f"step-{step:08d}" for step in (10, 20, 30)]
    assert ".step-00000099.writing: left by a process" in text
    text = said(capsys, "show", run / "step-00000020")
    assert "step 20" in text and "by 2 ranks, mesh 2" in text
    assert "model.embed.weight" in text and "Shard(dim=0) over 2" in text and "tied to model.embed.weight" in text
    assert "optimizer.param_groups.0.lr = 0.02" in text and "exp_avg_sq" not in text
    text = said(capsys, "show", run / "step-00000020", "--all")
    assert "optimizer.state.scale.exp_avg_sq" in text and "shared.epoch = (7,)" in text


def test_verify(made: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]) -> None:
    path = made[0] / "step-00000010"
    assert "items are as they were written" in said(capsys, "verify", path)
    file = path / "__1_0.distcp"
    whole = file.read_bytes()
    at = whole.index(made[1]["unused"][2].numpy().tobytes())  # nothing trains it
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    text = said(capsys, "verify", path, status=1)
    assert "__1_0.distcp, 'model.unused': its checksum is" in text and text.rstrip().endswith("items differ")
    file.write_bytes(whole[:-1])
    assert f"__1_0.distcp has {len(whole) - 1} bytes, and had {len(whole)}" in said(capsys, "verify", path, status=1)
    file.write_bytes(whole)


@pytest.mark.full
def test_diff(made: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]) -> None:
    one, other = made[0] / "step-00000010", made[0] / "step-00000030"
    assert "no difference in names" in said(capsys, "diff", one, other)
    text = said(capsys, "diff", one, other, "--values", status=1)
    assert "model.scale: differs by up to" in text and "model.counts: 4 of 4 elements differ" in text
    assert "model.frozen" not in text
    assert said(capsys, "diff", one, one, "--values").strip() == "no difference"


def test_diff_of_numbers_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two that are NaN, or infinite, are the same."""
    inf, nan = float("inf"), float("nan")
    model = torch.nn.Module()
    for name, values in {"one": [1.0, inf, nan, -inf], "two": [nan, 1.0, 2.0, inf], "all": [nan] * 2}.items():
        model.register_buffer(name, torch.tensor(values))
    save(tmp_path / "a", model)
    model.two.copy_(torch.tensor([1.0, 1.5, 2.0, inf]))  # type: ignore[operator,union-attr]
    save(tmp_path / "b", model)
    assert said(capsys, "diff", tmp_path / "a", tmp_path / "a", "--values").strip() == "no difference"
    text = said(capsys, "diff", tmp_path / "a", tmp_path / "b", "--values", status=1)
    assert text.strip() == "model.two: differs by up to 0.5, 1 of 4 elements are NaN or infinite in one of them"


def test_a_run_with_a_damaged_checkpoint_is_listed(
    made: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = made
    path = run / "step-00000020" / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    text = said(capsys, "list", run, status=1)
    found = json.loads(said(capsys, "list", run, "--json", status=1))["checkpoints"]
    path.write_bytes(whole)
    assert [line.split()[0] for line in text.splitlines()[1:4]] == [f"step-{step:08d}" for step in (10, 20, 30)]
    assert "step-00000020  " in text and "unreadable" in text and f"{path} is damaged" in text
    assert [("error" in each, each["bytes"] is None) for each in found] == [(False,) * 2, (True,) * 2, (False,) * 2]

    def refuses(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuses)
    assert "Permission denied" in said(capsys, "list", run, status=1)


def test_export(made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    run, state = made
    assert "15 tensors" in said(capsys, "export", run / "step-00000030", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "head.weight" not in found and "table" not in found
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name
    assert "exists" in said(capsys, "export", run / "step-00000030", tmp_path / "out", status=1)
    arguments = ("--dtype", "bfloat16", "--max-file-bytes", "300")
    said(capsys, "export", run / "step-00000030", tmp_path / "half", *arguments)
    files = sorted((tmp_path / "half").glob("*.safetensors"))
    assert len(files) > 1
    merged = {name: each for file in files for name, each in load_file(file).items()}
    assert torch.equal(merged["scale"], state["scale"].bfloat16()) and merged["counts"].dtype is torch.int64
    save_safetensors(run / "step-00000030", tmp_path / "again", rename=lambda name: f"net.{name}")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["net.scale"], state["scale"])


def test_prune(made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    anew(1, make, run)
    assert "removed 1 of 3" in said(capsys, "prune", run, "--keep-last", 1, "--keep-every", 20)
    assert {each.name for each in run.iterdir()} == {"step-00000020", "step-00000030"}
    assert "the newest always stays" in said(capsys, "prune", run, "--keep-last", 0, status=1)


def test_the_same_as_json(
    made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, state = made

    def found(*arguments: object, status: int = 0) -> dict[str, Any]:
        return json.loads(said(capsys, *arguments, "--json", status=status))

    assert [each["step"] for each in found("list", run)["checkpoints"]] == [10, 20, 30]
    assert {each["ranks"] for each in found("list", run)["checkpoints"]} == {2}
    shown = found("show", run / "step-00000030")
    tensors = {each["name"].removeprefix("model."): each for each in shown["tensors"]}
    for name in ("scale", "counts", "embed.weight"):
        assert tensors[name]["shape"] == list(state[name].shape) and tensors[name]["bytes"] == state[name].nbytes
    assert shown["hyperparameters"]["optimizer.param_groups.0.lr"] == 0.02 and shown["values"] == {}
    assert found("show", run / "step-00000030", "--all")["values"]["shared.epoch"] == [7]
    assert found("verify", run / "step-00000030")["differ"] == 0
    assert found("diff", run / "step-00000030", run / "step-00000030", "--values") == {"differences": []}
    assert found("diff", run / "step-00000010", run / "step-00000030", "--values", status=1)["differences"]
    assert found("export", run / "step-00000030", tmp_path / "out")["tensors"] == 15


def test_mistakes(
    made: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no run" in said(capsys, "list", tmp_path / "nowhere", status=1)
    assert "no such folder" in said(capsys, "show", tmp_path / "nowhere", status=1)
    assert "it has no .metadata" in said(capsys, "verify", tmp_path, status=1)
    done = subprocess.run(
        [sys.executable, "-m", "fsdp2.checkpoint", "list", str(made[0])], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "step-00000030" in done.stdout
    with pytest.raises(SystemExit) as ended:
        main(["lst"])
    assert ended.value.code == 2 and "invalid choice: 'lst'" in capsys.readouterr().err
