"""Other people's programs on fsdp2: written for torch, run with `-m fsdp2.compat`, compared with one process.

Each trains a few steps on 2 or 4 gloo ranks. Losses and gradient norms are compared step by step, on plain or momentum
SGD where the program allows it (Adam hides the scale of a gradient). All of it is slow: a program imports torch and its
libraries on every rank, 8 to 25 s on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.launch import IMPLEMENTATION, require, run_client

pytestmark = pytest.mark.full

# fp32, the same numbers added up in another order, some steps long.
FP32 = 1e-5
# Parameters rounded to 8 bits for the forward; the unsharded training rounds elsewhere (autocast), or not at all.
BF16 = 2e-2


@dataclass(frozen=True)
class Client:
    """A program with its arguments; ``{folder}`` among them is a temporary one."""

    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    packages: tuple[str, ...] = ()
    tolerance: float = FP32
    implementation: str = IMPLEMENTATION

    def __str__(self) -> str:
        words = [word.lstrip("-") for word in self.arguments if word != "{folder}"]
        return "-".join([self.program, *words, f"{self.ranks}ranks"])


def client(program: str, arguments: str = "", **facts: Any) -> Client:
    """`Client`, with its arguments in one string."""
    return Client(program, tuple(arguments.split()), **facts)


def check(client: Client, folder: Path) -> None:
    """Run it, and compare what it found with what it expected."""
    require(*client.packages)
    arguments = [word.format(folder=folder) for word in client.arguments]
    report = run_client(client.program, *arguments, ranks=client.ranks, folder=folder)
    assert report.implementation == client.implementation
    assert report.found["loss"] and report.found["gradient norm"]
    for name, found in report.found.items():
        tolerance = pytest.approx(report.expected[name], rel=client.tolerance, abs=client.tolerance)
        assert found == tolerance, name


PIPELINES = [
    client("pipelining", schedule, ranks=4)
    for schedule in (
        "GPipe",
        "1F1B",
        "1F1B --reshard-after-forward",
        "Interleaved1F1B",
        "Interleaved1F1B --reshard-after-forward",
        "LoopedBFS",
        # Not with --reshard-after-forward: zero-bubble schedules then lose gradients, silently, with torch's FSDP2 too.
        # They look for weights among `parameters()` before the backward that gathers them (`stage_backward_input`).
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    )
]
DEFERRED = [client("pipelining", f"{schedule} --defer", ranks=4) for schedule in ("GPipe", "Interleaved1F1B")]


@pytest.mark.parametrize("client", PIPELINES, ids=str)
def test_pipelining(client: Client, tmp_path: Path) -> None:
    """`torch.distributed.pipelining`. About 9 s each."""
    stages_in_v = client.arguments[0] in ("ZBVZeroBubble", "DualPipeV")
    if stages_in_v and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 warms up stages of one rank by sending to itself, which gloo cannot")
    check(client, tmp_path)


@pytest.mark.parametrize("client", DEFERRED, ids=str)
def test_pipelining_that_reduces_late(client: Client, tmp_path: Path) -> None:
    """`step(finalize_gradients=False)` and ``defer_reduce_grad_wait``. About 9 s each."""
    if torch.__version__ < "2.15":
        pytest.skip("pipelining has it from torch 2.15 on")
    check(client, tmp_path)


def test_pipelining_of_replicated_stages(tmp_path: Path) -> None:
    """torch's `replicate` stays torch's beside the swap, and its gradients are reduced. About 9 s."""
    check(client("pipelining", "1F1B --replicate", ranks=4, implementation="torch"), tmp_path)


def test_distributed_checkpoint(tmp_path: Path) -> None:
    """State dicts of `torch.distributed.checkpoint`. About 8 s."""
    check(client("checkpointing", "{folder}"), tmp_path)


ACCELERATE = [
    client("accelerate_fsdp2", "{folder}", packages=("accelerate",)),
    client("accelerate_fsdp2", "{folder} --ram-efficient", packages=("accelerate",)),
    client("accelerate_fsdp2", "{folder} --bf16", packages=("accelerate",), tolerance=BF16),
]


@pytest.mark.parametrize("client", ACCELERATE, ids=str)
def test_accelerate(client: Client, tmp_path: Path) -> None:
    """Accelerate's FSDP2 plugin. About 12 s each."""
    check(client, tmp_path)


LIGHTNING = [
    client("lightning_trainer", "{folder}", packages=("lightning",)),
    client("lightning_trainer", "{folder} --full-checkpoint", packages=("lightning",)),
    client("lightning_trainer", "{folder} --tensor-parallel", ranks=4, packages=("lightning",)),
    client("lightning_fabric", "{folder}", packages=("lightning",)),
]


@pytest.mark.parametrize("client", LIGHTNING, ids=str)
def test_lightning(client: Client, tmp_path: Path) -> None:
    """Lightning's `ModelParallelStrategy`. About 15 s each."""
    check(client, tmp_path)


TRANSFORMERS = [
    client("transformers_trainer", "{folder}", packages=("transformers", "accelerate")),
    client("transformers_trainer", "{folder} --replicate 2", ranks=4, packages=("transformers", "accelerate")),
    client("transformers_trainer", "{folder} --bf16", packages=("transformers", "accelerate"), tolerance=BF16),
    client("peft_lora", packages=("peft", "transformers")),
]


@pytest.mark.parametrize("client", TRANSFORMERS, ids=str)
def test_transformers(client: Client, tmp_path: Path) -> None:
    """transformers' Trainer on a model sharded while loading; LoRA adapters of PEFT. About 15 s each."""
    check(client, tmp_path)


TORCHTITAN = [
    client("torchtitan_training", arguments, ranks=ranks, packages=("torchtitan",))
    for ranks, arguments in (
        (2, ""),
        (2, "--chunked-loss"),
        (2, "--checkpoint-activations"),
        (2, "--compile"),
        (2, "--backend full_dtensor"),
        (4, "--replicate 2 --chunked-loss"),
        (4, "--tensor 2"),
        (4, "--experts 2"),
        (4, "--backend full_dtensor --replicate 2"),
        (4, "--backend full_dtensor --tensor 2"),
        (4, "--backend full_dtensor --experts 2"),
    )
]


@pytest.mark.parametrize("client", TORCHTITAN, ids=str)
def test_torchtitan(client: Client, tmp_path: Path) -> None:
    """torchtitan's own parallelize functions, losses and clipping. About 15 s on 2 ranks, 25 s on 4."""
    check(client, tmp_path)


TORCHAO = [
    client("torchao_quantized", arguments, packages=("torchao", "triton"))
    for arguments in ("nf4", "nf4 --reshard-after-forward", "int8", "int8-mixed", "int8-mixed --reshard-after-forward")
]


@pytest.mark.parametrize("client", TORCHAO, ids=str)
def test_torchao(client: Client, tmp_path: Path) -> None:
    """torchao's weights that bring their own all-gather. About 12 s each."""
    check(client, tmp_path)
