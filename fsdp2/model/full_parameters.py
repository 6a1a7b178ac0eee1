"""`full_parameters`: full parameters in place of sharded ones, for as long as a ``with`` block lasts.

The successor of FSDP1's ``summon_full_params``. Copies are registered, which `whole_tensors` gathers outside of any
plan: the engine's own unsharded parameters may have another dtype, and nothing may write them. The engine sees by
`FSDPParamGroup.loan` that others are registered. This file decides what is lent, and what is written back.

[Note: what was written]
A program may write by ``.data``, which torch counts nowhere, so values are compared: this rank's rows with its shard,
bit by bit. But whether a shard was written must have one answer on all ranks, or some would refuse the next backward,
or gather again, and others not. So the ranks exchange one flag for each parameter: a parameter counts as written on all
of them if its rows differ on any. What was only read thus changes nothing, also between a forward and its backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.arguments import checked
from fsdp2.core import agreement
from fsdp2.core.failure import recover_if_failed
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.param import FSDPParam, Link, fsdp_param_of, is_subclass, mark_replaced, replacement_of
from fsdp2.core.running import running_pass
from fsdp2.core.several_roots import roots_of
from fsdp2.core.sharding import local_shard
from fsdp2.core.state import FSDPState, state_of, states_below
from fsdp2.core.traits import carry_attributes_over
from fsdp2.core.transport import all_reduce, is_alone
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPRuntimeError
from fsdp2.plugs.parameters.whole_tensors import Part, unsharded_like, whole_tensors

_NAME = "full_parameters()"


@checked()
def full_parameters(
    module: nn.Module | Sequence[nn.Module],
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> AbstractContextManager[None]:
    """Inside of the block, ``module`` and what is below it hold full parameters in place of sharded ones.

    Each is a plain `nn.Parameter` (a DTensor of the other mesh dims under tensor parallelism) in its original dtype,
    with the ``requires_grad`` and the attributes of the sharded one; tied ones are one object. After the block the
    sharded parameters, the very same objects, are registered again. Parameters that no group owns are left alone.

    Collective: all ranks must enter and leave the block, outside of forward and backward. It may lie between a forward
    and its backward, which goes on if nothing was written. Small groups travel together, large ones alone, and all stay
    unsharded until the end of the block: ``recurse=False``, unit by unit, takes less memory. A forward inside computes
    with the full parameters. It is refused if gradients are recorded, or if not all ranks have all of them in full.

    If an exception leaves the block nothing is written back, and nothing communicated. A block inside of another one
    leaves alone what is unsharded already; it may ask for nothing that the outer one does not do, which writes back.

    Args:
        module: any module: sharded itself, part of a sharded one, or containing several. Or a sequence of such modules.
        recurse: False: only the parameters of its own `fully_shard` call (none, if it was not called on it).
        writeback: keep this rank's rows of what the parameters are at the end, however they were written: in place, by
            ``.data``, or by another `nn.Parameter` of the same shape and dtype in their place; and their
            ``requires_grad``. Every rank must write the same. False: nothing is kept, under any strategy.
        rank0_only: only the first rank of each parameter's data-parallel mesh gets full parameters. The others keep
            their sharded ones registered, and allocate nothing but what they send. Needs ``writeback=False``.
        offload_to_cpu: put full parameters in host memory; by default they are on the device of the mesh.
        with_grads: gather gradients too, where there are any, as ``.grad`` of the full parameters. With ``writeback``
            they are kept as they were changed, set, or cleared. False: ``.grad`` is None, and dropped at the end.

    Raises:
        FSDPTypeError: an argument is of another type.
        FSDPNotImplementedError: ``rank0_only`` with ``writeback``; a parameter that is a tensor subclass.
        FSDPRuntimeError: inside of a forward or backward; a parameter on meta; the ranks differ; a block that the outer
            one does not serve. At the end of the block, and then nothing is kept: a parameter has another shape, dtype
            or kind; or sharded parameters were written inside as well, as by an optimizer's step.
    """
    if rank0_only and writeback:
        raise FSDPNotImplementedError(
            f"{_NAME} with rank0_only=True and writeback=True is not supported: what one rank writes is not sent to "
            "the others. Pass writeback=False to read on rank 0; leave rank0_only out, and write the same on all "
            "ranks, to write."
        )
    modules = [module] if isinstance(module, nn.Module) else module
    return _full(modules, recurse, _Options(writeback, rank0_only, offload_to_cpu, with_grads))


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of one block."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def serve(self, inner: _Options) -> bool:
        """Whether an outer block with these options does all that a block inside asks for."""
        if (self.rank0_only, self.offload_to_cpu) != (inner.rank0_only, inner.offload_to_cpu):
            return False
        return self.writeback >= inner.writeback and self.with_grads >= inner.with_grads

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


class _Lent(NamedTuple):
    """What is registered in place of one sharded parameter.

    Attributes:
        whole: the full parameter; None on ranks that get none.
        options: the arguments of the block that has lent it.
        version: the version of the sharded parameter at the beginning of that block.
    """

    whole: nn.Parameter | None
    options: _Options
    version: tuple[int, int]


class _Loan:
    """What one block, or several inside of each other, have lent of one group."""

    __slots__ = ("_count", "lender", "lent")

    def __init__(self, group: FSDPParamGroup) -> None:
        self.lender = _NAME
        self.lent: dict[FSDPParam, _Lent] = {}
        self._count = len(group.params)

    def refuse_pass(self, name: str, *, for_backward: bool) -> None:
        """Allow a forward without gradients to compute with full parameters, if all ranks have all of them.

        Raises:
            FSDPRuntimeError: it is another forward, or a backward.
        """
        if for_backward or torch.is_grad_enabled():
            why = "the gradients of whole parameters would be reduced by nobody"
        elif any(each.options.rank0_only for each in self.lent.values()):
            why = "the parameters are whole on rank 0 alone"
        elif len(self.lent) < self._count:
            why = "only a part of its parameters is whole"
        else:
            return
        raise FSDPRuntimeError(
            f"a {'backward' if for_backward else 'forward'} of '{name}' began inside of {_NAME}, where {why}: run it "
            "after the block. (Forwards under torch.no_grad() may run inside, if all of the module is whole on all "
            "ranks.)"
        )


_Taken = dict[FSDPParamGroup, list[FSDPParam]]
"""The parameters that a block lends, by their groups."""


@contextmanager
def _full(modules: Sequence[nn.Module], recurse: bool, options: _Options) -> Iterator[None]:
    found = _params_below(modules, recurse=recurse)
    error = _settle(found, options)
    _agree(found, options, error)
    # What an outer block has lent stays, and is the outer block's to write back.
    taken = {group: [p for p in params if p not in _lent_of(group)] for group, params in found.items()}
    try:
        # Full parameters must not become inference tensors, although the program may be in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for batch in _batches(taken):
                _lend(batch, options)
        yield
        if options.writeback:
            with torch.inference_mode(False), torch.no_grad():
                _keep(taken)
    finally:
        _take_back(taken)


def _lent_of(group: FSDPParamGroup) -> dict[FSDPParam, _Lent]:
    return group.loan.lent if isinstance(group.loan, _Loan) else {}


# ---- the beginning -------------------------------------------------------------------------------


def _params_below(modules: Sequence[nn.Module], *, recurse: bool) -> _Taken:
    """The sharded parameters that ``modules`` or those below hold; without ``recurse`` those of their own groups."""
    groups: list[FSDPParamGroup] = []
    for module in modules:
        state = state_of(module)
        states = states_below(module) if recurse else [] if state is None else [state]
        groups += [group for each in states for group in each.unit]
        if recurse:  # a module that is a part of a sharded one has no state: it is further up
            groups += [owner.group for p in module.parameters() if (owner := owner_of(p)) is not None]
    below = {each for module in modules for each in module.modules()}
    # A group may have parameters outside of ``modules`` too, if these are a part of a sharded module, or share weights.
    taken = {g: [p for p in g.params if any(use in below for use, _ in p.uses)] for g in dict.fromkeys(groups)}
    return {group: params for group, params in taken.items() if params}


def owner_of(parameter: nn.Parameter) -> FSDPParam | None:
    """The `FSDPParam` of ``parameter``: sharded, unsharded by the engine, or lent by an outer block."""
    link: Link[FSDPParam] | None = getattr(parameter, "_fsdp_lent", None)
    if link is not None:
        return link.target
    successor = replacement_of(parameter)
    return fsdp_param_of(parameter if successor is None else successor)


def _settle(found: _Taken, options: _Options) -> FSDPError | None:
    """Bring the groups to rest, as before a state dict is taken. Returns this rank's reason not to go on, if any.

    Raises:
        FSDPRuntimeError: a forward or backward is running, so nothing may be communicated.
    """
    states: list[FSDPState] = list(dict.fromkeys(sharer for group in found for sharer in group.sharers))
    leave_passes(states, _NAME, " For the parameters of a single module there, unshard() and reshard() that module.")
    try:
        for state in states:
            # Unsharded parameters keep their values, as a backward that reads them would not be noticed in time.
            state.quiesce(frees=False)
            state.adopt_replaced()
        for group, params in found.items():
            for param in params:
                _refuse(param, _lent_of(group).get(param), options)
    except FSDPError as error:  # not raised yet: the other ranks are told first, or they would wait for this one
        return error
    return None


def leave_passes(states: Sequence[FSDPState], caller: str, otherwise: str = "") -> None:
    """Wait until all gradients of the roots of ``states`` have arrived, and refuse inside of a pass.

    Raises:
        FSDPRuntimeError: ``caller`` is inside of a forward or backward; ``otherwise`` says what to do there.
    """
    modules = [module for state in states for module in state.modules]
    for root in roots_of(states):
        recover_if_failed(root)
        running = running_pass(root, modules) or ("backward" if _torch.backward_is_running() else None)
        if running is not None:
            raise FSDPRuntimeError(
                f"{caller} was called inside of a {running} of {root.name}, which computes with its unsharded "
                f"parameters: call it before or after, on all ranks.{otherwise}"
            )
        root.comm.finish_reduces()


def _refuse(param: FSDPParam, outer: _Lent | None, options: _Options) -> None:
    where = _where(param)
    if outer is not None and not outer.options.serve(options):
        raise FSDPRuntimeError(
            f"{_NAME} with {options}, inside of one with {outer.options}, which has made {where} whole: an inner "
            "block may ask for nothing that the outer one does not do. Give the outer one these arguments, or "
            "leave it first."
        )
    if param.local.is_meta:
        raise FSDPRuntimeError(
            f"{where} is on the meta device, and has no values that {_NAME} could gather: "
            "materialize the model first, model.to_empty(device=...), then initialize it or load a state dict."
        )
    if is_subclass(param.local):
        raise FSDPNotImplementedError(
            f"{where} is a {type(param.local).__name__}, a tensor subclass, which {_NAME} cannot "
            "gather; unshard() its module to compute with it, or take its state_dict()."
        )
    gradient, spec = param.sharded.grad, _torch.spec_of(param.sharded)
    if not options.with_grads or gradient is None:
        return
    if not isinstance(gradient, DTensor) or (gradient.device_mesh, gradient.placements) != (spec.mesh, spec.placements):
        raise FSDPRuntimeError(
            f"the gradient of {where} was set to one that is not sharded like its parameter, which {_NAME} with "
            "with_grads=True cannot gather: parameter.grad = parameter.grad.redistribute(placements="
            "parameter.placements) if it is a DTensor, or None."
        )


def _where(param: FSDPParam) -> str:
    return f"parameter '{param.path}' of {param.group_name}"


def _by_mesh(taken: _Taken) -> list[tuple[DataParallelMesh, list[FSDPParam]]]:
    """The parameters of each mesh, in the same order on all ranks."""
    found: dict[object, tuple[DataParallelMesh, list[FSDPParam]]] = {}
    for group, params in taken.items():
        found.setdefault(group.mesh.key, (group.mesh, []))[1].extend(params)
    return list(found.values())


def _agree(found: _Taken, options: _Options, error: FSDPError | None) -> None:
    """Compare with the other ranks what each would do, and raise on all if one cannot. Collective over each mesh.

    Raises:
        FSDPError: ``error``; or, on the other ranks, that another one has it.
    """
    by_mesh = {mesh.key: (mesh, params) for mesh, params in _by_mesh(found)}

    def described_on(mesh: DataParallelMesh) -> str:
        lines = [f"{_NAME} with {options}" if error is None else f"refused: {error}"]
        for param in by_mesh[mesh.key][1]:
            # Gradients travel too, so ranks must agree on which parameters have one.
            gradient = param.sharded.grad if options.with_grads and error is None else None
            state = " (whole already)" if param in _lent_of(param.group) else ""
            of_gradient = "" if gradient is None else f", gradient {gradient.dtype}"
            lines.append(f"{param.fqn} {list(param.shape)} {param.dtype}{of_gradient}{state}")
        return "\n".join(lines)

    difference, *_ = agreement.compared_over(
        [mesh for mesh, _ in by_mesh.values()], described_on, f"what {_NAME} gathers"
    )
    if error is not None:
        raise error
    if difference:
        raise FSDPRuntimeError(f"the ranks differ in what {_NAME} is to gather. Difference:\n{difference}")


_TOGETHER_BYTES = 64 << 10
"""Packed tensors are in memory twice for a moment: one group, or several of so many bytes together."""


def _batches(taken: _Taken) -> Iterator[_Taken]:
    """Groups of one mesh that travel together: several, if all of them take no more memory than the largest group."""
    sizes = {g: sum(p.sharding.partition.numel * p.dtype.itemsize for p in params) for g, params in taken.items()}
    most = max([_TOGETHER_BYTES, *sizes.values()])
    batch: _Taken = {}
    for group, params in taken.items():
        if not params:
            continue
        if batch and (
            sum(map(sizes.__getitem__, batch)) + sizes[group] > most or next(iter(batch)).mesh.key != group.mesh.key
        ):
            yield batch
            batch = {}
        batch[group] = params
    if batch:
        yield batch


def _lend(batch: _Taken, options: _Options) -> None:
    """Gather parameters of one mesh and register the full ones. Collective over the mesh; with ``rank0_only`` over the
    ranks of its first replica.

    Stream: the current one.
    """
    mesh = next(iter(batch)).mesh
    for group in batch:
        if not isinstance(group.loan, _Loan):
            group.loan = _Loan(group)  # before anything is registered, so that an exception is cleaned up after
    params = [param for each in batch.values() for param in each]
    trained = [param for param in params if options.with_grads and param.sharded.grad is not None]
    # Parameters and their gradients travel in the same exchange, parameters first.
    locals_ = [param.local for param in params] + [_torch.local_of(p.sharded.grad) for p in trained]  # type: ignore[arg-type]
    partitions = [param.sharding.partition for param in (*params, *trained)]
    device = torch.device("cpu") if options.offload_to_cpu else mesh.device
    wholes: list[torch.Tensor] = []
    replica = 0 if mesh.replicate_group is None else dist.get_rank(mesh.replicate_group)
    # Other replicas have the same rows, so with ``rank0_only`` the first one gathers alone.
    if not options.rank0_only or replica == 0:
        parts = [Part(*each) for each in zip(locals_, partitions, strict=True)]
        wholes = whole_tensors(parts, mesh, device=device, only=0 if options.rank0_only else None)
    # On ranks that get no full parameters ``wholes`` is empty.
    gradients = dict(zip(trained, wholes[len(params) :], strict=False))
    for index, param in enumerate(params):
        whole = _whole_parameter(param, wholes[index], gradients.get(param)) if wholes else None
        # Noted before it is registered, so that `_take_back` finds it whatever comes in between.
        _lent_of(param.group)[param] = _Lent(whole, options, _version(param))
        if whole is not None:
            for mapping, name in param.registrations:
                mapping[name] = whole


def _version(param: FSDPParam) -> tuple[int, int]:
    """A version of the sharded parameter that changes with each write that can be seen."""
    return param.write_counter.writes, _torch.version_of(param.sharded)


def _whole_parameter(param: FSDPParam, value: torch.Tensor, gradient: torch.Tensor | None) -> nn.Parameter:
    """A parameter over ``value``, with what the user has set on the sharded one except hooks, which stay with that."""
    sharded = param.sharded
    whole = nn.Parameter(unsharded_like(value, param.sharding), requires_grad=sharded.requires_grad)
    carry_attributes_over(sharded, whole)
    explicit, dtype = _torch.grad_dtype_policy(sharded)
    if explicit:
        whole.grad_dtype = dtype
    if gradient is not None:
        whole.grad = unsharded_like(gradient, param.sharding)
    whole._fsdp_lent = Link(param)  # type: ignore[attr-defined]
    return whole


# ---- the end -------------------------------------------------------------------------------------


def _take_back(taken: _Taken) -> None:
    """Register the sharded parameters again. No communication, as this must work after any exception."""
    FSDPParam.identity_changes += 1  # optimizers that were built or have stepped inside look for these
    for group, params in taken.items():
        lent = _lent_of(group)
        for param in params:
            whole = lent.pop(param).whole if param in lent else None
            if whole is None:
                continue
            # The full parameter, and one that the program put in its place: optimizers may hold either.
            passed = {id(whole): whole}
            for mapping, name in param.registrations:
                registered = mapping.get(name)
                if isinstance(registered, nn.Parameter) and registered is not param.sharded:
                    passed[id(registered)] = registered
                mapping[name] = param.sharded
            for each in passed.values():
                each.grad = None
                mark_replaced(each, param.sharded)
        if not lent:
            group.loan = None


def _keep(taken: _Taken) -> None:
    """Write the values of the full parameters to the shards. Collective over each mesh. See [Note: what was written].

    Raises:
        FSDPRuntimeError: something cannot be kept, on this rank or another. Then nothing is kept.
    """
    found: dict[FSDPParam, nn.Parameter | None] = {}
    error: FSDPError | None = None
    try:
        for group, params in taken.items():
            for param in params:
                found[param] = _registered(param, _lent_of(group)[param])
    except FSDPError as raised:
        error = raised
    # All ranks take part in this exchange, also one with an error: the others wait for it, and must hear of it.
    changed = _changed_anywhere(taken, None if error is not None else found)
    if error is not None:
        raise error
    if changed is None:
        raise FSDPRuntimeError(
            f"another rank could not keep what was written inside of {_NAME}, and says why; nothing was kept on any."
        )
    for group, params in taken.items():
        written = [param for param in params if param in changed]
        for param in written:
            value = found[param]
            param.local.copy_(param.local if value is None else _own_rows(param, value, param.local.device))
            # The DTensor's own version does not count writes to its local tensor.
            torch.autograd.graph.increment_version([param.sharded])
        if written:
            # The next gather then copies the shards anew into what it sends.
            group.storage.forget_sent()
        for param in params:
            value = found[param]
            if value is not None:
                _keep_the_rest(param, value, _lent_of(group)[param].options)


def _registered(param: FSDPParam, lent: _Lent) -> nn.Parameter | None:
    """The parameter that the modules hold now in place of ``param``; None if that is the sharded one again.

    Raises:
        FSDPRuntimeError: its values cannot be kept.
    """
    whole = lent.whole
    assert whole is not None, "where something is kept all ranks have it"
    # What the program has registered in place of the full parameter, in any of the modules that hold it.
    others = {id(each): each for m, name in param.registrations if (each := m.get(name)) is not whole}
    if len(others) > 1:
        raise _cannot_keep(param, "its tied modules hold different parameters")
    found = next(iter(others.values()), whole)
    if found is param.sharded:
        return None
    if not isinstance(found, nn.Parameter):
        raise _cannot_keep(param, f"a {type(found).__name__} is registered in its place")
    for what, tensor in (("", found), ("the gradient, ", found.grad if lent.options.with_grads else None)):
        if tensor is not None:
            _refuse_kind(param, what, tensor)
    if found.dtype != param.dtype:
        raise _cannot_keep(param, f"it is {found.dtype} now, and was {param.dtype}")
    if _version(param) != lent.version:
        raise _cannot_keep(
            param,
            "the sharded parameter was written inside of the block as well, as an optimizer's step does, and writing "
            "the whole one back would undo that",
        )
    return found


def _refuse_kind(param: FSDPParam, what: str, tensor: torch.Tensor) -> None:
    spec = param.sharding.unsharded_spec
    if isinstance(tensor, DTensor) is (spec is None):
        was = "a plain tensor" if spec is None else f"a DTensor on {spec.mesh}"
        raise _cannot_keep(param, f"{what}it is a {type(tensor.data).__name__} now, and the whole parameter was {was}")
    if isinstance(tensor, DTensor) and (tensor.device_mesh, tensor.placements) != (spec.mesh, tuple(spec.placements)):
        raise _cannot_keep(param, f"{what}its placements are {list(tensor.placements)}, not {list(spec.placements)}")
    plain = _torch.plain_of(tensor)
    if plain.is_meta or plain.layout is not torch.strided or tuple(plain.shape) != param.shape:
        kind = f"{tuple(plain.shape)}, {plain.layout}, on {plain.device}"
        raise _cannot_keep(param, f"{what}it is {kind} now, and the whole parameter was of shape {param.shape}")


def _cannot_keep(param: FSDPParam, why: str) -> FSDPRuntimeError:
    return FSDPRuntimeError(
        f"{_NAME} cannot keep what was written to {_where(param)}: {why}. Nothing was kept. Write values of the same "
        "shape and dtype, in place or by .data; convert and replace sharded parameters after the block; or pass "
        "writeback=False."
    )


def _changed_anywhere(
    taken: _Taken, found: Mapping[FSDPParam, nn.Parameter | None] | None
) -> frozenset[FSDPParam] | None:
    """The parameters that some rank has written; None if ``found`` is None on some rank. See [Note: what was written].

    Collective over each mesh. The host waits for the device, once for each mesh.
    """
    changed: list[FSDPParam] = []
    failed = False
    for mesh, params in _by_mesh(taken):
        # (1 + params,): whether this rank cannot keep something, and which parameters it has written.
        flags = torch.zeros(1 + len(params), dtype=torch.int32, device=mesh.device)
        if found is None:
            flags[0] = 1
        else:
            for index, param in enumerate(params):
                value = found[param]
                if value is not None:
                    flags[1 + index] = _differs(
                        _own_rows(param, value, mesh.device), _copied_to(mesh.device, param.local)
                    )
        # A maximum over both groups, one after the other, is one over all ranks of the mesh.
        for process_group in (mesh.shard_group, mesh.replicate_group):
            if process_group is not None and not is_alone(process_group):
                all_reduce(flags, process_group, dist.ReduceOp.MAX, None)
        has_failed, *are_changed = flags.tolist()
        failed = failed or bool(has_failed)
        changed += [param for param, is_changed in zip(params, are_changed, strict=True) if is_changed]
    return None if failed else frozenset(changed)


def _own_rows(param: FSDPParam, whole: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's rows of ``whole``, on ``device``."""
    mesh, partition = param.sharding.mesh, param.sharding.partition
    plain = _torch.plain_of(whole.detach())
    rows = local_shard(plain, partition, partition.rows(mesh.shard_size), mesh.shard_rank)
    return _copied_to(device, rows)


def _copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, if it is on ``device``; else a copy there."""
    return (
        tensor
        if tensor.device == device
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)
    )


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(): whether any bit differs. (Compared as numbers, nan would differ from itself, and -0.0 not from 0.0.)"""
    # No integer dtype is as wide.
    if one.dtype is torch.complex128:
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other)
    dtype = _OF_SIZE[one.element_size()]
    return (one.resolve_conj().resolve_neg().view(dtype) != other.view(dtype)).any()


def _keep_the_rest(param: FSDPParam, value: nn.Parameter, options: _Options) -> None:
    """Keep ``requires_grad`` and, if gradients were lent, the gradient."""
    sharded = param.sharded
    if value.requires_grad is not sharded.requires_grad:
        sharded.requires_grad_(value.requires_grad)
    if not options.with_grads:
        return
    if value.grad is None:
        sharded.grad = None
    elif sharded.grad is None:
        sharded.grad = param.shard_of(_torch.plain_of(value.grad))
    else:
        _torch.local_of(sharded.grad).copy_(_own_rows(param, value.grad, param.local.device))
