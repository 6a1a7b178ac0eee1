"""A timeline as one HTML page: an SVG made here, tables, light and dark, no script and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from fsdp2.tools.timeline.analysis import Traffic
from fsdp2.tools.timeline.records import Span
from fsdp2.tools.timeline.report import MIB, GroupSummary, TimelineReport
from fsdp2.tools.timeline.view import COLOURS, WORDS, RankView, View, view_of

WIDTH, LEFT, RIGHT = 1100, 78, 16
LANE, THIN, MEMORY, GAP = 30, 12, 34, 18

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2430; --faint: #5b6675;
  --line: #d7dce3; --band: #f3f5f8; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181f; --ink: #e4e8ee; --faint: #9aa5b4; --line: #333b47; --band: #1c222b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px 16px 48px; max-width: 1180px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 22px; margin: 0 0 8px; } h2 { font-size: 17px; margin: 30px 0 8px; }
p { margin: 4px 0; max-width: 80ch; } .faint { color: var(--faint); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
.scroll svg { display: block; min-width: 820px; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); } svg .faint { fill: var(--faint); }
svg .in { fill: var(--ground); font-size: 10px; pointer-events: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 10px 0; padding: 0; list-style: none;
  font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; background: var(--band); }
tr:last-child td { border-bottom: 0; }
.bar { display: flex; width: 120px; height: 10px; background: var(--band); border-radius: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; }
"""


def page(report: TimelineReport) -> str:
    """The page."""
    view = view_of(report)
    first, *others = report.headlines()
    title = f"Timeline of {escape(report.records[0].model)}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title><style>{STYLE}{_colours()}</style></head><body>",
        f"<h1>{title}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (first, *others)),
        f'<p class="faint">{escape(view.left_out)} {escape(_clock_words(report))}</p>',
        _legend(view),
        f'<div class="scroll">{_drawing(view)}</div>',
        "<h2>Ranks, in a step</h2>",
        '<p class="faint">Busy: all time but waits. Memory: the most at a time.</p>',
        _rank_table(report),
        "<h2>Groups, in a step</h2>",
        '<p class="faint">On average over ranks. Hidden: in flight while the rank computes. Exposed: the rank stands '
        "still.</p>",
        _group_table(report),
        "</body></html>",
    ]
    return "\n".join(parts)


def _clock_words(report: TimelineReport) -> str:
    if report.records[0].has_streams:
        return "Times are the device's."
    return "Times are the host's: an exchange is shown in flight until the host has waited for it."


def _colours() -> str:
    def rules(index: int) -> str:
        return "".join(
            f".{_class(kind)}{{fill:{pair[index]};background:{pair[index]}}}" for kind, pair in COLOURS.items()
        )

    return f"{rules(0)}@media (prefers-color-scheme: dark){{{rules(1)}}}"


def _class(kind: str) -> str:
    return "k-" + kind.replace(" ", "-")


def _legend(view: View) -> str:
    items = [f'<li><i class="{_class(kind)}"></i>{escape(WORDS.get(kind, kind))}</li>' for kind in view.used]
    return f'<ul class="legend">{"".join(items)}</ul>'


# -- the drawing


class _Scale:
    """From seconds to places in the drawing."""

    def __init__(self, view: View) -> None:
        self.begin, self.end = view.begin, view.end
        self._factor = (WIDTH - LEFT - RIGHT) / max(view.end - view.begin, 1e-9)

    def x(self, seconds: float) -> float:
        """Inside of the drawing."""
        return LEFT + (min(max(seconds, self.begin), self.end) - self.begin) * self._factor


def _drawing(view: View) -> str:
    scale = _Scale(view)
    parts: list[str] = []
    top = 34.0
    for rank in view.ranks:
        drawn, height = _rank(rank, scale, top, view.peak_bytes)
        parts += drawn
        top += height + GAP
    height = top + 6
    axis = _axis(view, scale, height)
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="What each rank does over time">'
    return "".join([head, *axis, *parts, "</svg>"])


def _axis(view: View, scale: _Scale, height: float) -> list[str]:
    span = view.end - view.begin
    unit = 10.0 ** _exponent(span / 8)
    step = next(each * unit for each in (1, 2, 5, 10) if each * unit >= span / 8)
    parts = []
    for index in range(int(span / step) + 1):
        x = scale.x(view.begin + index * step)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="28" y2="{height:.0f}" stroke="var(--line)"/>')
        parts.append(f'<text class="faint" x="{x + 3:.1f}" y="26">{index * step * 1e3:g} ms</text>')
    for number, begin in view.steps:
        x = scale.x(begin)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height:.0f}" stroke="var(--faint)" stroke-dasharray="3 3"/>'
        )
        parts.append(f'<text x="{x + 3:.1f}" y="13">step {number}</text>')
    return parts


def _exponent(value: float) -> int:
    exponent = -9
    while 10.0 ** (exponent + 1) <= value:
        exponent += 1
    return exponent


