"""Other people's programs on fsdp2: written for torch, run with `-m fsdp2.compat`, compared with one process.

Each trains a few steps on 2 or 4 gloo ranks. Losses and gradient norms are compared step by step, on plain or momentum
SGD where the program allows it (Adam hides the scale of a gradient). What brings an engine, weights or optimizers of
its own is run with torch's `fully_shard` too, and their checkpoints are compared. All of it is slow: a program imports
torch and its libraries on every rank, 8 to 25 s on two cores.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.helpers import IMPLEMENTATION, Report, require, run_client

pytestmark = pytest.mark.full

# fp32, the same numbers added up in another order, some steps long.
FP32 = 1e-5
# Parameters rounded to 8 bits for the forward; the unsharded training rounds elsewhere (autocast), or not at all.
BF16 = 2e-2
# To 11 bits.
FP16 = 3e-3


@dataclass(frozen=True)
class Client:
    """A program with its arguments; ``{folder}`` among them is a temporary one.

    Attributes:
        implementation: whose its models are in the end, if not of the implementation that it is run with.
        options: of `fsdp2.compat`.
    """

    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    packages: tuple[str, ...] = ()
    tolerance: float = FP32
    implementation: str | None = None
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [word.lstrip("-") for word in self.arguments if word != "{folder}"]
        return "-".join([self.program, *words, f"{self.ranks}ranks"])


def client(program: str, arguments: str = "", **facts: Any) -> Client:
    """`Client`, with its arguments in one string."""
    return Client(program, tuple(arguments.split()), **facts)


def check(client: Client, folder: Path, swapped: str = IMPLEMENTATION) -> Report:
    """Run it, and compare what it found with what it expected."""
    require(*client.packages)
    arguments = [word.format(folder=folder) for word in client.arguments]
    report = run_client(
        client.program, *arguments, ranks=client.ranks, folder=folder, implementation=swapped, options=client.options
    )
    assert report.implementation == (client.implementation or swapped)
    for series in ("loss", "gradient norm"):
        assert any(name.startswith(series) and found for name, found in report.found.items())
    for name, found in report.found.items():
        tolerance = pytest.approx(report.expected[name], rel=client.tolerance, abs=client.tolerance)
        assert found == tolerance, name
    return report


def check_beside_torch(client: Client, folder: Path) -> None:
    """The same, and with torch's own implementation: losses, and checkpoints tensor by tensor, are alike."""
    folders = {name: folder / name for name in ("torch", "fsdp2")}
    for each in folders.values():
        each.mkdir()
    theirs = check(client, folders["torch"], "torch")
    if IMPLEMENTATION == "torch":
        return
    ours = check(client, folders["fsdp2"], "fsdp2")
    for name, expected in theirs.found.items():
        assert ours.found[name] == pytest.approx(expected, rel=client.tolerance, abs=client.tolerance), name
    assert ours.checkpoint.keys() == theirs.checkpoint.keys()
    for name, tensor in theirs.checkpoint.items():
        torch.testing.assert_close(ours.checkpoint[name], tensor, rtol=client.tolerance, atol=client.tolerance)


