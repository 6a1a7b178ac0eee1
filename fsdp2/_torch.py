"""Every use of a private or version-dependent name of torch, and nothing else.

Each entry says why it is needed, and where versions of torch differ. All were seen to work on 2.11, 2.13 and 2.15.
`fsdp2._torch_names` has a table of these names, which is probed before this is imported.
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

# torch 2.13 renamed these functions, and warns of the older names. They are looked up at every call, so that a program
# which patches or wraps them sees the traffic.
_ALL_GATHER = "all_gather_single" if has("torch.distributed:all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if has("torch.distributed:reduce_scatter_single") else "reduce_scatter_tensor"


# The functions as torch defines them, and the methods of process groups that they call.
_FUNCTIONS = vars(dist)
_ORIGINALS = (getattr(dist, _ALL_GATHER), getattr(dist, _REDUCE_SCATTER))
_ALL_REDUCE = dist.all_reduce
_ALL_GATHER_METHOD = (
    "all_gather_single" if has("torch.distributed:ProcessGroup.all_gather_single") else "_allgather_base"
)
_COALESCED_GATHER = "allgather_into_tensor_coalesced"  # in versions with the older names
_FORGETS_OPTIONS = _ALL_GATHER_METHOD == "_allgather_base"  # these versions' coalescing manager does, for all-gathers
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

    It calls the process group's method, which saves 2 us (8 on 2.15), unless a program has replaced the function of
    ``torch.distributed``.
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
    """Reduce ``input`` (world_size * n,) over the ranks; ``output`` (n,) is this rank's. See `all_gather_single`."""
    if output.is_complex():  # torch's all-gathers and all-reduces do this themselves
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
    """`all_gather_single` for use inside of `coalescing`."""
    _FUNCTIONS[_ALL_GATHER](output, input, group=group)


