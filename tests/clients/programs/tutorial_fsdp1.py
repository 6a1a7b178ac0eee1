"""torch's tutorial "Getting Started with Fully Sharded Data Parallel (FSDP)", from its text, as it stands.

The text is not here: ``FSDP1_TUTORIAL`` names a copy of intermediate_source/FSDP1_tutorial.rst of pytorch/tutorials.
What the program imports and machines with CUDA have, `tutorial_stand_ins` stands in for; it spawns its ranks itself.

Usage:
    FSDP1_TUTORIAL=FSDP1_tutorial.rst python tutorial_fsdp1.py FOLDER [plain|wrapped|offloaded]
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
import tutorial_stand_ins as stand_ins
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from trial import Report

EPOCHS, ROWS, RANKS = 2, 8, stand_ins.RANKS
OPTIONS = [f"--epochs={EPOCHS}", f"--batch-size={ROWS}", "--test-batch-size=16", "--lr=0.5", "--save-model"]


def program(text: str, kind: str) -> str:
    """What the text builds up: its Python blocks until the main function, the model wrapped as it says later on."""
    blocks = [
        textwrap.dedent(each)
        for each in re.findall(r"^\.\. code-block:: python\n\n((?:(?: {4}.*)?\n)+)", text, re.MULTILINE)
    ]
    last = next(index for index, block in enumerate(blocks) if "__main__" in block)
    code = "\n\n".join(blocks[: last + 1])
    _, by_size, offloaded = (None, blocks[last + 1], blocks[last + 2])
    chosen = {"plain": None, "wrapped": by_size[by_size.index("model = FSDP") :], "offloaded": offloaded}[kind]
    if chosen is None:
        return code
    assert code.count("    model = FSDP(model)\n") == 1
    code = code.replace("min_num_params=100", "min_num_params=20000")
    return code.replace("    model = FSDP(model)\n", textwrap.indent(chosen.strip(), "    ") + "\n")


def train_unsharded(net: type[torch.nn.Module]) -> tuple[list[float], list[float], list[float], dict[str, Any]]:
    """Losses of training and of testing by epoch, gradient norms by step, and weights: in one process.

    Each rank's random numbers, for dropout and what a loader draws, are a stream of their own, as in its process.
    """
    torch.manual_seed(stand_ins.SEED)
    model = net()
    streams = [torch.get_rng_state() for _ in range(RANKS)]
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train, test = stand_ins.MNIST("", train=True), stand_ins.MNIST("", train=False)
    samplers = [DistributedSampler(train, rank=rank, num_replicas=RANKS, shuffle=True) for rank in range(RANKS)]
    losses, tested, norms = [], [], []
    for epoch in range(1, EPOCHS + 1):
        model.train()
        total = 0.0
        batches = []
        for rank, sampler in enumerate(samplers):
            sampler.set_epoch(epoch)
            torch.set_rng_state(streams[rank])
            batches.append(list(DataLoader(train, batch_size=ROWS, sampler=sampler)))
            streams[rank] = torch.get_rng_state()
        for each in zip(*batches, strict=True):
            optimizer.zero_grad()
            for rank, (images, targets) in enumerate(each):
                torch.set_rng_state(streams[rank])
                loss = torch.nn.functional.nll_loss(model(images), targets, reduction="sum")
                streams[rank] = torch.get_rng_state()
                (loss / RANKS).backward()
                total += loss.item()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norms.append(sum(gradient.double().square().sum().item() for gradient in gradients) ** 0.5)
            optimizer.step()
        losses.append(total / len(train))
        model.eval()
        with torch.no_grad():
            images, targets = next(iter(DataLoader(test, batch_size=len(test))))
            tested.append(torch.nn.functional.nll_loss(model(images), targets).item())
        for rank in range(RANKS):
            torch.set_rng_state(streams[rank])
            iter(DataLoader(test))  # which draws a seed
            streams[rank] = torch.get_rng_state()
        scheduler.step()
    return losses, tested, norms, model.state_dict()


def run(path: Path) -> str:
    """What the ranks print."""
    printed = path.with_suffix(".txt")
    os.environ |= {stand_ins.FOLDER: str(path.parent)}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(path.parent), str(Path(__file__).parent), *sys.path[1:]])
    sys.path.insert(0, str(path.parent))
    before = os.dup(1)
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        sys.argv = [str(path), *OPTIONS]
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            sys.stdout.flush()
            os.dup2(before, 1)
    return printed.read_text()


def main() -> None:
    """Run it, train as it does in one process, and report."""
    folder, kind = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "plain"
    path = folder / "FSDP_mnist.py"
    path.write_text(program(Path(os.environ["FSDP1_TUTORIAL"]).read_text(), kind))
    (folder / "torchvision.py").write_text("from tutorial_stand_ins import datasets, transforms\n")
    os.chdir(folder)
    printed = run(path)
    losses, tested, norms, weights = train_unsharded(runpy.run_path(str(path), run_name="tutorial")["Net"])
    report = Report((folder / "implementation").read_text())
    found = re.findall(r"Train Epoch: \d+ \tLoss: ([\d.]+)", printed)
    for value, expected in zip(found, losses, strict=True):
        report.add("loss", float(value), round(expected, 6))  # as it prints them
    for value, expected in zip(re.findall(r"Average loss: ([\d.]+)", printed), tested, strict=True):
        report.add("loss of the test set", float(value), round(expected, 4))
    for value, expected in zip((folder / "norms").read_text().split(), norms, strict=True):
        report.add("gradient norm", float(value), expected)
    saved = torch.load(folder / "mnist_cnn.pt")
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        report.add("saved weight", (saved[name] - value).norm().item() / value.norm().item(), 0.0)
    report.write()


if __name__ == "__main__":
    main()
