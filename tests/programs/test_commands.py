"""Whole commands of ``fsdp2``, in this process where that is possible: what they print, their files, their status."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

import fsdp2
from fsdp2.tools.commands import main

MODELS = """
import fsdp2
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def build():
    return nn.Sequential(nn.Linear(64, 64), *[Block() for _ in range(3)], nn.Linear(64, 64))

def words():
    return nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))

def wide():
    return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))

def by_hand():
    model = build()
    fsdp2.fully_shard(model[2])
    return fsdp2.fully_shard(model)
"""
BLOCK_BYTES = 4 * (64 * 128 + 128 + 128 * 64 + 64)
REST_BYTES = 4 * 2 * (64 * 64 + 64)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a file of models; the folder is the current one."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "_fsdp2_target_models", raising=False)
    return str(tmp_path / "models.py")


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    found = main(arguments)
    output = capsys.readouterr()
    assert found == status, output.out + output.err
    return output.out + output.err


def test_the_module_and_the_console_script_are_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp2", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("fsdp2", run_name="__main__")
    assert left.value.code == 0 and capsys.readouterr().out == f"fsdp2 {fsdp2.__version__}\n"
    project = (Path(fsdp2.__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.scripts]\nfsdp2 = "fsdp2.__main__:run"\n' in project


def test_explain(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = fsdp2.ShardingConfig(blocks=("Block",), min_bytes=0, strategy="zero2").to_file(tmp_path / "a.json")
    arguments = ("explain", f"{models}:build", "--mesh", "2x4", "--config", str(config))
    found = json.loads(said(capsys, *arguments, "--json"))
    sizes = {each["name"]: sum(buffer["unsharded_bytes"] for buffer in each["buffers"]) for each in found["groups"]}
    assert sizes == {"": REST_BYTES, "1": BLOCK_BYTES, "2": BLOCK_BYTES, "3": BLOCK_BYTES}
    assert not torch.distributed.is_initialized()
    text = said(capsys, *arguments)
    assert "sharded over 4 ranks in 2 copies" in text and "kept" in text
    assert "The settings of its ShardingConfig:\n  strategy: zero2\n  blocks: ['Block']\n  min_bytes: 0" in text
    assert "up.weight" in said(capsys, *arguments, "--group", "2")
    assert "There are: " in said(capsys, *arguments, "--group", "9", status=1)


@pytest.mark.parametrize(("device", "hardware", "reduced"), [("cuda", "h100-8x", 2), ("cpu", "cpu", 1)])
def test_explain_and_estimate_say_the_same_of_what_moves(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, hardware: str, reduced: int
) -> None:
    """NCCL reduces in fp32 what was computed in bf16, and sends that; on gloo bf16 travels, but for what is packed."""
    sizes = {"mesh_shape": (4,), "device_type": device}
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    config = fsdp2.ShardingConfig(**sizes, mp_policy=policy).to_file(tmp_path / "a.json")
    explained = json.loads(said(capsys, "explain", f"{models}:wide", "--config", str(config), "--json"))
    batch = ("--batch", "8x1024", "--hardware", hardware, "--mesh", "4", "--dtype", "bfloat16")
    estimated = json.loads(said(capsys, "estimate", f"{models}:wide", *batch, "--json"))
    for kind, times in (("all-gather", 2), ("reduce-scatter", reduced)):
        sent = sum(each["inside_bytes"] for each in explained["exchanges"] if each["kind"] == kind)
        said_too = sum(each["sent_inside"] for each in estimated["collectives"] if each["kind"] == kind)
        assert sent == pytest.approx(said_too, rel=0.001)
        assert sent == pytest.approx(times * 3 / 4 * 2 * 1024 * 1024 * 2, rel=0.01), kind
    reduces = {each["reduce"] for group in explained["groups"] for each in group["params"]}
    assert device == "cpu" or reduces == {"packed"}, "where it is cast as it is packed"


def test_explain_says_first_that_blocks_are_cut(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = fsdp2.ShardingConfig(blocks=("Block",), min_bytes=0, max_bytes=40_000).to_file(tmp_path / "a.json")
    text = said(capsys, "explain", f"{models}:build", "--ranks", "2", "--config", str(config))
    assert text.startswith("Note: 3 blocks") and text.index("Note: ") < text.index("sharded over 2 ranks")


def test_explain_takes_a_model_that_is_sharded_at_its_word(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "explain", f"{models}:by_hand", "--mesh", "8", "--json"))
    assert {group["name"] for group in found["groups"]} == {"", "2"}


def test_mistakes_have_status_1(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'build'" in said(capsys, "explain", f"{models}:biuld", status=1)
    assert "torch.optim has no optimizer 'AdanW'. Did you mean 'AdamW'" in said(
        capsys, "estimate", f"{models}:build", "--batch", "8x64", "--optimizer", "AdanW", status=2
    )
    assert "there is no run" in said(capsys, "checkpoint", "list", str(tmp_path / "none"), status=1)
    config = fsdp2.ShardingConfig(mesh_shape=(2, -1)).to_file(tmp_path / "a.json")
    text = said(capsys, "explain", f"{models}:build", "--config", str(config), status=1)
    assert "depends on the number of ranks: say it, --mesh 4x8" in text


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 computes embeddings of fake numbers of any dtype")
def test_a_batch_without_its_dtype_is_refused_in_a_sentence(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "estimate", f"{models}:words", "--ranks", "2", "--batch", "8x4", "--hardware", "cpu", status=2)
    assert text.startswith("fsdp2 estimate: the forward of Sequential refused the batch (8x4:float32): Expected tensor")
    assert "If its numbers are indices, write 8x4:int64 on the command line" in text and "Traceback" not in text


def test_doctor_without_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("NCCL_", "FSDP2_"))]:
        monkeypatch.delenv(name)
    found = json.loads(said(capsys, "doctor", "--no-exchange", "--json"))
    topics = {each["topic"] for each in found["findings"]}
    assert {"fsdp2", "torch", "backend", "device", "variables"} <= topics and found["well"] is True
    monkeypatch.setenv("FSDP2_COMM", "nccl")
    assert "PROBLEM  variables" in said(capsys, "doctor", "--no-exchange", status=1)


# ---- what takes longer ------------------------------------------------------------------------------


@pytest.mark.full  # 15 s
def test_doctor_measures_an_all_gather(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "doctor", "--ranks", "2", "--json"))
    (values,) = [each["values"] for each in found["findings"] if each["topic"] == "exchange"]
    assert values["ranks"] == 2 and values["bytes_per_second"] > 0 and values["gathered_bytes"] == 2**24


@pytest.mark.full  # 3 s
def test_estimate(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("estimate", f"{models}:build", "--batch", "64x64", "--mesh", "8", "--hardware", "h100-8x", "--json")
    found = json.loads(said(capsys, *arguments, "--blocks", "Block"))
    assert found["parameters"] == (3 * BLOCK_BYTES + REST_BYTES) // 4 and found["fits"] is True
    config = fsdp2.ShardingConfig(blocks=("Block",), min_bytes=0, strategy="zero2").to_file(tmp_path / "a.json")
    assert json.loads(said(capsys, *arguments, "--config", str(config)))["fits"] is True


@pytest.mark.full  # 5 s
def test_suggest(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "estimate", f"{models}:build", "--batch", "64x64", "--ranks", "4", "--suggest", "--json")
    found, _ = json.JSONDecoder().raw_decode(text)  # what is being estimated follows, on stderr
    assert found["best"] == found["tried"][0]["arguments"] and found["tried"][0]["fits"]
