"""`FSDPParam`: one parameter in its sharded and unsharded forms. `Registrations`: the places where modules hold them.

`Registrations` compares what modules hold now with what was registered there. That is on the hot path: its loops run
inside ``map``, so that a group of many parameters costs no Python call for each of them.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, getitem, is_
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2 import _torch
from fsdp2.core.mesh import SHARDED
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.core.ports import Port
from fsdp2.core.sharding import (
    Partition,
    Sharding,
    class_of,
    dtensor_like,
    dtensor_over,
    local_shard,
    parameter_at_offset,
)
from fsdp2.core.traits import carry_attributes_over, carry_over, loses_its_class
from fsdp2.errors import FSDPRuntimeError

# `WriteCounter`: the optimizer guard tells groups by it of writes that version counters may miss.


class WriteCounter:
    """Counts writes to the sharded parameters of a `fully_shard` call that their version counters may miss.

    Attributes:
        writes: how many steps of optimizers on these parameters, and replacements, there were.
        steps: (of the class) how many steps there were of any optimizer, also on other parameters.
        unwatched: (of the class) whether steps go unnoticed, or one is under way on any rank of this process.
    """

    __slots__ = ("writes",)
    steps: ClassVar[int] = 0
    unwatched: ClassVar[bool] = True

    def __init__(self) -> None:
        self.writes = 0


# Links between parameters: originals, unsharded and replaced parameters lead to those that took their place.
#
# Optimizers that were built on a predecessor find the sharded parameter by them. This part knows nothing of groups.


Target = TypeVar("Target")


class Link(Generic[Target]):
    """A reference kept in a parameter's attributes, which does not travel with copies and pickles of that parameter."""

    __slots__ = ("target",)

    def __init__(self, target: Target) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        """Copy and pickle as None."""
        return type(None), ()


class _PickledAlone:
    """The ``__reduce_ex__`` of an unsharded parameter: it is pickled without the rest of its group's memory."""

    __slots__ = ("_alias", "_find")

    def __init__(self, alias: torch.Tensor, find: Callable[[], nn.Parameter | None]) -> None:
        self._alias, self._find = alias, find

    def __call__(self, protocol: Any) -> Any:
        # (While the group is sharded, the memory is freed, and there is nothing to clone.)
        alone = nn.Parameter(self._alias.clone() if self._alias.untyped_storage().nbytes() else self._alias)
        parameter = self._find()
        if parameter is not None:
            carry_attributes_over(parameter, alone)
            alone.requires_grad_(parameter.requires_grad)
        alone._fsdp_successor = None  # type: ignore[attr-defined]  # see `is_orphan_copy`
        return alone.__reduce_ex__(protocol)

    def __reduce__(self) -> Any:
        """Copy and pickle as None."""
        return type(None), ()


PREDECESSOR_COPIER: Port[Callable[[Callable[[], torch.Tensor | None]], Any] | None] = Port(None)
"""Makes the ``__deepcopy__`` of a parameter whose place another has taken, from a function that finds the parameter."""


def mark_replaced(
    predecessor: torch.Tensor, successor: nn.Parameter, *, find: Callable[[], torch.Tensor | None] | None = None
) -> None:
    """Note on ``predecessor`` that ``successor`` takes its place, for an optimizer that was built on it.

    ``find`` returns ``predecessor``, by default through a weak reference. A parameter that is still registered at times
    needs another way: with a weak reference `torch.utils.swap_tensors`, by which conversions may replace parameters,
    refuses it; a strong one would be a cycle, which keeps its memory.
    """
    predecessor._fsdp_successor = Link(successor)  # type: ignore[attr-defined]
    if PREDECESSOR_COPIER.filling is not None:
        predecessor.__deepcopy__ = PREDECESSOR_COPIER.filling(find or weakref.ref(predecessor))  # type: ignore[method-assign]


def replacement_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """The parameter that took the place of ``parameter``, an original, unsharded or replaced one; None if none did."""
    successor: nn.Parameter | None = None
    link: Link[nn.Parameter] | None = getattr(parameter, "_fsdp_successor", None)
    while link is not None:
        successor = link.target
        link = getattr(successor, "_fsdp_successor", None)
    return successor


