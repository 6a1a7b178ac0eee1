"""``python docs/drawings/draw.py``: the pictures of README.md and docs/, as SVG files beside this one.

What they show is the engine's own: places in buffers are those of its layout, the order of a step and the bytes of each
strategy are recorded on torch's fake process group. A test compares the files with what this would write. Each picture
has a form for light and one for dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp2
from fsdp2.core.layout import BufferLayout
from fsdp2.core.sharding import Partition

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of one form; ``hues`` are fills, on each of which ``on_hue`` can be read."""

    text: str
    faint: str
    line: str
    empty: str
    on_hue: str
    hues: tuple[str, ...]


PALETTES = {
    "light": Palette(
        "#1f2430", "#5b6472", "#aab2bf", "#eef0f4", "#ffffff", ("#3f51b5", "#b4521a", "#24744a", "#8a3a86")
    ),
    "dark": Palette(
        "#e6e9ef", "#a3acba", "#5d6675", "#2c313d", "#11141a", ("#93a1f2", "#f0a273", "#79cf9d", "#dc95d8")
    ),
}


class Svg:
    """A picture that grows by shapes; ``text`` may stand on a hue."""

    def __init__(self, width: int, height: int, title: str, palette: Palette) -> None:
        self.size, self.title, self.palette = (width, height), title, palette
        self._body: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none", dashed: bool = False
    ) -> None:
        """A rectangle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._body.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="2" fill="{fill}" '
            f'stroke="{stroke}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        fill: str = "",
        size: int = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """One line of text, its baseline at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        self._body.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{weight} '
            f'fill="{fill or self.palette.text}">{escape(text)}</text>'
        )

    def label(self, x: float, y: float, w: float, h: float, fill: str, text: str, size: int = 12) -> None:
        """A box with text in its middle."""
        self.box(x, y, w, h, fill)
        on = self.palette.text if fill == self.palette.empty else self.palette.on_hue
        self.text(x + w / 2, y + h / 2 + size * 0.36, text, fill=on, size=size, anchor="middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False) -> None:
        """A line, or an arrow to its second end."""
        head = ' marker-end="url(#arrow)"' if arrow else ""
        self._body.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{self.palette.faint}"{head}/>'
        )

    def __str__(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
            f"<title>{escape(self.title)}</title>"
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{self.palette.faint}"/></marker></defs>'
        )
        return "\n".join([head, *self._body, "</svg>", ""])


def overview(palette: Palette) -> Svg:
    """Four ranks while block 1 of four computes in forward."""
    svg = Svg(860, 318, "Four ranks in the middle of a forward", palette)
    blocks, ranks = 4, 4
    states = ("resharded", "computes", "arrives", "sharded")
    left, top, width, gap, height = 86, 62, 178, 12, 46
    for block in range(blocks):
        x = left + block * (width + gap)
        svg.text(x + width / 2, 24, f"block {block}", anchor="middle", bold=True)
        svg.text(x + width / 2, 44, states[block], anchor="middle", fill=palette.faint)
        for rank in range(ranks):
            y = top + rank * (height + 8)
            part = width / ranks
            whole = states[block] in ("computes", "arrives")
            svg.box(x, y, width, height, palette.empty, stroke=palette.line)
            for other in range(ranks):
                if states[block] == "computes" or other == rank:
                    svg.box(x + other * part + 1, y + 1, part - 2, height - 2, palette.hues[other])
                elif whole:
                    svg.box(
                        x + other * part + 2,
                        y + 2,
                        part - 4,
                        height - 4,
                        "none",
                        stroke=palette.hues[other],
                        dashed=True,
                    )
    for rank in range(ranks):
        svg.text(12, top + rank * (height + 8) + 29, f"rank {rank}", bold=True)
    svg.text(
        12,
        302,
        "Filled: in this rank's memory. Each rank keeps a quarter of every block. Dashed: on its way.",
        fill=palette.faint,
    )
    return svg


