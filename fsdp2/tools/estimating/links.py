"""What a collective costs: bytes over links inside and between nodes, and seconds. A written model, in this file.

Every collective is a ring over its ranks, in the order of their numbers, as NCCL makes them: of ``n`` ranks and ``B``
bytes of the whole tensor, each rank sends ``(n - 1) / n * B`` for an all-gather or a reduce-scatter, and twice that for
an all-reduce. Of a node's ``g`` ranks in the ring one sends to the next node, the others to a rank of the same node;
NCCL turns the ring so that every network card gets its turn, so that the bytes between nodes are those of one rank
divided by ``g``, and their bandwidth is that of ``g`` cards.

    seconds = launch + hops inside * latency inside + hops between * latency between
              + bytes sent / min(bandwidth inside, g * bandwidth between)

The number of hops is that of NCCL's own model (``tuning.cc``): of the ``n - 1`` steps, one between nodes for each other
node. (Its trees, NVLS and PAT are faster in small messages, which the model does not know.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fsdp2.tools.estimating.hardware import Hardware


class Kind(str, Enum):
    """Collectives of the engine, and of tensor parallelism."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective as one rank sees it.

    Attributes:
        sent_inside: bytes that a rank sends to ranks of its node, the mean over the group.
        sent_between: the same, to other nodes.
        seconds: how long it runs, alone.
    """

    sent_inside: float
    sent_between: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    """How the ranks of a process group lie on nodes: ``ranks`` of them on ``nodes``."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> float:
        """Ranks of the group on a node, the mean."""
        return self.ranks / self.nodes


def shape_of(ranks: Sequence[int], hardware: Hardware) -> Shape:
    """How ``ranks`` (global numbers) lie on the nodes of ``hardware``."""
    return Shape(len(ranks), len(Counter(rank // hardware.ranks_per_node for rank in ranks)))


def exchange(kind: Kind, nbytes: int, shape: Shape, hardware: Hardware) -> Exchange:
    """What one collective costs.

    Args:
        kind: which.
        nbytes: of the whole tensor: what an all-gather fills, a reduce-scatter reads, an all-reduce reduces.
        shape: of its process group.
        hardware: whose links.
    """
    if shape.ranks == 1:
        return Exchange(0.0, 0.0, 0.0)
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    sent = rounds * nbytes * (shape.ranks - 1) / shape.ranks
    between = sent / shape.per_node if shape.nodes > 1 else 0.0
    bandwidth = hardware.bandwidth_inside
    if shape.nodes > 1:
        across = shape.per_node * hardware.bandwidth_between
        bandwidth = across if shape.per_node == 1 else min(bandwidth, across)
    hops_between = shape.nodes - 1
    hops = hops_between * hardware.latency_between + (shape.ranks - 1 - hops_between) * hardware.latency_inside
    seconds = hardware.launch_seconds + rounds * hops + sent / (bandwidth * hardware.achieved_links)
    return Exchange(sent - between, between, seconds)