def is_orphan_copy(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is a copy or pickle of a predecessor: nothing leads from it to the present parameter."""
    return getattr(parameter, "_fsdp_successor", parameter) is None  # a `Link` is copied as None


# `FSDPParam`: one parameter of a group, from the user's original to its sharded and unsharded forms.
#
# It owns the identities: which `nn.Parameter` objects exist, and in which module slots they are registered. It knows
# nothing of buffers beyond the tensor that it is given to lie on. It communicates only where tensor parallelism leaves
# a gradient with other placements than its parameter: that gradient is redistributed.


class _SetattrSlots:
    """Stands in for ``module._parameters`` where the module's class has a ``__setattr__`` of its own.

    `nn.RNNBase`, for example, keeps a second list of its parameters, which only its ``__setattr__`` updates.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __setitem__(self, name: str, parameter: nn.Parameter) -> None:
        setattr(self._module, name, parameter)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._module._parameters[name]

    def get(self, name: str) -> nn.Parameter | None:
        """The registered parameter, or None."""
        return self._module._parameters.get(name)


Registration = tuple[Any, str]
"""A mapping of registered parameters (``module._parameters`` or its stand-in) and the name in it."""


def registration(module: nn.Module, name: str) -> Registration:
    """Where to write a parameter so that ``module`` uses it under ``name``."""
    plain = type(module).__setattr__ is nn.Module.__setattr__
    return (module._parameters if plain else _SetattrSlots(module), name)


def refuse_share_memory() -> NoReturn:
    """Takes the place of ``share_memory_`` on sharded parameters, where torch's own would crash the process.

    Raises:
        FSDPRuntimeError: always.
    """
    raise FSDPRuntimeError(
        "share_memory() is not possible on sharded parameters, which lie in one buffer per group; share the memory of "
        "the module before sharding it."
    )


class FSDPParam:
    """One parameter of a group, registered in one or more module slots (several if it is shared in the group).

    Attributes:
        fqn: its name below the module that `fully_shard` was called on.
        path: its name below the root, for messages; ``fqn`` until the root is known.
        group_name: the class of that module, for messages.
        uses: the modules that hold it, each with the parameter's name there.
        registrations: how to write to these places; all hold the same object at any time.
        sharding: which dim is cut, over which ranks; what the DTensors look like.
        policy: its own mixed precision policy.
        shape: the shape of the unsharded parameter on this rank, which tensor parallelism may have cut.
        sharded: the `nn.Parameter` over a sharded DTensor, which optimizers and state dicts see. Its identity
            changes only when the user replaces it.
        local: the local tensor of ``sharded`` when it was last looked at, to notice when it is replaced.
        unsharded: the `nn.Parameter` over this parameter's slot of the unsharded buffer (a DTensor under tensor
            parallelism); None before lazy initialization.
        post_forward: the `nn.Parameter` that is registered while the group is resharded to fewer ranks; None if
            ``sharded`` is registered then, as for a tensor that gathers itself.
        requires_grad: whether it is trained, as the engine knows it; the user may freeze any form of it meanwhile.
        grad_dtype: the user's policy for gradients: whether there is one, and the dtype (None: as they arrive).
        arrived_dtype: for gradients that are reduced in the dtype in which they arrive, the widest one that has
            arrived; None before the first.
        group: the group that holds it.
        in_full_precision: the policy's ``param_dtype`` is ignored, see `GroupSettings`.
        write_counter: counts writes for all parameters of the `fully_shard` call.
        identity_changes: (of the class) how many sharded parameters were ever created or replaced.
    """

    __slots__ = (
        "__weakref__",
        "arrived_dtype",
        "fqn",
        "grad_dtype",
        "group",
        "group_name",
        "in_full_precision",
        "local",
        "path",
        "policy",
        "post_forward",
        "registrations",
        "requires_grad",
        "shape",
        "sharded",
        "sharding",
        "unsharded",
        "uses",
        "write_counter",
    )
    identity_changes: ClassVar[int] = 0

    def __init__(
        self,
        fqn: str,
        uses: Sequence[tuple[nn.Module, str]],
        original: nn.Parameter,
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
        write_counter: WriteCounter,
        group_name: str,
        place: torch.device,
    ) -> None:
        self._begin(fqn, uses, sharding, policy, write_counter, group_name)
        self.shape = sharding.partition.shape
        self._warn_of_original(original)
        self.adopt(shard_parameter(original, sharding, place))

    @classmethod
    def of_sharded(
        cls,
        fqn: str,
        uses: Sequence[tuple[nn.Module, str]],
        sharded: nn.Parameter,
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
        shape: tuple[int, ...],
        write_counter: WriteCounter,
        group_name: str,
    ) -> FSDPParam:
        """Make it from a parameter that is sharded already."""
        param = cls.__new__(cls)
        param._begin(fqn, uses, sharding, policy, write_counter, group_name)
        param.shape = shape
        param.adopt(sharded)
        return param

    def _begin(
        self,
        fqn: str,
        uses: Sequence[tuple[nn.Module, str]],
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
        write_counter: WriteCounter,
        group_name: str,
    ) -> None:
        self.fqn = fqn
        self.path = fqn
        self.group_name = group_name
        self.write_counter = write_counter
        self.uses = tuple(uses)
        self.registrations = tuple([registration(module, name) for module, name in self.uses])
        self.sharding = sharding
        self.policy = policy
        self.unsharded: nn.Parameter | None = None
        self.post_forward: nn.Parameter | None = None
        self.grad_dtype: tuple[bool, torch.dtype | None] = (policy.grad_dtype is not None, policy.grad_dtype)
        self.arrived_dtype: torch.dtype | None = None
        self.group: Any = None
        self.in_full_precision = False

    def tie(self, uses: Sequence[tuple[nn.Module, str]]) -> None:
        """Register the sharded parameter in further modules, which hold its original (or itself)."""
        self.uses += tuple(uses)
        self.register_in([registration(module, name) for module, name in uses])

    def register_in(self, places: Sequence[Registration]) -> None:
        """Register the sharded parameter in further places, which hold its original (or itself)."""
        self.registrations += tuple(places)
        for mapping, name in places:
            mapping[name] = self.sharded

    def adopt(self, sharded: nn.Parameter) -> None:
        """Take ``sharded`` as the sharded parameter, and register it everywhere."""
        # Optimizers look for their parameters again when the count has changed. One that was merely frozen or thawed
        # does not count.
        if sharded is not getattr(self, "sharded", None) or _torch.local_of(sharded) is not self.local:
            FSDPParam.identity_changes += 1
        self.sharded = sharded
        if sharded.__dict__.pop("_fsdp_successor", None) is not None:  # it comes back after another had its place
            sharded.__dict__.pop("__deepcopy__", None)
        SHARDED.add(_torch.spec_of(sharded).mesh)
        self.local: torch.Tensor = _torch.local_of(sharded)
        self.requires_grad = sharded.requires_grad
        explicit, dtype = _torch.grad_dtype_policy(sharded)
        if explicit:
            self.grad_dtype = (True, dtype)
        elif self.grad_dtype[0]:  # the policy has set it, or a conversion has made a parameter without it
            sharded.grad_dtype = self.grad_dtype[1]
        sharded._fsdp_param = Link(self)  # type: ignore[attr-defined]
        sharded.share_memory_ = refuse_share_memory  # type: ignore[method-assign,assignment]
        for mapping, name in self.registrations:
            mapping[name] = sharded
        for other in (self.unsharded, self.post_forward):  # all forms are frozen, or all are trained
            if other is not None and other.requires_grad is not self.requires_grad:
                other.requires_grad_(self.requires_grad)

    def adopt_toggled(self) -> None:
        """If one of its forms was frozen or thawed, freeze or thaw all of them."""
        forms = [each for each in (self.sharded, self.unsharded, self.post_forward) if each is not None]
        if any(each.requires_grad is not self.requires_grad for each in forms):
            self.requires_grad = not self.requires_grad
            for each in forms:
                each.requires_grad_(self.requires_grad)

    @property
    def resting(self) -> nn.Parameter:
        """The parameter that is registered while the group is resharded to fewer ranks."""
        return self.sharded if self.post_forward is None else self.post_forward

    def rename(self, paths: Mapping[nn.Module, str]) -> None:
        """Set ``path`` to the name below a root of the first use there. ``paths``: the names of the root's modules."""
        for module, name in self.uses:
            if module in paths:
                self.path = f"{paths[module]}.{name}" if paths[module] else name
                return

    @property
    def dtype(self) -> torch.dtype:
        """The original dtype, in which the sharded parameter is kept."""
        return self.local.dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        dtype = None if self.in_full_precision else self.policy.param_dtype
        return dtype if dtype is not None and self.dtype.is_floating_point else self.dtype

    @property
    def accumulation_dtype(self) -> torch.dtype | None:
        """The dtype in which unsharded gradients add up while reduction is disabled; None: as they arrive.

        Complex ones stay complex, as in their reduction: a real dtype would drop half of each number.
        """
        if self.policy.reduce_dtype is not None and not self.dtype.is_complex:
            return self.policy.reduce_dtype
        explicit, dtype = self.grad_dtype
        return dtype if explicit else self.dtype

    @property
    def default_reduce_dtype(self) -> torch.dtype:
        """The dtype in which its gradient is reduced if the policy has no ``reduce_dtype``."""
        # A `grad_dtype` of the policy counts with every torch. Else this follows the `fully_shard` of the installed
        # torch, which goes by the parameter's `grad_dtype` from 2.15 on, and by its unsharded dtype before.
        if self.policy.grad_dtype is not None and self.grad_dtype == (True, self.policy.grad_dtype):
            return self.policy.grad_dtype
        if not _torch.reduces_in_grad_dtype:
            return self.param_dtype
        explicit, dtype = self.grad_dtype
        return (dtype or self.arrived_dtype or self.param_dtype) if explicit else self.dtype

    @property
    def follows_arrivals(self) -> bool:
        """Whether its gradients are reduced in the dtype in which they arrive."""
        explicit, dtype = self.grad_dtype
        return _torch.reduces_in_grad_dtype and self.policy.reduce_dtype is None and explicit and dtype is None

    @property
    def local_numel(self) -> int:
        """Elements of the unsharded parameter on this rank."""
        return math.prod(self.shape)

    def delivery_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the sharded gradient, reduced in ``reduce_dtype``."""
        explicit, dtype = self.grad_dtype
        return (dtype or reduce_dtype) if explicit else self.dtype

    def lie_on(self, local: torch.Tensor) -> None:
        """Move the sharded parameter's values onto ``local`` (its local shape and dtype) and keep it there."""
        with torch.no_grad():
            if local.device.type != "meta":  # which has no values
                local.copy_(self.local)
        self._lie_under(local)

    def move(self, device: torch.device) -> None:
        """Move the sharded parameter's local tensor, which lies in no buffer, to ``device``."""
        if self.local.device != device:
            self._lie_under(self.local.to(device))

    def _lie_under(self, local: torch.Tensor) -> None:
        """Make ``local`` the local tensor of the sharded parameter, which moves to its device with its gradient.

        A DTensor keeps the device that it was made on. If that was another one (by ``model.to()``, or with the tensors
        of a state dict), the parameter is set to a new DTensor, made on the device of ``local``.
        """
        sharded = self.sharded
        if sharded.device != local.device and not local.is_meta:
            # The gradient is taken off meanwhile: torch refuses one on another device than its parameter's.
            gradient = None if sharded.grad is None else _moved(sharded.grad, local.device)
            sharded.grad = None
            placeholder = torch.empty(0, dtype=local.dtype, device=local.device)
            sharded.data = dtensor_over(placeholder, _torch.spec_of(sharded))
            sharded.grad = gradient
        _torch.set_local(sharded, local)
        self.local = local

    def lies_under(self, found: nn.Parameter) -> bool:
        """Whether ``found`` is just another wrapper around the local tensor that the group knows."""
        local = _torch.local_of(found)
        if is_subclass(local) or is_subclass(self.local):  # whose memory has no address of its own
            return found is self.sharded and local is self.local
        return (
            local.data_ptr() == self.local.data_ptr()
            and (found is self.sharded or local.numel() > 0)  # empty ones all have the same address
            and local.dtype == self.local.dtype
            and local.device == self.local.device
        )

    def take_unsharded(self, alias: torch.Tensor, *, is_extended: bool = False) -> None:
        """Make the unsharded parameter over ``alias``: its slot of the unsharded buffer, or an extension's tensor.

        ``is_extended``: an extension has made it, whose backward may ask for its ``grad_dtype`` (from torch 2.15 on).
        """
        spec = self.sharding.unsharded_spec
        if spec is None:
            unsharded = nn.Parameter(alias, requires_grad=self.requires_grad)
            if type(unsharded) is nn.Parameter:
                unsharded.__reduce_ex__ = _PickledAlone(alias, self._finds("unsharded"))  # type: ignore[method-assign]
        else:
            spec = _torch.spec_with_dtype(spec, alias.dtype)
            unsharded = parameter_at_offset(alias, spec, requires_grad=self.requires_grad)
        if alias.dtype.is_floating_point or alias.dtype.is_complex:
            asks = is_extended and _torch.reduces_in_grad_dtype
            # None lets a gradient of any dtype be set here, as gradients in `accumulation_dtype` are.
            unsharded.grad_dtype = self.accumulation_dtype if asks else None
        carry_attributes_over(self.sharded, unsharded)
        if self.unsharded is not None:
            # Graphs of earlier forwards may hold the former one: a gradient that still arrives there would be lost.
            mark_replaced(self.unsharded, self.sharded)
            if self.unsharded.requires_grad:
                late = functools.partial(_refuse_outdated_gradient, self.path)
                self.unsharded.register_post_accumulate_grad_hook(late)
        mark_replaced(unsharded, self.sharded, find=self._finds("unsharded"))
        if self.unsharded is not None:  # gradients that were accumulated without communication move along
            kept, dtype = self.unsharded.grad, self.accumulation_dtype
            unsharded.grad = kept if kept is None or dtype is None else kept.to(dtype)
        self.unsharded = unsharded

    def rest_as(self, parameter: nn.Parameter) -> None:
        """Let ``parameter`` be what is registered while the group is resharded to fewer ranks."""
        if self.post_forward is not None:
            mark_replaced(self.post_forward, self.sharded)
        mark_replaced(parameter, self.sharded, find=self._finds("post_forward"))
        self.post_forward = parameter

    def _finds(self, attribute: str) -> Callable[[], nn.Parameter | None]:
        """A function that looks up ``attribute`` when it is called, and keeps nothing alive."""
        reference = weakref.ref(self)

        def find() -> nn.Parameter | None:
            param = reference()
            return None if param is None else getattr(param, attribute)

        return find

    def pop_grad(self) -> torch.Tensor | None:
        """Take autograd's gradient off the unsharded parameter, as a plain tensor of ``shape``; None if there is none.

        Under tensor parallelism it is first redistributed to the parameter's own placements, which may communicate.
        """
        unsharded = self.unsharded
        if unsharded is None or unsharded.grad is None:
            return None
        gradient: torch.Tensor = unsharded.grad
        unsharded.grad = None
        if self.sharding.unsharded_spec is None:
            return gradient
        return _torch.wait_for_tensor(_torch.local_of(self._placed(gradient)))

    def _placed(self, gradient: torch.Tensor) -> DTensor:
        spec = self.sharding.unsharded_spec
        if not isinstance(gradient, DTensor):
            raise FSDPRuntimeError(
                f"parameter '{self.path}' is a DTensor on {spec.mesh}, but autograd left it a plain gradient; compute "
                "with the parameter as a DTensor (parallelize_module does), or take it with to_local()."
            )
        mesh, wanted = self.sharding.mesh, list(spec.placements)
        if mesh.spmd_mesh is not None and mesh.dims is not None:
            # In the data-parallel dims the gradient is left as it is: reducing there is the engine's part.
            names = spec.mesh.mesh_dim_names
            summed = 1
            for name in mesh.dims.shard_names + mesh.dims.replicate_names:
                index = names.index(name)
                wanted[index] = gradient.placements[index]
                if isinstance(wanted[index], Replicate):
                    summed *= spec.mesh.size(index)
            if summed > 1:  # DTensor may have summed over these ranks, or not: the placement does not tell
                self._warn_of_sums(summed)
        if tuple(wanted) == tuple(gradient.placements):
            return gradient
        return gradient.redistribute(placements=wanted)

    def _warn_of_original(self, original: nn.Parameter) -> None:
        """Warn of what the sharded form will lack of ``original``."""
        where, name = f"Parameter '{self.path}' of {self.group_name}", type(original).__name__
        if original.requires_grad and loses_its_class(type(original)):
            warnings.warn(
                f"{where} is of the class {name}, which changes what tensors do: its sharded form is no {name}. Where "
                "a program asks for the class (for an optimizer's groups), let it ask for an attribute of the "
                "parameter instead: attributes stay.",
                stacklevel=2,
            )
        if original.grad is not None:
            warnings.warn(
                f"{where} has a gradient, and its sharded form begins without one: run that backward after "
                "fully_shard, or call zero_grad() before it.",
                stacklevel=2,
            )

    def _warn_of_sums(self, ranks: int) -> None:
        warnings.warn(
            f"The gradient of parameter '{self.path}' arrived as Replicate() over {ranks} data-parallel ranks. It is "
            "taken as what this rank computed by itself, as with to_local() or inputs that are Replicate() too. If "
            "DTensor has summed it over the ranks already, which it does for tanh, sigmoid, softmax and others of a "
            f"parameter, it is {ranks} times too large. Compute with parameter.to_local(grad_placements=[Partial(), "
            "...]), Partial() in each data-parallel dim: then nothing is summed before.",
            stacklevel=2,
        )

    def shard_of(self, whole: torch.Tensor) -> DTensor:
        """A copy of this rank's part of ``whole``, as a DTensor that is sharded like this parameter.

        ``whole``: this parameter's ``shape``, or the full one that tensor parallelism has cut; in any dtype.
        """
        mesh, partition = self.sharding.mesh, self.sharding.partition
        if tuple(whole.shape) != self.shape:
            spec = self.sharding.unsharded_spec
            whole = _torch.local_of(distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None))
        local = (
            local_shard(whole, partition, partition.rows(mesh.shard_size), mesh.shard_rank)
            .to(self.local.device)
            .clone()
        )
        return dtensor_like(self.sharded, local)

    def registered(self) -> nn.Parameter:
        """What the modules hold now, for comparison with ``sharded``.

        Raises:
            FSDPRuntimeError: it is not a DTensor parameter that this group can adopt.
        """
        # The user may have replaced it in one of several places only: that place counts.
        mapping, name = self.registrations[0]
        for other, other_name in self.registrations:
            if other.get(other_name) is not self.sharded:
                mapping, name = other, other_name
                break
        found = mapping.get(name)
        spec = _torch.spec_of(self.sharded)
        other_owner = fsdp_param_of(found) if isinstance(found, torch.Tensor) else None
        if other_owner is not None and other_owner is not self:
            raise FSDPRuntimeError(
                f"parameter '{self.path}' was replaced after fully_shard by the sharded parameter '{other_owner.path}' "
                f"of {other_owner.group_name}: tie weights before calling fully_shard, or unwrap() the model, tie "
                "them, and shard it again."
            )
        if (
            isinstance(found, nn.Parameter)
            and isinstance(found, DTensor)
            and found.shape == self.sharded.shape
            and found.device_mesh == spec.mesh
            and tuple(found.placements) == tuple(spec.placements)
            and _is_a_part(found, spec, self.local)
        ):
            return found
        raise FSDPRuntimeError(
            f"parameter '{self.path}' was replaced after fully_shard by {describe(found)}, which cannot be adopted; "
            f"expected a nn.Parameter over a DTensor of shape {tuple(self.sharded.shape)} with placements "
            f"{list(spec.placements)} on "
            f"{spec.mesh}. Write into the parameter in place, load with load_state_dict(), or replace it by "
            "nn.Parameter(torch.distributed.tensor.distribute_tensor(value, param.device_mesh, param.placements)); "
            "torch.func.functional_call takes such parameters too, and no others."
        )