def memory(palette: Palette) -> Svg:
    """The buffers of a group of three parameters over four ranks, in fp32, as the engine lays them out."""
    named = {"a": (512, 512), "b": (192, 512), "c": (9, 8192)}
    layout = BufferLayout.build([Partition(shape) for shape in named.values()], world_size=4, itemsize=4)
    svg = Svg(860, 420, "A group of three parameters on four ranks, to scale", palette)
    left, per_element = 168, 670 / layout.unsharded_numel
    hues = dict(zip(named, palette.hues, strict=False))
    slots = dict(zip(named, layout.slots, strict=True))

    def x_of(numel: float) -> float:
        return left + numel * per_element

    svg.text(
        12,
        26,
        "; ".join(f"{name}: {shape}, {'direct' if slots[name].direct else 'packed'}" for name, shape in named.items())
        + "; a 0: the rows of a on rank 0",
        fill=palette.faint,
    )
    for rank in range(4):
        y = 44 + rank * 38
        svg.text(12, y + 20, "shard buffer" if rank == 0 else "", bold=True)
        svg.text(156, y + 20, f"rank {rank}", fill=palette.faint, anchor="end")
        svg.box(x_of(0), y, layout.shard_numel * per_element, 30, palette.empty, stroke=palette.line)
        for name, slot in slots.items():
            rows = slot.local_shape(rank)[0]
            if rows:
                svg.label(
                    x_of(slot.shard_offset),
                    y,
                    rows * slot.partition.row_numel * per_element,
                    30,
                    hues[name],
                    f"{name} {rank}",
                )
    svg.text(
        x_of(layout.shard_numel) + 12, 44 + 3 * 38 + 20, "the last rank has no row of c: padding", fill=palette.faint
    )
    _staging(svg, layout, slots, hues, 222, x_of)
    y = 332
    svg.text(12, y + 20, "unsharded", bold=True)
    svg.text(12, y + 36, "buffer", bold=True)
    for name, slot in slots.items():
        each = slot.shard_numel
        for rank in range(4):
            rows = slot.local_shape(rank)[0]
            if rows:
                svg.label(
                    x_of(slot.unsharded_offset + rank * each) + 0.5,
                    y,
                    rows * slot.partition.row_numel * per_element - 1,
                    44,
                    hues[name],
                    f"{name} {rank}",
                    11,
                )
            else:
                svg.box(
                    x_of(slot.unsharded_offset + rank * each),
                    y,
                    each * per_element,
                    44,
                    palette.empty,
                    stroke=palette.line,
                    dashed=True,
                )
    svg.text(
        left,
        y + 66,
        "each parameter is contiguous, in the order of its rows; it has memory only while the group computes",
        fill=palette.faint,
    )
    return svg


def _staging(
    svg: Svg,
    layout: BufferLayout,
    slots: dict[str, Any],
    hues: dict[str, str],
    y: float,
    x_of: Callable[[float], float],
) -> None:
    """What is packed as it arrives, rank by rank, and the way of what is direct."""
    svg.text(12, y + 20, "staging buffer", bold=True)
    per_element = x_of(1) - x_of(0)
    for rank in range(4):
        start = rank * layout.packed_numel
        svg.box(x_of(start), y, layout.packed_numel * per_element, 30, svg.palette.empty, stroke=svg.palette.line)
        for name, slot in slots.items():
            rows = slot.local_shape(rank)[0]
            if not slot.direct and rows:
                svg.label(
                    x_of(start + slot.shard_offset) + 0.5,
                    y,
                    rows * slot.partition.row_numel * per_element - 1,
                    30,
                    hues[name],
                    f"{name} {rank}",
                    11,
                )
    end = x_of(4 * layout.packed_numel)
    svg.line(x_of(2 * layout.packed_numel), y + 34, x_of(2 * layout.packed_numel), y + 104, arrow=True)
    svg.text(x_of(2 * layout.packed_numel) + 10, y + 66, "one copy out", fill=svg.palette.faint)
    direct = next(slot for slot in slots.values() if slot.direct)
    middle = x_of(direct.unsharded_offset + 2 * direct.shard_numel)
    svg.line(middle, y - 26, middle, y + 104, arrow=True)
    svg.text(max(middle + 10, end + 10), y + 18, "a is direct: straight into place", fill=svg.palette.faint)


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """This process as rank 0 of as many, on torch's fake process group; does nothing where there is a group."""
    if dist.is_initialized():
        yield
        return
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """A small one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An embedding and a head, which are the root's, and blocks between them."""

    def __init__(self, blocks: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, 8)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(4)


def sharded(blocks: int, mesh: Any, width: int = 32, **arguments: Any) -> Model:
    """A model, sharded by its blocks."""
    model = Model(blocks, width)
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module, mesh=mesh, **arguments)
    return model


