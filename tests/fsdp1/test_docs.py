"""The two programs of docs/fsdp1.md, before and after, train alike and end with the same state dict."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp2
from fsdp2.compat import fsdp1
from tests.harness import multi_rank

PAGE = Path(__file__).parents[2] / "docs" / "fsdp1.md"


class Block(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Model(nn.Module):
    """Two units below the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def program(heading: str, block: int) -> str:
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[block]


def run(text: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What it prints on this rank, and the whole state dict."""
    torch.manual_seed(dist.get_rank())  # the values are rank 0's in the end
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    names: dict[str, Any] = {
        "fsdp2": fsdp2,
        "torch": torch,
        "FSDP": fsdp1.FullyShardedDataParallel,
        **{name: getattr(fsdp1, name) for name in fsdp1.__all__},
        "StateDictOptions": StateDictOptions,
        "get_model_state_dict": get_model_state_dict,
        "Block": Block,
        "model": Model(),
        "device": torch.device("cpu"),
        "microbatches": torch.randn(3, 4, 5, generator=generator).unbind(),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(text, names)
    return printed.getvalue(), names["whole"]


@multi_rank(2)
def test_the_program_after_does_what_the_one_before_does(world_size: int) -> None:
    before, after = (run(program("Move on to `fully_shard`", block)) for block in (0, 1))
    assert before[0] == after[0] and "tensor(" in before[0]
    if dist.get_rank() == 0:
        assert list(before[1]) == list(after[1]) == list(Model().state_dict())
        for name, value in before[1].items():
            assert torch.equal(value, after[1][name]), name
    else:
        assert before[1] == {}