def describe(value: object) -> str:
    """A short description of whatever was found in a parameter's place."""
    if value is None:
        return "nothing (it was removed, as by a parametrization or weight_norm: apply these before fully_shard)"
    if isinstance(value, DTensor):
        return f"a DTensor of shape {tuple(value.shape)}, placements {list(value.placements)}, {value.device_mesh}"
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} that is not a DTensor"
    return f"a {type(value).__name__}"


def _is_a_part(found: DTensor, spec: Any, local: torch.Tensor) -> bool:
    """Whether ``found`` is cut as its placements say: torch's DTensor does not know how to cut by those of ours."""
    own = class_of(spec)
    return own is DTensor or (isinstance(found, own) and _torch.local_of(found).shape == local.shape)


def _padded_shard(data: torch.Tensor, partition: Partition, world_size: int, rank: int) -> torch.Tensor:
    """`local_shard` for tensor subclasses, in a tensor of its own that has room for as many rows as rank 0's.

    It uses only operations that torch's ``fully_shard`` uses as well, since such classes implement these.
    """
    dim = partition.dim or 0
    is_chunked = partition.is_chunked(world_size)
    chunks = torch.chunk(data, world_size, dim) if is_chunked else torch.split(data, partition.rows(world_size), dim)
    padded = data.new_zeros(chunks[0].size())
    length = chunks[rank].size(dim) if rank < len(chunks) else 0
    part = padded.narrow(dim, 0, length)
    if length:
        part.copy_(chunks[rank])
    return part


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.to(device)
    return dtensor_over(_torch.local_of(tensor).to(device), _torch.spec_of(tensor))