def recorded_step() -> list[tuple[str, str, bool]]:
    """The second step of a model of three blocks: ``(kind, name, root is unsharded)``, as the host issues them.

    Kinds are the words of the engine's profiler ranges, "all_gather" and "post_backward_reduce", of which the names are
    groups; and "forward", "backward" of modules.
    """
    model = sharded(3, init_device_mesh("cpu", (8,)))
    names = {model.embed: "embed", model.head: "head"} | {
        block: f"block {index}" for index, block in enumerate(model.blocks)
    }

    def mark(kind: str, name: str) -> None:
        whole = not isinstance(model.head.weight, DTensor)
        with torch.profiler.record_function(f"{kind} ({name}{'+' if whole else ''})"):
            pass

    def watch_backward(module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _gradient: mark("backward", names[module]))

    for module, name in names.items():
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: mark("forward", name))
        if module is not model.head:
            module.register_forward_hook(watch_backward)
    # The head's output is the root's, whose own hook is to come first, as those of the blocks do.
    model.register_forward_hook(lambda _module, inputs, output: watch_backward(model.head, inputs, output))
    model(TOKENS).sum().backward()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:  # 2.11 warns without
        model(TOKENS).sum().backward()
    found = []
    for event in sorted(profile.events(), key=lambda each: each.time_range.start):
        kind, _, name = event.name.removeprefix("FSDP::").rstrip(")").partition(" (")
        if kind in ("forward", "backward"):
            found.append((kind, name.rstrip("+"), name.endswith("+")))
        elif kind in ("all_gather", "post_backward_reduce"):
            found.append((kind, name.replace("blocks.", "block ") if "blocks" in name else "root", True))
    return found


DURATIONS = {"all_gather": 1.0, "forward": 1.0, "backward": 2.0, "post_backward_reduce": 1.0}
LANES = {"all_gather": "gather", "forward": "compute", "backward": "compute", "post_backward_reduce": "reduce"}


@dataclass(frozen=True, slots=True)
class Bar:
    """What occupies a lane from ``start`` to ``end``, in units of a block's forward."""

    lane: str
    kind: str
    name: str
    start: float
    end: float
    root_is_whole: bool

    @property
    def group(self) -> str:
        """The `fully_shard` call that it belongs to."""
        return self.name if self.name.startswith("block") else "root"


def timed(events: Sequence[tuple[str, str, bool]]) -> list[Bar]:
    """Lay recorded events on lanes: each lane does one at a time, and a module computes when its gather has arrived."""
    free = dict.fromkeys(LANES.values(), 0.0)
    arrived: dict[str, float] = {}
    bars: list[Bar] = []
    now = 0.0  # when the host comes to an event, as on a CPU: after what computes, beside what communicates
    for kind, name, root_is_whole in events:
        lane, ready = LANES[kind], now
        group = name if name.startswith("block") else "root"
        if lane == "compute":
            ready = max(ready, arrived.get(group, 0.0))
        if lane == "reduce":
            ready = max(bar.end for bar in bars if bar.kind == "backward" and bar.group == group)
        start = max(ready, free[lane])
        free[lane] = start + DURATIONS[kind] * (0.5 if name in ("embed", "head") else 1.0)
        bars.append(Bar(lane, kind, name, start, free[lane], root_is_whole))
        if lane == "gather":
            arrived[group] = free[lane]
        elif lane == "compute":
            now = free[lane]
    return bars


def step(palette: Palette) -> Svg:
    """The lanes of a step, and below which groups are unsharded when."""
    with fake_ranks(8):
        bars = timed(recorded_step())
    end = max(bar.end for bar in bars)
    groups = ["root", "block 0", "block 1", "block 2"]
    hues = dict(zip(groups, (palette.hues[3], *palette.hues[:3]), strict=True))
    svg = Svg(860, 366, "One training step of a model of three blocks", palette)
    left, unit = 120, 726 / end
    for index, lane in enumerate(("compute", "gather", "reduce")):
        y = 34 + index * 48
        svg.text(12, y + 22, lane, bold=True)
        svg.box(left, y, 726, 36, palette.empty)
        for bar in (each for each in bars if each.lane == lane):
            word = bar.name if bar.end - bar.start >= 0.9 else ""
            svg.label(left + bar.start * unit + 1, y, (bar.end - bar.start) * unit - 2, 36, hues[bar.group], word, 11)
    turn = next(bar.start for bar in bars if bar.kind == "backward")
    svg.text(left, 22, "forward", fill=palette.faint)
    svg.text(left + turn * unit + 5, 22, "backward", fill=palette.faint)
    svg.line(left + turn * unit, 12, left + turn * unit, 340)
    svg.text(12, 205, "whole", bold=True)
    for index, group in enumerate(groups):
        y = 188 + index * 38
        svg.text(108, y + 17, group, fill=palette.faint, anchor="end")
        svg.box(left, y, 726, 26, palette.empty)
        for start, stop in unsharded(bars, group):
            svg.label(left + start * unit + 1, y, (stop - start) * unit - 2, 26, hues[group], group, 11)
    svg.text(
        left,
        356,
        "time; the embedding (first and last) and the head (between forward and backward) are the root's",
        fill=palette.faint,
    )
    return svg


