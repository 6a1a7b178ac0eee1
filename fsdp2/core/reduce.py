"""`GradientReducer`: the gradient side of a group: what is reduced, over whom, how it is scaled, when it is kept back.

Owns the group's gradient buffers and its communication settings for gradients. Independent of where the parameters
stand: a group can be unsharded again while its reduction is in flight.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2.core.buffers import ALLOCATOR, Arena, Offloading
from fsdp2.core.gather import Transfer
from fsdp2.core.gradients import GradientBucket, GradientBuffer, PackedGradients
from fsdp2.core.layout import GradientLayout, direct_threshold_bytes
from fsdp2.core.mesh import DataParallelMesh, own_reduce_scatter_group
from fsdp2.core.options import DEFAULT, GroupSettings
from fsdp2.core.param import FSDPParam
from fsdp2.core.places import Label, label
from fsdp2.core.plan import ReducePlan, Scaling, Waiting, indices_of
from fsdp2.core.streams import Device, FSDPCommContext, PendingReduce, Stage
from fsdp2.core.transport import Alone, Transport, among, is_alone, transport_of
from fsdp2.errors import FSDPRuntimeError, FSDPValueError

_LARGE_DIVISOR = 1024.0


class _Sent(NamedTuple):
    """One dtype's part of a reduction under way."""

    gradients: GradientBucket
    packed: PackedGradients
    scaling: Scaling

    def leave(self) -> None:
        """Neither free nor use again where a collective may write that nothing can wait for."""
        self.gradients.leave_buffer()

    def release_gradients(self) -> None:
        """Let go of the gradients that were packed."""
        self.packed.inputs = []

    def release_inputs(self) -> None:
        """Let go of what was sent: it has been reduced."""
        self.packed.release_inputs()


def _launches(sent: list[_Sent]) -> list[tuple[Any, list[Transfer]]]:
    """What is reduced with which operation: everything at once, unless dtypes are scaled differently."""
    launches: list[tuple[Any, list[Transfer]]] = []
    last: Scaling | None = None  # (operations that multiply by other factors compare as equal)
    for _, packed, scaling in sent:
        if scaling.before != 1.0:
            for _, input in packed.members:
                input.div_(scaling.before)
        if last is not None and (last.scatter_op, last.factor) == (scaling.scatter_op, scaling.factor):
            launches[-1][1].extend(packed.members)
        else:
            launches.append((scaling.scatter_op, list(packed.members)))
        last = scaling
    return launches


