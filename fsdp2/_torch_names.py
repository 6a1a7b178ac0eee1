"""The private names of torch that fsdp2 relies on: what each is needed for, and what happens if it is missing.

This file owns the table and its probes, and uses none of the names: `fsdp2._torch` and `fsdp2._torch_compiler` do, and
a few other files. A test compares the table with the source. It imports nothing that loads torch's private modules.

A missing name ends in one of three ways:

- ``import fsdp2`` raises, and lists all that are missing, if every run needs them (neither field below is set);
- something else is done in its place, which tests show (`TorchName.otherwise`);
- the feature that needs it refuses when it is used, and says so (`TorchName.feature`). Modules of torch that take
  long to import are looked into only then.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

COMPILING = "torch.compile of sharded modules"
OVERLAP = "the overlap of communication in graphs of inductor"
SYMMETRIC = "set_symm_mem()"
TRANSFORMS = "functorch transforms around sharded modules"
SHOWING = "showing gloo's messages to CommDebugMode"
SIMULATING = "fsdp2.estimate()"
COMPAT_FSDP1 = "FullyShardedDataParallel of fsdp2.compat"
PREMULTIPLYING = "sums of NCCL that multiply by a factor"


@dataclass(frozen=True, slots=True)
class TorchName:
    """One name of torch that may be gone in its next version.

    Attributes:
        path: ``module:attribute.attribute``; an attribute of instances is written below their class.
        needed_for: completes "without it there are no ...".
        arguments: the arguments that are passed by name, or whose position matters.
        feature: the feature that refuses without it, when it is used; "" if it belongs to none.
        otherwise: what is done in its place; "" if nothing is.
        unless: the path of another name; where torch has that, this one is not used.
    """

    path: str
    needed_for: str
    arguments: tuple[str, ...] = ()
    feature: str = ""
    otherwise: str = ""
    unless: str = ""

    @property
    def is_required(self) -> bool:
        """Whether ``import fsdp2`` raises without it."""
        return not self.feature and not self.otherwise

    @property
    def shown(self) -> str:
        """The path as programs write it."""
        return self.path.replace(":", ".")


_COLLECTIVES, _DTENSORS, _AUTOGRAD = "collectives", "DTensors on memory of the engine", "hooks of the backward pass"
_PACKING, _MODULES, _MESHES = "copies of many tensors in one kernel", "hooks of modules", "meshes of several dims"
_GRAPHS, _WATCHING = "operations in graphs of torch.compile", "reports of which ranks wait for what"
_MEMORY = "buffers that are freed and filled again under tensors"

_REQUIRED: dict[str, tuple[str, ...]] = {
    _COLLECTIVES: (
        "torch.distributed:distributed_c10d._coalescing_manager",
        "torch.distributed:distributed_c10d._world.pg_coalesce_state",
        "torch.distributed:distributed_c10d._world.pg_group_ranks",
        "torch.distributed:distributed_c10d.AllgatherOptions.asyncOp",
        "torch.distributed:distributed_c10d.ReduceScatterOptions.asyncOp",
        "torch.distributed:distributed_c10d.ReduceScatterOptions.reduceOp",
        "torch.distributed:ProcessGroup._get_backend",
        "torch.distributed:ProcessGroup._device_types",
        "torch.distributed._functional_collectives:AsyncCollectiveTensor.wait",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch._C:_len_torch_dispatch_stack",
        "torch._C:_get_dispatch_stack_at",
        "torch._C:_pop_torch_dispatch_stack",
        "torch._C:_push_on_torch_dispatch_stack",
        "torch.utils.checkpoint:_CachedTorchDispatchMode",
        "torch.utils.checkpoint:_CachingTorchDispatchMode",
    ),
    _DTENSORS: (
        "torch.distributed.tensor._dtensor_spec:DTensorSpec",
        "torch.distributed.tensor._dtensor_spec:TensorMeta",
        "torch.distributed.tensor._ops._math_ops:_NormPartial",
        "torch.distributed.tensor.placement_types:_StridedShard",
        "torch.distributed.tensor:DTensor._local_tensor",
        "torch.distributed.tensor:DTensor._spec",
        "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "torch._C:_disabled_torch_function_impl",
        "torch._C:DisableTorchFunctionSubclass",
        "torch:ops.aten.add_.Tensor._schema.arguments",
        "torch:ops.aten._foreach_norm.Scalar",
        "torch:ops.aten._local_scalar_dense.default",
    ),
    _AUTOGRAD: (
        "torch.autograd.graph:_engine_run_backward",
        "torch.autograd:_engine_run_backward",
        "torch.autograd:_unsafe_preserve_version_counter",
        "torch.autograd:Variable._execution_engine.queue_callback",
        "torch.autograd.function:BackwardCFunction.apply",
        "torch.autograd.forward_ad:_current_level",
        "torch.autograd.profiler:_is_profiler_enabled",
        "torch._C:_current_graph_task_id",
        "torch._C:_will_engine_execute_node",
        "torch._C:_are_functorch_transforms_active",
        "torch.autograd.graph:Node._sequence_nr",
        "torch:Tensor._base",
        "torch:Tensor._version",
        "torch:Tensor._use_count",
        "torch:Tensor._backward_hooks",
        "torch._C:TensorBase._post_accumulate_grad_hooks",
    ),
    _PACKING: (
        "torch:_foreach_copy_",
        "torch:_foreach_zero_",
        "torch:_foreach_norm",
        "torch:_foreach_mul_",
        "torch:_foreach_clamp_min_",
        "torch:_foreach_clamp_max_",
    ),
    _MEMORY: (
        "torch._C:TensorBase.untyped_storage",
        "torch._C:_storage_Use_Count",
        "torch._C:_has_storage",
        "torch:UntypedStorage._cdata",
        "torch._subclasses.fake_tensor:FakeTensor.fake_device",
        "torch._subclasses.fake_tensor:FakeTensorMode",
    ),
    _MODULES: (
        "torch.nn:Module._get_name",
        "torch.nn:Module._forward_pre_hooks",
        "torch.nn:Module._parameters",
        "torch.nn:Module._buffers",
        "torch.nn:Module._modules",
        "torch.nn:Module._call_impl",
        "torch.nn:Module._compiled_call_impl",
        "torch:_disable_dynamo",
    ),
    _MESHES: (
        "torch.distributed.device_mesh:DeviceMesh._concatenate",
        "torch.distributed.device_mesh:DeviceMesh._flatten",
        "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
    ),
    _WATCHING: (
        "torch.distributed:distributed_c10d._get_default_store",
        "torch.distributed:distributed_c10d._resolve_process_group",
        "torch.distributed:PrefixStore._underlying_non_prefix_store",
        "torch.distributed:ProcessGroup._get_sequence_number_for_group",
    ),
    _GRAPHS: (
        "torch._C._dynamo.eval_frame:get_eval_frame_callback",
        "torch.fx.traceback:current_meta",
    ),
}
"""Names that every run needs, by what fsdp2 would lack without them."""

_REPLACEABLE: tuple[tuple[str, str, str], ...] = (
    (
        "torch:UntypedStorage._swap_data_ptr_",
        "memory that moves between gradients and the pool",
        "gradients are copied, and set_communication_memory_pool refuses",
    ),
    (
        "torch:Tensor._has_grad_dtype_override",
        "difference between a grad_dtype that was set and one that was not",
        "one that differs from the parameter's dtype counts as set",
    ),
    (
        "torch.distributed:all_gather_single",
        "all-gather by its name of 2.13",
        "all_gather_into_tensor, its former name, is called",
    ),
    (
        "torch.distributed:reduce_scatter_single",
        "reduce-scatter by its name of 2.13",
        "reduce_scatter_tensor, its former name, is called",
    ),
    (
        "torch.distributed:ProcessGroup.all_gather_single",
        "method of that name",
        "_allgather_base, its former name, is called",
    ),
    (
        "torch.distributed:ProcessGroup.reduce_scatter_single",
        "method of that name",
        "_reduce_scatter_base, its former name, is called",
    ),
    (
        "torch.distributed:_make_nccl_premul_sum",
        "sum of NCCL that multiplies by a factor",
        "gradients are divided by an operation of its own",
    ),
    (
        "torch:_amp_foreach_non_finite_check_and_unscale_",
        "check and scaling of all gradients in one kernel",
        "each is checked and scaled by itself",
    ),
    (
        "torch.nn.init:_no_grad_trunc_normal_",
        "place where every truncated normal distribution is drawn",
        "nn.init.trunc_normal_ itself is replaced",
    ),
    (
        "torch.distributed._composable.contract:REGISTRY_KEY",
        "sight of fully_shard for torch's other composable functions",
        "a registry of fsdp2 alone is kept",
    ),
    (
        "torch.distributed._composable.contract:RegistryItem",
        "sight of fully_shard for torch's other composable functions",
        "a registry of fsdp2 alone is kept",
    ),
    (
        "torch.distributed._composable_state:_module_state_mapping",
        "sight of states for programs that look for torch's",
        "module._get_fsdp_state() alone finds them",
    ),
    (
        "torch._dynamo.eval_frame:OptimizedModule._orig_mod",
        "names without what torch.compile puts before them",
        "reports and metrics show the names with it",
    ),
    (
        "torch.distributed.fsdp.wrap:_Policy._run_policy",
        "policies of torch's FSDP1 as objects",
        "a policy is called as the functions are that FSDP1 takes",
    ),
)
"""Names with a substitute: the name, what fsdp2 lacks without it, and what is done instead."""

_OF_FEATURES: dict[str, tuple[str, ...]] = {
    COMPILING: (
        "torch._C._dynamo.eval_frame:set_code_exec_strategy",
        "torch._dynamo.types:FrameAction.SKIP",
        "torch._dynamo.types:FrameAction.DEFAULT",
        "torch._dynamo.types:FrameExecStrategy",
        "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint",
        "torch._dynamo.config:skip_fsdp_guards",
        "torch._dynamo:mark_static",
    ),
    OVERLAP: (
        "torch._inductor.config:post_grad_custom_post_pass",
        "torch._inductor.custom_graph_pass:CustomGraphPass",
        "torch._inductor.fx_passes.control_dependencies:preserve_node_ordering",
        "torch.utils._ordered_set:OrderedSet",
    ),
    SYMMETRIC: (
        "torch.distributed._symmetric_memory:set_backend",
        "torch.distributed._symmetric_memory:get_mem_pool",
        "torch.distributed._symmetric_memory:rendezvous",
    ),
    TRANSFORMS: (
        "torch._functorch.eager_transforms:enable_inplace_requires_grad",
        "torch._C:_DisableFuncTorch",
    ),
    SHOWING: (
        "torch._C._distributed_c10d:FakeProcessGroup._create_internal",
        "torch.distributed:ProcessGroup._set_default_backend",
        "torch.distributed:ProcessGroup._register_backend",
        "torch.distributed:ProcessGroup._set_group_name",
    ),
    SIMULATING: (
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        "torch._subclasses.fake_tensor:UnsupportedFakeTensorException",
        "torch._subclasses.fake_tensor:UnsupportedOperatorException",
    ),
    COMPAT_FSDP1: (
        "torch.nn.modules.batchnorm:_BatchNorm",
        "torch:Tensor._make_wrapper_subclass",
        "torch.nn:Module._non_persistent_buffers_set",
    ),
}
"""Names that one feature needs, which refuses without them."""


def _table() -> Iterable[TorchName]:
    for needed_for, paths in _REQUIRED.items():
        for path in paths:
            yield TorchName(path, needed_for)
    yield TorchName("torch:_chunk_cat", _PACKING)
    yield TorchName("torch:ops.aten._chunk_cat.out", _PACKING, ("tensors", "dim", "num_chunks", "out"))
    for former, name in (("_allgather_base", "all_gather_single"), ("_reduce_scatter_base", "reduce_scatter_single")):
        group = "torch.distributed:ProcessGroup"
        yield TorchName(f"{group}.{former}", _COLLECTIVES, unless=f"{group}.{name}")
    functional = "torch:ops._c10d_functional."
    yield TorchName(f"{functional}all_gather_into_tensor.default", _GRAPHS, ("input", "group_size", "group_name"))
    yield TorchName(f"{functional}reduce_scatter_tensor.default", _GRAPHS, ("input", "reduce_op", "group_size"))
    yield TorchName(f"{functional}all_reduce.default", _GRAPHS, ("input", "reduce_op", "group_name"))
    yield TorchName(f"{functional}wait_tensor.default", _GRAPHS, ("tensor",))
    for path, needed_for, otherwise in _REPLACEABLE:
        yield TorchName(path, needed_for, otherwise=otherwise)
    for feature, paths in _OF_FEATURES.items():
        for path in paths:
            yield TorchName(path, feature, feature=feature)
    yield TorchName("torch._dynamo:mark_static_address", COMPILING, ("guard",), feature=COMPILING)


NAMES: tuple[TorchName, ...] = tuple(_table())
"""All names."""

WRITTEN = {
    "_torchdynamo_disable": "test_frame_callback_is_false_below_disabled_functions",
    "_torchdynamo_disable_msg": "test_frame_callback_is_false_below_disabled_functions",
}
"""Names that fsdp2 writes for torch to read, which no probe can find, and the test in test_torch_names.py for each."""


def has(path: str) -> bool:
    """Whether the installed torch has the name with this ``path``, which is in the table. Imports its module."""
    return not lacking(_BY_PATH[path])


def lacking(name: TorchName) -> str:
    """What torch lacks of ``name``: "" if nothing, or if the name is not used. Imports its module."""
    if name.unless and has(name.unless):
        return ""
    try:
        found = _look_up(name.path)
    except (ImportError, AttributeError) as error:
        return f"{name.shown} ({error})"
    known = _argument_names(found) if name.arguments else None
    missing = [each for each in name.arguments if known is not None and each not in known]
    return f"the argument {', '.join(missing)} of {name.shown}" if missing else ""


def require(installed: str, tested: str, remedy: str) -> None:
    """Probe the names that every run needs.

    Args:
        installed: ``torch.__version__``.
        tested: the versions that fsdp2 was tested with.
        remedy: what to install instead.

    Raises:
        ImportError: names are missing; the message lists all of them, and what each is needed for.
    """
    missing = [(text, name.needed_for) for name in NAMES if name.is_required and (text := lacking(name))]
    if missing:
        lines = "".join(f"\n  {text}: without it there are no {needed_for}" for text, needed_for in missing)
        raise ImportError(
            f"fsdp2 was tested with {tested}, and torch {installed}, which is installed, lacks a name that it needs: "
            f"{lines}\n{remedy} Please open an issue with this message."
        )


@functools.cache
def missing_for(feature: str) -> tuple[str, ...]:
    """The names that ``feature`` needs and the installed torch lacks. Imports their modules."""
    return tuple(text for name in NAMES if name.feature == feature and (text := lacking(name)))


def need(feature: str) -> None:
    """Probe the names that ``feature`` needs, the first time.

    Raises:
        FSDPNotImplementedError: names are missing; the message lists them.
    """
    missing = missing_for(feature)
    if missing:
        from fsdp2.errors import FSDPNotImplementedError  # not above: tests load this file by itself, to hide names

        raise FSDPNotImplementedError(says(feature, missing))


def says(feature: str, missing: Iterable[str]) -> str:
    """The message for a ``feature`` that cannot work, as these names are ``missing``."""
    return (
        f"{feature} cannot work with torch {torch.__version__}, which lacks {'; '.join(missing)}. Everything else in "
        "fsdp2 does: go on without it, or install a torch that fsdp2 was tested with (pip show fsdp2 says which). "
        "Please open an issue with this message."
    )


def _look_up(path: str) -> Any:
    """The object that ``path`` leads to; None for an attribute of instances that their class annotates.

    Raises:
        ImportError, AttributeError: ``path`` leads nowhere.
    """
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            if not any(attribute in _annotations(each) for each in getattr(found, "__mro__", ())):
                raise
            found = None
    return found


def _annotations(cls: type[Any]) -> Mapping[str, object]:
    """The annotations of ``cls`` itself. In Python 3.14 and later they are evaluated late, and may name nothing."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return vars(cls).get("__annotations__", {})


def _argument_names(function: Any) -> list[str] | None:
    """The argument names of a Python function or an operator; None if they cannot be known."""
    if hasattr(function, "_schema"):
        return [argument.name for argument in function._schema.arguments]
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


_BY_PATH = {name.path: name for name in NAMES}
