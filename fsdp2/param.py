"""`FSDPParam`: one parameter of a group, from the user's original to its sharded and unsharded forms.

Owns the identities: which `nn.Parameter` objects exist, and in which module slots they are registered. Knows nothing
of buffers beyond the tensor it is given to lie on, and nothing of communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import _torch
from fsdp2.common import FSDPRuntimeError
from fsdp2.mesh import ShardMesh

Target = TypeVar("Target")


class Link(Generic[Target]):
    """A reference kept in a parameter's attributes, which does not travel with copies and pickles of that parameter."""

    __slots__ = ("target",)

    def __init__(self, target: Target) -> None:
        self.target = target

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copied as None."""

    def __reduce__(self) -> Any:
        """Pickled as None."""
        return type(None), ()


def refuse_share_memory() -> NoReturn:
    """Takes the place of ``share_memory_`` on sharded parameters, where torch's own would crash the process.

    Raises:
        FSDPRuntimeError: always.
    """
    raise FSDPRuntimeError(
        "share_memory() is not possible on sharded parameters, which lie in one buffer per group; share the memory of "
        "the module before sharding it."
    )


class _SetattrSlots:
    """Stands in for ``module._parameters`` where the module's class has a ``__setattr__`` of its own.

    `nn.RNNBase` for one keeps a second list of its parameters, which only its ``__setattr__`` updates.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __setitem__(self, name: str, parameter: nn.Parameter) -> None:
        setattr(self._module, name, parameter)

    def get(self, name: str) -> nn.Parameter | None:
        """The registered parameter, or None."""
        return self._module._parameters.get(name)


Registration = tuple[Any, str]
"""A mapping of registered parameters (``module._parameters`` or its stand-in) and the name in it."""


def registration(module: nn.Module, name: str) -> Registration:
    """Where to write a parameter so that ``module`` uses it under ``name``."""
    plain = type(module).__setattr__ is nn.Module.__setattr__
    return (module._parameters if plain else _SetattrSlots(module), name)


class Freshness:
    """Whether unsharded copies of a group's parameters still show what the sharded ones hold. Shared by the group.

    Attributes:
        stale: an optimizer has stepped since the last all-gather.
    """

    __slots__ = ("stale",)

    def __init__(self) -> None:
        self.stale = False


class FSDPParam:
    """One parameter of a group, registered in one or more module slots (several if it is shared in the group).

    Attributes:
        fqn: its name below the module that `fully_shard` was called on.
        prefix: what leads from the root to that module, "" until the root is known.
        group_name: that module's class.
        uses: the modules that hold it, and under which names.
        registrations: how to write there; all hold the same object at any time.
        shape: unsharded shape.
        sharded: the `nn.Parameter` over a ``Shard(0)`` DTensor, which optimizers and state dicts see. Its identity
            changes only when the user replaces it.
        local: the local tensor of ``sharded`` when it was last looked at, to notice when it is replaced.
        unsharded: the `nn.Parameter` over this parameter's slot of the unsharded buffer; None before lazy
            initialization.
        requires_grad: what the plan was made for.
        freshness: of the group.
        identity_changes: (of the class) how many sharded parameters were ever created or replaced.
    """

    __slots__ = (
        "fqn",
        "freshness",
        "group_name",
        "local",
        "prefix",
        "registrations",
        "requires_grad",
        "shape",
        "sharded",
        "unsharded",
        "uses",
    )
    identity_changes: ClassVar[int] = 0

    def __init__(
        self,
        fqn: str,
        uses: Sequence[tuple[nn.Module, str]],
        sharded: nn.Parameter,
        freshness: Freshness,
        group_name: str,
    ) -> None:
        self.fqn = fqn
        self.prefix = ""
        self.group_name = group_name
        self.freshness = freshness
        self.uses = tuple(uses)
        self.registrations = tuple(registration(module, name) for module, name in self.uses)
        self.shape = tuple(sharded.shape)
        self.unsharded: nn.Parameter | None = None
        self.adopt(sharded)

    def adopt(self, sharded: nn.Parameter) -> None:
        """Take ``sharded`` as the sharded parameter, and register it everywhere."""
        FSDPParam.identity_changes += 1
        self.sharded = sharded
        self.local = _torch.local_of(sharded)
        self.requires_grad = sharded.requires_grad
        sharded._fsdp_param = Link(self)  # type: ignore[attr-defined]
        sharded.share_memory_ = refuse_share_memory  # type: ignore[method-assign,assignment]
        for mapping, name in self.registrations:
            mapping[name] = sharded

    @property
    def path(self) -> str:
        """The fully qualified name below the root, for messages."""
        return self.prefix + self.fqn

    @property
    def dtype(self) -> torch.dtype:
        """The original dtype, in which the sharded parameter is kept."""
        return self.local.dtype

    def lie_on(self, local: torch.Tensor) -> None:
        """Move the sharded parameter's values onto ``local`` (its local shape and dtype) and keep it there."""
        with torch.no_grad():
            if local.device.type != "meta":
                local.copy_(self.local)
        _torch.set_local(self.sharded, local)
        self.local = local

    def lies_under(self, found: nn.Parameter) -> bool:
        """Whether ``found`` is just another wrapper around the local tensor that the group knows."""
        local = _torch.local_of(found)
        return (
            local.data_ptr() == self.local.data_ptr()
            and (found is self.sharded or local.numel() > 0)  # empty ones all have the same address
            and local.dtype == self.local.dtype
            and local.device == self.local.device
            and found.requires_grad is self.requires_grad
        )

    def take_unsharded(self, unsharded: nn.Parameter) -> None:
        """Take ``unsharded`` as the unsharded parameter."""
        succeed(unsharded, self.sharded)
        if self.unsharded is not None:  # laid out again: what was accumulated without communication stays
            kept = self.unsharded.grad
            unsharded.grad = None if kept is None else kept.to(unsharded.dtype)
        self.unsharded = unsharded

    def registered(self) -> nn.Parameter:
        """What the modules hold now, for comparison with ``sharded``.

        Raises:
            FSDPRuntimeError: it is not a DTensor parameter that this group can adopt.
        """
        mapping, name = self.registrations[0]
        for other, other_name in self.registrations:
            if other.get(other_name) is not self.sharded:
                mapping, name = other, other_name
                break
        found = mapping.get(name)
        spec = _torch.spec_of(self.sharded)
        if (
            isinstance(found, nn.Parameter)
            and isinstance(found, DTensor)
            and tuple(found.shape) == self.shape
            and found.device_mesh == spec.mesh
            and tuple(found.placements) == tuple(spec.placements)
        ):
            return found
        raise FSDPRuntimeError(
            f"parameter '{self.path}' was replaced after fully_shard by {describe(found)}, which cannot be adopted; "
            f"expected a nn.Parameter over a DTensor of shape {self.shape} with placements {list(spec.placements)} on "
            f"{spec.mesh}. Write into the parameter in place, load with load_state_dict(), or replace it by "
            "torch.distributed.tensor.distribute_tensor(value, param.device_mesh, param.placements)."
        )


