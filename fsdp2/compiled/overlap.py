"""Orders the communication in a graph so that it overlaps with compute.

In the trace a group's all-gather stands right before the use of its parameters, and is waited for at once. This pass
moves the next group's all-gather up, before the wait for the present one, so that it runs beside the present group's
compute; and it moves the wait for a reduce-scatter down, to where the next one is issued. Nothing else moves, and the
results are the same. inductor orders nodes again, for memory, and would undo this: dependencies between the nodes
prevent that.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fsdp2 import _torch_compiler
from fsdp2.compiled.exchanges import BEGIN_GATHER, BEGIN_REDUCE, END_GATHER, END_REDUCE

Unit = list[fx.Node]

GATHERS = _torch_compiler.ALL_GATHERS | {BEGIN_GATHER}
REDUCTIONS = _torch_compiler.REDUCE_SCATTERS | {BEGIN_REDUCE}
BEGINS = frozenset({BEGIN_GATHER, BEGIN_REDUCE})
COLLECTIVES = _torch_compiler.COLLECTIVES | GATHERS | REDUCTIONS
WAITS = frozenset({_torch_compiler.WAIT, END_GATHER, END_REDUCE})


def overlap(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Reorder ``graph``, of a forward, of a backward or of inference, in place.

    Returns:
        The dependencies that a compiler with an order of its own must respect: each node comes after its list of nodes.
    """
    gathers, scatters = _units(graph, GATHERS), _units(graph, REDUCTIONS)
    order = _positions(graph)
    arrivals = [min(_waits(unit), key=order.__getitem__) for unit in gathers]
    after: dict[fx.Node, list[fx.Node]] = {}
    for index in range(1, len(gathers)):
        first = _first_beside(gathers, index)
        if first < index and _issue_before(gathers[index], arrivals[first], graph):
            after.setdefault(arrivals[first], []).extend(gathers[index])
        else:
            first = index
        for node in gathers[index]:
            if node.target is BEGIN_GATHER:
                after[node] = _not_before(node, arrivals[:first])
    for unit in scatters:
        arrival = _next_arrival(unit, arrivals, graph)
        if arrival is not None:
            after.setdefault(arrival, []).extend(unit)
    for unit, following in itertools.pairwise(scatters):
        if _end_before(unit, following[0], graph):
            for wait in _waits(unit):
                after[wait] = following[0].all_input_nodes
    if scatters:
        _end_before(scatters[-1], graph.output_node(), graph)
    # Ranks whose batches differ have graphs of different sizes, which a compiler would order differently, by memory.
    # But all ranks must issue their collectives in the same order.
    for before, node in itertools.pairwise([node for node in graph.nodes if node.target in BEGINS]):
        after.setdefault(node, []).append(before)
    return {node: others for node, others in after.items() if others}


def _not_before(begin: fx.Node, arrivals: list[fx.Node]) -> list[fx.Node]:
    """The nodes that must come before ``begin``. A compiler counts no memory for its token, and might move it far up.

    They are the last of ``arrivals``, the waits for earlier gathers; with a prefetch budget, the last node before it.
    """
    note = _torch_compiler.note_of(begin)
    if note is None or note[1] is None:
        return arrivals[-1:]
    node = begin.prev
    while node.op == "call_function" and not isinstance(node.meta.get("val"), torch.Tensor):
        node = node.prev
    return [node] if node.op == "call_function" else arrivals[-1:]


def _next_arrival(unit: Unit, arrivals: list[fx.Node], graph: fx.Graph) -> fx.Node | None:
    """The first wait for an all-gather that comes after all of ``unit``."""
    positions = _positions(graph)
    end = max(positions[node] for node in unit)
    return min((each for each in arrivals if positions[each] > end), key=positions.__getitem__, default=None)


def _units(graph: fx.Graph, targets: frozenset[Any]) -> list[Unit]:
    """The collectives of each gather or reduction of a group, in their order."""
    units: dict[Any, Unit] = {}
    for node in graph.nodes:
        key = _torch_compiler.note_of(node)
        if key is not None and node.op == "call_function" and node.target in targets:
            units.setdefault(key[0], []).append(node)
    return list(units.values())


def _waits(unit: Unit) -> list[fx.Node]:
    return [user for node in unit for user in node.users if user.target in WAITS]


def _nbytes(unit: Unit) -> int:
    """How many bytes the waits for ``unit`` return."""
    values = [node.meta["val"] for node in _waits(unit)]
    flats = [flat for value in values for flat in (value if isinstance(value, (list, tuple)) else [value])]
    return sum(flat.numel() * flat.element_size() for flat in flats)


def _first_beside(units: list[Unit], index: int) -> int:
    """The index of the unit before whose arrival ``units[index]`` is issued.

    Without a budget it is the unit before this one; with a budget, the earliest one that it allows. If this unit alone
    exceeds the budget, it is ``index`` itself: the unit stays where it is.
    """
    note = _torch_compiler.note_of(units[index][0])
    room = None if note is None else note[1]
    if room is None:
        return index - 1
    first = index
    while first > 0 and _nbytes(units[first]) <= room:
        room -= _nbytes(units[first])
        first -= 1
    return first


def _issue_before(unit: Unit, arrival: fx.Node, graph: fx.Graph) -> bool:
    """Move ``unit``, and the nodes that it depends on, right before ``arrival``.

    Returns:
        False, and nothing is moved, if it depends on other collectives.
    """
    chain, positions = _sources(unit), _positions(graph)
    if any(node.target in COLLECTIVES and node not in unit for node in chain):
        return False
    for node in sorted(chain, key=positions.__getitem__):
        if positions[node] > positions[arrival]:
            arrival.prepend(node)
    return True


def _sources(unit: Unit) -> set[fx.Node]:
    """``unit`` and all nodes that it depends on, without inputs of the graph."""
    found: set[fx.Node] = set()
    todo = list(unit)
    while todo:
        node = todo.pop()
        if node not in found and node.op not in ("placeholder", "get_attr"):
            found.add(node)
            todo += node.all_input_nodes
    return found


def _end_before(unit: Unit, place: fx.Node, graph: fx.Graph) -> bool:
    """Move the waits for ``unit``, and all nodes that depend on them, right before ``place``.

    Returns:
        False, and nothing is moved, if ``place`` depends on them or comes before one of them.
    """
    tail = set()
    todo: list[fx.Node] = list(_waits(unit))
    while todo:
        node = todo.pop()
        if node not in tail and node.op != "output":
            tail.add(node)
            todo += node.users
    positions = _positions(graph)
    if place in tail or any(positions[node] > positions[place] for node in tail):
        return False
    for node in sorted(tail, key=positions.__getitem__):
        place.prepend(node)
    return True


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def source_hash() -> str:
    """A hash of this file: a graph in a compiler's cache that an older version of this pass has ordered is not used."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