def reduce_scatter_batched(output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """`reduce_scatter_single` for use inside of `coalescing`."""
    if output.is_complex():
        output, input = _as_real(output), _as_real(input)
    _FUNCTIONS[_REDUCE_SCATTER](output, input, op=op, group=group)


def _as_real(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat).view(-1)


def send(tensor: torch.Tensor, target: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Begin to send ``tensor`` to rank ``target`` of ``group``: `dist.isend` at a third of its host time."""
    work: dist.Work = group.send([tensor], target, tag)
    return work


def receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Begin to receive into ``tensor`` what rank ``source`` of ``group`` sends with ``tag``."""
    work: dist.Work = group.recv([tensor], source, tag)
    return work


@contextmanager
def coalescing(group: dist.ProcessGroup) -> Iterator[None]:
    """Batch the all-gathers, or the reduce-scatters, issued inside into one launch. (There is no public form.)

    If an exception leaves the block, nothing is launched, and the group is reset: torch's manager would leave it
    batching for ever.
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
    """Launch batched all-gathers on the current stream: torch drops the option, and the backend would use its own."""
    if batched and batched[0].redop is None:  # reductions have an operation
        outputs, inputs = [each.dst_tensor for each in batched], [each.tensor for each in batched]
        work = getattr(group, _COALESCED_GATHER)(outputs, inputs, _GATHER_OPTIONS[False])
        batched.clear()
        if work is not None:
            work.wait()


def make_dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor over ``local`` with a ready ``DTensorSpec``. It takes 1.6 us, `DTensor.from_local` 16."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


class _RunsOperators(TorchDispatchMode):
    """Sends operators on subclasses of `OwnOperators` to these. (Up to 2.12, where DTensor's C++ takes all of them.)"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = next((each for each in types if issubclass(each, OwnOperators)), None)
        return func(*args, **(kwargs or {})) if owner is None else owner.run_operator(func, args, kwargs or {})


SETS_ITEMS_AS_DTENSORS = _VERSION < (2, 13)
"""Whether ``dtensor[...] = value`` runs DTensor's operators on all operands, also on those of `OwnOperators`."""


class OwnOperators(DTensor):
    """A DTensor that runs operators itself: subclasses implement `run_operator`. Made as ``cls(local, spec, ...)``."""

    @classmethod
    def run_operator(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the ``OpOverload`` ``func``. One of its arguments (or an element of a list) is of this class."""
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
"""Undoes a change of torch. If somebody else has replaced it again since, that stays."""


def handle_operators(handlers: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]) -> Undo:
    """Let DTensor call ``handler(func, args, kwargs)`` for these ``OpOverload``s, as torch's ``loss_parallel`` does.

    (2.11 to 2.15. In C++ its dispatcher looks every operator up in this dict.)
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
    """Run ``func``, which has a handler, as DTensor would run it without one."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(func)
    try:
        return func(*args, **kwargs)
    finally:
        handlers[func] = handler


@functools.cache
def collective_operators() -> tuple[Any, ...]:
    """The operators of ``torch.distributed``'s collectives, which take no DTensors."""
    names = ("allgather_", "allreduce_", "broadcast_", "reduce_", "reduce_scatter_", "scatter_", "gather_", "send")
    packets = [getattr(torch.ops.c10d, name) for name in names if hasattr(torch.ops.c10d, name)]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def replace_truncated_normal(ours: Callable[..., Any]) -> Undo:
    """Let `nn.init.trunc_normal_` call ``ours(draw, tensor, mean, ...)``, where ``draw`` fills a plain tensor.

    In 2.13 and later torch draws again while ``any`` element is out of range. For a DTensor each rank would see only
    its own part. (2.11 to 2.15.)
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
    """The arguments that the ``OpOverload`` ``func`` writes, in the order of its schema: ``self``, or ``out=``."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return written


def operator_name(func: Any) -> str:
    """The name of an ``OpOverload`` without namespace and overload, such as ``add_``."""
    return str(func._schema.name).partition("::")[2]


def norm_partial(order: float) -> Placement:
    """The placement of partial norms, from which ``redistribute`` computes the norm of all parts (``order`` >= 0)."""
    if order == math.inf:
        return Partial("max")
    return Partial("sum") if order == 0 else _NormPartial(order)


# The local tensor of a DTensor, without the autograd edge that `to_local()` adds. (A C-level attribute getter.)
local_of: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("_local_tensor")


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


# The DTensorSpec. `p`, `p.grad` and the plan share one object, or every foreach call would compare specs slowly.
spec_of: Callable[[torch.Tensor], Any] = operator.attrgetter("_spec")


use_count: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
"""How many hold a tensor: Python (one), a node that takes its gradient, each node that has saved it. (2.11 to 2.15.)"""

# Counts most in-place writes: DTensor's operators, but neither foreach and fused ones nor those on `.data`.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a shape and a device, but no values."""
    return isinstance(tensor, FakeTensor)


BACKWARD_FUNCTION = "_engine_run_backward"
"""The function in whose frame every backward of a thread runs."""


def share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an in-place write to ``other`` counts in the version of ``one``, as for a view."""
    before = one._version
    with torch.autograd._unsafe_preserve_version_counter(other):  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(other)
        return one._version != before


untyped_storage: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage
"""Returns another object once ``tensor.data`` was set. For a DTensor nothing else changes: its local tensor stays."""


def is_of_several(hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is one that `torch.autograd.graph.register_multi_grad_hook` registers on each of its tensors."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == _OF_SEVERAL and code.co_name in ("inner_hook", "wrapped_fn")


_OF_SEVERAL = torch.autograd.graph.register_multi_grad_hook.__code__.co_filename


def set_local(dtensor: torch.Tensor, local: torch.Tensor) -> None:
    """Let ``dtensor`` lie on ``local`` (same shape, dtype and device): the only way that keeps its identity."""
    dtensor._local_tensor = local  # type: ignore[attr-defined]


def chunk_cat(tensors: Sequence[torch.Tensor], num_chunks: int, out: torch.Tensor) -> None:
    """Pack ``tensors`` rank-major into ``out`` (num_chunks, n). Dim 0 of each is cut into ``num_chunks`` chunks of
    ceil(size0 / num_chunks) rows, and short ones are padded with zeros. One kernel for any number of tensors."""
    torch._chunk_cat(tensors, 0, num_chunks, out=out)  # type: ignore[arg-type]


foreach_copy: Callable[..., Any] = torch._foreach_copy_
"""``(destinations, sources, non_blocking=False)``: copy each source into its destination. On a device this is one
kernel, if each is dense and has its destination's strides, and all have one dtype; else one kernel for each."""


def copy_columns(matrix: torch.Tensor, widths: Sequence[int], columns: list[torch.Tensor]) -> None:
    """Copy the columns of ``matrix`` (rows, n) into ``columns``, which have these ``widths``. On a device this is one
    kernel, if all are dense."""
    torch.split_with_sizes_copy(matrix, list(widths), dim=1, out=columns)


def foreach_zero(tensors: list[torch.Tensor]) -> None:
    """Fill each of ``tensors`` with zeros: one kernel on accelerators."""
    torch._foreach_zero_(tensors)


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The norm () of each of ``tensors``, computed in ``dtype`` if given: a few kernels for all on accelerators."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_mul(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each of ``tensors`` by ``factor`` (), which is on their device, in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_clamp(tensors: list[torch.Tensor], least: float, most: float) -> None:
    """Bring each element of ``tensors`` between two bounds, in place, as ``torch.nn.utils.clip_grad_value_`` does."""
    torch._foreach_clamp_min_(tensors, least)
    torch._foreach_clamp_max_(tensors, most)


def unscale(tensors: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply ``tensors``, of one device and dtype, by ``factor``; set ``found`` to 1 if an element was not finite.

    ``torch.amp.GradScaler`` calls the same: one kernel on accelerators. It has no public name.
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
"""True on 2.13 and later."""


def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory (and sizes) of two storages; tensors stay on theirs. (2.13 to 2.15, for cudagraph trees.)"""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The ``step`` of an optimizer class, without the wrapper for hooks that its first instance puts around it."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def around_zero_grad(owner: Any, action: Callable[[Any, bool], Callable[[], None]]) -> Undo:
    """Let ``zero_grad`` of all instances of ``owner`` (and of subclasses that call it) call ``action`` first.

    ``action`` gets the instance, and whether gradients are set to None. It returns a function, which is called last.
    (torch has no hook for this.)
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
"""The number of the backward pass that the calling thread is inside of; -1 outside."""


def on_host(number: torch.Tensor) -> float:
    """The value of ``number`` (), float32 or float64 in host memory. An operator would look like a wait to tools."""
    kind = ctypes.c_double if number.dtype is torch.float64 else ctypes.c_float
    return kind.from_address(number.data_ptr()).value


def memory_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of ``tensor``, contiguous on the host, valid while it lives. Like `on_host` it runs no operator."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def replace_run_backward(ours: Callable[..., Any]) -> Undo:
    """Let backwards begin with ``ours(run, outputs, gradients, retain_graph, create_graph, inputs, ...)``.

    ``run`` is torch's function. (2.11 to 2.15: `torch.autograd.backward` and `grad` pass these by position.)
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
    """Whether a backward without ``retain_graph`` has run ``node``, which belongs to an `autograd.Function`."""
    try:
        node.saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


def order_of(node: Any) -> int:
    """A number that is higher for nodes of autograd's graph that one thread has created later."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of the storage of ``tensor`` (of a DTensor's local tensor); 0 if it has none (sparse)."""
    tensor = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0  # type: ignore[attr-defined]


_NOTHING: AbstractContextManager[None] = nullcontext()


def without_grad() -> AbstractContextManager[Any]:
    """`torch.no_grad()`; free where grad mode is off already, as in a backward without ``create_graph``."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


plain_attributes: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Inside, attributes of DTensors (`grad`, `requires_grad`, `_version`, hooks) are read and set at half the cost: torch
does not look for ``__torch_function__``, which DTensor does not have. Not for the user's code. Seen on 2.11 to 2.15."""


def in_range(name: str) -> AbstractContextManager[Any]:
    """Profilers show what runs inside as ``name``. Free where none records."""
    return torch.profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


tensor_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None]
tensor_hooks = operator.attrgetter("_backward_hooks")
"""The hooks of `Tensor.register_hook`; autograd calls them only for tensors in its graph."""

post_accumulate_grad_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
post_accumulate_grad_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `Tensor.register_post_accumulate_grad_hook`; autograd calls them only for its own leaves."""


def prepend_forward_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Let ``hook(module, args, kwargs)`` run before ``module``'s forward, and before the hooks that it has.

    Dynamo of 2.11 guards hooks in the order in which they were put into their dict, which ``prepend`` does not keep.
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
"""The key in ``module.__dict__`` of the composable functions (``fully_shard``, ``replicate``) called on it, by name.

(It is no attribute: wrappers that pass on attributes of what they wrap, as torch's for checkpoints, would have it too.)
"""

if has("torch.distributed._composable_state:_module_state_mapping"):
    from torch.distributed._composable_state import _module_state_mapping as _states
else:
    _states = weakref.WeakKeyDictionary()


def compose(module: torch.nn.Module, name: str) -> None:
    """Note that the composable function ``name`` was called on ``module``, where torch's own look (2.11 to 2.15)."""
    module.__dict__.setdefault(COMPOSED, {}).setdefault(name, _COMPOSED())


def map_state(module: torch.nn.Module, state: object) -> None:
    """Note ``state`` as the state that a composable function has made for ``module``, where programs look for it."""
    _states[module] = weakref.ref(state)  # type: ignore[arg-type]


def decompose(module: torch.nn.Module, name: str) -> None:
    """Undo `compose` and `map_state`."""
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
    """Let ``mesh``, which equals ``live`` but may have lost its process groups, share everything with ``live``."""
    mesh.__dict__.update(live.__dict__)


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    """A DTensorSpec, which describes a DTensor."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def spec_with_dtype(spec: Any, dtype: torch.dtype) -> Any:
    """``spec`` itself if it has ``dtype``, else a copy that has."""
    if spec.tensor_meta.dtype == dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, spec.tensor_meta.shape, spec.tensor_meta.stride, dtype)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of a mesh dim left of others that cut ``dim`` first, into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor)


def is_shard(placement: Placement) -> bool:
    """Whether ``placement`` cuts a dim, strided or not."""
    return isinstance(placement, (Shard, _StridedShard))


def wait_for_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; or its values, once they have arrived, if it is the result of a functional collective."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore[no-any-return]


def grad_dtype_policy(parameter: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether the user set ``parameter.grad_dtype``, and to what. (Up to 2.14 only another dtype is noticed.)"""
    dtype: torch.dtype | None = parameter.grad_dtype
    explicit = parameter._has_grad_dtype_override if _KNOWS_OVERRIDE else dtype != parameter.dtype  # type: ignore[attr-defined]
    return bool(explicit), dtype


_KNOWS_OVERRIDE = has("torch:Tensor._has_grad_dtype_override")


reduces_in_grad_dtype = _VERSION >= (2, 15)
"""Whether ``reduce_dtype=None`` means each parameter's ``grad_dtype`` (since 2.15) rather than ``param_dtype``."""


def unobserved() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode (such as ``CommDebugMode``) sees operators."""
    return _disable_current_modes()


functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]
"""Whether a functorch transform (``vmap``, ``jvp``, ``grad``) is being applied."""


@contextmanager
def without_functorch() -> Iterator[None]:
    """Inside, functorch transforms that are being applied have no effect, and parameters can be made."""
    need(_torch_names.TRANSFORMS)
    from torch._functorch.eager_transforms import enable_inplace_requires_grad  # a transform has imported it

    with torch._C._DisableFuncTorch(), enable_inplace_requires_grad(True):  # type: ignore[attr-defined]
        yield


can_premultiply = has("torch.distributed:_make_nccl_premul_sum")


def premultiplied_sum(factor: float) -> Any:
    """NCCL's reduce operation that multiplies by ``factor`` before it sums."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend of ``group`` for ``device``: "nccl", "gloo", ...; "" if there is none.

    A group that is written in Python has "" too, even if it wraps one of these: its own methods communicate.
    """
    return group._get_backend(device).name().lower() if _has_backend(group, device) else ""


def backend_names(group: dist.ProcessGroup | None) -> list[str]:
    """The names of the backends of all devices that ``group`` serves."""
    if type(group) is not dist.ProcessGroup:
        return []
    return [group._get_backend(each).name().lower() for each in group._device_types]


def coalesces(group: dist.ProcessGroup) -> bool:
    """Whether `coalescing` works on ``group``'s accelerator: gloo would read device addresses on the host."""
    if type(group) is not dist.ProcessGroup:
        return True
    accelerators = [device for device in group._device_types if device.type != "cpu"]
    return all(group._get_backend(device).name().lower() != "gloo" for device in accelerators)


def knows_group(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows ``group``, so it was not destroyed."""
    return group in dist.distributed_c10d._world.pg_group_ranks


def begun_over_groups() -> dict[dist.ProcessGroup, int]:
    """How many collectives and messages this rank has begun over each of its groups whose backend counts them."""
    found = {}
    for group in list[Any](dist.distributed_c10d._world.pg_group_ranks):
        with suppress(RuntimeError, AttributeError):  # for groups that this rank is not in, there is a number here
            found[group] = group._get_sequence_number_for_group()
    return found


_c10d: Any = dist.distributed_c10d
_TCP_STORE: Any = vars(dist)["TCPStore"]


def shared_store(prefix: str) -> tuple[Any, str]:
    """A store that all ranks of the default process group share, with keys of its own; and the prefix of these keys."""
    default = _c10d._get_default_store()
    token = default.compare_set(f"{prefix}/token", "", uuid.uuid4().hex).decode()
    own = f"{prefix}/{token}"
    return _c10d.PrefixStore(own, _without_prefix(default)), own


def own_store(prefix: str) -> Any:
    """The store of `shared_store` with this ``prefix``, over a new connection. Slow where host names are found slowly.

    A TCPStore is not cloned: the one that the program uses would be locked meanwhile.
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
    """Whether ``group`` is written in C++, and has a backend for ``device``."""
    return type(group) is dist.ProcessGroup and device.type in [each.type for each in group._device_types]


def gather_unobserved(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """An all-gather that neither patched functions nor dispatch modes see, for the engine's own comparisons."""
    with _disable_current_modes():
        getattr(group, _ALL_GATHER_METHOD)(output, input, _GATHER_OPTIONS[True]).wait()


count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are active."""


def is_checkpointed_selectively() -> bool:
    """Whether a mode of selective activation checkpointing is active."""
    return any(isinstance(mode, _SELECTIVE) for mode in _dispatch_modes())


def clones_saved_tensors() -> bool:
    """Whether `torch.autograd.graph.allow_mutation_on_saved_tensors` is active."""
    return any(type(mode).__name__ == "_CloneArgBeforeMutateMode" for mode in _dispatch_modes())


def outside_selective_checkpoints(action: Callable[..., Any], *args: Any) -> Any:
    """``action(*args)``, without the active modes of selective activation checkpointing. They would take its operators
    for those of the region: results are kept in forward, and returned in a recompute without running the operator.
    """
    modes = _dispatch_modes()
    below = next((index for index, mode in enumerate(modes) if isinstance(mode, _SELECTIVE)), len(modes))
    try:
        _stack_modes(below, [mode for mode in modes[below:] if not isinstance(mode, _SELECTIVE)])
        return action(*args)
    finally:
        _stack_modes(below, modes[below:])


def _stack_modes(below: int, modes: Sequence[Any]) -> None:
    """Replace the dispatch modes above the ``below`` lowest ones by ``modes``."""
    while count_dispatch_modes() > below:
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


def _dispatch_modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(index) for index in range(count_dispatch_modes())]


_SELECTIVE = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


def gathers_are_patched() -> bool:
    """Whether a program has replaced torch.distributed's all-gather function."""
    return _FUNCTIONS[_ALL_GATHER] is not _ORIGINALS[0]


def all_reduces_are_patched() -> bool:
    """Whether a program has replaced torch.distributed's all-reduce function."""
    return dist.all_reduce is not _ALL_REDUCE


def reduce_scatters_are_patched() -> bool:
    """Whether a program has replaced torch.distributed's reduce-scatter function."""
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
    """Memory from the allocator of ``group``'s backend, or from torch's if it has none."""
    if _has_backend(group, device):
        backend: Any = group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            return backend.allocate_tensor(numel, dtype=dtype, device=device)  # type: ignore[no-any-return]
    return torch.empty(numel, dtype=dtype, device=device)


def use_symmetric_memory(backend: str, group: dist.ProcessGroup) -> None:
    """Choose the backend of symmetric memory, and make ``group``'s communicator exist. Collective.

    (NCCL's barrier warns and guesses if it is not told its device.)
    """
    need(_torch_names.SYMMETRIC)
    import torch.distributed._symmetric_memory as symmetric_memory  # few programs use it

    symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    device = torch.accelerator.current_accelerator()
    takes_device = device is not None and backend_name(group, device).startswith("nccl")
    dist.barrier(group=group, device_ids=[torch.accelerator.current_device_index()] if takes_device else None)


def symmetric_empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer from the pool of symmetric memory. Memory of the pool stays known to all ranks after one rendezvous."""
    import torch.distributed._symmetric_memory as symmetric_memory

    pool = symmetric_memory.get_mem_pool(device)
    with torch.get_device_module(device).use_mem_pool(pool):
        return torch.empty(tuple(size), dtype=dtype, device=device)


def symmetric_rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Let the ranks of ``group`` access ``tensor``'s memory. Collective, once per buffer."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.rendezvous(tensor, group=group.group_name)


# For the simulation of one rank: tensors without memory, and a process group without peers.


def fake_tensors() -> FakeTensorMode:
    """A mode in which new tensors have no memory; tensors with memory may be used too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_made_in(tensor: object, mode: Any) -> bool:
    """Whether ``tensor`` was made in ``mode``, which `fake_tensors` has returned."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode


def property_without_memory(func: Any, args: Sequence[Any]) -> Any:
    """The result of a ``prim`` operator: mostly the tensor's device, which C++ asks for several times per operator."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return func(*args)


def only_plain_or_fake(types: Sequence[type]) -> bool:
    """Whether none of these ``types`` of an operator's operands is a tensor class that runs operators itself."""
    return all(issubclass(each, FakeTensor) or each in (torch.Tensor, nn.Parameter) for each in types)


def begin_simulated_world(rank: int, world_size: int) -> None:
    """Make this process ``rank`` of ``world_size``, although no other process exists. (The store is not public.)"""
    need(_torch_names.SIMULATING)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    sys.excepthook = hook  # torch wraps it once more for every group


def forget_meshes() -> None:
    """Make DTensor decide anew: its caches find decisions by a mesh's shape, and hold process groups that are gone."""
    need(_torch_names.SIMULATING)
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives call ``name``."""
    resolve: Callable[[str], dist.ProcessGroup] = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009, type checkers refuse it
    return resolve(name)


def unsupported_without_memory() -> tuple[type[Exception], ...]:
    """The exceptions of operators whose result depends on values, when tensors of `fake_tensors` have none."""
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