PIPELINES = [
    client("pipelining", schedule, ranks=4)
    for schedule in (
        "GPipe",
        "1F1B --reshard-after-forward",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        # With torch's FSDP2 it loses gradients, silently: `stage_backward_input` looks for weights among `parameters()`
        # before the backward that gathers them.
        "InterleavedZeroBubble --reshard-after-forward",
        "ZBVZeroBubble --reshard-after-forward",
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


ACCELERATE_FSDP1 = [
    client("accelerate_fsdp1", f"{{folder}} {arguments}".strip(), packages=("accelerate",), **facts)
    for arguments, facts in (
        ("", {}),
        ("--state-dict SHARDED", {}),
        ("--state-dict LOCAL", {}),
        ("--checkpointing", {}),
        ("--bf16", {"tolerance": BF16}),
        ("--fp16", {"tolerance": FP16}),
    )
]


@pytest.mark.parametrize("client", ACCELERATE_FSDP1, ids=str)
def test_accelerate_with_fsdp1(client: Client, tmp_path: Path) -> None:
    """Accelerate's FSDP1 plugin, on the wrapper. About 15 s each."""
    check(client, tmp_path)


LIGHTNING_FSDP1 = [
    client(program, f"{{folder}} {kind}", packages=("lightning",))
    for program in ("lightning_fsdp1", "lightning_trainer_fsdp1")
    for kind in ("full", "sharded")
]


@pytest.mark.parametrize("client", LIGHTNING_FSDP1, ids=str)
def test_lightning_with_fsdp1(client: Client, tmp_path: Path) -> None:
    """`FSDPStrategy` of Fabric and of Lightning's Trainer, on the wrapper. About 15 s and 30 s each."""
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


TRANSFORMERS_FSDP1 = [
    client("transformers_fsdp1", f"{{folder}} {arguments}".strip(), packages=("peft", "accelerate"))
    for arguments in ("", "--state-dict SHARDED", "--lora", "--lora --state-dict SHARDED")
]


@pytest.mark.parametrize("client", TRANSFORMERS_FSDP1, ids=str)
def test_transformers_with_fsdp1(client: Client, tmp_path: Path) -> None:
    """transformers' Trainer with FSDP1 in its arguments, on the wrapper. About 35 s each."""
    check(client, tmp_path)


TORCHTITAN = [
    client("torchtitan_training", arguments, ranks=ranks, packages=("torchtitan",))
    for ranks, arguments in (
        (2, ""),
        (2, "--chunked-loss"),
        (2, "--checkpoint-activations"),
        (2, "--compile"),
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


VERL = [
    client("verl_engine", f"{{folder}} {arguments}", ranks=ranks, packages=("verl", "tensordict", "peft"), **facts)
    for arguments, ranks, facts in (
        ("", 2, {}),
        ("--lora", 2, {}),
        ("--bf16", 2, {"tolerance": BF16}),
        ("--replicate 2", 4, {}),
    )
]


@pytest.mark.parametrize("client", VERL, ids=str)
def test_verl(client: Client, tmp_path: Path) -> None:
    """verl's FSDP engine on a policy: training, weights for rollouts, checkpoints. About 45 s each, 60 s on 4 ranks."""
    check_beside_torch(client, tmp_path)


@pytest.mark.parametrize("arguments", ["", " --lora"], ids=["whole", "lora"])
def test_verl_offloaded(arguments: str, tmp_path: Path) -> None:
    """The same with parameters on the host. About 25 s each."""
    if IMPLEMENTATION == "torch":
        pytest.skip("torch pins host memory, as verl asks for, by the driver of an accelerator that is not there")
    packages = ("verl", "tensordict", "peft")
    check(client("verl_engine", f"{{folder}} --offload{arguments}", packages=packages), tmp_path)


VERL_FSDP1 = [
    client(
        "verl_engine",
        f"{{folder}} --fsdp1 {arguments}".strip(),
        ranks=ranks,
        packages=("verl", "tensordict", "peft"),
        **facts,
    )
    for arguments, ranks, facts in (
        ("", 2, {}),
        ("--offload", 2, {}),
        ("--lora", 2, {}),
        ("--lora --offload", 2, {}),
        ("--bf16", 2, {"tolerance": BF16}),
        ("--replicate 2", 4, {}),
    )
]


@pytest.mark.parametrize("client", VERL_FSDP1, ids=str)
def test_verl_with_fsdp1(client: Client, tmp_path: Path) -> None:
    """The same engine with FSDP1, on the wrapper. About 45 s each, 90 s on 4 ranks."""
    check(client, tmp_path)


LLAMAFACTORY = [
    client("llamafactory_engine", f"{{folder}} {arguments}", packages=("llamafactory", "peft"), **facts)
    for arguments, facts in (
        ("default", {}),
        ("rank0", {}),
        ("meta", {}),
        ("default --lora", {}),
        ("default --bf16", {"tolerance": BF16}),
    )
]


@pytest.mark.parametrize("client", LLAMAFACTORY, ids=str)
def test_llamafactory(client: Client, tmp_path: Path) -> None:
    """LLaMA-Factory's `FSDP2Engine`. About 35 s each."""
    check_beside_torch(client, tmp_path)


QLORA = [
    client("bitsandbytes_qlora", f"{{folder}} {arguments}", packages=("bitsandbytes", "peft", "transformers"))
    for arguments in ("", "--reshard-after-forward")
]


@pytest.mark.parametrize("client", QLORA, ids=str)
def test_bitsandbytes(client: Client, tmp_path: Path) -> None:
    """4-bit weights whose layer registers them anew in each forward. About 35 s each."""
    check_beside_torch(client, tmp_path)


QLORA_FSDP1 = [
    client(
        "bitsandbytes_fsdp1",
        f"{{folder}} {arguments}".strip(),
        packages=("bitsandbytes", "peft", "transformers"),
    )
    for arguments in ("", "--policy modules", "--policy modules --storage bfloat16", "--storage uint8")
]


@pytest.mark.parametrize("client", QLORA_FSDP1, ids=str)
def test_bitsandbytes_with_fsdp1(client: Client, tmp_path: Path) -> None:
    """The same weights on the wrapper, with adapters in units of their own, or with them. About 45 s each."""
    check(client, tmp_path)


TRL = [
    client("trl_sft", f"{{folder}} {arguments}", packages=("trl", "peft", "accelerate")) for arguments in ("", "--lora")
]


@pytest.mark.parametrize("client", TRL, ids=str)
def test_trl(client: Client, tmp_path: Path) -> None:
    """Supervised fine-tuning, sharded by Accelerate. About 40 s each."""
    check_beside_torch(client, tmp_path)


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_trl_sends_weights_with_fsdp1(mode: str, tmp_path: Path) -> None:
    """Its sending of weights to vLLM, unit by unit, on the wrapper. About 40 s each."""
    check(client("trl_vllm_fsdp1", mode, packages=("trl", "accelerate")), tmp_path)


@pytest.mark.parametrize("kind", ["plain", "wrapped", "offloaded"])
def test_torchs_tutorial_of_fsdp1(kind: str, tmp_path: Path) -> None:
    """Its program as it stands, on the wrapper; with offloading too. About 30 s each."""
    if "FSDP1_TUTORIAL" not in os.environ:
        pytest.skip("the text of torch's tutorial is not in this repository: FSDP1_TUTORIAL names a copy of it")
    check(client("tutorial_fsdp1", f"{{folder}} {kind}", ranks=0), tmp_path)


AXOLOTL = [
    client("axolotl_tiled_mlp", arguments, packages=("axolotl", "transformers"))
    for arguments in ("", "--reshard-after-forward", "--on-mlp --reshard-after-forward")
]


@pytest.mark.parametrize("client", AXOLOTL, ids=str)
def test_axolotl(client: Client, tmp_path: Path) -> None:
    """axolotl's tiled MLP. About 20 s each."""
    check(client, tmp_path)


COMPOSER = [
    client("composer_prepare", f"{{folder}} {arguments}", packages=("composer",)) for arguments in ("", "--from-rank-0")
]


@pytest.mark.parametrize("client", COMPOSER, ids=str)
def test_composer(client: Client, tmp_path: Path) -> None:
    """Composer's `parallelize_composer_model`. About 30 s each."""
    check_beside_torch(client, tmp_path)


def test_torchft(tmp_path: Path) -> None:
    """torchft's process group in an all-reduce hook. About 30 s."""
    check_beside_torch(client("torchft_hook", ranks=4, packages=("torchft",)), tmp_path)


OPTIMIZERS = (
    "lion ademamix simplifiedademamix adabelief laprop adamc yogi tiger schedulefreesgd galore fira apollo scion"
)


def test_pytorch_optimizer(tmp_path: Path) -> None:
    """Optimizers of the `pytorch_optimizer` package that DTensor can run. About 30 s."""
    check_beside_torch(client("optimizers", OPTIMIZERS, packages=("pytorch_optimizer",)), tmp_path)


def test_pytorch_optimizer_on_local_shards(tmp_path: Path) -> None:
    """Elementwise ones whose operations DTensor lacks, by `fsdp2.optim.local`. About 15 s."""
    names = "adan adopt diffgrad ftrl madgrad srmm"
    check(
        client("optimizers", f"--on-shards {names}", packages=("pytorch_optimizer",), implementation=IMPLEMENTATION),
        tmp_path,
    )


def test_torchao_optimizers(tmp_path: Path) -> None:
    """Optimizers with quantized states, whose steps are compiled. About 100 s."""
    # A state is scaled by block, and blocks end elsewhere in shards.
    check_beside_torch(client("torchao_low_bit", packages=("torchao",), tolerance=1e-3), tmp_path)


@pytest.mark.parametrize("how", ["the command", "the setup hook", "nothing"])
def test_ray(how: str, tmp_path: Path) -> None:
    """Workers of Ray inherit the swap, or install it by the hook that Ray has for it. About 25 s each."""
    hook = " --setup-hook fsdp2.compat.install" if how == "the setup hook" else ""
    expected = "torch" if how == "nothing" else "fsdp2"
    asked = client("ray_workers", hook, ranks=0, packages=("ray",), implementation=expected)
    check(asked, tmp_path, swapped="fsdp2" if how == "the command" else "torch")