def is_subclass(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a wrapper around other tensors, whose values no flat buffer can hold."""
    return is_traceable_wrapper_subclass(tensor)


def local_data(parameter: nn.Parameter) -> torch.Tensor:
    """The data that this rank has of an original parameter: all of it, or its part under tensor parallelism."""
    data = parameter.detach()
    return _torch.local_of(data) if isinstance(data, DTensor) else data


def shard_parameter(original: nn.Parameter, sharding: Sharding, place: torch.device) -> nn.Parameter:
    """The sharded parameter of ``original``: this rank's part of the dim that ``sharding`` cuts, as a DTensor.

    Its local tensor still lies in ``original``'s storage (unless a dim behind the first is cut), until the group moves
    it into its shard buffer. That buffer is at ``place``, so the DTensor is made there: its device does not follow its
    local tensor, and torch refuses a gradient on another device. (One on meta is replaced when it gets memory.) Hooks
    and Python attributes set on ``original`` are carried over. No communication: every rank cuts its own part.
    """
    data, mesh, partition = local_data(original), sharding.mesh, sharding.partition
    # A DTensor's own storage is null. It is made from an empty tensor, since with an offset it could not be saved.
    placeholder = torch.empty(0, dtype=data.dtype, device=data.device if data.is_meta else place)
    sharded = nn.Parameter(dtensor_over(placeholder, sharding.spec), requires_grad=original.requires_grad)
    if is_subclass(data):
        assert partition.dim is not None, "a subclass without dims is refused"
        local = _padded_shard(data, partition, mesh.shard_size, mesh.shard_rank)
    else:
        local = local_shard(data, partition, partition.rows(mesh.shard_size), mesh.shard_rank)
        # The part is dense, with its dims in the memory order of the parameter (channels_last, say): it lies so in the
        # shard buffer.
        stride = partition.stride(local.shape)
        if local.stride() != stride:
            local = torch.empty_strided(local.shape, stride, dtype=local.dtype, device=local.device).copy_(local)
    _torch.set_local(sharded, local)
    carry_over(original, sharded)
    mark_replaced(original, sharded)
    return sharded


def fsdp_param_of(parameter: torch.Tensor) -> FSDPParam | None:
    """The `FSDPParam` whose sharded parameter ``parameter`` is, if any."""
    link: Link[FSDPParam] | None = getattr(parameter, "_fsdp_param", None)
    # A parameter that was replaced keeps its link, and is no sharded parameter any more.
    return link.target if link is not None and link.target.sharded is parameter else None


# Getters that `map` calls without a Python frame.
_SHARDED: Callable[[FSDPParam], Any] = attrgetter("sharded")
_UNSHARDED: Callable[[FSDPParam], Any] = attrgetter("unsharded")
_RESTING: Callable[[FSDPParam], Any] = attrgetter("resting")
_LOCAL: Callable[[FSDPParam], Any] = attrgetter("local")
_REQUIRES_GRAD: Callable[[Any], bool] = attrgetter("requires_grad")


class Registrations:
    """The places in which a group's parameters are registered.

    Attributes:
        places: for each of them, a mapping of registered parameters, the name in it, and the `FSDPParam`.
    """

    __slots__ = ("_mappings", "_names", "_params", "_require_grad", "_sharded", "places")

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self.places = tuple([(mapping, name, param) for param in params for mapping, name in param.registrations])
        columns: Any = zip(*self.places, strict=True) if self.places else ((), (), ())
        self._mappings, self._names, self._params = columns
        self.expect_replaced()

    def expect_replaced(self) -> None:
        """Expect the present sharded parameters from now on, as they are frozen or trained."""
        self._sharded = tuple(map(_SHARDED, self._params))
        self._require_grad = list(map(_REQUIRES_GRAD, self._params))

    def hold_sharded(self) -> bool:
        """Whether the modules hold the sharded parameters, neither frozen nor unfrozen, on their local tensors."""
        sharded = self._sharded
        with _torch.plain_attributes():
            held = self._hold(sharded)
        # A conversion may keep a parameter and change the local tensor in it.
        return held and all(map(is_, map(_torch.local_of, sharded), map(_LOCAL, self._params)))

    def hold_post_forward(self) -> bool:
        """Whether the modules hold what `register_post_forward` has registered, neither frozen nor unfrozen."""
        return self._hold(map(_RESTING, self._params))

    def hold_unsharded(self) -> bool:
        """Whether the modules hold the unsharded parameters, neither frozen nor unfrozen."""
        return self._hold(map(_UNSHARDED, self._params))

    def _hold(self, expected: Iterable[Any]) -> bool:
        """Whether the modules hold what is ``expected``, neither frozen nor unfrozen."""
        try:
            found = list(map(getitem, self._mappings, self._names))
        except KeyError:  # one was removed
            return False
        return all(map(is_, found, expected)) and list(map(_REQUIRES_GRAD, found)) == self._require_grad

    def are_toggled(self) -> bool:
        """Whether parameters, sharded or unsharded, were frozen or unfrozen since `expect_replaced`."""
        known, params = self._require_grad, self._params
        is_toggled = list(map(_REQUIRES_GRAD, map(_UNSHARDED, params))) != known
        return is_toggled or list(map(_REQUIRES_GRAD, map(_SHARDED, params))) != known

    def were_changed(self) -> bool:
        """Whether the modules hold other parameters than the sharded ones, or these were frozen or thawed."""
        try:
            held = [*map(getitem, self._mappings, self._names)]
        except KeyError:
            return True
        return not all(map(is_, held, self._sharded)) or [*map(_REQUIRES_GRAD, held)] != self._require_grad

    def register_sharded(self) -> None:
        """Let the modules hold the sharded parameters."""
        for mapping, name, sharded in zip(self._mappings, self._names, self._sharded):  # noqa: B905  all are columns
            mapping[name] = sharded

    def restore_sharded(self, *, by_user: bool = False, keeps: bool = False) -> FSDPParam | None:
        """Let the modules hold the sharded parameters, whatever they hold now. Frozen and unfrozen ones stay so.

        ``by_user``: the user has unsharded them, and may have registered other parameters over their memory, with which
        nothing is lost. ``keeps``: what the user has put in the place of sharded ones stays there.

        Returns:
            A parameter in whose place they held something that is lost now; None if there is none.
        """
        replaced: FSDPParam | None = None
        for mapping, name, param in self.places:
            found: nn.Parameter | None = mapping.get(name)
            if found is not None and (found is param.unsharded or found is param.post_forward):
                if found.requires_grad is not param.requires_grad:
                    param.sharded.requires_grad_(found.requires_grad)
            elif found is not param.sharded:
                if keeps:
                    continue
                if found is None or not _is_another_view(found, param, may_train=by_user):
                    replaced = param
                elif found.requires_grad:
                    _retire(found, param)
            mapping[name] = param.sharded
        return replaced

    def register_unsharded(self) -> None:
        """Let the modules hold the unsharded parameters."""
        for mapping, name, param in self.places:
            mapping[name] = param.unsharded

    def register_post_forward(self) -> None:
        """Let the modules hold the post-forward parameters, on fewer ranks."""
        for mapping, name, param in self.places:
            mapping[name] = param.resting


def _is_another_view(found: torch.Tensor, param: FSDPParam, *, may_train: bool) -> bool:
    """Whether ``found`` is another parameter over the memory of the unsharded ``param``: nothing is lost with it then.

    Quantized layers register such parameters in forward, since they need a class of their own: frozen ones. With one
    that is trained, the gradient of that forward would be lost, so it counts only if it ``may_train`` and has none.
    """
    unsharded = param.unsharded
    if unsharded is None or found.requires_grad is not param.requires_grad or isinstance(found, DTensor):
        return False
    whole = _torch.plain_of(unsharded)
    if found.requires_grad:
        looks_alike = found.shape == whole.shape and found.dtype == whole.dtype
        if not (may_train and looks_alike and found.grad is None):
            return False
    return (
        _torch.storage_of(found) == _torch.storage_of(whole)
        and found.data_ptr() == whole.data_ptr()
        and found.nbytes == whole.nbytes
        # It was not written; or shares the version counter, on which `DtypeBuffers.changed` sees the write.
        and (_torch.version_of(found) == 0 or _torch.share_version(found, whole))
    )


def _retire(found: nn.Parameter, param: FSDPParam) -> None:
    """Note that ``found``, which is trained, had the place of the unsharded ``param``, and has it no more.

    Optimizers that hold it find the sharded parameter. A graph that was built on it may still be differentiated: then
    its gradient is refused.
    """
    if replacement_of(found) is None:
        mark_replaced(found, param.sharded)
        found.register_post_accumulate_grad_hook(functools.partial(_refuse_late_gradient, param.path))


def _refuse_outdated_gradient(path: str, found: torch.Tensor) -> NoReturn:
    raise FSDPRuntimeError(
        f"the gradient of parameter '{path}' arrived where it does not lie any more, for it was laid out anew since "
        "the forward, after an exception or a change of settings: it would be lost. Run all backwards before that, or "
        "the forward again."
    )


def _refuse_late_gradient(path: str, found: torch.Tensor) -> NoReturn:
    raise FSDPRuntimeError(
        f"the gradient of parameter '{path}' arrived at another parameter, which the program had registered in its "
        "place while it was unsharded: it would be lost. Compute what is differentiated with the parameters that "
        "unshard() registers; or call reshard() before the forward."
    )
