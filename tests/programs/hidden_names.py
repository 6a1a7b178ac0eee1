"""``python tests/programs/hidden_names.py [PATH ...]``: takes names from torch, one by one, and says what fsdp2 does.

Each is hidden in a process of its own, which then imports fsdp2; of those of a feature, whose modules take long to
import, the first. If that works, two ranks train a model there and compare it with the plain one. A line of JSON for
each name: its path, whether torch has lost it (not all of C++ can be hidden: fsdp2's table alone misses it then), the
error, the exit codes of the ranks.

It is run by its path: the package of the tests imports fsdp2.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # what most programs have imported before fsdp2
from torch import nn

PACKAGE = str(Path(__file__).parents[2] / "fsdp2")
TABLE = Path(PACKAGE) / "_torch_names.py"
RANKS, STEPS = 2, 3


def load_table() -> ModuleType:
    """`fsdp2._torch_names` alone, as the package will find it when it is imported."""
    assert "fsdp2" not in sys.modules, "names are hidden from what is imported later"
    name = "fsdp2._torch_names"
    spec = importlib.util.spec_from_file_location(name, TABLE)
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    sys.modules[name] = table
    spec.loader.exec_module(table)
    return table


def hide(table: ModuleType, path: str) -> bool:
    """Take the name out of torch, and out of the table's sight; whether torch has lost it.

    From a module it is hidden, not taken: torch itself goes on finding it, as a torch without it would do without.
    """
    look_up = table._look_up

    def look(other: str) -> Any:
        if other == path:
            raise AttributeError(f"hidden: {path}")
        return look_up(other)

    table._look_up = look  # type: ignore[attr-defined]
    module, _, attributes = path.partition(":")
    *owners, last = attributes.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        if isinstance(owner, ModuleType):
            owner.__class__ = hiding(type(owner), last)
        else:
            delattr(owner, last)
    except (ImportError, AttributeError, TypeError):  # it is not there, or of C++
        return False
    return True


def hiding(kind: type, name: str) -> type:
    """A class of modules like ``kind`` in which fsdp2 does not find ``name``."""

    def look(self: Any, asked: str) -> Any:
        if asked == name and sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        return kind.__getattribute__(self, asked)

    return type(kind.__name__, (kind,), {"__getattribute__": look})


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, ranks: list[int]) -> None:
    """SGD on the mean over all ranks' batches; ``ranks``: whose batches this process computes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        for rank in ranks:
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(batch).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def be_rank(rank: int, store: str) -> None:
    """Train as one of the ranks, check all of the numbers, and that initialization draws those of the whole."""
    import fsdp2

    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    plain, model = build(), build()
    train(plain, list(range(RANKS)))
    fsdp2.fully_shard(model[0])  # type: ignore[index]
    fsdp2.fully_shard(model)
    model.set_gradient_divide_factor(RANKS + 0.0)  # type: ignore[operator]
    train(model, [rank])
    with fsdp2.full_parameters(model):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach())
    for each in (plain, model):
        torch.manual_seed(3)
        nn.init.trunc_normal_(each[0].weight)  # type: ignore[index]
    assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)  # type: ignore[index,operator]
    scaler = fsdp2.ShardedGradScaler(device="cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler.scale(model(torch.ones(1, 5)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    dist.barrier()
    dist.destroy_process_group()


def rank_codes() -> list[int]:
    """Fork the ranks, each of which trains; their exit codes."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                leave(lambda rank=rank: be_rank(rank, f"{folder}/store"))
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def leave(action: Any) -> None:
    """Run ``action`` and end this process."""
    try:
        action()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def try_without(table: ModuleType, name: Any) -> dict[str, Any]:
    """Hide ``name``, import fsdp2 and train."""
    found: dict[str, Any] = {"path": name.path, "is_gone": hide(table, name.path), "error": "", "text": "", "ranks": []}
    try:
        importlib.import_module("fsdp2.compat.fsdp1" if name.feature == table.COMPAT_FSDP1 else "fsdp2")
    except BaseException as error:
        return found | {"error": type(error).__name__, "text": str(error)}
    return found | {"ranks": rank_codes()}


def main(paths: list[str]) -> None:
    table = load_table()
    for name in table.NAMES:
        is_first = not name.feature or name is next(each for each in table.NAMES if each.feature == name.feature)
        if not (name.path in paths if paths else is_first):
            continue
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            leave(lambda name=name, pipe=writing: os.write(pipe, json.dumps(try_without(table, name)).encode()))
        os.close(writing)
        with os.fdopen(reading) as lines:
            print(lines.read() or json.dumps({"path": name.path, "error": "died", "is_gone": False, "ranks": []}))
        os.waitpid(child, 0)
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