def describe(value: object) -> str:
    """A short description of whatever was found in a parameter's place."""
    if value is None:
        return "nothing (it was removed)"
    if isinstance(value, DTensor):
        return f"a DTensor of shape {tuple(value.shape)}, placements {list(value.placements)}, {value.device_mesh}"
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} that is not a DTensor"
    return f"a {type(value).__name__}"


def shard_parameter(original: nn.Parameter, mesh: ShardMesh, rows: int) -> nn.Parameter:
    """The sharded parameter of ``original``: this rank's ``rows`` rows (fewer at the end) as a ``Shard(0)`` DTensor.

    Its local tensor still lies in ``original``'s storage: the group moves it into its shard buffer. Hooks and
    Python attributes set on ``original`` are carried over. No communication: every rank cuts its own rows.
    """
    data = original.detach()
    start = min(rows * mesh.rank, data.shape[0])
    # A wrapper's own storage is null. Made from a local tensor with an offset, it could not be saved.
    dtensor = DTensor.from_local(
        data.new_empty(0), mesh.device_mesh, [Shard(0)], run_check=False, shape=data.shape, stride=data.stride()
    )
    sharded = nn.Parameter(dtensor, requires_grad=original.requires_grad)
    _torch.set_local(sharded, data[start : start + rows])
    sharded.__dict__.update(original.__dict__)
    for hook in (_torch.post_accumulate_grad_hooks(original) or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)
    for tensor_hook in (_torch.tensor_hooks(original) or {}).values():
        sharded.register_hook(tensor_hook)
    succeed(original, sharded)
    return sharded


def owner_of(parameter: torch.Tensor) -> FSDPParam | None:
    """The `FSDPParam` whose sharded parameter ``parameter`` is, if any."""
    link: Link[FSDPParam] | None = getattr(parameter, "_fsdp_param", None)
    return link.target if link is not None and link.target.sharded is parameter else None


def succeed(predecessor: torch.Tensor, sharded: nn.Parameter) -> None:
    """Note on ``predecessor`` that ``sharded`` takes its place, for an optimizer that was built on it."""
    predecessor._fsdp_successor = Link(sharded)  # type: ignore[attr-defined]


def successor_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """The sharded parameter that took the place of ``parameter``: an original, an unsharded or a replaced one."""
    link: Link[nn.Parameter] | None = getattr(parameter, "_fsdp_successor", None)
    if link is None:
        return None
    return successor_of(link.target) or link.target
