"""`unwrap`: turns sharded modules back into plain ones, one group at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.api.module import mix_out
from fsdp2.arguments import checked
from fsdp2.core import agreement
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import FSDPParam, fsdp_param_of, is_subclass, mark_replaced
from fsdp2.core.several_roots import roots_of
from fsdp2.core.state import FSDPState, forget_state, states_below
from fsdp2.core.traits import carry_over
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPRuntimeError, FSDPValueError
from fsdp2.optim.guard import rekey
from fsdp2.plugs.parameters.whole_tensors import Former, Part, note_former_sharding, unsharded_like, whole_tensors

Module = TypeVar("Module", bound=nn.Module)


@checked()
def unwrap(module: Module, *, optimizers: Iterable[Optimizer] = ()) -> Module:
    """Undo `fully_shard` on ``module`` and everything below it: plain modules with full parameters on every rank.

    Classes are restored, and hooks and attributes of fsdp2 are removed. Each sharded parameter is replaced by a plain
    `nn.Parameter` (a DTensor again under tensor parallelism) of the same name, order and ``requires_grad``, with the
    user's attributes and hooks, and with its full gradient if it has one. Tied parameters become one object. Buffers
    stay. Parameters are on the mesh's device, or in host memory if they were offloaded; on meta they stay there.

    Collective: all ranks must call it, between iterations. One group is gathered at a time.

    An optimizer that was built on the sharded parameters goes on with the full ones: ``optimizers`` at once, others in
    their next step, which then gathers their state and so must be run on all ranks. Until that step their ``zero_grad``
    clears nothing.

    Args:
        module: a sharded module, or one that contains sharded modules. If a module above it is sharded too, that one
            finds its root anew, and ``module`` must be sharded again (or ignored) before its next forward.
        optimizers: optimizers that hold parameters of ``module``.

    Returns:
        ``module`` itself. Nothing is changed if nothing is sharded.

    Raises:
        FSDPTypeError: ``module`` is no module.
        FSDPValueError: parameters belong to a group of a module that is not below ``module``.
        FSDPRuntimeError: a forward or backward is running, gradients wait for a reduction, or the ranks differ.
        FSDPNotImplementedError: a parameter is a tensor subclass.
    """
    states = states_below(module)
    _refuse_parts_of_groups(module, states)
    roots = roots_of(states)
    for root in roots:
        recover_if_failed(root)
        if root.is_running():
            raise FSDPRuntimeError(
                f"unwrap() was called inside a forward or backward of {root.name}, or before finalize_backward(); call "
                "it between iterations."
            )
        root.finish()
    groups = list(dict.fromkeys(group for state in states for group in state.unit))
    if states:
        _refuse_groups(groups, _settled(states))
    for root in roots:
        root.dissolve()
    waiting = _made_plain(states, set())
    whole: set[FSDPParamGroup] = set()
    for group in groups:
        _make_whole(group)
        whole.add(group)
        waiting = _made_plain(waiting, whole)
    for optimizer in optimizers:
        rekey(optimizer)
    return module


def _settled(states: Sequence[FSDPState]) -> FSDPError | None:
    """Reshard ``states`` and adopt replaced parameters. Returns the error if this rank cannot, to be raised later.

    An error must not be raised here: other ranks would wait for this one in the comparison that follows.
    """
    try:
        for state in states:
            state.quiesce()
            state.adopt_replaced()
    except FSDPError as error:
        return error
    return None


def _made_plain(states: Sequence[FSDPState], whole: set[FSDPParamGroup]) -> list[FSDPState]:
    """Make the modules of those states plain whose groups are all ``whole``: an exception leaves no module half-made.

    Returns:
        The other states.
    """
    waiting = []
    for state in states:
        if not whole.issuperset(state.unit):
            waiting.append(state)
            continue
        for each in state.modules:
            mix_out(each)
        forget_state(state)
    return waiting


def _refuse_parts_of_groups(module: nn.Module, states: Sequence[FSDPState]) -> None:
    below = set(module.modules())
    for state in states:
        outside = [type(each).__name__.removeprefix("FSDP") for each in state.modules if each not in below]
        if outside:
            raise FSDPValueError(
                f"{state.class_name} was sharded in one group with ({', '.join(outside)}), which is not below what is "
                "to be unwrapped; unwrap a module that contains them all."
            )
    for state in states:
        for group in state.unit:
            for sharer in group.sharers:
                if sharer not in states:
                    raise FSDPValueError(
                        f"parameters of '{group.name}' are tied to parameters of a {sharer.class_name} that is not to "
                        "be unwrapped; unwrap a module that contains both."
                    )
    ours = {param for state in states for group in state.unit for param in group.params}
    for parameter in module.parameters():
        owner = fsdp_param_of(parameter)
        if owner is not None and owner not in ours:
            raise FSDPValueError(
                f"parameter '{owner.path}' belongs to the group of {owner.group_name}, of which only a part is to be "
                f"unwrapped; unwrap the {owner.group_name}."
            )


def _refuse_groups(groups: Sequence[FSDPParamGroup], refused: FSDPError | None) -> None:
    """Refuse ``groups`` that this rank, or another one, cannot unwrap. Collective.

    Args:
        groups: the groups whose parameters are to be gathered.
        refused: an error that has come on this rank already.

    Raises:
        FSDPError: a rank refuses, or the ranks differ. It is raised on all ranks.
    """
    error = refused
    try:
        for group in groups if error is None else ():
            _refuse_own(group)
    except FSDPError as raised:
        error = raised  # it is raised after the comparison, which other ranks take part in

    def described_on(each: DataParallelMesh) -> str:
        return "\n".join(
            [*map(_described, (group for group in groups if group.mesh.key == each.key)), str(error or "")]
        )

    meshes = [group.mesh for group in groups]
    difference, *_ = agreement.compared_over(meshes, described_on, "what is to be unwrapped")
    if error is not None:
        raise error
    if difference:
        raise FSDPRuntimeError(f"the ranks would unwrap different parameters. Difference:\n{difference}")


def _described(group: FSDPParamGroup) -> str:
    lines = [
        f"{param.fqn} {list(param.shape)} {param.dtype}"
        + ("" if param.sharded.grad is None else f", gradient {param.sharded.grad.dtype}")
        for param in group.params
    ]
    return "\n".join([f"group '{group.name}' over {group.mesh}", *lines])


def _refuse_own(group: FSDPParamGroup) -> None:
    group.refuse_loan("unwrap()")
    reducer = group.reducer
    if reducer.owes_gradients():
        raise FSDPRuntimeError(
            f"gradients of '{group.name}' wait for their reduction, and would be lost by unwrapping: run a backward "
            "with set_requires_gradient_sync(True) first, or drop them with reset_iter_state()."
        )
    for param in group.params:
        gradient = param.sharded.grad
        if is_subclass(param.local):
            raise FSDPNotImplementedError(
                f"parameter '{param.path}' is a {type(param.local).__name__}, a tensor subclass, which unwrap() cannot "
                "gather; load its state_dict() into a new module."
            )
        if gradient is not None and not _lies_like(gradient, param.sharded):
            raise FSDPRuntimeError(
                f"the gradient of '{param.path}' was set to a {type(gradient).__name__} that is not sharded like its "
                "parameter; set it to None, or redistribute it to the placements of the parameter, before unwrapping."
            )


def _lies_like(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    if not isinstance(gradient, DTensor):
        return False
    mine, theirs = _torch.spec_of(gradient), _torch.spec_of(parameter)
    return mine.mesh == theirs.mesh and tuple(mine.placements) == tuple(theirs.placements)


def _make_whole(group: FSDPParamGroup) -> None:
    """Gather the parameters and gradients of ``group``, and register plain parameters. Collective."""
    params = [param for param in group.params if not param.local.is_meta]
    trained = [param for param in params if param.sharded.grad is not None]
    with torch.no_grad():
        parts = [Part(param.local, param.sharding.partition) for param in params]
        wholes = dict(zip(params, whole_tensors(parts, group.mesh), strict=True))
        parts = [Part(_torch.local_of(param.sharded.grad), param.sharding.partition) for param in trained]  # type: ignore[arg-type]
        gradients = dict(zip(trained, whole_tensors(parts, group.mesh), strict=True)) if trained else {}
        for param in group.params:
            whole = wholes[param] if param in wholes else _on_meta(param)
            _replace(param, whole, gradients.get(param))


def _on_meta(param: FSDPParam) -> torch.Tensor:
    stride = param.sharding.partition.stride(param.shape)
    return torch.empty_strided(param.shape, stride, dtype=param.dtype, device="meta")


def _replace(param: FSDPParam, whole: torch.Tensor, gradient: torch.Tensor | None) -> None:
    sharded, sharding = param.sharded, param.sharding
    with torch.inference_mode(False):
        plain = nn.Parameter(unsharded_like(whole, sharding), requires_grad=sharded.requires_grad)
    carry_over(sharded, plain)
    plain.grad = None if gradient is None else unsharded_like(gradient, sharding)
    sharded.grad = None
    FSDPParam.identity_changes += 1
    del sharded._fsdp_param  # type: ignore[attr-defined]
    note_former_sharding(sharded, Former(sharding))
    mark_replaced(sharded, plain)
    for mapping, name in param.registrations:
        mapping[name] = plain
