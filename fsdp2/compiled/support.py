"""Which features cannot be part of a graph, and what to use instead."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from fsdp2.arguments import checked
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.plan import Waiting
from fsdp2.core.state import FSDPState, state_of, states_below
from fsdp2.errors import FSDPRuntimeError, FSDPValueError


def reason_against(state: FSDPState, inside: Collection[FSDPState]) -> str | None:
    """Why the hooks of ``state`` cannot be traced, and the eager alternative; None if they can.

    Args:
        state: of a module in the graph.
        inside: those of all modules in the graph.
    """
    what = _feature_of_state(state)
    for group in state.unit:
        what = what or _sharer_outside(group, inside) or _feature_of_group(group)
    if what is None:
        return None
    return (
        f"'{state.name}' cannot be part of a graph of torch.compile: {what}. Or compile the modules inside it, or its "
        "block alone with block.compile(): its communication then stays outside of the graph, as in eager mode."
    )


@checked()
def set_graph_capture(model: nn.Module, enabled: bool, *, recurse: bool = True) -> None:
    """Whether graphs of `torch.compile` hold the gathers and reductions of the sharded modules in ``model``; they do.

    Disabled, hooks stay outside, as torch's do: for blocks that are compiled one by one, whose gathers eager hooks
    issue ahead of the blocks before, where a graph of its own could not. A compiled module around them then raises.
    No communication; all ranks must call it alike.

        >>> fsdp2.set_graph_capture(model, False)
        >>> for block in model.blocks:
        ...     block.compile(fullgraph=True)

    Args:
        model: a module; with ``recurse`` all sharded modules in it are meant, else itself.
        enabled: whether.
        recurse: see there.

    Raises:
        FSDPTypeError: not a module, or not a bool.
        FSDPValueError: nothing in it is sharded.
    """
    state = state_of(model)
    states = states_below(model) if recurse else [] if state is None else [state]
    if not states:
        raise FSDPValueError(f"fully_shard was called on no module of {type(model).__name__}: call it before this.")
    for each in states:
        each.is_captured = enabled


def _feature_of_state(state: FSDPState) -> str | None:
    if not state.is_captured:
        return "set_graph_capture(False) was called on it"
    settings = state.root_settings if state.root is None else state.root.settings
    if settings.divergence == "join":
        return "set_divergence('join'): what a rank skips is known only while it runs"
    if len(state.modules) > 1:
        return "fully_shard was called on a list of modules; call it on each of them"
    if state.forward_prefetch is not None or state.backward_prefetch is not None:
        return (
            "set_modules_to_forward_prefetch() and set_modules_to_backward_prefetch() order eager gathers; leave them "
            "out, for a graph has an order of its own"
        )
    return None


@contextmanager
def explained_conversion(state: FSDPState) -> Iterator[None]:
    """Around ``module.to(...)`` and the like, which compiled steps of optimizers forbid: they refer to parameters.

    Raises:
        FSDPRuntimeError: torch could not convert a parameter of ``state``, to which something refers.
    """
    try:
        yield
    except RuntimeError as error:
        params = [param for group in state.unit for param in group.params]
        held = next((param for param in params if weakref.getweakrefcount(param.sharded)), None)
        if "swap" in str(error) and held is not None:
            raise FSDPRuntimeError(
                f"something holds weak references to parameter '{held.path}', so that torch cannot convert or move "
                "it: most likely the graph of an optimizer's compiled step, or one that a backend of torch.compile "
                "keeps. Do that before the first compiled call, or make the optimizer with fsdp2.optim.local, whose "
                "graphs refer to local tensors only."
            ) from error
        raise


def _sharer_outside(group: FSDPParamGroup, inside: Collection[FSDPState]) -> str | None:
    for sharer in group.sharers:
        if sharer not in inside:
            return f"it shares parameters, or their gather, with '{sharer.name}', which the graph does not hold"
    return None


def _feature_of_group(group: FSDPParamGroup) -> str | None:
    storage, reducer, settings = group.storage, group.reducer, group.settings
    if storage.offloading.is_host or storage.offloading.sums_on_host:
        return "its parameters or gradients are offloaded; leave out offload_policy"
    if settings.custom_all_gather is not None or settings.custom_reduce_scatter is not None:
        return "it has a custom all-gather or reduce-scatter, which graphs do not call"
    if group.mesh.spmd_mesh is not None:
        return "dp_mesh_dims: whether a gradient is summed over data-parallel dims is known only when it arrives"
    if storage.extended:
        return "its tensors gather themselves (fsdp_pre_all_gather)"
    if storage.post_forward is not None:
        return "reshard_after_forward is an int; use True or False"
    # Where nothing is gathered a rank may have left the module out: asked is what all ranks know.
    accumulated = (
        reducer.waiting & Waiting.UNREDUCED if group.mesh.shard_group is not None else reducer.may_owe_gradients
    )
    if accumulated or reducer.waiting & ~Waiting.UNREDUCED:
        return (
            "gradients of earlier backwards wait for their reduction, which a graph would leave out; run all "
            "microbatches of a step eagerly, or call fsdp2.synchronize_gradients() before"
        )
    if not settings.requires_gradient_sync:
        return "set_requires_gradient_sync(False): gradients without communication; reduce every microbatch"
    if not settings.requires_all_reduce:
        return "set_requires_all_reduce(False); all-reduce every microbatch"
    if reducer.follows_arrivals:
        return "gradients are reduced in the dtype in which they arrive (grad_dtype=None); set reduce_dtype"
    if any(buffers.layout.region is not None for buffers in storage.buffers):
        return "it has owned parameters (Owned)"
    if group.graph_inputs is not None:  # its modules were looked at before
        return None
    for param in group.params:
        for module, _ in param.uses:
            if type(module).__setattr__ is not nn.Module.__setattr__:
                return f"{type(module).__name__} keeps its parameters in a way of its own"
    return None
