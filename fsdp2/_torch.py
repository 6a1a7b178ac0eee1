"""Every use of a private or version-dependent name of torch, and nothing else.

Each entry says why it is needed, and where versions of torch differ. All were seen to work on 2.11, 2.13 and 2.15.
`fsdp2._torch_names` has the table of them, which is probed before this is imported.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad as forward_ad  # read by the hot path, at no call
from torch.autograd import profiler as profiler  # read by the hot path, at no call
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from fsdp2 import _torch_names
from fsdp2._torch_names import has, need

# `all_gather_single` / `reduce_scatter_single` are the names from 2.13 on, where the older ones warn. Looked
# up at every call, so that a program which patches or wraps the function sees the traffic.
_ALL_GATHER = "all_gather_single" if has("torch.distributed:all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if has("torch.distributed:reduce_scatter_single") else "reduce_scatter_tensor"


# The functions as torch defines them, and the methods of process groups that they end in.
_FUNCTIONS = vars(dist)
_ORIGINALS = (getattr(dist, _ALL_GATHER), getattr(dist, _REDUCE_SCATTER))
_ALL_REDUCE = dist.all_reduce
_ALL_GATHER_METHOD = (
    "all_gather_single" if has("torch.distributed:ProcessGroup.all_gather_single") else "_allgather_base"
)
_COALESCED_GATHER = "allgather_into_tensor_coalesced"  # of the torch that has the older names
_FORGETS_OPTIONS = _ALL_GATHER_METHOD == "_allgather_base"  # their manager, of coalesced gathers
_REDUCE_SCATTER_METHOD = (
    "reduce_scatter_single" if has("torch.distributed:ProcessGroup.reduce_scatter_single") else "_reduce_scatter_base"
)


def _gather_options(async_op: bool) -> Any:
    options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = async_op
    return options


def _reduce_options(op: Any, async_op: bool) -> Any:
    options = dist.distributed_c10d.ReduceScatterOptions()  # type: ignore[attr-defined]
    options.reduceOp, options.asyncOp = op, async_op
    return options


_GATHER_OPTIONS = (_gather_options(False), _gather_options(True))
_MEAN_OPTIONS = tuple(_reduce_options(dist.ReduceOp.AVG, is_async) for is_async in (False, True))
_SUM_OPTIONS = tuple(_reduce_options(dist.ReduceOp.SUM, is_async) for is_async in (False, True))


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Gather ``input`` (n,) of every rank into ``output`` (world_size * n,) in rank order.

    Straight through the process group's method, which saves 2 us (8 on 2.15), unless a program has put something else
    in the place of the function.
    """
    if _FUNCTIONS[_ALL_GATHER] is not _ORIGINALS[0] or output.is_complex():
        return _FUNCTIONS[_ALL_GATHER](output, input, group=group, async_op=async_op)  # type: ignore[no-any-return]
    work: dist.Work | None = getattr(group, _ALL_GATHER_METHOD)(output, input, _GATHER_OPTIONS[async_op])
    if not async_op and work is not None:
        work.wait()
    return work if async_op else None


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Reduce ``input`` (world_size * n,) over the ranks; ``output`` (n,) is this rank's part. See the other."""
    if output.is_complex():  # gathers and all-reduces do this themselves
        output, input = _as_real(output), _as_real(input)
    if _FUNCTIONS[_REDUCE_SCATTER] is not _ORIGINALS[1]:
        return _FUNCTIONS[_REDUCE_SCATTER](output, input, op=op, group=group, async_op=async_op)  # type: ignore[no-any-return]
    known = _MEAN_OPTIONS if op is dist.ReduceOp.AVG else _SUM_OPTIONS if op is dist.ReduceOp.SUM else None
    options = _reduce_options(op, async_op) if known is None else known[async_op]
    work: dist.Work | None = getattr(group, _REDUCE_SCATTER_METHOD)(output, input, options)
    if not async_op and work is not None:
        work.wait()
    return work if async_op else None


