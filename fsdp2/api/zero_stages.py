"""ZeRO stages by name: when each frees the unsharded parameters, and over which ranks it shards them.

A stage is nothing but settings: the mesh says whether parameters are sharded, two flags say when unsharded ones are
freed. The names come from Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2019, arXiv 1910.02054; ``"replicate"`` is distributed data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp2.core.mesh import DataParallelMesh, DataParallelMeshInfo, replicating_info
from fsdp2.core.state import FSDPState, Strategy
from fsdp2.errors import FSDPValueError


class ReshardPolicy(NamedTuple):
    """How long parameters stay unsharded.

    Attributes:
        reshard_after_forward: whether the end of forward frees them.
        reshard_after_backward: whether the end of backward frees them; None: if it reduces gradients.
    """

    reshard_after_forward: bool
    reshard_after_backward: bool | None


_RESIDENCES = {
    "replicate": ReshardPolicy(False, None),
    "zero1": ReshardPolicy(False, None),
    "zero2": ReshardPolicy(False, True),
    "zero3": ReshardPolicy(True, True),
}


def reshard_policy_of(strategy: Any) -> ReshardPolicy:
    """How long parameters stay unsharded under ``strategy``.

    Raises:
        FSDPValueError: it is not one of the four.
    """
    if not isinstance(strategy, str) or strategy not in _RESIDENCES:
        raise FSDPValueError(f"strategy must be one of {', '.join(map(repr, _RESIDENCES))}, got {strategy!r}.")
    return _RESIDENCES[strategy]


def _info_for(strategy: Strategy, info: DataParallelMeshInfo) -> DataParallelMeshInfo:
    """``info``; for ``"replicate"`` an info that replicates over all its ranks, for which process groups may be made.

    Raises:
        FSDPValueError: the strategy shards over a mesh that only replicates, or the other way around.
    """
    dims = info.dp_mesh_dims
    if strategy != "replicate":
        if info.shard_mesh_dim is None:
            raise FSDPValueError(
                f"strategy={strategy!r} shards, and dp_mesh_dims={dims} names no dim to shard over; name one in "
                "dp_mesh_dims.shard, or pass strategy='replicate'."
            )
        return info
    if dims is not None and dims.shard_names:
        raise FSDPValueError(
            f"strategy='replicate' shards nothing, and dp_mesh_dims={dims} names dims to shard over; name them in "
            "dp_mesh_dims.replicate, or pass another strategy."
        )
    return replicating_info(info)


def _refuse_contradictions(strategy: Strategy, reshard_after_forward: Any, shard_placement_fn: Any) -> None:
    """Refuse arguments that contradict ``strategy``.

    An int for ``reshard_after_forward`` says to how many ranks ``"zero3"`` reshards after forward.

    Raises:
        FSDPValueError: one does; the message names both.
    """
    reshards = reshard_policy_of(strategy).reshard_after_forward
    is_int = isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
    asked = reshard_after_forward != 1 if is_int else reshard_after_forward
    if asked is not None and asked is not reshards:
        raise FSDPValueError(
            f"strategy={strategy!r} and reshard_after_forward={reshard_after_forward!r} contradict each other: under "
            f"{strategy!r} parameters are {'' if reshards else 'not '}resharded after forward. Pass only one of them."
        )
    if strategy == "replicate" and shard_placement_fn is not None:
        raise FSDPValueError(
            "strategy='replicate' and shard_placement_fn contradict each other: nothing is sharded. Pass only one of "
            "them."
        )


def _refuse_switch(strategy: Strategy, mesh: DataParallelMesh, name: str) -> None:
    """Refuse to change at run time between replicated and sharded parameters, which are laid out on different meshes.

    Raises:
        FSDPValueError: ``strategy`` would; the message names the module and the remedy.
    """
    replicates = mesh.shard_group is None
    if (strategy == "replicate") is not replicates:
        now = "replicated" if replicates else "sharded"
        raise FSDPValueError(
            f"the parameters of '{name}' are {now}, so set_strategy({strategy!r}) would lay them out anew. Undo it by "
            f"fsdp2.unwrap(model), which its optimizers outlive, and fully_shard(..., strategy={strategy!r}) again; "
            "or leave this module out, with recurse=False."
        )


def info_for(
    strategy: Strategy, reshard_after_forward: Any, shard_placement_fn: Any, info: Callable[[], DataParallelMeshInfo]
) -> DataParallelMeshInfo:
    """The mesh info for ``strategy``, which the other arguments must not contradict. ``info`` makes the default one."""
    _refuse_contradictions(strategy, reshard_after_forward, shard_placement_fn)
    return _info_for(strategy, info())


def set_strategy(strategy: Strategy, states: Sequence[FSDPState]) -> None:
    """Let ``states`` reshard as ``strategy`` says.

    Raises:
        FSDPValueError: it is not one of the four, or would lay parameters out anew.
    """
    reshard_policy = reshard_policy_of(strategy)
    for state in states:
        _refuse_switch(strategy, state.mesh, state.name)
    for state in states:
        state.reshard_after_forward, state.reshard_after_backward = reshard_policy
