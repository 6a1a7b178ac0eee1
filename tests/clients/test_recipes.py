"""Recipes for launchers and libraries, run as their pages show them: files and commands are taken out of the page.

Pages: docs/migrate/accelerate.md, docs/migrate/lightning.md, docs/migrate/torchtitan.md, docs/recipes/trainer.md and
docs/recipes/ray.md. What differs from the page: the program is started by `programs/recipe.py`, which lets Accelerate
take the CPU for an accelerator, and says whose the model is. All of it is slow: libraries are imported on every rank.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.clients.helpers import PROGRAMS, require
from tests.harness.documents import DOCS
from tests.harness.launchers import environment, run

pytestmark = pytest.mark.full

FILE = re.compile(r"^```\w+ title=\"(?P<name>[^\"]+)\"\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "accelerate launch": ["-m", "accelerate.commands.launch"],
    "python": [],
}
"""What a command of a page begins with, and how this Python starts the same."""


def write_files(page: str, folder: Path) -> None:
    """All titled blocks of a page, as a reader would save them."""
    for found in FILE.finditer((DOCS / page).read_text()):
        (folder / found["name"]).write_text(found["text"])


def command_of(page: str, program: str) -> list[str]:
    """The line of the page that starts ``program`` on this machine, with `recipe.py` in front of the program."""
    text = FILE.sub("", (DOCS / page).read_text())
    (line,) = {
        found for found in re.findall(r"^.*$", text, re.MULTILINE) if found.endswith(f" {program}") and starts(found)
    }
    start = starts(line)
    words = shlex.split(line.removeprefix(start))
    return [sys.executable, *PYTHON[start], *words[:-1], str(PROGRAMS / "recipe.py"), program]


def starts(line: str) -> str:
    """Of `PYTHON`, what a line begins with; "" if it is no command that runs as it stands."""
    runs = "nproc-per-node 8" not in line and not ("accelerate" in line and "config_file" not in line)
    return next((each for each in PYTHON if line.startswith(f"{each} ") and runs), "")


def run_page(page: str, program: str, folder: Path, **variables: str) -> str:
    """Save its files, and run the command that starts one of them."""
    write_files(page, folder)
    variables = environment(
        HF_HUB_OFFLINE="1",
        PYTHONWARNINGS="ignore",
        RAY_AUTH_MODE="disabled",
        RUNS=str(folder),
        **variables,
    )
    variables["PYTHONPATH"] = os.pathsep.join([str(PROGRAMS), variables["PYTHONPATH"]])
    return run(command_of(page, program), folder, variables)


def losses(printed: str) -> list[float]:
    """The numbers behind the word."""
    return [float(each) for each in re.findall(r"'?loss'?:? '?([\d.]+)", printed)]


def test_accelerate_launch(tmp_path: Path) -> None:
    """With its configuration file. About 20 s."""
    require("accelerate")
    printed = run_page("migrate/accelerate.md", "train.py", tmp_path)
    found = losses(printed)
    assert len(found) == 4 and found[-1] < 0.7 * found[0], printed
    assert "the model is sharded by fsdp2" in printed
    assert [*(tmp_path / "checkpoint" / "pytorch_model_fsdp_0").glob("*.distcp")]


def test_transformers_trainer(tmp_path: Path) -> None:
    """Trains, saves, and goes on from what it has saved. About 60 s."""
    require("transformers", "accelerate")
    printed = run_page("recipes/trainer.md", "train.py", tmp_path)
    found = losses(printed)
    assert len(found) >= 6 and found[5] < 0.7 * found[0], printed
    assert "the model is sharded by fsdp2" in printed
    assert [*(tmp_path / "out" / "checkpoint-15").glob("pytorch_model_fsdp_0/*.distcp")]


def test_lightning_trainer(tmp_path: Path) -> None:
    """About 25 s."""
    require("lightning")
    printed = run_page("migrate/lightning.md", "trainer.py", tmp_path)
    assert losses(printed)[-1] < 0.5, printed
    assert "the model is sharded by fsdp2" in printed
    assert [*(tmp_path / "lightning.ckpt").glob("*.distcp")]


def test_lightning_fabric(tmp_path: Path) -> None:
    """About 20 s."""
    require("lightning")
    printed = run_page("migrate/lightning.md", "fabric.py", tmp_path)
    found = losses(printed)
    assert len(found) == 8 and found[-1] < 0.6 * found[0], printed
    assert "the model is sharded by fsdp2" in printed
    assert [*(tmp_path / "fabric.ckpt").glob("*.distcp")]


def write_assets(folder: Path) -> None:
    """What `llama3_debugmodel` reads from a checkout of torchtitan: a tokenizer, and some text."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|begin_of_text|>", "<|end_of_text|>", "<unk>", *(f"w{index}" for index in range(500))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assets = folder / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    known = {"bos_token": words[0], "eos_token": words[1], "add_bos_token": True, "add_eos_token": True}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(known))
    texts = [" ".join(f"w{(start + step) % 500}" for step in range(200)) for start in range(64)]
    (assets / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def test_torchtitan(tmp_path: Path) -> None:
    """Its own training, by a configuration of one's own; then on from its checkpoint. About 60 s."""
    require("torchtitan")
    write_files("migrate/torchtitan.md", tmp_path)
    write_assets(tmp_path)
    (line,) = re.findall(
        r"^PYTHONPATH=. (torchrun .*)$", (DOCS / "migrate" / "torchtitan.md").read_text(), re.MULTILINE
    )
    words = shlex.split(
        line.removeprefix("torchrun ").replace("-m torchtitan.train", str(PROGRAMS / "torchtitan_on_cpu.py"))
    )
    variables = environment(HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore", LOG_RANK="0")
    variables["PYTHONPATH"] = os.pathsep.join([str(PROGRAMS), str(tmp_path), variables["PYTHONPATH"]])
    command = [sys.executable, *PYTHON["torchrun"], *words]
    printed = run(command, tmp_path, variables)
    assert "the model is sharded by fsdp2" in printed
    checkpoints = tmp_path / "outputs" / "checkpoint"
    assert sorted(each.name for each in checkpoints.iterdir()) == ["step-10", "step-5"]
    written = (checkpoints / "step-10" / ".metadata").stat().st_mtime_ns
    run([*command, "--training.steps", "12"], tmp_path, variables)
    assert sorted(each.name for each in checkpoints.iterdir()) == ["step-10", "step-12", "step-5"]
    assert (checkpoints / "step-10" / ".metadata").stat().st_mtime_ns == written  # it was read, not trained again


def test_ray_train(tmp_path: Path) -> None:
    """As a reader runs it. About 40 s."""
    require("ray", "pandas", "pyarrow")
    write_files("recipes/ray.md", tmp_path)
    printed = run([sys.executable, "train.py"], tmp_path, ray_variables(tmp_path))
    found = losses(printed)
    assert "step 200: loss" in printed and found[-1] < 0.6 * found[0], printed
    assert [*(tmp_path / "ray").glob("step-00000200/*.distcp")]


def test_ray_train_after_a_worker_has_died(tmp_path: Path) -> None:
    """Ray starts the workers again, and they go on from the last checkpoint. About 60 s."""
    require("ray", "pandas", "pyarrow")
    write_files("recipes/ray.md", tmp_path)
    program = tmp_path / "train.py"
    dies = """\
            died = os.path.join(config["run"], "died")
            if step == 110 and rank == 1 and not os.path.exists(died):
                open(died, "x").close()
                os.kill(os.getpid(), 9)
"""
    text = program.read_text()
    assert text.count("            loss.backward()\n") == 1
    program.write_text(text.replace("            loss.backward()\n", f"{dies}            loss.backward()\n"))
    printed = run([sys.executable, "train.py"], tmp_path, ray_variables(tmp_path))
    assert (tmp_path / "ray" / "died").exists()
    assert "step 200: loss" in printed, printed
    # Every step but those after the last checkpoint is done once.
    assert re.findall(r"step (\d+): loss", printed) == [str(step) for step in range(20, 201, 20)]


def ray_variables(folder: Path) -> dict[str, str]:
    """No token in the user's home, no statistics sent, runs in a folder of the test."""
    return environment(
        RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_AIR_LOCAL_CACHE_DIR=str(folder), RUNS=str(folder)
    )
