"""`python -m benchmarks.peers` counts right, names what cannot be compared, and says who is first and why."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks.implementations import ShardingOptions
from benchmarks.models import ModelSpec, build_model
from benchmarks.peers import __main__ as command
from benchmarks.peers.facts import (
    TOLERANCE,
    Facts,
    acknowledged_bytes,
    difference,
    own_bytes,
    reference_losses,
)
from benchmarks.peers.table import COLUMNS, Contender, table_of
from benchmarks.throughput import Samples
from benchmarks.training import PACKAGES, adamw, batch_of

ROOT = Path(__file__).resolve().parents[2]
TINY = ModelSpec(name="tiny", blocks=1, params_per_block=2, dim=8, hidden_dim=8, bias=True, batch_rows=2)
TWO = ShardingOptions(world_size=2)
FACTS = Facts(
    losses=(1.0, 2.0, 3.0),
    peak_bytes=20 << 20,
    computing_peak_bytes=18 << 20,
    copied_bytes=0,
    sent_bytes=3 << 20,
    calls=100,
    operations=10,
)


def contender(name: str, seconds: float, facts: Facts = FACTS) -> Contender:
    return Contender(name, Samples(cpu=(seconds,) * 5, wall=(seconds,) * 5), facts, own_bytes=16 << 20)


# What is counted


@pytest.mark.full
def test_bytes_sent_are_those_of_open_connections() -> None:
    with socket.create_server(("localhost", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            before = acknowledged_bytes()
            client.sendall(bytes(50_000))
            left = 50_000
            while left:
                left -= len(accepted.recv(left))
            deadline = time.monotonic() + 10
            while acknowledged_bytes() - before < 50_000 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert acknowledged_bytes() - before == 50_000


PEAKS = """
import time
from benchmarks.peers import allocator
allocator.count_large_blocks()
before = allocator.bytes_in_use()
with allocator.PeakOfAllocator() as peak:
    kept = bytearray(4 << 20)
    held = allocator.bytes_in_use() - before
    temporary = bytearray(8 << 20)
    time.sleep(0.1)
    del temporary
    print(held, peak.take() - before, peak.take() - before)
