"""The command line: what is understood, and what is refused with which words. In this process."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import FSDPTypeError, FSDPValueError, ShardingConfig
from fsdp2.tools import progress
from fsdp2.tools.commands import main
from fsdp2.tools.commands.entry import COMMANDS
from fsdp2.tools.commands.estimate import loss_named
from fsdp2.tools.commands.models import look_up, make_batch, make_model, mesh_shape_of
from fsdp2.tools.commands.sharding import blocks_that_are_cut

NAMES = [command.name for command in COMMANDS]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"fsdp2 {fsdp2.__version__}\n"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command.name} " in text and command.does in text for command in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_with_an_example_that_it_understands(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    example = text.partition("example:\n")[2].replace("\\\n", " ")
    assert f"fsdp2 {name}" in example
    if name != "run":
        (command,) = [each for each in COMMANDS if each.name == name]
        command.parser().parse_all(example.split(f"fsdp2 {name}")[1].split())
        assert "--json" in command.parser().options() or all(
            "--json" in inner.options() for inner in command.parser().subcommands().values()
        )


WRONG: list[tuple[list[str], str]] = [
    (["explan"], "fsdp2: there is no command 'explan'. Did you mean 'explain'?"),
    (["--versoin"], "fsdp2: there is no option '--versoin'. Did you mean '--version'?"),
    (["explain"], "fsdp2 explain: the following arguments are required: MODULE:FUNCTION."),
    (["explain", "a:b", "--startegy", "zero1"], "unrecognized arguments: --startegy zero1. Did you mean '--strategy'?"),
    (
        ["explain", "a:b", "--strategy", "zero4"],
        "argument --strategy: invalid choice: 'zero4' (choose from",
    ),
    (["explain", "a:b", "c"], "unrecognized arguments: c."),
    (["estimate", "a:b"], "arguments are required: --batch."),
    (["estimate", "a:b", "--batch", "8", "--loss", "mse"], "there is no loss 'mse'"),
    (["checkpoint", "lst"], "Did you mean 'list'?"),
    (["checkpoint", "prune", "run", "--keep-lst", "3", "--keep-last", "2"], "Did you mean '--keep-last'?"),
    (["doctor", "--rank", "2"], "Did you mean '--ranks'?"),
    (["doctor", "--ranks", "two"], "argument --ranks: invalid int value: 'two'."),
    (["estimate", "a:b", "--ranks", "8x", "--batch", "8"], "a mesh is a number of ranks, 8, or sizes of its dims, 4x8"),
    (["explain", "a:b", "--mesh", "0"], "got '0'."),
    (["estimate", "a:b", "--batch", "8x8:int6"], "a batch has no dtype 'int6'"),
    (["estimate", "a:b", "--batch", "8", "--hardware", "h101"], "hardware 'h101' is not known. Known are"),
    (["run"], "fsdp2 run: no program named."),
    (["run", "--keep-fsdp", "train.py"], "Did you mean '--keep-fsdp1'?"),
    (["run", "missing.py"], "fsdp2 run: no such file: missing.py."),
    (["run", "torchrun", "x.py"], "torchrun [options] -m fsdp2 run script.py"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(each[0]) for each in WRONG])
def test_wrong_use_has_status_2_and_says_what_was_meant(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    found = capsys.readouterr()
    assert says in found.err and "--help" in found.err and not found.out


def test_what_is_wrong_with_a_config_has_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "a.json"
    config.write_text('{"stratgy": "zero1"}')
    assert main(["explain", "a:b", "--config", str(config)]) == 1
    assert f"fsdp2 explain: {config}: a ShardingConfig has no setting 'stratgy'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["explain", "estimate"])
def test_ranks_and_mesh_are_two_names_of_one_option(name: str) -> None:
    (command,) = [each for each in COMMANDS if each.name == name]
    needed = ["a:b"] if name == "explain" else ["a:b", "--batch", "8"]
    one, other = (vars(command.parser().parse_all([*needed, option, "16"])) for option in ("--ranks", "--mesh"))
    assert one == other and one["mesh"] == "16"


def test_losses_by_name() -> None:
    assert loss_named(None) is None
    logits, targets = torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.int64)
    total, entropy = loss_named("sum"), loss_named("cross-entropy")
    assert total is not None and entropy is not None
    assert total((logits + 1, None), targets).item() == 24
    assert entropy(logits, targets).item() == pytest.approx(math.log(4))
    assert entropy(logits, input_ids=targets - 1, labels=targets).item() == pytest.approx(math.log(4))
    with pytest.raises(FSDPValueError, match=r"there is no loss 'cross_entropy'.*Did you mean 'cross-entropy'"):
        loss_named("cross_entropy")


def test_blocks_that_are_cut_are_named() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)])
    said = blocks_that_are_cut(model, ShardingConfig(max_bytes=20_000, min_bytes=0))
    assert said.startswith("3 blocks (0-2, Sequential) of up to 32.5 KiB are above max_bytes=20000 (19.5 KiB)")
    assert "--max-bytes 33280" in said
    assert blocks_that_are_cut(model, ShardingConfig(max_bytes=33280, min_bytes=0)) == ""


# ---- models and batches -----------------------------------------------------------------------------

MODELS = """
from dataclasses import dataclass
import torch
from torch import nn
from beside import WIDTH

