"""`ShardedGradScaler`: loss scaling in which all ranks agree whether a step is skipped.

``torch.amp.GradScaler`` does the rest: the scale, how it grows, and the steps. This file says only how gradients are
unscaled, and how ranks learn that one of them was not finite.

[Note: who must agree]
The parameters of the optimizer decide which ranks these are, never their gradients, which a rank may lack. They are the
ranks of all meshes that a parameter is on, replicas included. For a parameter that lies on a part of its module's ranks
(`optim/slices.py`) they are all ranks of the module, as ranks would go on with different scales otherwise. One
all-reduce over an existing process group tells them. If no group has just these ranks (a mesh of two dims beside
pipeline stages), it is done over the dims of the mesh in turn: a maximum over rows and then columns is one over all.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2 import _torch
from fsdp2.arguments import checked_class
from fsdp2.core.mesh import device_of
from fsdp2.core.sharding import RankGroup
from fsdp2.errors import FSDPValueError
from fsdp2.optim.delivered import Delivered
from fsdp2.optim.guard import GUARD
from fsdp2.optim.slices import SLICES


class _Plan(Delivered):
    """How the gradients of one optimizer are unscaled, for as long as it holds the same parameters.

    Attributes:
        meshes: the meshes of the parameters, each once, and those of the modules of slices.
        changes: `SLICES.changes` when this was made.
        reductions: the groups over which their ranks agree, one after the other.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params)
        meshes = [_torch.spec_of(param).mesh for param in params if isinstance(param, DTensor)]
        meshes += SLICES.wholes_of(params)
        self.changes = SLICES.changes
        self.meshes: tuple[DeviceMesh, ...] = tuple({id(mesh): mesh for mesh in meshes}.values())

    @functools.cached_property
    def reductions(self) -> list[RankGroup]:
        return _groups_of(self.meshes)