"""


@pytest.mark.full
def test_peaks_are_those_of_the_allocator() -> None:
    """In another process, as the allocator keeps what it is told."""
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, capture_output=True, text=True, check=True)
    held, first, second = map(int, done.stdout.split())
    assert 4 << 20 <= held <= (4 << 20) + 65536
    assert 12 << 20 <= first <= (12 << 20) + 131072
    assert 4 << 20 <= second <= (4 << 20) + 131072


def test_a_rank_has_its_part_of_parameters_gradients_and_two_states() -> None:
    numel = sum(each.numel() for each in build_model(TINY).parameters())
    assert own_bytes("ddp", TINY, 2) == own_bytes("unsharded-whole", TINY, 2) == 16 * numel
    assert own_bytes("fsdp2-whole", TINY, 2) == own_bytes("torch-again", TINY, 2) == 8 * numel


# What counts as the same training


def losses_of(factor: float, clips: float | None = None, ranks: tuple[int, ...] = (0, 1)) -> list[float]:
    """Of one process; ``factor`` times the average gradient of the batches of ``ranks``, clipped to a norm."""
    model, losses = build_model(TINY), []
    optimizer = adamw(model.parameters())
    for _ in range(3):
        losses.append(sum(model(batch_of(TINY, rank)).item() for rank in (0, 1)) / 2)
        (factor * sum(model(batch_of(TINY, rank)) for rank in ranks) / len(ranks)).backward()  # type: ignore[union-attr]
        if clips is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clips)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_sum_in_place_of_an_average_is_noticed_as_are_clipping_and_ranks_by_themselves() -> None:
    expected = reference_losses(TINY, 2)
    assert difference(losses_of(1.0), expected) <= TOLERANCE
    for wrong in (losses_of(2.0), losses_of(1.0, clips=0.1), losses_of(1.0, ranks=(0,))):
        assert difference(wrong, expected) > TOLERANCE


def test_what_trains_something_else_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "reference_losses", lambda spec, world_size: (1.0, 2.0, 3.0))
    monkeypatch.setattr(
        command,
        "measure_facts",
        lambda name, *_: FACTS if name == "torch" else replace(FACTS, losses=(1.0, 2.0, 3.1)),
    )
    facts, missing = command.probe(["torch", "torch-again", "ddp"], TINY, TWO, 1.0)
    assert list(facts) == ["torch", "torch-again"]
    assert missing == [
        f"ddp (torch {version('torch')}): trains something else: losses 1, 2, 3.1, 3e-02 from the reference"
    ]


def test_what_fails_or_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(name: str, *_: object) -> Facts:
        if name == "deepspeed":
            raise RuntimeError("-- Process 0 terminated with the following error:\n\nValueError: no CPU here\n")
        raise TimeoutError("ranks were not done after 60 s")

    monkeypatch.setattr(command, "measure_facts", measured)
    monkeypatch.setitem(PACKAGES, "deepspeed", "pytest")
    monkeypatch.setitem(PACKAGES, "megatron", "no-such-package")
    facts, missing = command.probe(["deepspeed", "megatron", "fsdp2"], TINY, TWO, 60)
    assert not facts
    assert missing == [
        f"deepspeed (pytest {pytest.__version__}): ValueError: no CPU here",
        "megatron (no-such-package is not installed): left out",
        f"fsdp2 (torch {version('torch')}): ranks were not done after 60 s",
    ]


# The table


def test_the_table_has_each_column_and_says_who_is_first() -> None:
    quick = replace(FACTS, sent_bytes=2 << 20, copied_bytes=None, operations=None)
    rows = [contender("unsharded", 0.1), contender("torch", 1.0), contender("torch-again", 0.3)]
    rows += [contender("ddp", 0.4, quick), contender("fsdp2", 0.5), contender("fsdp2-whole", 0.6, quick)]
    printed = table_of(rows, "A run").render().splitlines()
    assert all(column.title in printed[2] for column in COLUMNS)
    cells = {line.split()[0]: line.split() for line in printed[4:10]}
    assert cells["fsdp2"][1:5] == ["500", "0.500", "[0.500,", "0.500]"]
    assert cells["torch"] == ["torch", "1000", "1000", "20", "4", "2", "0.0", "3.0", "100", "10"]
    assert cells["ddp"].count("-") == 2
    first = dict(line.strip().removeprefix("first in ").split(": ", 1) for line in printed if "first in " in line)
    assert list(first) == [column.title for column in COLUMNS]
    assert first["wall ms"].startswith("ddp (400, fsdp2 500): it has all parameters on every rank")
    assert first["sent MiB"] == "ddp and fsdp2-whole"
    assert first["copied MiB"] == "torch and fsdp2"


@pytest.mark.full  # a minute: each contender is tried in processes of its own
def test_the_command_compares_what_torch_has_by_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    names = "unsharded,ddp,fsdp1,torch,torch-again,fsdp2"
    tiny = ["--blocks", "1", "--width", "32", "--rows", "4", "--repetitions", "2"]
    command.main(["--impl", f"{names},megatron", *tiny, "--json", str(file)])
    printed = capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert [each["name"] for each in figures["contenders"]] == names.split(",")
    assert all(len(each["times"]["cpu"]) == 2 for each in figures["contenders"])
    assert all(column.title in printed for column in COLUMNS)
    assert "torch-again is a second torch: " in printed
    assert "Not in the table:\n  megatron (megatron-fsdp" in printed
    by_name = {each["name"]: each["facts"] for each in figures["contenders"]}
    assert by_name["unsharded"]["sent_bytes"] == 0 < by_name["fsdp2"]["sent_bytes"] < by_name["torch"]["sent_bytes"]
    assert by_name["fsdp2"]["copied_bytes"] < by_name["torch"]["copied_bytes"]
