"""The pictures of the loss, and of what the steps have cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SMOOTHING = 0.9
"""The weight of the past in the running mean of the training loss."""


def plot_loss(path: Path, metrics: Sequence[dict[str, float]], *, bigram_bits: float | None) -> None:
    """Draw training and held-out loss over the steps, in bits per byte, with the bigram table's beside."""
    training = [(line["step"], line["loss"] / math.log(2)) for line in metrics if "loss" in line]
    held_out = [(line["step"], line["held_out_loss"] / math.log(2)) for line in metrics if "held_out_loss" in line]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte")
    if training:
        steps, bits = zip(*training, strict=True)
        axes.plot(steps, bits, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, running_mean(bits), color="tab:blue", label="training (running mean)")
    if held_out:
        steps, bits = zip(*held_out, strict=True)
        axes.plot(steps, bits, color="tab:orange", marker="o", markersize=3, label="held out")
    if bigram_bits is not None:
        axes.axhline(bigram_bits, color="gray", linestyle="--", label=f"bigram table ({bigram_bits:.2f})")
    axes.set_ylim(0, 8)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


PANELS = (
    ("tokens_per_second", 1.0, "tokens per second"),
    ("exposed_share", 100.0, "% of the time waits for communication"),
    ("peak_memory_bytes", 2.0**-20, "peak memory, MiB"),
    ("gradient_norm", 1.0, "norm of the gradients"),
)
"""What is drawn of the metrics: the name, by what it is multiplied, the label."""


def plot_metrics(path: Path, metrics: Sequence[dict[str, float]]) -> None:
    """Draw what the logged steps have cost on rank 0, as `fsdp2.metrics` has measured it."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (name, factor, label) in enumerate(PANELS):
        axes = figure.add_subplot(2, 2, index + 1, xlabel="step", title=label)
        lines = [line for line in metrics if name in line]
        axes.plot([line["step"] for line in lines], [factor * line[name] for line in lines], linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1.1 * max([1e-9, *(factor * line[name] for line in lines)]))
    figure.savefig(path, dpi=120)


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the exponential running mean of `values`, corrected for its start."""
    means = []
    total = weight = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(total / weight)
    return means