def unsharded(bars: Sequence[Bar], group: str) -> list[tuple[float, float]]:
    """From when until when ``group`` has memory for its whole parameters."""
    gathers = [bar.start for bar in bars if bar.lane == "gather" and bar.group == group]
    uses = [bar for bar in bars if bar.lane == "compute"]
    if group == "root":
        seen = [bar.end for bar in uses if bar.root_is_whole]
        return [(gathers[0], seen[-1])]
    return list(zip(gathers, [bar.end for bar in uses if bar.group == group], strict=True))


@dataclass(slots=True)
class Sent:
    """Bytes that one rank sends in a step."""

    parameters: float = 0.0
    gradients: float = 0.0


@contextmanager
def counted() -> Iterator[Sent]:
    """Counts the collectives of `torch.distributed` inside, by what a rank sends in a ring."""
    sent = Sent()
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    originals = {name: getattr(dist, name) for name in (gather, scatter, "all_reduce")}

    def counting(name: str) -> Callable[..., Any]:
        def call(first: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            group = options.get("group") or next(each for each in arguments if isinstance(each, dist.ProcessGroup))
            whole = arguments[0] if name == scatter else first
            share = whole.numel() * whole.element_size() * (group.size() - 1) / group.size()
            if name == gather:
                sent.parameters += share
            else:
                sent.gradients += share * (2 if name == "all_reduce" else 1)
            return originals[name](first, *arguments, **options)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def recorded_bytes() -> dict[str, dict[int, Sent]]:
    """For each strategy and number of microbatches what a rank of 8 sends in a step, in units of the parameters."""
    plain = init_device_mesh("cpu", (8,))
    hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "zero3": (plain, {"strategy": "zero3"}),
        "zero2": (plain, {"strategy": "zero2"}),
        "zero1": (plain, {"strategy": "zero1"}),
        "replicate": (plain, {"strategy": "replicate"}),
        "HSDP 2 x 4": (hybrid, {}),
    }
    return {
        name: {count: _bytes_of(mesh, arguments, count) for count in (1, 4)}
        for name, (mesh, arguments) in settings.items()
    }


def _bytes_of(mesh: Any, arguments: dict[str, Any], microbatches: int) -> Sent:
    model = sharded(4, mesh, 256, reshard_after_forward=None, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for _ in range(2):  # the second step is counted
        with counted() as sent:
            for index in range(microbatches):
                with fsdp2.accumulate(model, last=index == microbatches - 1):
                    model(TOKENS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Sent(sent.parameters / size, sent.gradients / size)


def strategies(palette: Palette) -> Svg:
    """Two bars for each strategy."""
    with fake_ranks(8):
        found = recorded_bytes()
    svg = Svg(860, 402, "What one rank sends in a step, by strategy", palette)
    left, unit = 190, 70.0
    svg.box(left, 14, 14, 14, palette.hues[0])
    svg.text(left + 20, 26, "parameters (all-gathers)")
    svg.box(left + 200, 14, 14, 14, palette.hues[1])
    svg.text(left + 220, 26, "gradients (reduce-scatters, all-reduces)")
    for index, (name, by_count) in enumerate(found.items()):
        y = 48 + index * 66
        svg.text(12, y + 22, name, bold=True)
        for row, (count, sent) in enumerate(by_count.items()):
            top = y + row * 27
            svg.text(
                left - 10,
                top + 16,
                f"{count} microbatch{'es' if count > 1 else ''}",
                fill=palette.faint,
                size=12,
                anchor="end",
            )
            svg.box(left, top, sent.parameters * unit, 22, palette.hues[0])
            svg.box(left + sent.parameters * unit, top, sent.gradients * unit, 22, palette.hues[1])
            end = left + (sent.parameters + sent.gradients) * unit
            svg.text(end + 8, top + 16, f"{sent.parameters + sent.gradients:.2f} P", size=12)
    svg.text(
        12,
        394,
        "8 ranks; P: the bytes of all parameters. Bytes that one rank sends in a step, recorded.",
        fill=palette.faint,
    )
    return svg


PICTURES: dict[str, Callable[[Palette], Svg]] = {
    "overview": overview,
    "memory": memory,
    "step": step,
    "strategies": strategies,
}


def pictures() -> dict[str, str]:
    """All files, by name."""
    return {
        f"{name}-{form}.svg": str(draw(palette))
        for name, draw in PICTURES.items()
        for form, palette in PALETTES.items()
    }


if __name__ == "__main__":
    for file, text in pictures().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
        print(f"{file}: {len(text)} bytes")
