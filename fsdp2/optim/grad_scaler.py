"""`ShardedGradScaler`: loss scaling, of which all ranks agree whether a step is skipped.

``torch.amp.GradScaler`` does the rest: the scale, how it grows, what is stepped. Here is only how the gradients of an
optimizer are unscaled, and how the ranks learn that one of them was not finite.

[Note: who must agree]
Which ranks these are follows from the parameters of the optimizer, never from their gradients, which a rank may lack:
those of all meshes that a parameter is on, replicas included; and of a parameter that lies on a part of the ranks of
its module (`optim/slices.py`) those of the module, or else ranks would go on with different scales. One all-reduce over
a process group that there is already. Where there is none of just these ranks (a mesh of two dims beside pipeline
stages), the dims of the mesh that has them in turn: a maximum over rows and then over columns is one over all.
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
    """How the gradients of one optimizer are unscaled, as long as it holds the same parameters.

    Attributes:
        meshes: of the parameters, each once, and of the modules of slices.
        changes: of `SLICES`, when it was made.
        reductions: over which the ranks of these are to agree, in turn.
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
    """Scales losses and unscales gradients, for models that `fully_shard` was called on, on any device, CPU too.

    As ``torch.amp.GradScaler``, with the same methods and the same state dict, but for this: an optimizer's step is
    skipped on all ranks if a gradient is not finite on one of them, gradients may be fp16, and `scale` keeps the dtype
    of what it scales. Gradients that lie on one buffer are unscaled as one tensor, by one kernel for each dtype and
    device; one all-reduce of one number says what was found. Parameters may be sharded, replicated, offloaded or plain
    ones, together in one optimizer; gradients of plain ones are expected to be alike on all ranks.

    `unscale_`, or else `step`, must be called by all ranks that hold parts of an optimizer's parameters, also where
    some or all gradients are None. Of parameters that ``shard_placement_fn`` has put on a part of their
    module's ranks, as experts, that is by all ranks of the module, in the same order if there are several optimizers:
    they skip a step of their experts together, and go on with one scale.

    Args:
        device: the type of device that losses are on.
        init_scale: what losses are multiplied by at first.
        backoff_factor: by which the scale is multiplied after a step that was skipped.
        growth_factor: by which it is multiplied after ``growth_interval`` steps that were not.
        growth_interval: see there.
        enabled: False: nothing is scaled, and `step` only steps.
        process_group: the ranks that skip a step together; None: those of the meshes of the optimizer's parameters.
            With pipeline parallelism give it all stages, which must go on with one scale.

    Raises:
        FSDPTypeError: an argument of another type.
        FSDPValueError: this rank is not part of ``process_group``; later: no process group has just the ranks of the
            meshes, so one must be given.
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
        """``outputs``, a tensor or an iterable of such, multiplied by the scale; in their own dtypes.

        Raises:
            ValueError: they are something else.
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
        """Unscale the gradients of ``optimizer``. Collective, over the ranks that [Note: who must agree] tells.

        What ``torch.amp.GradScaler`` calls, from its ``unscale_`` and its ``step``. Does not wait for the device.

        Args:
            optimizer: the gradients of whose parameters are multiplied in place.
            inv_scale: () by which.
            found_inf: () of zero.
            allow_fp16: not looked at: fp16 gradients are those of a model that is fp16 as a whole.

        Returns:
            One tensor (), by its device: not zero if a gradient on some rank was not finite.
        """
        GUARD.look_through(optimizer)  # so that it holds the parameters that have the gradients
        plan = self._plan_of(optimizer)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with _torch.plain_attributes():
            for gradient in plan.gradients():
                alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = {found_inf.device: found_inf}
        for (device, _), gradients in alike.items():
            if device not in found:
                found[device] = torch.zeros_like(found_inf, device=device)
            # The host reads its copy at once.
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
        """The largest of ``found`` (), on all ranks that are concerned. Collective."""
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
        """What is pickled: not what is known of optimizers of this process."""
        return {name: value for name, value in super().__getstate__().items() if name != "_plans"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled."""
        super().__setstate__(state)
        self._plans = weakref.WeakKeyDictionary()


def _given(group: dist.ProcessGroup, devices: Sequence[torch.device]) -> RankGroup:
    """``group``, communicating from the first of ``devices`` for which it has a backend."""
    able = [device for device in devices if _torch.backend_name(group, device)]
    return RankGroup(tuple(dist.get_process_group_ranks(group)), group, (able or list(devices))[0])


def _groups_of(meshes: Sequence[DeviceMesh]) -> list[RankGroup]:
    """What is to be reduced over, in turn, for the ranks of all ``meshes`` to agree: see [Note: who must agree].

    Raises:
        FSDPValueError: there is no such group.
    """
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    if len(ranks) < 2:
        return []
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