def all_gather_batched(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The same, inside of `coalescing`."""
    _FUNCTIONS[_ALL_GATHER](output, input, group=group)


def reduce_scatter_batched(output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """The same, inside of `coalescing`."""
    if output.is_complex():
        output, input = _as_real(output), _as_real(input)
    _FUNCTIONS[_REDUCE_SCATTER](output, input, op=op, group=group)


def _as_real(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat).view(-1)


def send(tensor: torch.Tensor, target: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Begin to send ``tensor`` to the rank ``target`` of ``group``: `dist.isend` at a third of its host time."""
    work: dist.Work = group.send([tensor], target, tag)
    return work


def receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Begin to receive into ``tensor`` what the rank ``source`` of ``group`` sends with ``tag``."""
    work: dist.Work = group.recv([tensor], source, tag)
    return work


@contextmanager
def coalescing(group: dist.ProcessGroup) -> Iterator[None]:
    """Batch the all-gathers, or the reduce-scatters, issued inside into one launch (there is no public form).

    After an exception nothing was launched; torch's own manager would then take the group for batching for ever.
    """
    try:
        with dist.distributed_c10d._coalescing_manager(group=group):
            yield
            if _FORGETS_OPTIONS:
                _gather_coalesced(dist.distributed_c10d._world.pg_coalesce_state[group], group)
    except BaseException:
        dist.distributed_c10d._world.pg_coalesce_state.pop(group, None)
        raise


def _gather_coalesced(batched: list[Any], group: dist.ProcessGroup) -> None:
    """Launch all-gathers on the current stream: torch would forget to tell the backend that, which has its own."""
    if batched and batched[0].redop is None:  # reductions have an operation
        outputs, inputs = [each.dst_tensor for each in batched], [each.tensor for each in batched]
        work = getattr(group, _COALESCED_GATHER)(outputs, inputs, _GATHER_OPTIONS[False])
        batched.clear()
        if work is not None:
            work.wait()


def make_dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor over ``local`` with a ready ``DTensorSpec``: 1.6 us, where `DTensor.from_local` takes 16."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


class _RunsOperators(TorchDispatchMode):
    """Sends the operators on subclasses of `OwnOperators` to them. (Up to 2.12, where DTensor's C++ takes them all.)"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = next((each for each in types if issubclass(each, OwnOperators)), None)
        return func(*args, **(kwargs or {})) if owner is None else owner.run_operator(func, args, kwargs or {})


SETS_ITEMS_AS_DTENSORS = _VERSION < (2, 13)
"""Whether ``dtensor[...] = value`` runs operators of DTensor on all that it meets, of the class below too."""


class OwnOperators(DTensor):
    """A DTensor that runs operators itself: subclasses implement `run_operator`. Made as ``cls(local, spec, ...)``."""

    @classmethod
    def run_operator(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the ``OpOverload`` ``func``, of whose arguments one (or an element of a list) is of this class."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.run_operator(func, args, kwargs or {})

    if _VERSION >= (2, 13):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    else:

        @classmethod
        def __torch_function__(  # type: ignore[override,misc]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with _RunsOperators(), torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))


Undo = Callable[[], None]
"""Takes back what the function that returns it has done to torch. What others have put over it since stays."""


def handle_operators(handlers: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]) -> Undo:
    """Let DTensor call ``handler(func, args, kwargs)`` for these ``OpOverload``s, as torch's ``loss_parallel`` does.

    (2.11 to 2.15: its dispatcher looks every operator up in this dict, in C++.)
    """
    known = DTensor._op_dispatcher._custom_op_handlers
    before = {func: known[func] for func in handlers if func in known}
    known.update(handlers)

    def undo() -> None:
        for func in handlers:
            known.pop(func, None)
        known.update(before)

    return undo


def run_unhandled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, which has a handler, as DTensor would without it."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(func)
    try:
        return func(*args, **kwargs)
    finally:
        handlers[func] = handler


@functools.cache
def collective_operators() -> tuple[Any, ...]:
    """The operators of ``torch.distributed``'s collectives, which no DTensor can be passed to."""
    names = ("allgather_", "allreduce_", "broadcast_", "reduce_", "reduce_scatter_", "scatter_", "gather_", "send")
    packets = [getattr(torch.ops.c10d, name) for name in names if hasattr(torch.ops.c10d, name)]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def replace_truncated_normal(ours: Callable[..., Any]) -> Undo:
    """Let `nn.init.trunc_normal_` call ``ours(draw, tensor, mean, ...)``; ``draw``: what it does to a plain tensor.

    From 2.13 on it draws again while ``any`` element is out of range, which of a DTensor each rank sees of its own part
    only. (2.11 to 2.15.)
    """
    name = "_no_grad_trunc_normal_" if has("torch.nn.init:_no_grad_trunc_normal_") else "trunc_normal_"
    draw = getattr(nn.init, name)
    return _put(nn.init, name, functools.partial(ours, draw))


def _put(owner: Any, name: str, ours: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, ours)

    def undo() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, before)

    return undo


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the ``OpOverload`` ``func`` writes, in the order of its schema: self, or ``out=``."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return written


def operator_name(func: Any) -> str:
    """The name of an ``OpOverload`` without namespace and overload: ``add_``."""
    return str(func._schema.name).partition("::")[2]


def norm_partial(order: float) -> Placement:
    """The placement of norms of the parts of a tensor, whose norm is had by ``redistribute`` (``order`` >= 0)."""
    if order == math.inf:
        return Partial("max")
    return Partial("sum") if order == 0 else _NormPartial(order)


# What lies under a DTensor, without the autograd edge that `to_local()` adds. (A C-level attribute getter.)
local_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same; a tensor that is no DTensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


# The DTensorSpec object; `p`, `p.grad` and the plan share one, or every foreach call compares specs slowly.
spec_of: Callable[[torch.Tensor], Any] = operator.attrgetter("_spec")


# Counts in-place writes, in most ways: DTensor's operators, but neither foreach and fused ones nor those on `.data`.
use_count: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
"""How many hold a tensor: Python (one), a node that takes its gradient, each node that has saved it. (2.11 to 2.15.)"""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape and a device, and no values."""
    return isinstance(tensor, FakeTensor)


BACKWARD_FUNCTION = "_engine_run_backward"
"""In whose frame every backward of a thread runs."""


def share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an in-place write to ``other`` counts in the version of ``one``, as of a view."""
    before = one._version
    with torch.autograd._unsafe_preserve_version_counter(other):  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(other)
        return one._version != before


untyped_storage: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage
"""Another object once ``tensor.data`` was set: of a DTensor that is all that changes, for its local tensor stays."""


def is_of_several(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is what `torch.autograd.graph.register_multi_grad_hook` hangs on each of its tensors."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == _OF_SEVERAL and code.co_name in ("inner_hook", "wrapped_fn")


_OF_SEVERAL = torch.autograd.graph.register_multi_grad_hook.__code__.co_filename


def set_local(dtensor: torch.Tensor, local: torch.Tensor) -> None:
    """Let ``dtensor`` lie on ``local`` (same shape, dtype and device): the one way that keeps its identity."""
    dtensor._local_tensor = local  # type: ignore[attr-defined]


def chunk_cat(tensors: Sequence[torch.Tensor], num_chunks: int, out: torch.Tensor) -> None:
    """Pack ``tensors`` rank-major into ``out`` (num_chunks, n): dim 0 of each is cut into ``num_chunks`` chunks
    of ceil(size0 / num_chunks) rows, short ones padded with zeros. One kernel for any number of tensors."""
    torch._chunk_cat(tensors, 0, num_chunks, out=out)  # type: ignore[arg-type]


foreach_copy: Callable[..., Any] = torch._foreach_copy_
"""``(destinations, sources, non_blocking=False)``: copy each source into its destination. On a device in one kernel if
each is dense and lies as its destination does, and all of these are of one dtype; else in one for each."""


def copy_columns(matrix: torch.Tensor, widths: Sequence[int], columns: list[torch.Tensor]) -> None:
    """Copy ``widths`` columns of ``matrix`` (rows, n), which they make up, into each of ``columns``: one kernel for
    all on a device, if all are dense."""
    torch.split_with_sizes_copy(matrix, list(widths), dim=1, out=columns)


def foreach_zero(tensors: list[torch.Tensor]) -> None:
    """Fill each of ``tensors`` with zeros, one kernel on accelerators."""
    torch._foreach_zero_(tensors)


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The norm () of each of ``tensors``, taken in ``dtype`` if given: a few kernels for all on accelerators."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_mul(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each of ``tensors`` by ``factor`` (), on their device, in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_clamp(tensors: list[torch.Tensor], least: float, most: float) -> None:
    """Bring each element of ``tensors`` between two bounds, in place, as ``torch.nn.utils.clip_grad_value_`` does."""
    torch._foreach_clamp_min_(tensors, least)
    torch._foreach_clamp_max_(tensors, most)


def unscale(tensors: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply ``tensors``, of one device and dtype, by ``factor``; set ``found`` to 1 if one was not finite.

    What ``torch.amp.GradScaler`` calls: one kernel on accelerators, public nowhere.
    """
    if _CHECKS_ALL:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)
        return
    for each in tensors:
        found.copy_(torch.maximum(found, (~torch.isfinite(each)).any().to(found)))
        each.mul_(factor)


_CHECKS_ALL = has("torch:_amp_foreach_non_finite_check_and_unscale_")


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects share ``storage``."""
    return torch._C._storage_Use_Count(storage._cdata)


can_swap_memory = has("torch:UntypedStorage._swap_data_ptr_")
"""From 2.13 on."""


def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory (and sizes) of two storages; tensors stay on theirs. (2.13 to 2.15, for cudagraph trees.)"""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer class's ``step`` without the wrapper that calls hooks, which its first instance gave it."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def around_zero_grad(owner: Any, action: Callable[[Any, bool], Callable[[], None]]) -> Undo:
    """Let ``zero_grad`` of all instances of ``owner`` (and of subclasses that call it) call ``action`` first.

    With the instance, and whether gradients are set to None; what it returns is called last. (There is no hook for it.)
    """
    original = owner.zero_grad

    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        at_the_end = action(self, set_to_none)
        original(self, set_to_none)
        at_the_end()

    return _put(owner, "zero_grad", torch._disable_dynamo(zero_grad))  # type: ignore[attr-defined]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has ended without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


current_backward: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
"""The number of the backward pass that the calling thread is inside of, -1 if of none."""


def on_host(number: torch.Tensor) -> float:
    """The value of ``number`` (), float32 or float64 in host memory, without an operator, which would seem to wait."""
    kind = ctypes.c_double if number.dtype is torch.float64 else ctypes.c_float
    return kind.from_address(number.data_ptr()).value


def memory_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """That of ``tensor``, contiguous on the host, for as long as it lives: read without an operator, as `on_host`."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def replace_run_backward(ours: Callable[..., Any]) -> Undo:
    """Let backwards begin with ``ours(run, outputs, gradients, retain_graph, create_graph, inputs, ...)``.

    ``run`` is torch's. (2.11 to 2.15: `torch.autograd.backward` and `torch.autograd.grad` pass these by position.)
    """
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    return _put(torch.autograd, "_engine_run_backward", functools.partial(ours, run))


def backward_is_running() -> bool:
    """Whether the calling thread is inside a backward pass (as under activation checkpointing's recompute)."""
    return current_backward() != -1


def backward_will_execute(node: Any) -> bool:
    """Whether ``node`` belongs to the graph of the running backward. (It may have been executed already.)"""
    return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined,no-any-return]


def is_released(node: Any) -> bool:
    """Whether a backward without ``retain_graph`` has run ``node``, of an `autograd.Function`."""
    try:
        node.saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


def order_of(node: Any) -> int:
    """Higher for nodes of autograd's graph that were created later, in one thread."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of the storage that ``tensor`` (a DTensor's local tensor) lies on, 0 if it has none (sparse)."""
    tensor = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0  # type: ignore[attr-defined]


_NOTHING: AbstractContextManager[None] = nullcontext()


def without_grad() -> AbstractContextManager[Any]:
    """`torch.no_grad()`, at no cost where grad mode is off already, as in a backward without ``create_graph``."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


plain_attributes: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Inside, attributes of DTensors (`grad`, `requires_grad`, `_version`, hooks) are read and set at half the cost: torch
looks for no ``__torch_function__``, of which DTensor has none. Not around code of the user's. Seen on 2.11 to 2.15."""


def in_range(name: str) -> AbstractContextManager[Any]:
    """What runs inside is shown as ``name`` by profilers. Free where none records."""
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


tensor_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None]
tensor_hooks = operator.attrgetter("_backward_hooks")
"""The hooks of `Tensor.register_hook`; autograd calls them only for what is in its graph."""

post_accumulate_grad_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
post_accumulate_grad_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `Tensor.register_post_accumulate_grad_hook`; autograd calls them only for its own leaves."""


def prepend_forward_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Let ``hook(module, args, kwargs)`` run before ``module``'s forward, and before the hooks that it has.

    Dynamo of 2.11 guards hooks by the order in which they were put into their dict, where ``prepend`` moves them.
    """
    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    hooks = module._forward_pre_hooks
    in_order = list(hooks.items())
    hooks.clear()
    hooks.update(in_order)
    return handle


if has("torch.distributed._composable.contract:REGISTRY_KEY") and has(
    "torch.distributed._composable.contract:RegistryItem"
):
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    COMPOSED: str = REGISTRY_KEY
    _COMPOSED: type = RegistryItem
else:
    COMPOSED, _COMPOSED = "_fsdp2_registry", object
"""In ``module.__dict__``: by name, the composable functions (``fully_shard``, ``replicate``) that were called on it.

(As an attribute it would be there of wrappers that hand on those of what they wrap, as torch's for checkpoints do.)
"""

if has("torch.distributed._composable_state:_module_state_mapping"):
    from torch.distributed._composable_state import _module_state_mapping as _states
else:
    _states = weakref.WeakKeyDictionary()


def compose(module: torch.nn.Module, name: str) -> None:
    """Note that the composable function ``name`` was called on ``module``, where torch's own look (2.11 to 2.15)."""
    module.__dict__.setdefault(COMPOSED, {}).setdefault(name, _COMPOSED())


def map_state(module: torch.nn.Module, state: object) -> None:
    """Note that ``state`` is what a composable function has made of ``module``, where programs look for it."""
    _states[module] = weakref.ref(state)  # type: ignore[arg-type]


def decompose(module: torch.nn.Module, name: str) -> None:
    """It was undone."""
    _states.pop(module, None)
    registry = module.__dict__.get(COMPOSED, {})
    registry.pop(name, None)
    if not registry:
        module.__dict__.pop(COMPOSED, None)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The mesh of all dims of ``meshes``, which must be slices of one mesh (2.11 to 2.15; there is no public form)."""
    with unobserved():  # ranks are real numbers, also while tensors are fake
        return DeviceMesh._concatenate(meshes)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """``mesh`` as one dim called ``name``. Makes a process group: all ranks must call it."""
    with unobserved():  # the ranks are real numbers, also while tensors are fake
        return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh that ``mesh`` was sliced out of; itself or None if it was not (2.11 to 2.15)."""
    return mesh._get_root_mesh()


def revive_mesh(mesh: DeviceMesh, live: DeviceMesh) -> None:
    """Make ``mesh``, an equal one whose process groups may be gone, the same as ``live``."""
    mesh.__dict__.update(live.__dict__)


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    """A DTensorSpec: what a DTensor knows of itself."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def spec_with_dtype(spec: Any, dtype: torch.dtype) -> Any:
    """``spec`` itself if it is of ``dtype``, else a copy that is."""
    if spec.tensor_meta.dtype == dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, spec.tensor_meta.shape, spec.tensor_meta.stride, dtype)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Shards of ``dim`` by a mesh dim left of others that cut the same dim first, into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor)


def is_shard(placement: Placement) -> bool:
    """Whether ``placement`` cuts a dim, strided or not."""
    return isinstance(placement, (Shard, _StridedShard))


def wait_for_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or what it stands for if it is the result of a functional collective under way."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore[no-any-return]


def grad_dtype_policy(parameter: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether the user set ``parameter.grad_dtype``, and to what. (Up to 2.14 only one that differs is noticed.)"""
    dtype: torch.dtype | None = parameter.grad_dtype
    explicit = parameter._has_grad_dtype_override if _KNOWS_OVERRIDE else dtype != parameter.dtype  # type: ignore[attr-defined]
    return bool(explicit), dtype


_KNOWS_OVERRIDE = has("torch:Tensor._has_grad_dtype_override")


reduces_in_grad_dtype = _VERSION >= (2, 15)
"""Whether ``reduce_dtype=None`` means each parameter's ``grad_dtype`` (from 2.15 on) rather than ``param_dtype``."""


def unobserved() -> AbstractContextManager[Any]:
    """No dispatch mode (such as ``CommDebugMode``) sees what runs inside."""
    return _disable_current_modes()


functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]
"""Whether a functorch transform (``vmap``, ``jvp``, ``grad``) is being applied."""


@contextmanager
def without_functorch() -> Iterator[None]:
    """What runs inside is no part of the functorch transforms that are being applied; it may make parameters."""
    need(_torch_names.TRANSFORMS)
    from torch._functorch.eager_transforms import enable_inplace_requires_grad  # a transform has imported it

    with torch._C._DisableFuncTorch(), enable_inplace_requires_grad(True):  # type: ignore[attr-defined]
        yield


can_premultiply = has("torch.distributed:_make_nccl_premul_sum")


def premultiplied_sum(factor: float) -> Any:
    """The reduce op of NCCL that multiplies by ``factor`` before it sums."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Which backend of ``group`` serves ``device``: "nccl", "gloo", ...; "" if none does.

    "" of a group that is written in Python too, even over one of these: its own methods are what communicates.
    """
    return group._get_backend(device).name().lower() if _has_backend(group, device) else ""


def backend_names(group: dist.ProcessGroup | None) -> list[str]:
    """Those of all devices that ``group`` serves."""
    if type(group) is not dist.ProcessGroup:
        return []
    return [group._get_backend(each).name().lower() for each in group._device_types]


def coalesces(group: dist.ProcessGroup) -> bool:
    """Whether `coalescing` works on ``group``'s accelerator: gloo would read the device's addresses on the host."""
    if type(group) is not dist.ProcessGroup:
        return True
    accelerators = [device for device in group._device_types if device.type != "cpu"]
    return all(group._get_backend(device).name().lower() != "gloo" for device in accelerators)


def knows_group(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows ``group``: it was not destroyed."""
    return group in dist.distributed_c10d._world.pg_group_ranks


def begun_over_groups() -> dict[dist.ProcessGroup, int]:
    """How many collectives and messages this rank has begun over each of its groups whose backend counts them."""
    found = {}
    for group in list[Any](dist.distributed_c10d._world.pg_group_ranks):
        with suppress(RuntimeError, AttributeError):  # a number stands for those that it is not in
            found[group] = group._get_sequence_number_for_group()
    return found


_c10d: Any = dist.distributed_c10d
_TCP_STORE: Any = vars(dist)["TCPStore"]


def shared_store(prefix: str) -> tuple[Any, str]:
    """What all ranks of the default process group share, with keys of its own, whose prefix is returned as well."""
    default = _c10d._get_default_store()
    token = default.compare_set(f"{prefix}/token", "", uuid.uuid4().hex).decode()
    own = f"{prefix}/{token}"
    return _c10d.PrefixStore(own, _without_prefix(default)), own


def own_store(prefix: str) -> Any:
    """The same, over a connection of its own; ``prefix`` as returned. Slow where names of hosts are not found at once.

    A TCPStore is not cloned: the one that the program uses would be locked for as long as that takes.
    """
    shared = _without_prefix(dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    if isinstance(shared, _TCP_STORE):
        own: Any = _TCP_STORE(shared.host, shared.port, is_master=False, wait_for_workers=False)
    else:
        own = shared.clone()
    return _c10d.PrefixStore(prefix, own)


def _without_prefix(store: Any) -> Any:
    return store._underlying_non_prefix_store if isinstance(store, _c10d.PrefixStore) else store


def _has_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` is one in C++, with a backend for ``device``."""
    return type(group) is dist.ProcessGroup and device.type in [each.type for each in group._device_types]


def gather_unobserved(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """An all-gather that neither patched functions nor dispatch modes see: the engine's own business."""
    with _disable_current_modes():
        getattr(group, _ALL_GATHER_METHOD)(output, input, _GATHER_OPTIONS[True]).wait()


count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes look at what runs."""


def is_checkpointed_selectively() -> bool:
    """Whether a mode of selective activation checkpointing looks at what runs, among ``count_dispatch_modes()``."""
    return any(isinstance(mode, _SELECTIVE) for mode in _dispatch_modes())


def outside_selective_checkpoints(action: Callable[..., Any], *args: Any) -> Any:
    """``action(*args)``, without the modes of selective activation checkpointing that are active: they would take its
    operators for the region's, whose results they keep in forward and give back, unrun, in a recompute.
    """
    modes = _dispatch_modes()
    below = next((index for index, mode in enumerate(modes) if isinstance(mode, _SELECTIVE)), len(modes))
    try:
        _stack_modes(below, [mode for mode in modes[below:] if not isinstance(mode, _SELECTIVE)])
        return action(*args)
    finally:
        _stack_modes(below, modes[below:])


def _stack_modes(below: int, modes: Sequence[Any]) -> None:
    """Let ``modes`` be what lies on the ``below`` lowest dispatch modes, which stay."""
    while count_dispatch_modes() > below:
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def _dispatch_modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(index) for index in range(count_dispatch_modes())]


_SELECTIVE = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


def gathers_are_patched() -> bool:
    """Whether a program has put something in the place of the function that gathers."""
    return _FUNCTIONS[_ALL_GATHER] is not _ORIGINALS[0]


def all_reduces_are_patched() -> bool:
    """The same of the one that reduces in place."""
    return dist.all_reduce is not _ALL_REDUCE


def reduce_scatters_are_patched() -> bool:
    """The same of the one that reduces."""
    return _FUNCTIONS[_REDUCE_SCATTER] is not _ORIGINALS[1]


def silent_group_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group that seems to have the ranks of ``group``, and over which nothing travels (2.11 to 2.15)."""
    backend_type = dist.ProcessGroup.BackendType.CUSTOM
    need(_torch_names.SHOWING)
    silent = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    silent._set_default_backend(backend_type)
    fake = torch._C._distributed_c10d.FakeProcessGroup  # type: ignore[attr-defined]
    backend = fake._create_internal(group.rank(), group.size())
    silent._register_backend(torch.device("cpu"), backend_type, backend)
    silent._set_group_name(group.group_name)
    ranks = dist.distributed_c10d._world.pg_group_ranks
    ranks[silent] = ranks[group]
    return silent


def allocate_from_group(group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory from the allocator of ``group``'s backend, or torch's where there is none."""
    if _has_backend(group, device):
        backend: Any = group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(numel, dtype=dtype, device=device)  # type: ignore[no-any-return]
    return torch.empty(numel, dtype=dtype, device=device)


def use_symmetric_memory(backend: str, group: dist.ProcessGroup) -> None:
    """Choose the backend of symmetric memory, and make ``group``'s communicator exist. Collective.

    (NCCL's barrier warns, and guesses, if it is not told which device it is for.)
    """
    need(_torch_names.SYMMETRIC)
    import torch.distributed._symmetric_memory as symmetric_memory  # few programs use it

    symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    device = torch.accelerator.current_accelerator()
    takes_device = device is not None and backend_name(group, device).startswith("nccl")
    dist.barrier(group=group, device_ids=[torch.accelerator.current_device_index()] if takes_device else None)


def symmetric_empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer from the pool of symmetric memory, which keeps what was rendezvoused once."""
    import torch.distributed._symmetric_memory as symmetric_memory

    pool = symmetric_memory.get_mem_pool(device)
    with torch.get_device_module(device).use_mem_pool(pool):
        return torch.empty(tuple(size), dtype=dtype, device=device)


def symmetric_rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Let the ranks of ``group`` reach into ``tensor``'s memory. Collective, once per buffer."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.rendezvous(tensor, group=group.group_name)


# What a simulation of one rank needs: tensors without memory, and a process group without peers.


def fake_tensors() -> FakeTensorMode:
    """A mode in which every new tensor is of no memory; tensors that have some may be used too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_made_in(tensor: object, mode: Any) -> bool:
    """Whether ``tensor`` was made in ``mode``, of `fake_tensors`."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode


def property_without_memory(func: Any, args: Sequence[Any]) -> Any:
    """What ``prim`` operators say of a tensor: mostly its device, which C++ asks for several times in an operator."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return func(*args)


def only_plain_or_fake(types: Sequence[type]) -> bool:
    """Whether no operand of an operator, of these ``types``, is a tensor that runs operators itself."""
    return all(issubclass(each, FakeTensor) or each in (torch.Tensor, nn.Parameter) for each in types)


def begin_simulated_world(rank: int, world_size: int) -> None:
    """Make this process ``rank`` of ``world_size``, of which no other is there (the store is not public)."""
    need(_torch_names.SIMULATING)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    sys.excepthook = hook  # torch puts one around it for every group


def forget_meshes() -> None:
    """Let DTensor decide anew: what it remembers is found by a mesh's shape, and is of process groups that are gone."""
    need(_torch_names.SIMULATING)
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives call ``name``."""
    resolve: Callable[[str], dist.ProcessGroup] = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009, type checkers refuse it
    return resolve(name)


def unsupported_without_memory() -> tuple[type[Exception], ...]:
    """What operators raise whose result depends on values, on tensors of `fake_tensors`."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    return (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