def _rank(rank: RankView, scale: _Scale, top: float, peak_bytes: int) -> tuple[list[str], float]:
    """The drawing of one rank, and its height."""
    parts = [f'<text x="6" y="{top + 19:.0f}" font-weight="600">rank {rank.rank}</text>']
    if rank.is_slowest:
        parts.append(f'<text class="faint" x="6" y="{top + 33:.0f}">slowest</text>')
    y = top
    parts.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" fill="var(--band)"/>')
    for each in rank.segments:
        words = f"waits for {each.name}" if each.what == "wait" else f"{each.what} {each.name}"
        parts.append(_box(scale, each.begin, each.end, y, LANE, each.what, words, label=each.name or each.what))
    y += LANE + 3
    for lane in (*rank.gathers, *rank.reductions):
        parts += [_box(scale, each.begin, each.end, y, THIN - 2, each.what, _said_of(each)) for each in lane]
        y += THIN
    y += 2
    parts.append(_memory(rank, scale, y, peak_bytes))
    parts.append(f'<text class="faint" x="6" y="{y + 12:.0f}">≤ {peak_bytes / MIB:.3g} MiB</text>')
    return parts, y + MEMORY - top


def _box(
    scale: _Scale, begin: float, end: float, y: float, height: float, kind: str, words: str, label: str = ""
) -> str:
    left, right = scale.x(begin), scale.x(end)
    width = max(right - left, 0.4)
    title = f"{words}: {(end - begin) * 1e3:.3f} ms"
    shape = f'<rect class="{_class(kind)}" x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}" rx="1">'
    text = ""
    if label and width > 6.2 * len(label) + 6:
        text = f'<text class="in" x="{left + 4:.1f}" y="{y + height / 2 + 3.5:.1f}">{escape(label)}</text>'
    return f"{shape}<title>{escape(title)}</title></rect>{text}"


def _said_of(span: Span) -> str:
    way = "for backward" if span.for_backward else "for forward"
    details = f"{span.nbytes / MIB:.3f} MiB, {span.sent_bytes / MIB:.3f} MiB sent"
    if span.what == "all-gather":
        details += f", {way}{', ahead' if span.ahead else ''}"
    return f"{span.what} of {span.name} ({details})"


def _memory(rank: RankView, scale: _Scale, y: float, peak_bytes: int) -> str:
    bottom = y + MEMORY
    points = [f"{LEFT},{bottom:.1f}"]
    level = bottom
    for seconds, nbytes in rank.memory:
        x = scale.x(seconds)
        points.append(f"{x:.2f},{level:.1f}")
        level = bottom - MEMORY * nbytes / peak_bytes
        points.append(f"{x:.2f},{level:.1f}")
    points += [f"{WIDTH - RIGHT},{level:.1f}", f"{WIDTH - RIGHT},{bottom:.1f}"]
    return f'<polygon class="{_class("memory")}" points="{" ".join(points)}" opacity="0.55"/>'


# -- tables


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _rank_table(report: TimelineReport) -> str:
    head = ["rank", "step ms", "busy ms", "waits for gathers ms", "for reductions ms", "", "sent MiB"]
    head += ["unsharded MiB", "process MiB"]
    rows = []
    for each in report.ranks:
        name = f"{each.rank} (slowest)" if report.slowest and report.slowest.rank == each.rank else str(each.rank)
        rows.append(
            [
                name,
                _number(each.step_seconds * 1e3),
                _number(each.busy_seconds * 1e3),
                _number(each.exposed_gather_seconds * 1e3),
                _number(each.exposed_reduce_seconds * 1e3),
                _bar(each.step_seconds, ("backward", each.busy_seconds), ("wait", each.exposed_seconds)),
                _number(each.sent_bytes / MIB),
                _number(each.peak_unsharded_bytes / MIB),
                _number(each.peak_allocated_bytes / MIB),
            ]
        )
    return _table(head, rows)


def _group_table(report: TimelineReport) -> str:
    head = ["group", "gathers", "MiB", "hidden ms", "exposed ms", "reductions", "MiB", "hidden ms", "exposed ms", ""]
    longest = max([1e-9, *(each.exposed_seconds + each.overlapped_seconds for each in report.groups)])
    return _table(head, [_group_row(each, longest) for each in report.groups])


def _group_row(group: GroupSummary, longest: float) -> list[str]:
    def cells(traffic: Traffic) -> list[str]:
        return [
            f"{traffic.count:g}",
            _number(traffic.nbytes / MIB),
            _number(traffic.overlapped_seconds * 1e3),
            _number(traffic.exposed_seconds * 1e3),
        ]

    bar = _bar(longest, ("all-gather", group.overlapped_seconds), ("wait", group.exposed_seconds))
    return [escape(group.name), *cells(group.gathers), *cells(group.reductions), bar]


def _bar(whole: float, *parts: tuple[str, float]) -> str:
    pieces = "".join(
        f'<i class="{_class(kind)}" style="width:{100 * min(1.0, seconds / max(whole, 1e-9)):.1f}%"></i>'
        for kind, seconds in parts
    )
    return f'<span class="bar">{pieces}</span>'


def _number(value: float) -> str:
    return f"{value:,.2f}"
