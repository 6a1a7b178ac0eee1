"""What a model holds, once each: parameters and buffers, sharded or not; and what ranks do together about them.

Owns the walk of a model, its rest, memory for what is on meta, and the note that something was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp2 import _torch
from fsdp2.checkpoint.names import names_of
from fsdp2.checkpoint.ranks import Ranks, group_of, ranks_of
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import device_of
from fsdp2.core.param import FSDPParam, fsdp_param_of, is_subclass
from fsdp2.core.state import FSDPState, states_below
from fsdp2.errors import FSDPError, FSDPNotImplementedError, FSDPRuntimeError
from fsdp2.model.full_parameters import leave_passes, owner_of


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A parameter or buffer of a model, once, however often it is tied.

    Attributes:
        names: all of its names, the first in the model's order first.
        tensor: as it is registered: sharded ones are DTensors.
        param: whose sharded parameter it is; None if no group owns it.
        is_buffer: it is no parameter.
        transient: it is a buffer that is not persistent.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    param: FSDPParam | None
    is_buffer: bool
    transient: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def local(self) -> torch.Tensor:
        """What this rank has of it."""
        return self.param.local if self.param is not None else _torch.plain_of(self.tensor.detach())

    @property
    def described(self) -> str:
        """Shape and dtype of the whole."""
        return f"{shape_text(self.tensor.shape)} {self.tensor.dtype}"


def held_by(model: nn.Module) -> list[Held]:
    """The parameters of ``model``, and then its buffers, in its order."""
    names = names_of(model)
    tensors, all_names = names.tensors(), dict[str, list[str]]()
    for name, first in names.first.items():
        all_names.setdefault(first, []).append(name)
    return [
        Held(
            tuple(each),
            tensors[first],
            fsdp_param_of(tensors[first]),
            is_buffer=first in names.buffers,
            transient=names.transient.issuperset(each),
        )
        for first, each in all_names.items()
    ]


def settle(model: nn.Module, caller: str, *, frees: bool) -> FSDPError | None:
    """Bring the parameters of ``model`` to rest, sharded; returns what speaks against that, on this rank.

    Not ``frees``: unsharded ones keep their values for a backward that is yet to come.

    Raises:
        FSDPRuntimeError: inside of a forward or backward, where nothing may be communicated.
    """
    groups = [group for state in states_below(model) for group in state.unit]
    groups += [owner.group for parameter in model.parameters() if (owner := owner_of(parameter)) is not None]
    states: list[FSDPState] = list(dict.fromkeys(sharer for group in groups for sharer in group.sharers))
    leave_passes(states, caller)
    try:
        for group in dict.fromkeys(groups):
            group.refuse_loan(caller)
        for state in states:
            state.quiesce(frees=frees)
            state.adopt_replaced()
    except FSDPError as error:
        return error
    return None


def refuse_unreadable(held: Iterable[Held], caller: str, *, meta: bool) -> None:
    """Refuse what cannot be read or written piece by piece; ``meta``: also what has no values.

    Raises:
        FSDPRuntimeError: on meta; not initialized.
        FSDPNotImplementedError: a tensor subclass, or sparse.
    """
    held = list(held)
    for each in held:
        if is_lazy(each.tensor):
            raise FSDPRuntimeError(f"'{each.name}' is not initialized: run a forward of the module before {caller}.")
        local = each.local
        if is_subclass(local) or local.layout is not torch.strided:
            raise FSDPNotImplementedError(
                f"'{each.name}' is a {type(local).__name__} of layout {local.layout}; {caller} takes dense tensors of "
                "no subclass. Take the model's state_dict() instead."
            )
    on_meta = [each.name for each in held if meta and each.local.is_meta]
    if on_meta:
        raise FSDPRuntimeError(
            f"{some_names(on_meta)} {'are' if len(on_meta) > 1 else 'is'} on the meta device, and {caller} finds no "
            "values there: materialize the model first, model.to_empty(device=...), then initialize or load it."
        )


def company_of(held: Iterable[Held]) -> tuple[dist.ProcessGroup | None, Ranks]:
    """The ranks that hold the model together: all there are, or those of its meshes. None and one rank without a group.

    Collective over them.
    """
    if not dist.is_initialized():
        return None, ranks_of(None)
    meshes = [_torch.spec_of(each.tensor).mesh for each in held if isinstance(each.tensor, DTensor)]
    members = tuple(sorted({int(rank) for mesh in dict.fromkeys(meshes) for rank in mesh.mesh.flatten().tolist()}))
    group = dist.group.WORLD
    assert group is not None, "it is initialized"
    if members and len(members) < group.size():
        lines = (mesh.get_group() for mesh in meshes if mesh.ndim == 1)
        known = next((each for each in lines if tuple(sorted(dist.get_process_group_ranks(each))) == members), None)
        group = group_of(members, "fsdp2.checkpoint") if known is None else known
    return group, ranks_of(group)


# ---- memory for what is on meta ------------------------------------------------------------------


def materialize(model: nn.Module, chosen: Sequence[Held]) -> None:
    """Give memory to those of ``chosen`` that are on meta, and to nothing else. They are other objects then.

    A group moves its parameters into its shard buffer once it has all of them: for that moment they are there twice.
    """
    on_meta = [each for each in chosen if each.local.is_meta]
    owned = {id(each.tensor): _home(each, chosen) for each in on_meta if each.param is not None}
    for held in on_meta:
        if held.param is None:
            _give_memory(model, held, _home(held, chosen))

    def made(tensor: torch.Tensor) -> torch.Tensor:
        home = owned.get(id(tensor))
        return tensor if home is None else torch.empty_like(tensor, device=home)

    if owned:
        states = {state for each in on_meta if each.param is not None for state in each.param.group.sharers}
        model._apply(made)
        for state in states:  # of a part of a sharded module the state is above
            state.adopt_replaced()


def _give_memory(model: nn.Module, held: Held, home: torch.device) -> None:
    """Of what no group owns. A parameter stays the object that it is, for optimizers, ties and ``ignored_params``."""
    made = torch.empty_like(held.tensor.detach(), device=home)
    if isinstance(held.tensor, nn.Parameter):
        parameter = nn.Parameter(made, requires_grad=held.tensor.requires_grad)
        parameter.__dict__.update(held.tensor.__dict__)
        torch.utils.swap_tensors(held.tensor, parameter)
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is held.tensor:
                module._buffers[name] = made


def _home(held: Held, chosen: Sequence[Held]) -> torch.device:
    """Where it is to be: where its shards live, or its mesh computes, or that of the others does."""
    if held.param is not None:
        group: FSDPParamGroup = held.param.group
        return group.storage.offloading.device
    if isinstance(held.tensor, DTensor):
        return device_of(held.tensor.device_mesh)
    others = (each.param.sharding.mesh.device for each in chosen if each.param is not None)
    return next(others, torch.device("cpu"))


def note_written(written: Iterable[Held]) -> None:
    """What was gathered, or sent, before is stale; autograd sees a write, too."""
    written = list(written)
    params = [each.param for each in written if each.param is not None]
    for param in params:
        param.write_counter.writes += 1
    tensors = [each.tensor if each.param is None else each.param.sharded for each in written]
    if tensors:
        torch.autograd.graph.increment_version(tensors)
    for group in dict.fromkeys(param.group for param in params):
        group.storage.forget_sent()


def shape_text(shape: Sequence[int]) -> str:
    """For messages."""
    return str(tuple(shape))


def some_names(names: Sequence[str], shown: int = 5) -> str:
    """The first of them, for messages."""
    text = ", ".join(f"'{name}'" for name in names[:shown])
    return text if len(names) <= shown else f"{text} and {len(names) - shown} more"
