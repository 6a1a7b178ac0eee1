"""A timeline as a picture by matplotlib (in the extra ``fsdp2[tools]``), which is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsdp2.tools.timeline.analysis import EXCHANGES, PROGRAM, segments
from fsdp2.tools.timeline.chrome_trace import lanes
from fsdp2.tools.timeline.records import RankRecord
from fsdp2.tools.timeline.report import MIB, TimelineReport

MOST_RANKS = 8
MOST_STEPS = 4

COLOURS = {
    "forward": "#2f6fde",
    "recompute": "#7a5cc9",
    "backward": "#c8690c",
    "optimizer": "#6d5a4a",
    "pack and launch": "#7d8ba0",
    "wait": "#d6336c",
    "all-gather": "#0e9aa7",
    "reduce-scatter": "#4b8f2a",
    "all-reduce": "#8f7a12",
}


def draw(report: TimelineReport, path: Path) -> None:
    """Draw the last steps of the first ranks and of the slowest, into the file ``path``. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    records, steps = shown(report)
    figure = Figure(figsize=(13, 1.6 + 1.5 * len(records)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(records), 1, sharex=True, squeeze=False)
    for record, place in zip(records, axes[:, 0], strict=True):
        _draw_rank(place, record, steps)
    axes[-1, 0].set_xlabel("ms")
    said = report.headlines()
    if (len(steps), len(records)) != (max(len(report.steps), 1), len(report.records)):
        said.append(f"Shown are the last {len(steps)} steps of {len(records)} ranks. A trace (.json) has all of them.")
    figure.suptitle("\n".join(said), fontsize=9, x=0.01, ha="left")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def shown(report: TimelineReport) -> tuple[list[RankRecord], list[tuple[float, float]]]:
    """The ranks and steps that a picture has room for."""
    slowest = -1 if report.slowest is None else report.slowest.rank
    first = sorted(report.records, key=lambda each: each.rank != slowest)[:MOST_RANKS]
    steps = report.steps or [(report.records[0].begin, report.records[0].end)]
    return sorted(first, key=lambda each: each.rank), steps[-MOST_STEPS:]


def _draw_rank(axes: Any, record: RankRecord, steps: list[tuple[float, float]]) -> None:
    """Draw three rows: what the rank does, what is in flight, and the memory of unsharded parameters."""
    begin, end = steps[0][0], steps[-1][1]

    def ms(seconds: float) -> float:
        return (seconds - begin) * 1e3

    def bars(spans: Iterable[Any], y: float, height: float) -> None:
        for each in spans:
            if each.end > begin and each.begin < end:
                place = [(ms(each.begin), (each.end - each.begin) * 1e3)]
                axes.broken_barh(place, (y, height), facecolors=COLOURS[each.what], linewidth=0)

    bars((each for each in segments(record) if each.what != PROGRAM), 0.0, 1.0)
    y = -0.1
    for kinds in (EXCHANGES[:1], EXCHANGES[1:]):
        for lane in lanes(each for each in record.spans if each.what in kinds):
            y -= 0.4
            bars(lane, y, 0.3)
    y -= 1.2
    samples = [(ms(each.time), each.unsharded_bytes + each.staged_bytes) for each in record.memory]
    peak = max([1, *(nbytes for _, nbytes in samples)])
    levels = [y + nbytes / peak for _, nbytes in samples]
    axes.fill_between([time for time, _ in samples], levels, y, step="post", color="#8b93a1", alpha=0.5, linewidth=0)
    for start, _ in steps:
        axes.axvline(ms(start), color="gray", linestyle=":", linewidth=0.8)
    axes.set_xlim(0, ms(end))
    axes.set_ylim(y, 1.2)
    axes.set_yticks([0.5, y + 0.5], [f"rank {record.rank}", f"≤ {peak / MIB:.3g} MiB"], fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