class GradientReducer:
    """Reduces the gradients of one group.

    Attributes:
        name: of the group, for messages.
        settings: what users have set on the group.
        is_last: the backward that runs is the last of its step: what has added up on the host comes back.
        waiting: where gradients of earlier backwards wait; see `Waiting`. The same on all ranks.
        scatter_group: the process group of the reduce-scatter, if it has one of its own.
        buckets: how gradients are laid out, one for each dtype they are reduced in.
        frozen: the parameters that are in none.
        is_reducing: a reduction was issued and has not been delivered.
        owing: (of the class) those that may hold gradients which are not in any ``.grad`` yet, after a backward.
    """

    owing: ClassVar[weakref.WeakSet[GradientReducer]] = weakref.WeakSet()

    def __init__(self, mesh: DataParallelMesh, offloading: Offloading) -> None:
        self.name, self.of_root = "", 0
        self.settings = DEFAULT
        self.is_last = True
        self.waiting = Waiting.NOWHERE
        self._on_host_after: Any = None  # an event: what adds up there has arrived
        self._cleared: frozenset[FSDPParam] = frozenset()  # since then
        self.scatter_group: dist.ProcessGroup | None = None
        self.buckets: tuple[GradientBucket, ...] = ()
        self._mesh = mesh
        self._home = offloading
        self.is_reducing = False
        self._to_widen: tuple[FSDPParam, ...] = ()
        self._follow_arrivals: tuple[FSDPParam, ...] = ()
        self.frozen: tuple[FSDPParam, ...] = ()
        self._may_have_added_up = False  # since the last reduction; the same on all ranks
        self._scalings: list[Scaling] = []
        self._params: tuple[FSDPParam, ...] = ()
        self._transport: Transport = Alone()
        self._labels: list[Label] = []  # of gradients of one backward, and of some that may have added up

    # -- what is reduced

    def lay_out(self, params: Sequence[FSDPParam]) -> None:
        """Lay out the gradients of the trainable ones of ``params``."""
        self._params = tuple(params)
        # Gradients that were accumulated before a parameter was frozen are still due.
        is_due = self.waiting != Waiting.NOWHERE
        due = {param for bucket in self.buckets for param in bucket.params} if is_due else set()
        trainable = [param for param in params if param.requires_grad or param in due]
        before = {bucket.dtype: bucket for bucket in self.buckets if bucket.waits()}
        buckets = tuple(self._bucket(params, dtype) for dtype, params in _by_reduce_dtype(trainable).items())
        kept = {bucket.dtype for bucket in buckets if bucket.dtype in before and bucket.continues(before[bucket.dtype])}
        lost = [bucket for dtype, bucket in before.items() if dtype not in kept]
        if lost:
            raise FSDPRuntimeError(
                f"parameters around '{lost[0].params[0].path}' were replaced, frozen or converted, or "
                "set_reduce_scatter_unused_params() was called, while gradients wait for their all-reduce over "
                "replicas, or on the host for the last backward; do so after a backward with "
                "set_requires_all_reduce(True) and set_is_last_backward(True)."
            )
        for bucket in buckets:
            if bucket.dtype in kept:
                bucket.take_reduce_scattered(before[bucket.dtype])
        self.buckets = buckets
        self.frozen = tuple(param for param in params if param not in trainable)
        self._transport = transport_of(self.group, self._mesh.device, self.settings.custom_reduce_scatter)
        self._to_widen = tuple(
            param for param in trainable if param.accumulation_dtype not in (None, param.param_dtype)
        )
        self._follow_arrivals = tuple(param for param in trainable if param.follows_arrivals)
        if self.settings.zeros_for_unused:
            self.refuse_zeros_of_any_dtype()
        self._scalings = [self._scaling(bucket.dtype) for bucket in self.buckets]
        self.name_exchanges()

    def name_exchanges(self) -> None:
        """Let ranks know them by module and root, and by sizes and scales, which may come to differ by rank."""
        sent = [f"{each.dtype} {each.layout.numel}" for each in self.buckets]
        scales = [each.of_any_backend() for each in self._scalings]  # an operation with a factor shows its address
        detail = f"{sent} {scales} {self.of_root}"
        self._labels = [
            label(f"the reduction of '{self.name}'", f"{detail} {dtypes}")
            for dtypes in ([each.plan.sent for each in self.buckets], [each.dtype for each in self.buckets])
        ]
        self._transport.label = self._labels[False]  # as graphs send
        replicas = self._mesh.replicate_group
        if replicas is not None and not is_alone(replicas):
            over = self._transport.among_replicas = among(replicas, self._mesh.device)
            over.label = label(f"the all-reduce of '{self.name}'", detail)

    def plans_of(self, params: Sequence[FSDPParam]) -> tuple[ReducePlan, ...]:
        """How gradients of the trainable ones of ``params``, all of the group, are laid out: also before `lay_out`."""
        trainable = [param for param in params if param.sharded.requires_grad]
        return tuple(self._plan(each, dtype, params) for dtype, each in _by_reduce_dtype(trainable).items())

    def _plan(self, params: Sequence[FSDPParam], dtype: torch.dtype, of_group: Sequence[FSDPParam]) -> ReducePlan:
        mesh = self._mesh
        scaling, settings = self._scaling(dtype), self.settings
        all_packed = settings.packs_reductions
        may_travel_alone = not all_packed and scaling.before == 1.0
        # Casts of one after the other need less memory than one of all. (Accelerators pack and cast in one kernel.)
        casts_alone = mesh.device.type == "cpu"
        threshold = direct_threshold_bytes(fuses=mesh.fuses)
        layout = GradientLayout.build(
            [param.sharding.partition for param in params],
            [
                may_travel_alone
                and (param.param_dtype == dtype or casts_alone)
                and param.sharding.partition.arrives_in_order
                and param.local_numel * dtype.itemsize >= threshold
                for param in params
            ],
            world_size=mesh.shard_size,
            itemsize=dtype.itemsize,
            region_threshold_bytes=math.inf if all_packed else threshold,
        )
        divisor = _LARGE_DIVISOR if settings.denominator is not None else settings.divide_factor or scaling.after
        # So that a division by the divisor does not make it vanish.
        presence = min(max(1.0, divisor), _LARGE_DIVISOR)
        if settings.zeros_for_unused and settings.custom_reduce_scatter is not None:
            presence = 0.0  # which nobody asks for, and which the user's function might take for gradients
        sent = self._sent_dtype(params, dtype, scaling)
        return ReducePlan(dtype, sent, indices_of(of_group, params), layout, scaling.of_any_backend(), presence)

    def _sent_dtype(self, params: Sequence[FSDPParam], dtype: torch.dtype, scaling: Scaling) -> torch.dtype:
        """Of what travels alone: the parameters', where the transport casts to ``dtype`` what has arrived.

        A gradient that autograd has left in a wider dtype than its parameter's is rounded to that, as autograd does by
        default, unless its parameter has a ``grad_dtype``: which gradients a rank has must not decide what travels.
        """
        arriving = {param.param_dtype for param in params}
        is_packed = self.settings.packs_reductions or scaling.before != 1.0
        if is_packed or len(arriving) > 1 or any(param.grad_dtype[0] for param in params):
            return dtype
        (narrow,) = arriving
        is_exact = torch.promote_types(narrow, dtype) == dtype and narrow.is_floating_point == dtype.is_floating_point
        return narrow if is_exact and transport_of(self.group, self._mesh.device).widens else dtype

    def _bucket(self, params: Sequence[FSDPParam], dtype: torch.dtype) -> GradientBucket:
        mesh = self._mesh
        return GradientBucket(
            params,
            self._plan(params, dtype, self._params),
            world_size=mesh.shard_size,
            rank=mesh.shard_rank,
            device=mesh.device,
            offloading=self._home,
        )

    def refuse_rescaling(self, comm: FSDPCommContext | None) -> None:
        """Refuse to scale gradients otherwise while some wait that were scaled as before."""
        if comm is not None:
            comm.finish_reduces()
        if self.waiting & Waiting.REDUCE_SCATTERED:
            raise FSDPRuntimeError(
                f"gradients of '{self.name}' were reduced over shards, with one scaling, and wait for their all-reduce "
                "over replicas; change how gradients are scaled before a backward with set_requires_all_reduce(False), "
                "or after the one that all-reduces."
            )

    def refuse_another_layout(self) -> None:
        """Refuse to lay gradients out otherwise while some wait as they were laid out."""
        if self.waiting & ~Waiting.UNREDUCED:
            raise FSDPRuntimeError(
                f"gradients of '{self.name}' wait for their all-reduce over replicas, or on the host for the last "
                "backward, as they were laid out; change what lays gradients out (set_custom_reduce_scatter) "
                "after a backward that delivers them."
            )

    def refuse_zeros_of_any_dtype(self) -> None:
        """Refuse zeros for gradients whose dtype nobody knows before they arrive."""
        if self._follow_arrivals:
            raise FSDPValueError(
                f"parameter '{self._follow_arrivals[0].path}' has grad_dtype=None, so its gradients are reduced in the "
                "dtype in which they arrive, and set_reduce_scatter_unused_params(True) asks for zeros where none "
                "arrives: set MixedPrecisionPolicy.reduce_dtype to the dtype that its gradients have."
            )

    def take_settings(self, settings: GroupSettings) -> None:
        """Go on with other settings that change no layout, whatever is in flight."""
        self.settings = settings
        self._may_have_added_up |= not settings.requires_gradient_sync

    def configure(self, settings: GroupSettings) -> None:
        """Go on with other settings. Where they change the layout of reductions, none is in flight."""
        before, group_before = self.settings, self.scatter_group
        self.take_settings(settings)
        if not settings.changes_layout(before):
            return
        self.scatter_group = own_reduce_scatter_group(self._mesh) if settings.has_scatter_group else None
        try:
            if self._params:
                self.lay_out(self._params)
        except BaseException:  # gradients wait that do not fit: everything stays as it was
            self.settings, self.scatter_group = before, group_before
            raise

    def _scaling(self, dtype: torch.dtype) -> Scaling:
        mesh, settings, group = self._mesh, self.settings, self.group
        has_sums_only = mesh.device.type == "mtia"
        return Scaling.choose(
            dtype,
            mesh.shard_size,
            mesh.replicate_size,
            factor=settings.divide_factor,
            only_sums=settings.only_sums or settings.denominator is not None or has_sums_only,
            premultiplies=group is not None
            and _torch.can_premultiply
            and settings.divide_factor is not None
            and _torch.backend_name(group, mesh.device).startswith("nccl"),
        )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Who reduces: the ranks that parameters are sharded over."""
        return self.scatter_group if self.scatter_group is not None else self._mesh.shard_group

    @property
    def transport(self) -> Transport:
        """What reduces its gradients."""
        return self._transport

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter is reduced."""
        return bool(self.buckets)

    def has_gradients(self) -> bool:
        """Whether autograd has left a gradient on any unsharded parameter."""
        for bucket in self.buckets:
            for param in bucket.params:
                unsharded = param.unsharded
                if unsharded is not None and unsharded.grad is not None:
                    return True
        return False

    def is_due(self) -> bool:
        """Whether the end of a backward has something to do, though the group took no part in it."""
        if self.waiting & Waiting.UNREDUCED or self.has_gradients():
            return True
        delivers = Waiting.REDUCE_SCATTERED | (Waiting.ON_HOST if self.is_last else Waiting.NOWHERE)
        goes_on = self.settings.requires_gradient_sync and self.settings.requires_all_reduce
        return goes_on and self.waiting & delivers != 0

    def wait_for_host_sums(self, device: Device) -> None:
        """Block the host until what adds up in its memory has arrived: before it reads or writes that itself."""
        event, self._on_host_after = self._on_host_after, None
        if event is not None:
            device.block_host(event)

    def owes_gradients(self) -> bool:
        """Whether what earlier backwards have computed is still to be delivered."""
        return self.waiting != Waiting.NOWHERE or self.has_gradients()

    @property
    def may_owe_gradients(self) -> bool:
        """`owes_gradients`, as far as all ranks know: also where this one has none."""
        is_reduced = self.waiting & ~Waiting.UNREDUCED != 0
        return self.is_trainable and (self._may_have_added_up or is_reduced)

    @property
    def follows_arrivals(self) -> bool:
        """Whether some gradients are reduced in the dtype in which they arrive."""
        return bool(self._follow_arrivals)

    def cleared_buffers(self) -> list[GradientBuffer]:
        """Those of sharded gradients that were delivered and cleared since, unless a reduction is on its way there."""
        return [] if self.is_reducing else [one for each in self.buckets if (one := each.cleared_buffer()) is not None]

    # -- the end of a backward

    def refuse_unexpected(self) -> None:
        """Refuse a gradient that is in no bucket: it would be lost.

        Raises:
            FSDPRuntimeError: naming the parameter.
        """
        for param in self.frozen:
            if param.unsharded is not None and param.unsharded.grad is not None:
                raise FSDPRuntimeError(
                    f"a gradient of parameter '{param.path}' arrived, which was frozen when this backward began to "
                    "gather: it would be lost. Freeze and thaw parameters before backward() is called."
                )

    def keep_unsharded(self) -> None:
        """Leave the gradients of this backward unsharded, for a later one to reduce the sum.

        They add up in `FSDPParam.accumulation_dtype`: autograd adds to what is there in place, in its dtype.
        """
        for param in self._to_widen:
            unsharded = param.unsharded
            if unsharded is not None and unsharded.grad is not None:
                unsharded.grad = unsharded.grad.to(param.accumulation_dtype)
        self.waiting |= Waiting.UNREDUCED
        self._may_have_added_up = True
        self._cleared = frozenset()
        self.owing.add(self)

    def reduce(self, comm: FSDPCommContext) -> None:
        """Issue the reduction. Collective, asynchronous; ``.grad`` is set when it is retired.

        What travels is fixed by the plan: parameters without a gradient on this rank contribute zeros.

        Stream: takes memory on that of compute, packs and reduces on the reduce-scatter stream, goes on over replicas
        on the all-reduce stream.
        """
        if not self.buckets:
            return
        if comm.device.has_streams:
            comm.make_room()
        else:
            comm.retire_reduces(comm.max_pending_reduces - 1)
        if self.is_reducing:
            comm.finish_reduces()
        if self._follow_arrivals:
            self._follow()
        taken = [bucket.pop_grads() for bucket in self.buckets]
        self._transport.label = self._labels[self._may_have_added_up]
        pending = PendingReduce(comm.device, self)
        pending.label = self._transport.label
        pending.steps = self._steps(taken, comm, pending)
        del taken
        comm.add_pending(pending)
        try:
            pending.launch()
            self.is_reducing = True
        except BaseException:
            comm.give_up(pending, self.settings.all_reduce_hook_stream)
            raise
        pending.is_launching = False
        self._may_have_added_up = False
        ends_here = self._mesh.replicate_group is not None and not self.settings.requires_all_reduce
        if ends_here:
            self.waiting = (self.waiting & Waiting.ON_HOST) | Waiting.REDUCE_SCATTERED
        else:
            self.waiting = Waiting.ON_HOST if self._home.sums_on_host and not self.is_last else Waiting.NOWHERE
        if ends_here or not self.is_last:
            self._cleared = frozenset()
            self.owing.add(self)

    def _follow(self) -> None:
        """Reduce in a wider dtype from now on, if gradients have arrived in one: alike on ranks of equal graphs."""
        wider = False
        for param in self._follow_arrivals:
            gradient = param.unsharded.grad if param.unsharded is not None else None
            if gradient is not None:
                dtype = torch.promote_types(gradient.dtype, param.default_reduce_dtype)
                wider = wider or dtype != param.default_reduce_dtype
                param.arrived_dtype = dtype
        if wider:
            self.lay_out(self._params)

    def _steps(
        self, taken: list[list[torch.Tensor | None]], comm: FSDPCommContext, pending: PendingReduce
    ) -> Iterator[Stage]:
        """One reduction, from packing to delivery, without gradients.

        After each yield what was launched is waited for: by the host, or where there are streams by these, at once. So
        ``pending`` holds whatever collectives were given: it would go with this frame if an exception came.
        """
        device, replicas, arena = comm.device, self._mesh.replicate_group, comm.reduce_arena
        stream = comm.reduce_scatter_stream
        ends_here = replicas is not None and not self.settings.requires_all_reduce
        keeps = self._home.sums_on_host and not self.is_last and not ends_here
        sent = [
            _Sent(
                bucket,
                bucket.begin(not (ends_here or keeps), self._transport.allocate, arena, self._transport.is_alone),
                scaling,
            )
            for bucket, scaling in zip(self.buckets, self._scalings, strict=True)
        ]
        pending.held = sent
        if device.has_streams:
            comm.reduces_follow_compute()
        with device.use(stream):
            casts = self._may_have_added_up
            for each, gradients in zip(sent, taken, strict=True):
                each.gradients.pack(each.packed, gradients, arena=arena, lets_go=not device.has_streams, casts=casts)
            if device.has_streams:
                pending.packed = device.record(stream)
            for op, members in _launches(sent):
                self._transport.reduce_scatter(members, op, None if device.has_streams else pending.works, arena)
        del taken, gradients, members  # this frame lives on: what is sent is to be let go of as soon as it was
        if not device.has_streams:
            for each in sent:
                each.packed.inputs = []
        yield Stage.LAST_LAUNCHED if replicas is None or ends_here else Stage.LAUNCHED
        if replicas is not None:
            with device.use(stream):
                self._settle_reduce_scattered(sent, ends_here)
        if not ends_here:
            if self._home.is_host:
                pending.needs_host = functools.partial(self._needs_values, sent)
            if replicas is not None or self.settings.all_reduce_hook is not None:
                stream = self.last_stream(comm)
                if device.has_streams:
                    self._go_on(stream, comm, pending)
            if replicas is not None:
                if not device.has_streams:
                    for each in sent:
                        each.packed.release_inputs()
                works = None if device.has_streams else pending.works
                with device.use(stream):
                    for each in sent:
                        self._transport.all_reduce(each.packed.output, each.scaling.replicate_op, works)
                yield Stage.LAST_LAUNCHED
            if device.has_streams:
                with device.use(stream):
                    self._finish(sent, keeps, arena, functools.partial(device.use, pending.compute_stream))
                    if not (keeps or self.settings.zeros_for_unused):
                        self._copy_presence(sent, device)
            else:
                self.is_reducing = False  # nothing is under way any more, whatever the user's hook raises
                self._finish(sent, keeps, arena)
        pending.event = device.record(stream)
        self._on_host_after = pending.event if keeps else None
        yield Stage.DONE
        self._deliver(sent, comm, pending, delivers=not (ends_here or keeps))

    def _go_on(self, stream: Any, comm: FSDPCommContext, pending: PendingReduce) -> None:
        """What follows the reduce-scatter does so on ``stream``, beside the next reduction.

        Not beside it where that may be given the memory which is still to be reduced, or copied to the host.
        """
        scattered = comm.all_reduces_follow(stream)
        if self._transport.allocate is None and not self._home.sums_on_host:
            pending.scattered = scattered

    def _deliver(self, sent: list[_Sent], comm: FSDPCommContext, pending: PendingReduce, *, delivers: bool) -> None:
        late = [each for each in sent if each.packed.presence is not None]
        self.is_reducing = bool(late)
        for each in sent:
            if delivers:
                each.gradients.set_grads(each.packed, zeros_for_unused=self.settings.zeros_for_unused)
            if each.packed.taken:
                each.packed.give_back()
        if late:
            comm.call_when_on_host(pending.event, self, functools.partial(self._set_late_grads, late))

    def _copy_presence(self, sent: list[_Sent], device: Device) -> None:
        for each in sent:
            if each.packed.missing and device.is_capturing():
                raise FSDPRuntimeError(
                    f"parameter '{each.gradients.params[each.packed.missing[0]].path}' has no gradient on this rank. "
                    "Whether its .grad is set depends on other ranks, which the host cannot ask while a graph is "
                    "captured: call set_reduce_scatter_unused_params(True), which sets zeros."
                )
            each.gradients.copy_presence(each.packed)

    def _set_late_grads(self, sent: list[_Sent]) -> None:
        self.is_reducing = False
        for each in sent:
            each.gradients.set_late_grads(each.packed)

    def _needs_values(self, sent: list[_Sent]) -> bool:
        """Whether delivery reads what was copied to the host."""
        return any(each.gradients.needs_values(each.packed) for each in sent)

    def _settle_reduce_scattered(self, sent: list[_Sent], ends_here: bool) -> None:
        for each in sent:
            if ends_here:
                each.gradients.keep_reduce_scattered(each.packed)
            else:
                each.gradients.add_reduce_scattered(each.packed)

    def last_stream(self, comm: FSDPCommContext) -> Any:
        """Where a reduction ends."""
        if self._mesh.replicate_group is not None:
            return comm.all_reduce_stream
        if self.settings.all_reduce_hook is None:
            return comm.reduce_scatter_stream
        hook_stream = self.settings.all_reduce_hook_stream
        return comm.all_reduce_stream if hook_stream is None else hook_stream

    def _finish(
        self,
        sent: list[_Sent],
        keeps: bool,
        arena: Arena = ALLOCATOR,
        of_compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        hook, denominator = self.settings.all_reduce_hook, self.settings.denominator
        for each in sent:
            if hook is not None:
                hook(each.packed.output)
            divisor: float | torch.Tensor | None = None if each.scaling.after == 1.0 else each.scaling.after
            if denominator is not None:
                before = each.scaling.before
                divisor = denominator if before == 1.0 else denominator / before
            each.gradients.finish(each.packed, divisor, keeps, arena, of_compute)

    def arrive_from_graph(
        self, arrived: Sequence[tuple[torch.Tensor | None, bool]], plans: Sequence[ReducePlan], *, may_keep: bool
    ) -> None:
        """Deliver what a compiled backward has reduced: for each dtype the sum, and whether a gradient was missing.

        A sum is scaled, cast and delivered like that of an eager reduction; unless this ``may_keep`` its memory, it is
        read and left as it is. The graph has reduced by ``plans``, whose scalings may be others than those of now.
        """
        sent = []
        for bucket, plan, (flat, some_missing) in zip(self.buckets, plans, arrived, strict=True):
            if flat is not None:
                missing = list(range(len(bucket.params))) if some_missing else []
                packed = PackedGradients(flat, is_borrowed=True, missing=missing, may_keep=may_keep)
                sizes = self._mesh.shard_size, self._mesh.replicate_size
                sent.append(_Sent(bucket, packed, bucket.plan.scaling.rest_after(plan.scaling, *sizes)))
        self._finish(sent, keeps=False)
        for each in sent:
            each.gradients.set_grads(each.packed, zeros_for_unused=self.settings.zeros_for_unused)

    def clear(self, params: Collection[FSDPParam], set_to_none: bool) -> None:
        """Drop what earlier backwards have computed of ``params``' gradients, wherever it waits; or make it zeros.

        What ``zero_grad`` means, for gradients that are not in ``.grad`` yet. No reduction is in flight.
        """
        for param in params:
            unsharded = param.unsharded
            if unsharded is None or unsharded.grad is None:
                continue
            if set_to_none:
                unsharded.grad = None
            else:
                unsharded.grad = torch.zeros_like(unsharded.grad)
        for bucket in self.buckets:
            bucket.clear([index for index, param in enumerate(bucket.params) if param in params], set_to_none)
        self._cleared = self._cleared.union(params)
        # What is still due may be of other parameters. That must not depend on which gradients this rank has.
        if set_to_none and self._are_cleared():
            self.waiting = Waiting.NOWHERE
            for bucket in self.buckets:
                bucket.drop()
        if not self.owes_gradients():
            self.owing.discard(self)

    def _are_cleared(self) -> bool:
        """Whether `clear` has been told every parameter since a backward left gradients that wait."""
        return all(param in self._cleared for bucket in self.buckets for param in bucket.params)

    # -- after an exception

    def abandon(self) -> bool:
        """Drop unsharded and partly reduced gradients; the reductions in flight have been dropped before.

        Returns:
            Whether gradients of earlier microbatches were lost.
        """
        lost = self.waiting != Waiting.NOWHERE and not self._are_cleared()
        self.waiting = Waiting.NOWHERE
        self._may_have_added_up = not self.settings.requires_gradient_sync
        self.is_reducing = False  # whatever the interrupted one was
        for bucket in self.buckets:
            bucket.drop()
            for param in bucket.params:
                if param.unsharded is not None:
                    param.unsharded.grad = None
        return lost


def _by_reduce_dtype(trainable: Sequence[FSDPParam]) -> dict[torch.dtype, list[FSDPParam]]:
    by_dtype: dict[torch.dtype, list[FSDPParam]] = {}
    for param, dtype in zip(trainable, reduce_dtypes(trainable), strict=True):
        by_dtype.setdefault(dtype, []).append(param)
    return by_dtype


def reduce_dtypes(params: Sequence[FSDPParam]) -> list[torch.dtype]:
    """The dtype in which each parameter's gradient is reduced.

    Those whose policy has a ``reduce_dtype`` follow it; the others share the promoted dtype of what the installed torch
    says for each of them. Complex ones stay complex: a real dtype would drop half of each number.
    """
    asked = [None if param.dtype.is_complex else param.policy.reduce_dtype for param in params]
    followed = [
        param.default_reduce_dtype
        for param, dtype in zip(params, asked, strict=True)
        if dtype is None and not param.dtype.is_complex
    ]
    shared = functools.reduce(torch.promote_types, followed) if followed else None
    chosen = [
        dtype or (param.default_reduce_dtype if param.dtype.is_complex else shared)
        for param, dtype in zip(params, asked, strict=True)
    ]
    return [dtype for dtype in chosen if dtype is not None]
