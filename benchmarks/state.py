"""`python -m benchmarks.state`: checkpoints beside torch's, on real gloo ranks and real files.

torch's are `torch.distributed.checkpoint` with its `fully_shard`, ours `fsdp2.checkpoint` with ours. Both are measured
in the same processes, in turn; CPU time is of all threads of a process, of the slowest rank; files lie in one folder.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
import statistics
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2
from benchmarks.ranks import on_ranks
from benchmarks.tables import Table
from fsdp2.checkpoint import Checkpoints, load, save

SIZES = {"small": (512, 16, 4608), "large": (1024, 9, 10_000)}
"""Width, blocks, and rows of the embedding: 55 million parameters (220 MB in fp32), and 125 million (500 MB)."""
MIB = 2**20
Measured = dict[str, dict[str, list[float]]]
"""By what is measured, by implementation: one figure for each repetition."""


class Model(nn.Module):
    """What a transformer's parameters are like; its head is tied to its embedding."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, blocks, rows = SIZES[size]
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight


class Trained:
    """A model that is sharded, and an optimizer with state.

    Args:
        name: "torch" or "fsdp2".
        size: of `SIZES`.
        replicas: how many; the rest of the ranks shards.
        steps: whether the optimizer has state.
    """

    def __init__(self, name: str, size: str, *, replicas: int = 1, steps: bool = True) -> None:
        torch.manual_seed(0)
        self.model = Model(size)
        mesh = None
        if replicas > 1:
            shape = (replicas, dist.get_world_size() // replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        shard: Any = torch_fully_shard if name == "torch" else fsdp2.fully_shard
        for unit in (*self.model.blocks, self.model):
            shard(unit, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        if steps:
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def shard_bytes(self) -> int:
        """Of this rank's part of the model."""
        return sum(p.to_local().nbytes for p in set(self.model.parameters()))  # type: ignore[attr-defined]

    def state(self) -> dict[str, Any]:
        """What torch saves."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds of all that ``action`` does in this process. All ranks begin together."""
    gc.collect()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


def add(found: Measured, what: str, name: str, *figures: float) -> None:
    """Add one repetition; several figures are CPU and wall time."""
    for kind, figure in zip((" CPU", " wall") if len(figures) > 1 else ("",), figures, strict=True):
        found.setdefault(what + kind, {}).setdefault(name, []).append(figure)


# ---- saves and loads -----------------------------------------------------------------------------


def save_and_load(size: str, repetitions: int, folder: str) -> Measured:
    """On as many ranks as save."""
    warnings.simplefilter("ignore")
    found: Measured = {}
    trained = {name: Trained(name, size) for name in ("torch", "fsdp2")}
    for repetition in range(repetitions + 1):
        for name, each in trained.items():
            path = Path(folder, f"{name}-{repetition}")
            if name == "torch":
                saved = timed(lambda: dcp.save(each.state(), checkpoint_id=path))  # noqa: B023
                loaded = timed(lambda: _torch_load(each, path))  # noqa: B023
            else:
                saved = timed(lambda: save(path, each.model, each.optimizer))  # noqa: B023
                loaded = timed(lambda: load(path, each.model, each.optimizer))  # noqa: B023
            if repetition:  # the first warms up
                add(found, "save", name, *saved)
                add(found, "load", name, *loaded)
            _remove(path)
    return found


def _torch_load(trained: Trained, path: Path) -> None:
    state = trained.state()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        trained.model, trained.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def held_up(size: str, repetitions: int, folder: str) -> Measured:
    """For how long an asynchronous save holds up training, in CPU time of the thread that trains."""
    warnings.simplefilter("ignore")
    found: Measured = {}
    group = dist.new_group(backend="gloo")
    torchs, ours = Trained("torch", size), Trained("fsdp2", size)
    checkpoints = Checkpoints(Path(folder, "run"), ours.model, ours.optimizer, keep_last=1)
    kept = [torch.empty_like(each) for each in _shards(ours)]
    for repetition in range(repetitions + 1):
        path = Path(folder, f"torch-{repetition}")
        dist.barrier()
        began = time.thread_time()
        future = dcp.async_save(torchs.state(), checkpoint_id=path, process_group=group)
        figure = time.thread_time() - began
        future.result()  # type: ignore[union-attr]
        _remove(path)
        dist.barrier()
        began = time.thread_time()
        checkpoints.save(repetition, asynchronous=True)
        mine = time.thread_time() - began
        checkpoints.wait()
        began = time.thread_time()
        for into, each in zip(kept, _shards(ours), strict=True):
            into.copy_(each)
        copied = time.thread_time() - began
        what = "held up" if repetition else "held up, first save"
        add(found, what, "torch", figure)
        add(found, what, "fsdp2", mine)
        if repetition:
            add(found, "held up, beside one copy of the shards", "torch", figure / copied)
            add(found, "held up, beside one copy of the shards", "fsdp2", mine / copied)
    checkpoints.close()
    return found


def _shards(trained: Trained) -> list[torch.Tensor]:
    states = [value for state in trained.optimizer.state.values() for value in state.values()]
    tensors = [*dict.fromkeys(trained.model.parameters()), *states]
    return [each.to_local() if hasattr(each, "to_local") else each for each in tensors]


def save_alone(size: str, folder: str) -> Measured:
    """One rank's checkpoint, for others to load."""
    warnings.simplefilter("ignore")
    trained = Trained("torch", size)
    dcp.save(trained.state(), checkpoint_id=Path(folder, "alone"))
    return {}


def load_elsewhere(size: str, repetitions: int, folder: str) -> Measured:
    """Load what one rank has saved."""
    warnings.simplefilter("ignore")
    found: Measured = {}
    path = Path(folder, "alone")
    trained = {name: Trained(name, size) for name in ("torch", "fsdp2")}
    for _ in range(repetitions):
        counted: dict[str, float] = {}
        read = _bytes_read()
        add(found, "load of one rank's", "torch", *timed(lambda: _torch_load(trained["torch"], path)))
        counted["torch"] = _bytes_read() - read
        read = _bytes_read()
        each = trained["fsdp2"]
        add(found, "load of one rank's", "fsdp2", *timed(lambda: load(path, each.model, each.optimizer)))  # noqa: B023
        counted["fsdp2"] = _bytes_read() - read
        for name, figure in counted.items():
            needed = 3 * trained[name].shard_bytes
            add(found, "load of one rank's: bytes read / needed", name, figure / needed)
    return found


def _bytes_read() -> int:
    """By this process, of files and of what else there is."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def replicas(size: str, folder: str) -> Measured:
    """What is written of two replicas of two shards, beside the model."""
    warnings.simplefilter("ignore")
    found: Measured = {}
    for name in ("torch", "fsdp2"):
        trained = Trained(name, size, replicas=2, steps=False)
        whole = sum(p.numel() * p.element_size() for p in set(trained.model.parameters()))
        path = Path(folder, f"replicas-{name}")
        if name == "torch":
            dcp.save({"model": get_model_state_dict(trained.model)}, checkpoint_id=path)
        else:
            save(path, trained.model)
        dist.barrier()
        sizes = [each.stat().st_size for each in path.glob("__*")]
        add(found, "replicas: bytes written / model", name, sum(sizes) / whole)
        add(found, "replicas: the largest rank's share", name, max(sizes) / whole)
        _remove(path)
    return found


def _remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


# ---- whole weights -------------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """The storages that operations have made, and the most bytes that were in them at a time.

    Not those of c10d: what they return lies on memory that they were given, and threads of gloo's hold it for a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._before: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(self._before, self._made, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._note(self._made, self._before, result)
        found = [each for each in (known() for known in self._made.values()) if each is not None]
        self.peak = max(self.peak, sum(each.nbytes() for each in found))
        return result

    def _note(self, into: dict[int, Any], others: dict[int, Any], tree: object) -> None:
        for each in tree_leaves(tree):
            if type(each) is torch.Tensor and not each.is_meta:
                storage = each.untyped_storage()
                known = others.get(storage._cdata)
                if known is None or known() is not storage:
                    into[storage._cdata] = weakref.ref(storage)


def peak(action: Callable[[], Any]) -> float:
    """The most memory that lives at once beside what lived before, in bytes."""
    gc.collect()
    mode = _Made()
    with mode:
        action()
    return float(mode.peak)


def whole_weights(size: str, repetitions: int, folder: str) -> Measured:
    """In and out, on all ranks."""
    from safetensors.torch import save_file

    from fsdp2.checkpoint import iter_full_parameters, load_full, save_safetensors

    warnings.simplefilter("ignore")
    found: Measured = {}
    torchs, ours = Trained("torch", size, steps=False), Trained("fsdp2", size, steps=False)
    torch.manual_seed(1)
    full = {name: torch.randn(p.shape) for name, p in ours.model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True)
    model_bytes = sum(p.numel() * 4 for p in set(ours.model.parameters()))

    def gathered() -> None:
        state = get_model_state_dict(torchs.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            save_file({name: each.clone() for name, each in state.items()}, Path(folder, "torch.safetensors"))

    for repetition in range(repetitions):
        path = Path(folder, f"st-{repetition}")
        add(found, "load_full", "torch", *timed(lambda: set_model_state_dict(torchs.model, full, options=options)))
        add(found, "load_full", "fsdp2", *timed(lambda: load_full(ours.model, full)))
        add(found, "save_safetensors", "torch", *timed(gathered))
        write = lambda: save_safetensors(ours.model, path, max_file_bytes=model_bytes // 8)  # noqa: E731, B023
        add(found, "save_safetensors", "fsdp2", *timed(write))
        _remove(path)
    shards, largest = ours.shard_bytes, max(each.nbytes for each in full.values())
    budget = 16 * MIB

    def iterate() -> None:
        for _, tensor in iter_full_parameters(ours.model, budget_bytes=budget):
            del tensor

    outside = {
        "load_full": (
            peak(lambda: set_model_state_dict(torchs.model, full, options=options)),
            peak(lambda: load_full(ours.model, full, budget_bytes=budget)),
        ),
        "save_safetensors": (
            peak(gathered),
            peak(lambda: save_safetensors(ours.model, Path(folder, "peak"), max_file_bytes=model_bytes // 8)),
        ),
        "iter_full_parameters": (
            math.nan,
            peak(iterate),
        ),
    }
    for what, (theirs, mine) in outside.items():
        label = f"{what}: peak, MiB (shards {shards / MIB:.0f}, largest {largest / MIB:.0f}, budget 16)"
        add(found, label, "torch", theirs / MIB)
        add(found, label, "fsdp2", mine / MIB)
    return found


# ---- all of it -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark with command line `arguments` (default: the process's own)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="default: small")
    parser.add_argument("--repetitions", type=int, default=5, help="interleaved (default: 5)")
    parser.add_argument("--folder", help="where files are written (default: a temporary one)")
    parser.add_argument("--only", help="measures whose name contains this")
    options = parser.parse_args(arguments)
    size, repetitions = options.size, options.repetitions
    parts: list[tuple[str, int, Callable[..., Measured], tuple[Any, ...]]] = [
        ("save and load", 2, save_and_load, (size, repetitions)),
        ("held up", 2, held_up, (size, repetitions)),
        ("alone", 1, save_alone, (size,)),
        ("alone, loaded", 4, load_elsewhere, (size, max(1, repetitions // 2))),
        ("replicas", 4, replicas, (size,)),
        ("whole weights", 4, whole_weights, (size, max(1, repetitions // 2))),
    ]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for what, world_size, measure, given in parts:
            if options.only is not None and options.only not in what:
                continue
            columns = ["", "torch", "fsdp2", "fsdp2/torch"]
            title = f"{what} ({size}, {world_size} ranks, torch {torch.__version__}); s, median of {repetitions}"
            table = Table(title, columns)
            _add_rows(table, on_ranks(world_size, measure, *given, folder))
            if table.rows:
                print(table.render(), "\n", flush=True)


def _add_rows(table: Table, of_ranks: Sequence[Measured]) -> None:
    for what in of_ranks[0]:
        slowest = {
            name: [max(figures) for figures in zip(*(rank[what][name] for rank in of_ranks), strict=True)]
            for name in of_ranks[0][what]
        }
        pairs = zip(slowest["fsdp2"], slowest["torch"], strict=True)
        ratio = statistics.median(mine / theirs if theirs else math.nan for mine, theirs in pairs)
        cells = [f"{statistics.median(slowest[name]):.3f}" for name in ("torch", "fsdp2")]
        table.add(what, *cells, f"{ratio:.3f}")


if __name__ == "__main__":
    main()
