"""`facts_of`: reads a model's states, groups and plans. It changes nothing, and starts no lazy initialization."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import _torch
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.layout import BufferLayout
from fsdp2.core.options import RootSettings, described
from fsdp2.core.plan import GatherPlan, ReducePlan
from fsdp2.core.prefetch import Unit
from fsdp2.core.state import FSDPState, state_of, states_below
from fsdp2.core.structure import module_paths
from fsdp2.core.transport import is_alone, transport_of
from fsdp2.errors import FSDPRuntimeError, FSDPTypeError, FSDPValueError
from fsdp2.plugs.memory.reshard_to_fewer import layout_over
from fsdp2.tools.facts.data import (
    BufferFacts,
    ExchangeFacts,
    GradientFacts,
    GroupFacts,
    ModelFacts,
    OrderFacts,
    PlainParamFacts,
    RestFacts,
)
from fsdp2.tools.facts.exchanges import Links, PackedRow, Visits, members_of_reduction, row_of
from fsdp2.tools.facts.parameters import PlansOfGroup, axes_of, extended_row_bytes, param_facts

LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


def facts_of(model: nn.Module, *, ranks_per_node: int | None = None) -> ModelFacts:
    """Everything that is known of ``model`` and of how it is sharded, as frozen data.

    Call it before the first step or after it, on meta or not, with any backend, also torch's fake one. Every rank may
    call it at any time outside of forward and backward: it communicates nothing, and changes nothing. A model that is
    not sharded has no groups.

    Args:
        model: a sharded module, or one that contains sharded modules; also in its compiled form. If it is itself part
            of a larger model whose first forward is still to come, it is described as if it were the outermost.
        ranks_per_node: how many ranks share a node, which tells links apart. Default: the environment's
            ``LOCAL_WORLD_SIZE``, as torchrun sets it; else all ranks.

    Raises:
        FSDPTypeError: ``model`` is not a module, or ``ranks_per_node`` is no int.
        FSDPValueError: ``ranks_per_node`` is below 1, or the environment's is no number.
        FSDPRuntimeError: the process groups that the model was sharded over have been destroyed.
    """
    if not isinstance(model, nn.Module):
        raise FSDPTypeError(f"facts_of() takes an nn.Module as 'model', got {type(model).__name__}.")
    model = getattr(model, "_orig_mod", model)
    known = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
    return _Reader(model, Links(rank, _ranks_per_node(ranks_per_node, world_size)), world_size).read()


def _ranks_per_node(asked: int | None, world_size: int) -> int:
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int):
            raise FSDPTypeError(f"ranks_per_node must be an int, the ranks that share a node, or None, got {asked!r}.")
        if asked < 1:
            raise FSDPValueError(f"ranks_per_node must be at least 1, got {asked}.")
        return asked
    text = os.environ.get(LOCAL_WORLD_SIZE, "")
    if not text:
        return max(world_size, 1)
    if not text.isdecimal() or int(text) < 1:
        raise FSDPValueError(
            f"the environment variable {LOCAL_WORLD_SIZE} must be the number of ranks of this node, got '{text}'; "
            "correct it, or pass ranks_per_node."
        )
    return int(text)


class _Reader:
    """Reads one model.

    Attributes:
        states: the states of all sharded modules, in the order of the modules.
        groups: their groups, each once.
        paths: the names of all modules.
    """

    def __init__(self, model: nn.Module, links: Links, world_size: int) -> None:
        self.model = model
        self.links = links
        self.world_size = world_size
        self.states = states_below(model)
        self.groups: tuple[FSDPParamGroup, ...] = tuple(
            dict.fromkeys(group for state in self.states for group in state.unit)
        )
        self.paths = module_paths([model])
        self._roots = self._find_roots()
        self._forward, self._backward, self._is_learned = self._orders()

    def read(self) -> ModelFacts:
        """Read everything."""
        for group in self.groups:
            _refuse_destroyed(group)
        plans = [PlansOfGroup.of(group) for group in self.groups]
        groups = tuple(self._group(index, each) for index, each in enumerate(plans))
        ignored, unsharded = self._plain_parameters()
        parameters = [*(param.local for group in self.groups for param in group.params), *self.model.parameters()]
        return ModelFacts(
            class_name=_class_name(self.model),
            world_size=self.world_size,
            rank=self.links.rank,
            ranks_per_node=self.links.ranks_per_node,
            is_meta=any(each.is_meta for each in parameters),
            roots=tuple(self._name(state) for state in self._roots),
            groups=groups,
            ignored=ignored,
            unsharded=unsharded,
            order=self._order(),
            exchanges=tuple(each for index, plan in enumerate(plans) for each in self._exchanges(index, plan)),
        )

    # -- whose modules these are

    def _find_roots(self) -> list[FSDPState]:
        """The outermost sharded modules, without those that belong to a root above the model."""
        outermost: dict[FSDPState, None] = {}

        def visit(module: nn.Module) -> None:
            state = state_of(module)
            if state is None:
                for child in module.children():
                    visit(child)
            elif state.root is None or state.own_root is not None:
                outermost[state] = None

        visit(self.model)
        return list(outermost)

    def _name(self, state: FSDPState) -> str:
        return self.paths.get(state.modules[0], state.name)

    def _names(self, units: tuple[Unit, ...] | None) -> tuple[str, ...] | None:
        if not isinstance(units, tuple):  # in a copy of a model they are not looked up yet
            return None
        titles = [self._name(group.sharers[0]) or group.name for unit in units for group in unit if group.sharers]
        return tuple(dict.fromkeys(titles))

    def _frees(self, state: FSDPState) -> bool:
        """Whether the end of the forward of ``state`` frees its parameters, if a backward may follow."""
        asked = state.reshard_after_forward
        return state not in self._roots if asked is None else asked

    # -- orders

    def _orders(self) -> tuple[list[FSDPState], list[FSDPState], bool]:
        """The orders in which forward and backward come to the states, and whether they were learned."""
        roots = [state.own_root for state in self._roots]
        if roots and all(root is not None and root.learned.forward for root in roots):
            by_unit = {id(state.unit): state for state in self.states}
            learned = [(root.learned.forward, root.learned.backward) for root in roots if root is not None]
            forward, backward = (
                [by_unit[id(unit)] for orders in learned for unit in orders[way] if id(unit) in by_unit]
                for way in (0, 1)
            )
            return forward, backward, True
        # A guess: backward comes to the last child first, and to a module before its children.
        backward_states: dict[FSDPState, None] = {}

        def visit(module: nn.Module) -> None:
            state = state_of(module)
            if state is not None:
                backward_states[state] = None
            for child in reversed(list(module.children())):
                visit(child)

        visit(self.model)
        return list(self.states), list(backward_states), False

    def _order(self) -> OrderFacts:
        settings = self._roots[0].root_settings if self._roots else RootSettings()
        forward, backward = (
            tuple(self.groups.index(group) for state in states for group in state.unit)
            for states in (self._forward, self._backward)
        )
        return OrderFacts(self._is_learned, forward, backward, settings.prefetch_bytes, settings.backward_prefetch)

    # -- groups

    def _group(self, index: int, plans: PlansOfGroup) -> GroupFacts:
        group = plans.group
        owner: FSDPState = group.sharers[0]
        mesh, is_root = group.mesh, owner in self._roots
        rests = group.storage.post_forward
        exact = not group.storage.extended
        return GroupFacts(
            index=index,
            name=self._name(owner),
            modules=tuple(self.paths.get(module, owner.name) for module in owner.modules),
            class_name=owner.class_name,
            shares_with=tuple(self._name(state) or state.class_name for state in group.sharers[1:]),
            is_root=is_root,
            params=tuple(param_facts(plans, number, self.paths) for number in range(len(group.params))),
            mesh=axes_of(mesh.device_mesh),
            shard_ranks=self._ranks(mesh.shard_group),
            replicate_ranks=self._ranks(mesh.replicate_group),
            device=mesh.device,
            backend=_backend(group),
            reshard_after_forward=rests.mesh.shard_size if rests is not None else self._frees(owner),
            reshard_after_backward=owner.reshard_after_backward,
            strategy=_strategy(owner, group),
            unshards_in_backward=group.settings.unshards_in_backward,
            offloads=_offloads(group),
            buffers=_buffers(plans),
            gradients=tuple(_gradients(group, plan) for plan in plans.reduces),
            rests=self._rests(plans),
            prefetches=self._names(owner.forward_prefetch),
            settings=tuple(described(group.settings, without=("unshards_in_backward",)).items()),
            is_exact=exact,
        )

    def _ranks(self, group: dist.ProcessGroup | None) -> tuple[int, ...]:
        return (self.links.rank,) if group is None else tuple(dist.get_process_group_ranks(group))

    def _row(self, plans: PlansOfGroup) -> PackedRow:
        moved = [plan for plan in plans.gathers if not _lies_in_place(plans.group, plan)]
        layouts = [(plans.layout(plan), plan.param_dtype.itemsize) for plan in moved]
        return row_of(layouts, extended_row_bytes(plans.group, plans.group.storage.extended))

    def _rests(self, plans: PlansOfGroup) -> RestFacts | None:
        rests = plans.group.storage.post_forward
        if rests is None:
            return None
        layouts = _resting_layouts(plans, rests.mesh.shard_size)
        nbytes = sum(layout.shard_numel * itemsize for layout, itemsize in layouts)
        return RestFacts(self._ranks(rests.mesh.shard_group), nbytes)

    # -- exchanges

    def _exchanges(self, index: int, plans: PlansOfGroup) -> Iterable[ExchangeFacts]:
        group = plans.group
        mesh, rests = group.mesh, group.storage.post_forward
        frees = {state: self._frees(state) for state in group.sharers}
        gathers = Visits(group, frees).count(self._forward, self._backward)
        shards, way = self._ranks(mesh.shard_group), _way(group, mesh.shard_group)
        row = self._row(plans).members
        exchange = self.links.exchange
        if not is_alone(mesh.shard_group) and row:
            if gathers.forward:
                yield exchange(index, "forward", "all-gather", shards, gathers.forward, row, way)
            if gathers.backward:
                yield exchange(index, "backward", "all-gather", shards, gathers.backward, row, way)
        if rests is not None and not is_alone(rests.mesh.shard_group):
            near, members = self._ranks(rests.mesh.shard_group), _row_from_rests(plans, rests.mesh.shard_size).members
            near_way = _way(group, rests.mesh.shard_group)
            if gathers.forward_from_fewer:
                times = gathers.forward_from_fewer
                yield exchange(index, "forward", "all-gather", near, times, members, near_way)
            if gathers.backward_from_fewer:
                times = gathers.backward_from_fewer
                yield exchange(index, "backward", "all-gather", near, times, members, near_way)
        if not plans.reduces or not self._is_reached(group):
            return
        if not is_alone(mesh.shard_group):
            members = tuple(each for plan in plans.reduces for each in members_of_reduction(plan))
            yield exchange(index, "backward", "reduce-scatter", shards, 1, members, way)
        if not is_alone(mesh.replicate_group):
            members = tuple(plan.layout.numel * plan.dtype.itemsize for plan in plans.reduces)
            ranks = self._ranks(mesh.replicate_group)
            yield exchange(index, "backward", "all-reduce", ranks, 1, members, _way(group, mesh.replicate_group))

    def _is_reached(self, group: FSDPParamGroup) -> bool:
        """Whether a backward comes to ``group``, as far as is known."""
        return not self._is_learned or any(group in state.unit for state in self._forward)

    # -- what is in no group

    def _plain_parameters(self) -> tuple[tuple[PlainParamFacts, ...], tuple[PlainParamFacts, ...]]:
        """Parameters that were to be ignored, and others that belong to no group."""
        owned = {(id(module), name) for group in self.groups for param in group.params for module, name in param.uses}
        ignored = {id(parameter) for state in self.states for parameter in state.ignored_params}
        found: dict[int, PlainParamFacts] = {}
        for module, path in self.paths.items():
            for name, parameter in module._parameters.items():
                if parameter is not None and (id(module), name) not in owned and id(parameter) not in found:
                    full = f"{path}.{name}" if path else name
                    shape, trains = tuple(parameter.shape), parameter.requires_grad
                    found[id(parameter)] = PlainParamFacts(full, shape, parameter.dtype, trains)
        asked, others = (
            tuple(facts for key, facts in found.items() if (key in ignored) is wanted) for wanted in (True, False)
        )
        return asked, others


def _resting_layouts(plans: PlansOfGroup, size: int) -> list[tuple[BufferLayout, int]]:
    """Layouts over ``size`` ranks between forward and backward, each with the bytes of an element."""
    itemsizes = [plan.param_dtype.itemsize for plan in plans.gathers]
    layouts = [
        layout_over(plan.layout, size, itemsize) for plan, itemsize in zip(plans.gathers, itemsizes, strict=True)
    ]
    if plans.group.settings.packs_gathers:
        layouts = [layout.all_packed() for layout in layouts]
    return list(zip(layouts, itemsizes, strict=True))


def _row_from_rests(plans: PlansOfGroup, size: int) -> PackedRow:
    extended = extended_row_bytes(plans.group, plans.group.storage.extended)
    return row_of(_resting_layouts(plans, size), extended * plans.group.mesh.shard_size // size)


def _class_name(model: nn.Module) -> str:
    state = state_of(model)
    return type(model).__name__ if state is None else state.class_name


def _refuse_destroyed(group: FSDPParamGroup) -> None:
    for process_group in (group.mesh.shard_group, group.mesh.replicate_group):
        if process_group is not None and not _torch.knows_group(process_group):
            raise FSDPRuntimeError(
                f"the process groups that '{group.name}' was sharded over have been destroyed, and its ranks with "
                "them: read its facts (fsdp2.explain, fsdp2.estimate) before destroy_process_group()."
            )


def _backend(group: FSDPParamGroup) -> str:
    process_group = group.mesh.shard_group or group.mesh.replicate_group
    return "" if process_group is None else _torch.backend_name(process_group, group.mesh.device)


def _way(group: FSDPParamGroup, process_group: dist.ProcessGroup | None) -> Literal["ring", "pairs"]:
    return "pairs" if transport_of(process_group, group.mesh.device).way == "peer to peer" else "ring"


def _strategy(state: FSDPState, group: FSDPParamGroup) -> str:
    if group.mesh.shard_group is None:
        return "replicate"
    after_forward = state.reshard_after_forward is not False
    known = {(True, True): "zero3", (False, True): "zero2", (False, None): "zero1"}
    return known.get((after_forward, state.reshard_after_backward), "")


def _offloads(group: FSDPParamGroup) -> tuple[str, ...]:
    offloading = group.storage.offloading
    if offloading.is_host:
        return ("parameters", "gradients", "optimizer_state")
    asked = {"gradient_sums": offloading.sums_on_host, "optimizer_state": offloading.state_on_host}
    return tuple(name for name, is_asked in asked.items() if is_asked)


def _buffers(plans: PlansOfGroup) -> tuple[BufferFacts, ...]:
    made = []
    for plan in plans.gathers:
        layout, itemsize = plans.layout(plan), plan.param_dtype.itemsize
        made.append(
            BufferFacts(
                dtype=plan.dtype,
                param_dtype=plan.param_dtype,
                shard_bytes=layout.shard_numel * plan.dtype.itemsize,
                unsharded_bytes=0 if _lies_in_place(plans.group, plan) else layout.unsharded_numel * itemsize,
            )
        )
    return tuple(made)


def _lies_in_place(group: FSDPParamGroup, plan: GatherPlan) -> bool:
    """Whether unsharded parameters take no memory, as this rank has all of them."""
    return is_alone(group.mesh.shard_group) and group.storage.could_lie_in_place(plan)


def _gradients(group: FSDPParamGroup, plan: ReducePlan) -> GradientFacts:
    params = [group.params[index] for index in plan.params]
    dtypes = {None if param.follows_arrivals else param.delivery_dtype(plan.dtype) for param in params}
    delivered = next(iter(dtypes)) if len(dtypes) == 1 else None
    return GradientFacts(
        dtype=plan.dtype,
        delivered_dtype=delivered,
        params=plan.params,
        delivered_bytes=_delivered_bytes(group, plan, delivered),
    )


def _delivered_bytes(group: FSDPParamGroup, plan: ReducePlan, delivered: torch.dtype | None) -> int:
    """Bytes of the reduced gradients' flat buffer; and, if dtypes differ, of copies of gradients in other dtypes."""
    if delivered is not None:
        return plan.layout.numel * delivered.itemsize
    copies = 0
    for param in [group.params[index] for index in plan.params]:
        dtype = param.delivery_dtype(plan.dtype)
        copies += param.local.numel() * dtype.itemsize if dtype != plan.dtype else 0
    return plan.layout.numel * plan.dtype.itemsize + copies