@dataclass
class Config:
    width: int = WIDTH

def build():
    return nn.Linear(Config().width, 2)

class Family:
    small = staticmethod(build)

def batch():
    return {"input": torch.zeros(4, 3)}

def nothing():
    return None

number = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("beside", "_fsdp2_target_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(tmp_path / "models.py")


def test_models_by_name(models: str) -> None:
    for name in (f"{models}:build", f"{models}:Family.small"):
        model = make_model(name)
        assert isinstance(model, nn.Linear) and model.weight.shape == (2, 3)
    assert look_up("torch.nn:Linear") is nn.Linear


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("models.py", FSDPValueError, "names no function: write package.module:function"),
        ("FILE:bild", FSDPValueError, "Did you mean 'build'"),
        ("FILE:number", FSDPTypeError, "is a int, and a function is needed"),
        ("FILE:nothing", FSDPTypeError, "returned a NoneType, and a module is needed"),
        ("no_such_package.models:build", FSDPValueError, r"cannot be imported: .* For a file write its path"),
        ("none/such.py:build", FSDPValueError, "there is no file none/such.py"),
    ],
)
def test_names_that_name_nothing(name: str, kind: type[Exception], says: str, models: str) -> None:
    with pytest.raises(kind, match=says):
        make_model(name.replace("FILE", models))


def test_batches(models: str) -> None:
    tokens, mask = make_batch("8x16:int64, 8", "meta")
    assert tokens.shape == (8, 16) and tokens.dtype is torch.int64 and tokens.is_meta
    assert mask.shape == (8,) and mask.dtype is torch.float32
    assert make_batch(f"{models}:batch", "meta")["input"].is_meta
    with pytest.raises(
        FSDPValueError, match=r"a batch has no dtype 'int65'; there are bool, .*\. Did you mean 'int64'"
    ):
        make_batch("8:int65", "cpu")
    with pytest.raises(FSDPValueError, match="a batch has no dtype 'int6'"):  # which is a name of torch's
        make_batch("8:int6", "cpu")
    with pytest.raises(FSDPValueError, match="'eight' is no batch"):
        make_batch("eight", "cpu")


def test_meshes() -> None:
    assert mesh_shape_of("8") == (8,) and mesh_shape_of("4x8") == (4, 8)
    for text in ("0", "4x", "x8", "-1", "many"):
        with pytest.raises(FSDPValueError, match="a mesh is a number of ranks"):
            mesh_shape_of(text)


def test_what_runs_is_named_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr(type(sys.stderr), "isatty", lambda self, shows=is_terminal: shows, raising=False)
        with progress.working("looking"):
            pass
        assert ("looking ..." in capsys.readouterr().err) is is_terminal
