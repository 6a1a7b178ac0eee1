"""Gradients that backwards have left, and that no reduction has brought to ``.grad`` yet: to look at, and to reduce.

They wait in three places, each for a setting that the user has chosen: on unsharded parameters (no reductions), after
the reduce-scatter (no all-reduce over replicas), and in host memory (`CPUOffloadPolicy(gradients=True)`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.arguments import checked
from fsdp2.core.buffers import storage_alias
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.gradients import GradientBucket
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.places import PLACE
from fsdp2.core.root import FSDPRoot
from fsdp2.core.state import states_below
from fsdp2.errors import FSDPRuntimeError


@dataclass(frozen=True, slots=True)
class PendingGradient:
    """What waits for one parameter on this rank. Read it only: it is the engine's own memory, and valid until the next
    backward, reduction or ``zero_grad``.

    Attributes:
        unreduced: the sum of this rank's microbatches for the full parameter, in the dtype that it adds up in; neither
            divided nor averaged. A DTensor on the tensor-parallel mesh, if the parameter is on one.
        over_shards: this rank's rows of what was reduced over the ranks that it is sharded over, in the reduce dtype:
            the mean, where fp32 and bf16 are averaged; zeros where nobody had a gradient. Replicas are still to come.
        on_host: this rank's rows of the mean over all ranks, of the microbatches so far, in host memory; zeros too.
    """

    unreduced: torch.Tensor | None
    over_shards: torch.Tensor | None
    on_host: torch.Tensor | None


@checked()
def pending_gradients(module: nn.Module) -> dict[nn.Parameter, PendingGradient]:
    """What backwards have left for the sharded parameters at and below ``module``, and no ``.grad`` shows yet.

        >>> for parameter, pending in fsdp2.pending_gradients(model).items():
        ...     print(parameter.shape, pending.unreduced.norm())

    Parameters for which nothing waits are left out. The call waits for reductions in flight, but communicates nothing,
    so ranks may differ in whether they make it. `synchronize_gradients` reduces what waits; ``zero_grad`` drops it.

    Returns:
        A dict by sharded parameter, in the order of the modules.

    Raises:
        FSDPTypeError: ``module`` is not a module.
        FSDPRuntimeError: a forward or backward is running.
    """
    found: dict[nn.Parameter, PendingGradient] = {}
    for group in _groups_between_steps(module, "pending_gradients"):
        assert group.comm is not None, "it has run"
        group.reducer.wait_for_host_sums(group.comm.device)
        for bucket in group.reducer.buckets:
            for index, param in enumerate(bucket.params):
                unreduced = None if param.unsharded is None else param.unsharded.grad
                parts = [_part(bucket, flat, index) for flat in (bucket.reduce_scattered, bucket.sum.waiting)]
                if unreduced is not None or any(part is not None for part in parts):
                    found[param.sharded] = PendingGradient(unreduced, *parts)
    return found


@checked()
def synchronize_gradients(module: nn.Module) -> None:
    """Reduce what backwards have left for the sharded parameters at and below ``module``, outside of any backward.

        >>> model.set_requires_gradient_sync(False)
        >>> for batch in batches:  # as many as there are
        ...     loss_of(model, batch).backward()
        >>> fsdp2.synchronize_gradients(model)
        >>> optimizer.step()

    It is for a loop that does not know which microbatch is the last. The result is added to ``.grad`` as by a backward
    that reduces, over shards and replicas; settings stay as they are. A second call changes nothing. A module that no
    rank has used takes part too, for ranks do not know that: its gradients stay as they are, or become zeros after
    ``set_reduce_scatter_unused_params(True)``.

    Collective: all ranks of the meshes must call it, after backwards with the same settings. Do not call it while a
    forward or backward runs.

    Raises:
        FSDPTypeError: ``module`` is not a module.
        FSDPRuntimeError: nothing at or below ``module`` is sharded, or a forward or backward is running.
    """
    groups = _groups_between_steps(module, "synchronize_gradients")
    PLACE.phase = "in synchronize_gradients()"
    # Not whether this rank has gradients, but whether some rank may have: all ranks must reduce the same groups.
    due = [group for group in groups if group.reducer.may_owe_gradients]
    for group in due:
        assert group.comm is not None, "what has a gradient has run"
        with _reducing_all(group):
            group.reducer.reduce(group.comm)
    for comm in dict.fromkeys(group.comm for group in due):
        comm.finish_reduces()  # type: ignore[union-attr]


@contextmanager
def _reducing_all(group: FSDPParamGroup) -> Iterator[None]:
    """Inside, reductions of ``group`` run to the end: over replicas too, and with what waits on the host."""
    before, reducer = group.settings, group.reducer
    was_last = reducer.is_last
    group.configure(dataclasses.replace(before, requires_gradient_sync=True, requires_all_reduce=True))
    reducer.is_last = True
    try:
        yield
    finally:
        group.configure(before)
        reducer.is_last = was_last


def _part(bucket: GradientBucket, flat: torch.Tensor | None, index: int) -> torch.Tensor | None:
    """A view of the local part of one parameter in the buffer ``flat``; None without a buffer."""
    if flat is None:
        return None
    slot, shape = bucket.layout.slots[index], bucket.local_shapes[index]
    return storage_alias(flat, slot.offset, shape, slot.partition.stride(shape))


def _groups_between_steps(module: nn.Module, function: str) -> list[FSDPParamGroup]:
    states = states_below(module)
    if not states:
        raise FSDPRuntimeError(
            f"{function}() was given a {type(module).__name__} that contains no sharded module: call it on what "
            "fully_shard was called on, or on a module that contains it."
        )
    roots: list[FSDPRoot] = list(dict.fromkeys(state.root for state in states if state.root is not None))
    for root in roots:
        recover_if_failed(root)
        if root.is_running():
            raise FSDPRuntimeError(
                f"{function}() was called while a forward or backward of {root.name} is running, or waits for "
                "finalize_backward(): call it after backward."
            )
        root.comm.finish_reduces()
    groups = dict.fromkeys(group for state in states for group in state.unit)
    return [group for group in groups if group.comm is not None]