@checked_class()
class ShardedGradScaler(torch.amp.GradScaler):  # type: ignore[name-defined]  # up to torch 2.11
    """Scales losses and unscales gradients for models that `fully_shard` was called on, on any device, CPU too.

    It has the methods and the state dict of ``torch.amp.GradScaler``, but: an optimizer's step is skipped on all ranks
    if a gradient is not finite on one of them, gradients may be fp16, and `scale` keeps the dtype of what it scales.
    Gradients on one buffer are unscaled as one tensor, by one kernel for each dtype and device; one all-reduce of one
    number tells all ranks what was found. One optimizer may hold sharded, replicated, offloaded and plain parameters;
    gradients of plain ones are expected to be the same on all ranks.

    Collective: all ranks that hold parts of an optimizer's parameters must call `unscale_`, or else `step`, also where
    some or all gradients are None. For parameters that ``shard_placement_fn`` has put on a part of their module's
    ranks, such as experts, all ranks of the module must call it, in the same order if there are several optimizers:
    they skip a step of their experts together, and go on with one scale.

    Args:
        device: the type of device that losses are on.
        init_scale: the factor that losses are multiplied by at first.
        backoff_factor: the scale is multiplied by it after a step that was skipped.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps that were not skipped.
        growth_interval: how many steps in a row let the scale grow.
        enabled: False: nothing is scaled, and `step` only steps.
        process_group: the ranks that skip a step together; None: the ranks of the meshes of the optimizer's parameters.
            With pipeline parallelism pass the group of all stages, which must go on with one scale.

    Raises:
        FSDPTypeError: an argument is of another type.
        FSDPValueError: this rank is not part of ``process_group``. Raised later: no process group has just the ranks of
            the meshes, so one must be given.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise FSDPValueError(
                f"ShardedGradScaler takes a process_group that this rank is part of; rank {dist.get_rank()} is not. "
                "Leave it out for the ranks of the meshes of the parameters."
            )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group
        self._plans: weakref.WeakKeyDictionary[Optimizer, _Plan] = weakref.WeakKeyDictionary()

    def scale(self, outputs: Any) -> Any:
        """``outputs``, a tensor or an iterable of tensors, multiplied by the scale, each in its own dtype.

        Raises:
            ValueError: ``outputs`` is something else.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError(f"scale() takes a tensor or an iterable of tensors, got {type(outputs).__name__}.")

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the gradients of ``optimizer``. Collective over the ranks of [Note: who must agree].

        ``unscale_`` and ``step`` of ``torch.amp.GradScaler`` call it. The host does not wait for the device.

        Args:
            optimizer: the optimizer whose gradients are multiplied in place.
            inv_scale: () that they are multiplied by.
            found_inf: () of zero.
            allow_fp16: ignored: gradients are fp16 if the whole model is.

        Returns:
            One tensor () by its device, not zero if a gradient was not finite on some rank.
        """
        GUARD.look_through(optimizer)  # first, so that it holds the parameters that have the gradients
        plan = self._plan_of(optimizer)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with _torch.plain_attributes():
            for gradient in plan.gradients():
                alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        # One flag for each device: gradients of offloaded parameters are unscaled on the host.
        found = {found_inf.device: found_inf}
        for (device, _), gradients in alike.items():
            if device not in found:
                found[device] = torch.zeros_like(found_inf, device=device)
            # To the CPU it must be a blocking copy, as the host reads it at once.
            scale = inv_scale.to(device, non_blocking=device.type != "cpu")
            _torch.unscale(gradients, found[device], scale)
        total = self._agreed([*found.values()], plan)
        return {total.device: total}

    def _plan_of(self, optimizer: Optimizer) -> _Plan:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        plan = self._plans.get(optimizer)
        if plan is None or plan.changes != SLICES.changes or not plan.is_of(params):
            plan = self._plans[optimizer] = _Plan(params)
        return plan

    def _agreed(self, found: list[torch.Tensor], plan: _Plan) -> torch.Tensor:
        """The largest of ``found`` () over all ranks that must agree. Collective."""
        if self.process_group is None:
            groups = plan.reductions
        else:
            groups = [_given(self.process_group, [*(each.device for each in found), *map(device_of, plan.meshes)])]
        device = groups[0].device if groups else found[0].device
        there = [each.to(device) for each in found]
        total = there[0] if len(there) == 1 else torch.stack(there).amax()
        for group in groups:
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group.group)
        return total

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without what is known of this process's optimizers."""
        return {name: value for name, value in super().__getstate__().items() if name != "_plans"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state; optimizers are looked at anew."""
        super().__setstate__(state)
        self._plans = weakref.WeakKeyDictionary()


def _given(group: dist.ProcessGroup, devices: Sequence[torch.device]) -> RankGroup:
    """``group``, with the first of ``devices`` that it has a backend for."""
    able = [device for device in devices if _torch.backend_name(group, device)]
    return RankGroup(tuple(dist.get_process_group_ranks(group)), group, (able or list(devices))[0])


def _groups_of(meshes: Sequence[DeviceMesh]) -> list[RankGroup]:
    """The groups to reduce over, in turn, so that the ranks of all ``meshes`` agree: see [Note: who must agree].

    Raises:
        FSDPValueError: no groups reach just these ranks.
    """
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    if len(ranks) < 2:
        return []
    # In this order: a mesh dim with just these ranks, the default group, all dims of one mesh in turn.
    dims = [RankGroup.of(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]
    for group in dims:
        if set(group.ranks) == ranks:
            return [group]
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None, "it has ranks"
        return [RankGroup(tuple(sorted(ranks)), world, device_of(meshes[0]))]
    for mesh in meshes:
        if mesh.size() == len(ranks):
            return [RankGroup.of(mesh, axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    raise FSDPValueError(
        f"the parameters of an optimizer lie on meshes of the ranks {sorted(ranks)}, and no mesh of them has all of "
        "these, so that ShardedGradScaler cannot let them agree whether to skip a step: give it the process group of "
        "the ranks that are to, ShardedGradScaler(process_group=...)."
    )
