"""TRL's sending of weights to vLLM, unit by unit, from a model that Accelerate wraps by FSDP1.

Usage:
    torchrun --nproc-per-node 2 trl_vllm_fsdp1.py [server|colocate]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_fsdp2 import allow_sharding_on_cpu
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers_trainer import MAX_NORM, RATE, STEPS, make_whole, samples
from trial import Report, finish, implementation, mean_over_ranks, part
from trl.generation.vllm_generation import VLLMGeneration


class Engine:
    """What stands for vLLM, here or behind a client: it keeps copies of the weights that it is sent."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.announced: list[tuple[str, str, list[int]]] = []
        model = SimpleNamespace(load_weights=self.load_weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As vLLM's own model has it."""
        for name, value in weights:
            assert name not in self.weights
            self.weights[name] = value.clone()

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named: Iterable[tuple[str, Tensor]]
    ) -> None:
        """As TRL's client has it."""
        self.announced = metadata
        self.load_weights(named)

    def reset_prefix_cache(self) -> None:
        """There is none."""


class Sending(VLLMGeneration):  # type: ignore[misc]
    """TRL's class, with the stand-in for vLLM."""

    def _init_vllm(self) -> None:
        self.llm = self.vllm_client = Engine()


def main() -> None:
    """Train, send the weights after each step, and report."""
    mode = sys.argv[1] if len(sys.argv) > 1 else "server"
    allow_sharding_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    whole = make_whole()
    reference = deepcopy(whole)
    model = accelerator.prepare(whole)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=RATE))
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    assert isinstance(model, FullyShardedDataParallel) and len(model.fsdp_modules(model)) == 3
    sending = Sending(model, accelerator, processing_class=None, mode=mode)
    report = Report(implementation(model))
    for rows in samples().chunk(STEPS):
        mine = part(rows, accelerator.process_index, accelerator.num_processes)
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss)
        expected_loss = loss_of(reference, rows)
        expected_loss.backward()
        report.add("loss", mean_over_ranks(loss), expected_loss.item())
        norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        report.add("gradient norm", norm.item(), nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM).item())
        for each in (optimizer, expected_optimizer):
            each.step()
            each.zero_grad()
        sending.llm.weights.clear()
        sending.sync_weights()
        if mode == "colocate" or accelerator.is_main_process:
            check_received(report, sending.llm, reference, mode)
    finish(report)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """The language model's own."""
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def check_received(report: Report, engine: Engine, reference: nn.Module, mode: str) -> None:
    """All weights, once each, whole, under the names of the plain model, and as those of one process."""
    expected = dict(reference.named_parameters())
    assert engine.weights.keys() == expected.keys()
    if mode == "server":
        assert [name for name, _, _ in engine.announced] == list(engine.weights)
        assert all(shape == list(expected[name].shape) for name, _, shape in engine.announced)
    for name, value in expected.items():
        assert engine.weights[name].shape == value.shape and type(engine.weights[name]) is Tensor
        report.add("weight difference", (engine.weights[name] - value).abs().max().item(), 0.0)
        report.add("weight norm", engine.weights[name].norm().item(), value.norm().item())


if __name__ == "__main__":
    main()
