"""torchtitan's own `torchtitan.train` on a CPU: it takes an accelerator for granted, so a stand-in plays one.

Usage:
    torchrun --nproc-per-node 2 -m fsdp2.compat torchtitan_on_cpu.py --module MODULE --config CONFIG [options]
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class CPU:
    """`torch.cpu`, with what torchtitan asks an accelerator for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """Its number."""
        return 0

    def get_device_name(self, device: object = None) -> str:
        """A name whose speed torchtitan does not know."""
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """How much memory there is."""
        return SimpleNamespace(total_memory=2**34)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Nothing is counted."""

    def empty_cache(self) -> None:
        """There is none."""


def main() -> None:
    """Say what the accelerator is, and train."""
    from torch import _utils

    _utils._get_available_device_type = lambda: "cpu"
    _utils._get_device_module = lambda name: CPU()  # type: ignore[assignment,return-value]
    if not hasattr(dist, "set_timeout"):  # torch 2.15 has it, which torchtitan 0.3 takes for granted
        dist.set_timeout = lambda *arguments, **options: None  # type: ignore[attr-defined]
    sys.path.insert(0, os.getcwd())
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer
    from trial import implementation

    parse: Any = ConfigManager.parse_args

    def parse_args(manager: Any) -> Any:
        config = parse(manager)
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()  # Flex has no backward on a CPU
        return config

    ConfigManager.parse_args = parse_args  # type: ignore[method-assign]
    closed: Any = Trainer.close

    def close(trainer: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            print("the model is sharded by", implementation(trainer.model_parts[0]), flush=True)
        closed(trainer)

    Trainer.close = close  # type: ignore[method-assign]
    from torchtitan.train import main as train

    train()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # see `trial.finish`


if __name__ == "__main__":
    main()
