"""Bars of time, CPU time and memory of all contenders, drawn by matplotlib, for light pages or dark ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.implementations import AGAIN, base_of
from benchmarks.peers.table import COLUMNS, OURS, Contender

SHOWN = ("wall ms", "CPU ms", "peak MiB")
PALETTES = {"light": ("#1f2430", "#aab2bf", "#3f51b5"), "dark": ("#e6e9ef", "#5d6675", "#93a1f2")}
"""Text; bars; our bars."""


def draw(contenders: Sequence[Contender], file: Path) -> None:
    """Writes `file`, as PNG or SVG by its name; one that ends with ``-dark`` is for dark pages.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fsdp2"
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, which can be searched and takes less
    shown = [each for each in contenders if not each.name.endswith(AGAIN)][::-1]
    text, bar, our_bar = PALETTES["dark" if file.stem.endswith("-dark") else "light"]
    figure, panels = pyplot.subplots(1, len(SHOWN), sharey=True, figsize=(10, 0.32 * len(shown) + 0.8))
    for panel, title in zip(panels, SHOWN, strict=True):
        (column,) = [each for each in COLUMNS if each.title == title]
        values = [column.value(each) or 0.0 for each in shown]
        colours = [our_bar if base_of(each.name) == OURS else bar for each in shown]
        drawn = panel.barh([each.name for each in shown], values, color=colours)
        panel.bar_label(drawn, fmt="%.0f", padding=3, color=text, fontsize=8)
        panel.set_title(title, color=text, fontsize=10)
        panel.set_xlim(0, 1.18 * max(values))
        panel.tick_params(colors=text, labelsize=8, bottom=False, labelbottom=False)
        for spine in panel.spines.values():
            spine.set_visible(False)
    figure.tight_layout()
    metadata = {"Date": None} if file.suffix == ".svg" else None
    figure.savefig(file, transparent=True, metadata=metadata, dpi=150)
    pyplot.close(figure)
