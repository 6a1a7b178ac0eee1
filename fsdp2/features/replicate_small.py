"""`replicate_below`: small parameters of many calls in one group, which is replicated and reduced once per backward.

Each call keeps its small parameters whole, in a group of their own: the *bucket*. A call on a module above takes the
buckets below it into its own. Its group is shared, like one of tied weights: gathered for whichever module needs it
first, reduced when the backward is over.

What is set on a module below is not set on the bucket, which is the module's above. What would then be other gradients
than were asked for is refused when the next iteration begins: see `FSDPParamGroup.ask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import DataParallelMesh, DataParallelMeshInfo, replicating_info
from fsdp2.core.offload_choice import offloading_of
from fsdp2.core.options import DEFAULT, GroupSettings, OffloadPolicy
from fsdp2.core.param import FSDPParam, WriteCounter, is_subclass, local_data
from fsdp2.core.root import Unit
from fsdp2.core.shard import SMALL, SmallParameters
from fsdp2.core.state import FSDPState, ShardArguments, states_below_all
from fsdp2.errors import FSDPNotImplementedError, FSDPRuntimeError, FSDPTypeError, FSDPValueError


class Absorbed(NamedTuple):
    """Buckets of calls below, and the larger one that they have become part of."""

    taken: list[FSDPParamGroup]
    bucket: FSDPParamGroup


def _bucket(state: FSDPState) -> FSDPParamGroup | None:
    """That of the call itself; others that its modules use are those of calls above it, or beside it."""
    if state.arguments.replicate_below:
        for group in state.unit:
            if group.mesh.shard_group is None and group.sharers[0] is state:
                return group
    return None


def _release(group: FSDPParamGroup, prefix: str) -> None:
    """End what runs on ``group``, whose parameters get names below the module above."""
    for state in group.sharers:
        for root in list(state.roots):
            root.finish()
            root.dissolve()
    group.quiesce()
    for param in group.params:
        param.fqn = f"{prefix}.{param.fqn}" if prefix else param.fqn


def _merged(params: Sequence[FSDPParam], like: FSDPParamGroup, name: str, settings: GroupSettings) -> FSDPParamGroup:
    write_counter = WriteCounter()
    for param in params:
        param.write_counter = write_counter
    FSDPParam.identity_changes += 1  # so that optimizers look for it
    merged = FSDPParamGroup(params, like.mesh, like.storage.offloading, write_counter=write_counter, name=name)
    merged.configure(settings)
    return merged


def _refuse_gradients(group: FSDPParamGroup) -> None:
    if group.reducer.owes_gradients():
        raise FSDPRuntimeError(
            f"gradients of '{group.name}' wait for their reduction, and would be lost as fully_shard is called on a "
            "module above: call it before the first backward, or drop them with reset_iter_state()."
        )


def _refuse_settings_that_differ(groups: Sequence[FSDPParamGroup], first: GroupSettings, name: str) -> None:
    for group in groups:
        if not group.settings.says_like(first):
            raise FSDPValueError(
                f"small parameters of '{group.name}' and of others in '{name}' are to be one group, and their settings "
                "differ (scales of gradients, hooks, synchronization): call setters after the outermost fully_shard, "
                "on its module as well, which owns that group."
            )


class SmallInBuckets(SmallParameters):
    """Those of many calls in one group."""

    def mesh_of(self, replicate_below: Any, info: DataParallelMeshInfo) -> DataParallelMesh | None:
        """Where small parameters are replicated: all ranks of ``info``; None if there are to be none. Collective.

        Raises:
            FSDPTypeError: ``replicate_below`` is no int.
            FSDPValueError: it is negative, or nothing is sharded anyway.
            FSDPNotImplementedError: the mesh is a part of a larger one.
        """
        if isinstance(replicate_below, bool) or not isinstance(replicate_below, int):
            raise FSDPTypeError(f"replicate_below must be a number of bytes, an int, got {replicate_below!r}.")
        if replicate_below < 0:
            raise FSDPValueError(f"replicate_below must be a number of bytes, 0 for none, got {replicate_below}.")
        if not replicate_below:
            return None
        if info.dp_mesh_dims is not None:
            raise FSDPNotImplementedError(
                "replicate_below does not work together with dp_mesh_dims; pass strategy='replicate' with dp_mesh_dims "
                "in the calls on small modules."
            )
        if info.shard_mesh_dim is None:
            raise FSDPValueError("replicate_below replicates small parameters, and all others are replicated, too.")
        return DataParallelMesh.from_info(replicating_info(info))

    def is_small(self, parameter: nn.Parameter, replicate_below: int) -> bool:
        """Whether the whole of it takes fewer bytes. (Not those that gather themselves.)"""
        return parameter.numel() * parameter.element_size() < replicate_below and not is_subclass(local_data(parameter))

    def below(
        self, modules: Sequence[nn.Module], arguments: ShardArguments, own: DataParallelMesh | None, name: str
    ) -> list[FSDPParamGroup]:
        """The buckets of calls below ``modules``, on the same ranks and in the same memory, that a call may take.

        ``own``: where it has small parameters itself. Nothing is changed yet.

        Raises:
            FSDPRuntimeError: gradients in one of them wait for their reduction.
            FSDPValueError: their settings differ.
        """
        assert isinstance(arguments.offload_policy, OffloadPolicy), "one for all, as `refuse_choice` sees to"
        place = offloading_of(arguments.offload_policy, arguments.mesh.device)
        ranks = None if own is None else own.key
        taken: list[FSDPParamGroup] = []
        for state in states_below_all(modules):
            group = _bucket(state)
            if group is None or group.storage.offloading != place or group.mesh.device != arguments.mesh.device:
                continue
            ranks = group.mesh.key if ranks is None else ranks
            if group.mesh.key == ranks:
                taken.append(group)
        if taken:
            _refuse_settings_that_differ(taken, taken[0].settings if own is None else DEFAULT, name)
        for group in taken:
            _refuse_gradients(group)
        return taken

    def absorb(
        self, modules: Sequence[nn.Module], unit: Unit, taken: list[FSDPParamGroup], name: str
    ) -> tuple[Unit, Absorbed]:
        """Make one bucket of that in ``unit`` and those ``taken`` below ``modules``.

        Returns:
            The unit with it, and what `share` is to be told.
        """
        names = {each: prefix for module in modules for prefix, each in module.named_modules()}
        for group in taken:
            _release(group, names[group.sharers[0].modules[0]])
        own = [group for group in unit if group.mesh.key == taken[0].mesh.key]
        groups = [*own, *taken]
        bucket = _merged([param for group in groups for param in group.params], groups[0], name, taken[0].settings)
        return (*(group for group in unit if group not in own), bucket), Absorbed(taken, bucket)

    def share(self, absorbed: Absorbed) -> None:
        """Let all modules that used one of the buckets use what it has become part of, after the one that owns it."""
        taken, bucket = absorbed
        for state in dict.fromkeys(sharer for group in taken for sharer in group.sharers):
            state.unit = tuple(dict.fromkeys(bucket if group in taken else group for group in state.unit))
            bucket.sharers.append(state)


SMALL.fill(SmallInBuckets())
