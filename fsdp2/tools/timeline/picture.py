"""A timeline as a picture, by matplotlib (of the extra ``fsdp2[tools]``); imported when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp2.tools.timeline.report import MIB, TimelineReport
from fsdp2.tools.timeline.view import COLOURS, WORDS, RankView, View, view_of

_MEMORY_ALPHA = 0.5


def draw(report: TimelineReport, path: Path) -> None:
    """Write the picture to ``path``. Needs matplotlib, and no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    view = view_of(report)
    figure = Figure(figsize=(13, 1.6 + 1.5 * len(view.ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(view.ranks), 1, sharex=True, squeeze=False)
    for rank, place in zip(view.ranks, axes[:, 0], strict=True):
        _draw_rank(place, rank, view)
    axes[-1, 0].set_xlabel("ms")
    said = [*report.headlines(), view.left_out] if view.left_out else report.headlines()
    figure.suptitle("\n".join(said), fontsize=9, x=0.01, ha="left")
    handles = [
        Patch(color=COLOURS[kind][0], alpha=_MEMORY_ALPHA if kind == "memory" else 1.0, label=WORDS.get(kind, kind))
        for kind in view.used
    ]
    handles.append(Patch(facecolor="white", edgecolor="gray", linewidth=0.6, label="white: the program's own"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def _draw_rank(axes: Any, rank: RankView, view: View) -> None:
    def ms(seconds: float) -> float:
        return (seconds - view.begin) * 1e3

    def bars(spans: Any, y: float, height: float) -> None:
        for what in dict.fromkeys(each.what for each in spans):
            places = [(ms(each.begin), (each.end - each.begin) * 1e3) for each in spans if each.what == what]
            axes.broken_barh(places, (y, height), facecolors=COLOURS[what][0], linewidth=0)

    bars(rank.segments, 0.0, 1.0)
    y = -0.1
    for lane in (*rank.gathers, *rank.reductions):
        y -= 0.4
        bars(lane, y, 0.3)
    y -= 1.2
    times = [ms(each) for each, _ in rank.memory] + [ms(view.end)]
    levels = [nbytes / view.peak_bytes for _, nbytes in rank.memory]
    levels = [y + each for each in (*levels, levels[-1])]
    axes.fill_between(times, levels, y, step="post", color=COLOURS["memory"][0], alpha=_MEMORY_ALPHA, linewidth=0)
    for number, begin in view.steps:
        axes.axvline(ms(begin), color="gray", linestyle=":", linewidth=0.8)
        axes.annotate(f" step {number + 1}", (ms(begin), 1.06), fontsize=7, color="gray", annotation_clip=False)
    axes.set_xlim(0, ms(view.end))
    axes.set_ylim(y, 1.35)
    axes.set_yticks([0.5, y + 0.5], [f"rank {rank.rank}", f"≤ {view.peak_bytes / MIB:.3g} MiB"], fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
