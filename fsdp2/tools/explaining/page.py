"""An explanation as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fsdp2.tools.explaining.advice import Advice
from fsdp2.tools.explaining.drawing import Piece, bar_of, memory_of
from fsdp2.tools.explaining.similar import SimilarGroups, similar_groups
from fsdp2.tools.explaining.text import (
    EXCHANGE_HEADERS,
    EXCHANGE_RIGHT,
    GROUP_RIGHT,
    PARAM_HEADERS,
    TRAFFIC_HEADERS,
    TRAFFIC_RIGHT,
    exchange_row,
    group_headers,
    param_row,
    plain_lines,
    properties_of,
    reasons,
    row_of,
    summary,
    traffic_rows,
)
from fsdp2.tools.facts.data import ModelFacts
from fsdp2.tools.quantities import shown_bytes

MOST_PARAMS = 200
"""Rows of a table of parameters; more are counted."""

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --soft: #5b6570; --line: #d9dee4; --panel: #f5f7f9;
  --pad: #e3e7ec; --rank: #b8c4d2; --own: #33475b; --temporary: #c9b3dd; --gradient: #9fc7a5; --hatch: #ffffffb0;
  --wrong: #b3261e; --memory: #8a5300; --slow: #8a5300; --note: #1f5fa8; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e6e9ec; --soft: #9aa5b1; --line: #333b44;
  --panel: #1c2126; --pad: #2b3138; --rank: #4b5a6b; --own: #cfd8e3; --temporary: #6d5585; --gradient: #41704a;
  --hatch: #00000070; --wrong: #ff8a80; --memory: #f0b45c; --slow: #f0b45c; --note: #83b9f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } .right { text-align: right; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; padding: .5rem .8rem;
  background: var(--panel); }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
summary span, .bar span { color: var(--soft); font-weight: 400; }
code, pre { font: .85rem/1.5 ui-monospace, monospace; } pre { overflow-x: auto; margin: .3rem 0; padding: .5rem;
  background: var(--back); border: 1px solid var(--line); border-radius: 4px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; font-size: .9rem; margin: .8rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.advice { padding-left: 1.2rem; } .advice li { margin: .6rem 0; overflow-wrap: anywhere; }
.level { font-weight: 700; } .wrong { color: var(--wrong); } .memory { color: var(--memory); }
.slow { color: var(--slow); } .note { color: var(--note); }
.bar p { margin: .5rem 0 .15rem; font-size: .85rem; overflow-wrap: anywhere; } .bar svg { display: block; }
rect.pad, i.pad { fill: var(--pad); background: var(--pad); } rect.rank { fill: var(--rank); stroke: var(--back); }
rect.own { fill: var(--own); } .key.rank { background-color: var(--rank); }
rect.temporary { fill: var(--temporary); } rect.gradient { fill: var(--gradient); }
rect.unsharded { fill: var(--rank); } rect.atrest { fill: var(--own); }
rect.slot { stroke: var(--back); stroke-width: 1; } rect.hatch { fill: url(#stripes); pointer-events: none; }
.stripe { stroke: var(--hatch); stroke-width: 3; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; padding: 0; margin: .5rem 0; list-style: none;
  font-size: .8rem; }
.legend li { overflow-wrap: anywhere; } .key { display: inline-block; width: .9em; height: .9em; margin-right: .4em;
  vertical-align: -.1em; border: 1px solid var(--line); }
.key.packed { background-image: repeating-linear-gradient(45deg, transparent 0 2px, var(--hatch) 2px 4px); }
footer { color: var(--soft); font-size: .8rem; margin-top: 2rem; }
"""

_HUES = ("#4c78a8", "#e39a3b", "#d1605e", "#6aaaa6", "#5fa55a", "#cfae2d", "#a97caa", "#e58f97")

_STRIPES = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs><pattern id="stripes" width="8" '
    'height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line class="stripe" x1="0" y1="0" x2="0" '
    'y2="8"/></pattern></defs></svg>'
)


