"""Trains without features that fill ports alone: without each, and without all, on two ranks, beside the plain model.

    python -m tests.programs.without_features

Prints a line for each feature. A process is forked for each, so that torch is imported once.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: once, before processes are forked
import torch.distributed as dist
from torch import nn

PACKAGE = Path(__file__).parents[2] / "fsdp2"
RANKS = 2


def _imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ImportFrom):
        return [statement.module or "", *(f"{statement.module}.{each.name}" for each in statement.names)]
    return [each.name for each in statement.names] if isinstance(statement, ast.Import) else []


def _names(path: Path) -> list[str]:
    statements = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.stmt)]
    return [name for each in statements for name in _imported(each)]


def _needs(path: Path, removed: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for name in _names(path) for each in removed)


def feature_modules() -> list[str]:
    """The features that `fully_shard` does not call, as names of modules: files and folders."""
    called: set[str] = set()
    waiting = ["api/fully_shard"]
    while waiting:
        each = waiting.pop()
        path = next((path for path in (PACKAGE / f"{each}.py", PACKAGE / each / "__init__.py") if path.exists()), None)
        if path is not None and each not in called:
            called.add(each)
            waiting += [name.removeprefix("fsdp2.").replace(".", "/") for name in _names(path)]
    folders = [PACKAGE / "model", *(each for each in (PACKAGE / "plugs").iterdir() if each.is_dir())]
    files = [each for folder in folders for each in folder.glob("*.py") if each.stem != "__init__"]
    every = {each.relative_to(PACKAGE).with_suffix("").as_posix() for each in files}
    return sorted(each.replace("/", ".") for each in every - called)


def remove(feature: str, package: Path) -> set[str]:
    """Take ``feature`` out of ``package``, and what outside of the core imports it; the names of what is gone."""
    gone = {f"fsdp2.{feature}"}
    faces = [package / "__init__.py", package / "plugs" / "__init__.py"]
    while True:
        beside = [each for each in package.rglob("*.py") if each.relative_to(package).parts[0] != "core"]
        needing = [each for each in beside if each.parent != package and each not in faces and _needs(each, gone)]
        (package / feature.replace(".", "/")).with_suffix(".py").unlink(missing_ok=True)
        for each in needing:
            each.unlink(missing_ok=True)
            gone.add("fsdp2." + ".".join(each.relative_to(package).with_suffix("").parts).removesuffix(".__init__"))
        if not needing:
            break
    for face in faces:
        tree = ast.parse(face.read_text())
        kept = [each for each in tree.body if not any(name in gone for name in _imported(each)[:1])]
        removed = [each for each in tree.body if each not in kept]
        lost = {each.asname or each.name for node in removed for each in getattr(node, "names", [])}
        for node in kept:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                node.value.elts = [each for each in node.value.elts if ast.literal_eval(each) not in lost]
        face.write_text(ast.unparse(ast.Module(kept, [])))
    return gone


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _train(model: nn.Module, batches: Callable[[int], list[torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = torch.stack([model(batch).square().mean() for batch in batches(step)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train_sharded(rank: int, store: str) -> None:
    """As rank ``rank``: the losses are those of the plain model, in its state dict are its parameters."""
    import fsdp2

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    plain = _model()
    expected = _train(plain, lambda step: [_batch(step, each) for each in range(RANKS)])
    model = _model()
    for each in (*model, model):
        fsdp2.fully_shard(each)
    found = torch.tensor(_train(model, lambda step: [_batch(step, rank)]))
    dist.all_reduce(found)
    torch.testing.assert_close(found / RANKS, torch.tensor(expected))
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(parameter.full_tensor(), plain.state_dict()[name])
    dist.destroy_process_group()


def _in_process(action: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        action()
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(*features: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "fsdp2"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        gone = {name for feature in features for name in remove(feature, package)}
        sys.path.insert(0, folder)
        import fsdp2

        assert Path(fsdp2.__file__).parent == package, "the copy is what runs"
        ranks = [_in_process(lambda rank=rank: train_sharded(rank, f"{folder}/store")) for rank in range(RANKS)]  # type: ignore[misc]
        name = features[0] if len(features) == 1 else "all of them"
        assert [os.waitpid(each, 0)[1] for each in ranks] == [0] * RANKS, f"without {name}"
        print(f"without {name}: trains" + (f" (nor {', '.join(sorted(gone))})" if len(gone) > 1 else ""))


def main() -> int:
    """All features in turn, and then all at once (or only that, if the command line says "all"); 1 if one is needed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    every = feature_modules()
    cases = [*((each,) for each in every if sys.argv[1:] != ["all"]), tuple(every)]
    failed = [each for each in cases if os.waitpid(_in_process(lambda each=each: _run(*each)), 0)[1]]  # type: ignore[misc]
    if failed:
        print(f"needed: {', '.join(each[0] if len(each) == 1 else 'some of all' for each in failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