def page(facts: ModelFacts, advice: Sequence[Advice]) -> str:
    """The whole page."""
    colours = "".join(f"rect.p{i}{{fill:{hue}}}.key.p{i}{{background-color:{hue}}}" for i, hue in enumerate(_HUES))
    title = f"How {facts.class_name} is sharded"
    alike = similar_groups(facts)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(summary(facts))}</p>",
        *(f"<p>{escape(line)}</p>" for line in plain_lines(facts)),
        _advice(advice),
        _groups(facts, alike),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{colours}</style></head>\n"
        f"<body>{_STRIPES}{''.join(parts)}"
        f"<footer>Written by fsdp2.explain on rank {facts.rank} of {facts.world_size}; "
        f"{facts.ranks_per_node} ranks share a node. Sizes are of one rank unless said.</footer></body></html>\n"
    )


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return ""
    items = "".join(
        f'<li><span class="level {each.level}">{each.level}</span> {escape(each.what)}'
        + (f"<pre>{escape(each.change)}</pre>" if each.change else "")
        + "</li>"
        for each in advice
    )
    return f'<h2>What could be better</h2><ol class="advice">{items}</ol>'


def _groups(facts: ModelFacts, alike: Sequence[SimilarGroups]) -> str:
    if not alike:
        return ""
    return (
        f"<h2>Groups</h2>{_table(group_headers(facts), (row_of(each, facts) for each in alike), GROUP_RIGHT)}"
        f"{_traffic(facts)}<h2>Sizes of the groups</h2><p>Each bar is a group's unsharded parameters; the dark part is "
        f"what one rank keeps at rest.</p>{_sizes(alike)}"
        f"<h2>Memory, to scale</h2>{''.join(_group(facts, each, number == 0) for number, each in enumerate(alike))}"
    )


def _traffic(facts: ModelFacts) -> str:
    if not facts.exchanges:
        return ""
    return f"<h2>What one rank sends in a step</h2>{_table(TRAFFIC_HEADERS, traffic_rows(facts), TRAFFIC_RIGHT)}"


def _sizes(alike: Sequence[SimilarGroups]) -> str:
    scale = max(max(each.first.unsharded_bytes, each.first.shard_bytes) for each in alike) or 1
    bars = []
    for each in alike:
        group = each.first
        whole, own = group.unsharded_bytes, group.shard_bytes
        pieces = [
            Piece(0, whole, "unsharded", f"unsharded: {shown_bytes(whole)}"),
            Piece(0, own, "atrest", f"at rest: {shown_bytes(own)}"),
        ]
        count = f"{len(each.groups)} groups, each " if len(each.groups) > 1 else ""
        bars.append(bar_of(each.name, f"{count}{shown_bytes(whole)}, at rest {shown_bytes(own)}", pieces, scale))
    return f'<div class="bars">{"".join(bars)}</div>'


def _group(facts: ModelFacts, alike: SimilarGroups, is_open: bool) -> str:
    group = alike.first
    count = f", {len(alike.groups)} alike; this is the first" if len(alike.groups) > 1 else ""
    facts_list = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in properties_of(facts, group)
    )
    rows = [param_row(param) for param in group.params]
    more = f"<p>and {len(rows) - MOST_PARAMS} more parameters</p>" if len(rows) > MOST_PARAMS else ""
    why = "".join(f"<p>{escape(line)}</p>" for line in reasons(group.params))
    exchanges = facts.exchanges_of(group.index)
    sent = ""
    if exchanges:
        sent = _table(EXCHANGE_HEADERS, map(exchange_row, exchanges), EXCHANGE_RIGHT)
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(alike.name)} <span>{escape(group.class_name)}{count}"
        f"</span></summary>{memory_of(group, facts.rank)}<dl>{facts_list}</dl>"
        f"{_table(PARAM_HEADERS, rows[:MOST_PARAMS], (3,))}{more}{why}{sent}</details>"
    )


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=right' if index in right else ''}>{escape(cell)}</{tag}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", headers)}</tr></thead><tbody>{body}</tbody></table></div>'
